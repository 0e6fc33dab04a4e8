"""Collectives written down a second time, in numpy, and the programs that are checked with them.

`Layout` knows which ranks form a group by its own arithmetic; `DEFINITIONS` says what a collective
does to the tensors of one group; `matrix` makes of it the integer matrix on all ranks' elements.
`Program` wraps a collective in something nonlinear, once rank by rank and once as one dense
function. Nothing here asks mfun what a group, a value or a derivative is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from mfun import comm
from mfun.comm import DUALS, Axis, Groups
from mfun.mesh import AxisLike, Factor, Mesh
from mfun.spec import P

DEFINITIONS: dict[str, Callable[..., Any]] = {
    "copy": lambda xs: xs,
    "reduce": lambda xs: [sum(xs)] * len(xs),
    "all_reduce": lambda xs: [sum(xs)] * len(xs),
    "gather": lambda xs, dim: [np.concatenate(xs, dim)] * len(xs),
    "unsplit": lambda xs, dim: [np.concatenate(xs, dim)] * len(xs),
    "reduce_scatter": lambda xs, dim: np.split(sum(xs), len(xs), dim),
    "split": lambda xs, dim: [np.split(x, len(xs), dim)[i] for i, x in enumerate(xs)],
    "all_to_all": lambda xs, cut, glue: [
        np.concatenate([np.split(x, len(xs), cut)[i] for x in xs], glue) for i in range(len(xs))
    ],
    "shift": lambda xs, offset: [xs[(i - offset) % len(xs)] for i in range(len(xs))],
    "broadcast": lambda xs, root: [xs[root]] * len(xs),
    "collect": lambda xs, root: [sum(xs) if i == root else 0 * xs[0] for i in range(len(xs))],
    "max": lambda xs: [np.maximum.reduce(xs)] * len(xs),
}


@attrs.frozen
class Layout:
    """A mesh and the axes of one group, with digits from slow to fast."""

    mesh: Mesh
    axes: tuple[AxisLike, ...]

    @property
    def digits(self) -> list[tuple[AxisLike, int]]:
        """Axes (or halves of an axis) in the order in which they number the ranks."""
        factor = next((a for a in self.axes if isinstance(a, Factor)), None)
        out: list[tuple[AxisLike, int]] = []
        for name in reversed([t for t in self.mesh.order.split("-") if t in ("tp", "cp", "dp")]):
            size = getattr(self.mesh, name)
            if factor is not None and factor.axis == name:
                inner = size // factor.parts
                out += [(Factor(name, factor.parts), factor.parts)]
                out += [(Factor(name, factor.parts, "inner"), inner)]
            else:
                out.append((name, size))
        return out

    @property
    def ranks(self) -> int:
        """How many there are."""
        return prod(size for _, size in self.digits)

    @property
    def groups(self) -> list[list[int]]:
        """Ranks that differ in `axes` only."""
        table = np.arange(self.ranks).reshape([size for _, size in self.digits])
        inside = [i for i, (axis, _) in enumerate(self.digits) if axis in self.axes]
        outside = [i for i in range(table.ndim) if i not in inside]
        size = prod(self.digits[i][1] for i in inside)
        return table.transpose(outside + inside).reshape(-1, size).tolist()

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])

    @property
    def number(self) -> list[int]:
        """For each rank the number of its group."""
        out = [0] * self.ranks
        for i, group in enumerate(self.groups):
            for rank in group:
                out[rank] = i
        return out

    def lead(self, equal: bool) -> tuple[AxisLike, ...]:
        """The entry that cuts a leading dim by rank, or (equal) by group."""
        return tuple(axis for axis, _ in self.digits if not (equal and axis in self.axes))


def define(layout: Layout, name: str, params: tuple[int, ...], x: np.ndarray) -> np.ndarray:
    """Rank-stacked result of a collective, by its definition."""
    out: list[Any] = [None] * layout.ranks
    for group in layout.groups:
        results = DEFINITIONS[name]([x[rank] for rank in group], *params)
        for rank, result in zip(group, results, strict=True):
            out[rank] = result
    return np.stack(out)


def matrix(layout: Layout, name: str, params: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """(out, in): the collective on the elements of all ranks."""
    full = (layout.ranks, *shape)
    basis = np.eye(prod(full)).reshape(-1, *full)
    columns = [define(layout, name, params, e).ravel() for e in basis]
    return torch.from_numpy(np.stack(columns, 1))


def out_shape(layout: Layout, name: str, params: tuple[int, ...], shape: tuple[int, ...]) -> Any:
    """Rank-local shape of the result."""
    return define(layout, name, params, np.zeros((layout.ranks, *shape))).shape[1:]


def call(name: str, x: Tensor, axis: Axis, params: tuple[int, ...]) -> Tensor:
    """The collective of mfun."""
    return getattr(comm, name)(x, axis, *params)


def some(name: str, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Parameters and a rank-local shape for a collective over n ranks."""
    return {
        "gather": ((1,), (2, 1)),
        "unsplit": ((0,), (1, 2)),
        "reduce_scatter": ((-1,), (2, n)),
        "split": ((0,), (n, 2)),
        "all_to_all": ((0, 1), (n, 2)),
        "shift": ((1,), (2, 1)),
        "broadcast": ((n - 1,), (2,)),
        "collect": ((n - 1,), (2,)),
    }.get(name, ((), (2,)))


@attrs.frozen
class Program:
    """Loss = sum of u * sin(collective(w * sin(x))), each value typed as the table says.

    x and w are stacked by rank, or by group where the collective takes an invariant. u likewise by
    its result: a loss of an invariant value is meant once.
    """

    layout: Layout
    name: str
    params: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def types(self) -> tuple[str, str]:
        """Of the input and of the result."""
        before, after = DUALS[self.name].types.split(" -> ")
        return before, after

    def specs(self, *front: Any) -> tuple[P, P, P]:
        """Of x, u and the loss, after `front` entries."""
        (before, after), lead = self.types, self.layout.lead
        loss = P(*front, sums=lead(after == "I"))
        return P(*front, lead(before == "I")), P(*front, lead(after == "I")), loss

    def inputs(self, *front: int) -> tuple[Tensor, Tensor, Tensor]:
        """Whole x, w, u."""
        before, after = self.types
        out = out_shape(self.layout, self.name, self.params, self.shape)
        count = {True: len(self.layout.groups), False: self.layout.ranks}
        made = torch.Generator().manual_seed(len(self.name))

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, generator=made)

        first = count[before == "I"]
        return (
            draw(*front, first, *self.shape),
            draw(first, *self.shape),
            draw(count[after == "I"], *out),
        )

    def local(self, groups: Groups, x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        """One rank's loss; its pieces have a leading dim of 1."""
        axis = groups.over(*self.layout.axes)
        y = call(self.name, (w * torch.sin(x))[0], axis, self.params)
        return (u[0] * torch.sin(y)).sum()

    def dense(self, x: Tensor, w: Tensor, u: Tensor) -> Tensor:
        """The same on one device, with the collective as a matrix."""
        layout = self.layout
        h = w * torch.sin(x)
        if self.types[0] == "I":
            h = h[layout.number]
        y = matrix(layout, self.name, self.params, self.shape) @ h.flatten()
        y = y.reshape(layout.ranks, *u.shape[1:])
        if self.types[1] == "I":
            y = y[[group[0] for group in layout.groups]]
        return (u * torch.sin(y)).sum()
