"""What a derivative needs to know of a mesh: how vectors of parameters are held.

A transform in this package is one formula. Outside of a mesh (the function `simulate` returns, or
one device) a vector of parameters is whole: nothing is to be summed, and the inner product is the
plain one. Inside, each rank holds pieces: a gradient is made whole by the reduction table, and the
inner product counts every element once, at its owner. `Space` is these two, so that the formulas
are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun import comm, tree
from mfun.comm import Axis, Groups
from mfun.grads import Reduction, finalize
from mfun.grads.table import DATA_AXES
from mfun.mesh import Mesh
from mfun.spec import axis_index

Tree = Any


def tree_dot(a: Tree, b: Tree) -> Tensor:
    """Sum over all leaves of the products of their elements.

    Example:
        >>> tree_dot({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])})
        tensor(11.)
    """
    products = tree.flatten(tree.map(lambda x, y: (x * y).sum(), a, b))
    return torch.stack(list(products.values())).sum()


@attrs.frozen(eq=False)
class Space:
    """How vectors of parameters are held.

    Args:
        whole: a gradient as `torch.func` gives it -> the gradient of the loss of all ranks.
        dot: inner product of two vectors, the same number on every rank.
        total: a rank's loss or count -> that of all data ranks.
    """

    whole: Callable[[Tree], Tree]
    dot: Callable[[Tree, Tree], Tensor]
    total: Callable[[Tensor], Tensor]


WHOLE = Space(whole=lambda grads: grads, dot=tree_dot, total=lambda x: x)
"""Outside of a mesh: all of every parameter is here."""


def rank_space(groups: Groups, table: Mapping[str, Reduction], *, over_data: bool = True) -> Space:
    """The space of one rank of a mesh, whose trees hold that rank's pieces.

    Args:
        groups: this rank's.
        table: from `mfun.grads.reductions`.
        over_data: vectors belong to all data ranks together. False for what each data rank has of
            its own, as per-sample gradients.

    Returns:
        A space; under `simulate` and on processes.

    Example:
        >>> from mfun.comm import simulate
        >>> from mfun.grads import reductions
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import P, ParamSpec
        >>> mesh, specs = Mesh(tp=2), {"w": ParamSpec(shape=(2,), p=P("tp"))}
        >>> table = reductions([specs], mesh)
        >>> norm = lambda groups, w: rank_space(groups, table).dot({"w": w}, {"w": w})
        >>> simulate(norm, mesh, (P("tp"),), P())(torch.tensor([3.0, 4.0]))
        tensor(25.)
    """
    rows = dict(table) if over_data else {path: within_a_model(table[path]) for path in table}
    model = groups.over("tp", stages=_everywhere(groups.mesh))
    axes = [model, groups["dp_cp"]] if over_data else [model]
    owner = {path: _owner(row, groups) for path, row in rows.items()}

    def dot(a: Tree, b: Tree) -> Tensor:
        a = tree.map_with_path(lambda path, x: owner[path].to(x.dtype) * x, a)
        return _summed(tree_dot(a, b), axes)

    return Space(
        whole=lambda grads: finalize(grads, groups, rows),
        dot=dot,
        total=lambda x: comm.reduce(x, groups["dp_cp"]),
    )


def within_a_model(row: Reduction) -> Reduction:
    """A leaf's reduction without the data axes: what one data rank's gradient takes."""
    pairs = [(a, r) for a, r in zip(row.axes, row.rows, strict=False) if a not in DATA_AXES]
    tied = row.rows[len(row.axes) :]
    axes = tuple(axis for axis, _ in pairs)
    return attrs.evolve(row, axes=axes, rows=(*(r for _, r in pairs), *tied))


def _everywhere(mesh: Mesh) -> tuple[int, ...] | None:
    return tuple(range(mesh.pp)) if mesh.pp > 1 else None


def _summed(x: Tensor, axes: list[Axis]) -> Tensor:
    for axis in axes:
        x = comm.reduce(x, axis)
    return x


def _owner(row: Reduction, groups: Groups) -> Tensor:
    """1 on the one rank that speaks for a piece, 0 on those that hold it too."""
    flags = []
    for rank in range(groups.mesh.world):
        coords = groups.mesh.coords(rank)
        first = all(axis_index(axis, groups.mesh, coords) == 0 for axis in row.axes)
        flags.append(float(first and coords["pp"] == row.stages[0]))
    return torch.tensor(flags)[groups.rank]
