"""Which leaves are hidden matrices, and how a rank's pieces of them become whole and pieces again.

A piece is gathered dim by dim over the axes that cut it. Where an axis is cut by a factor (key and
value heads fewer than tp), its ranks hold copies: all are gathered, which needs no further process
group, and of equal ones the first is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from mfun.comm import gather, split
from mfun.comm.groups import Groups
from mfun.comm.world import World
from mfun.flat import round_up
from mfun.mesh import AxisLike, Factor
from mfun.optim.muon import Hook, Matrix
from mfun.optim.transform import Leaves
from mfun.spec import ParamSpec, pad_to, pieces


class Matrices(NamedTuple):
    """What Muon needs to know of a layout.

    Args:
      matrices: path -> how a whole leaf is matrices.
      whole, cut: as `scale_by_muon`.
    """

    matrices: Mapping[str, Matrix]
    whole: Hook
    cut: Hook


def matrices_of(specs: Mapping[str, ParamSpec], world: World | None = None) -> Matrices:
    """The hidden matrices among some parameters, and how a rank makes them whole.

    Args:
      specs: of the parameters, by path.
      world: of the rank; in the mailbox, leaves are stacked per rank. None: they are whole.
    Example:
      >>> specs = {"w": ParamSpec(shape=(2, 3), matrix=(1, 1)), "b": ParamSpec(shape=(2,))}
      >>> matrices_of(specs).matrices
      {'w': Matrix(rows=1, columns=1)}
    """
    found = {path: Matrix(*spec.matrix) for path, spec in specs.items() if spec.matrix}
    if world is None:
        return Matrices(found, dict, dict)

    def lifted(leaf: Callable[[Tensor, ParamSpec, Groups], Tensor]) -> Hook:
        def local(groups: Groups, leaves: Leaves) -> Leaves:
            return {path: leaf(x, specs[path], groups) for path, x in leaves.items()}

        return world.lift(local)

    return Matrices(found, lifted(whole_leaf), lifted(cut_leaf))


def whole_leaf(x: Tensor, spec: ParamSpec, groups: Groups) -> Tensor:
    """The whole, unpadded tensor of which this rank holds a piece: V -> R.

    Args:
      x: rank-local piece.
      spec: of the leaf.
      groups: this rank's.
    """
    for dim, size in enumerate(spec.shape):
        for axis in reversed(spec.p.cuts(dim)):
            x = _gather(x, axis, dim, groups)
        x = x.narrow(dim, 0, size)
    return x


def cut_leaf(x: Tensor, spec: ParamSpec, groups: Groups) -> Tensor:
    """This rank's piece, padded, of a whole tensor that all ranks hold: I -> V.

    Args: as `whole_leaf`.
    """
    for dim, size in enumerate(spec.shape):
        count = pieces(spec.p, dim, groups.mesh)
        x = pad_to(x, (*x.shape[:dim], round_up(size, count), *x.shape[dim + 1 :]))
        for axis in spec.p.cuts(dim):
            x = _split(x, axis, dim, groups)
    return x


def _gather(x: Tensor, axis: AxisLike, dim: int, groups: Groups) -> Tensor:
    if not isinstance(axis, Factor):
        return gather(x, groups.over(axis), dim)
    halves = (groups.mesh.size(axis.outer), groups.mesh.size(axis.inner), -1)
    every = gather(x, groups.over(axis.axis), dim).unflatten(dim, halves)
    return every.select(dim + int(axis.part == "outer"), 0).flatten(dim, dim + 1)


def _split(x: Tensor, axis: AxisLike, dim: int, groups: Groups) -> Tensor:
    if not isinstance(axis, Factor):
        return split(x, groups.over(axis), dim)
    outer, inner = groups.mesh.size(axis.outer), groups.mesh.size(axis.inner)
    kept, copies = (outer, inner) if axis.part == "outer" else (inner, outer)
    at = dim + int(axis.part == "outer")  # copies vary within the kept half, or around it
    x = x.unflatten(dim, (kept, -1)).unsqueeze(at)
    repeated = x.expand(*x.shape[:at], copies, *x.shape[at + 1 :])
    return split(repeated.flatten(dim, dim + 2), groups.over(axis.axis), dim)
