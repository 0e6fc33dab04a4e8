"""The door of a simulated mesh: whole tensors in, rank-stacked pieces through, whole tensors out.

`enter` and `leave` are each other's derivative. A replicated value that is I (equal, with equal
gradients) is handed to all ranks and its gradient taken from the first; one that is R (`sums`) has
its gradients summed.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun.comm.kernels import gap
from mfun.comm.signed import signed
from mfun.mesh import DENSE, EXPERT, Mesh, mesh_axis
from mfun.spec import P, ParamSpec, local_shape, others, pad_to, piece_index, pieces


@attrs.frozen
class Door:
    """Which piece each rank holds, and which ranks speak for it.

    Args:
        cuts: number of pieces of each dim.
        piece: for every rank, the number of its piece (row-major over `cuts`).
        owner: for every rank, the rank whose copy of an equal value stands for it; an owner is its
            own, and where several owners hold one piece their values are summed.
        check: assert that the others agree with the owner.
        name: for messages.
    """

    cuts: tuple[int, ...]
    piece: tuple[int, ...]
    owner: tuple[int, ...]
    check: bool
    name: str


@functools.lru_cache(maxsize=4096)
def make_door(p: P, ndim: int, mesh: Mesh, check: bool, name: str) -> Door:
    """The door of a tensor of `ndim` dims cut by `p` over one stage of the mesh.

    Raises:
        ValueError: `p` has more entries than the tensor has dims, names an axis that the mesh
            lacks, or mixes axes of the dense and the expert view.
    """
    if len(p.entries) > ndim:
        raise ValueError(f"{name}: {p} has {len(p.entries)} entries for a tensor of {ndim} dims")
    view = _view(p, mesh, name)
    cuts = tuple(pieces(p, dim, mesh) for dim in range(ndim))
    # Neither cut nor summed: what is left of the axes holds equal values.
    equal = others((*p.axes, *p.sums), mesh, view)
    piece, owner = [], []
    ranks = mesh.stage_ranks(0)
    for rank in ranks:
        coords = {**mesh.coords(rank), **mesh.expert_coords(rank)}
        number = 0
        for dim in range(ndim):
            number = number * cuts[dim] + piece_index(p, dim, mesh, coords)
        piece.append(number)
        owner.append(ranks.index(mesh.group_of(rank, *equal)[0]))
    return Door(cuts, tuple(piece), tuple(owner), check, name)


def _view(p: P, mesh: Mesh, name: str) -> tuple[str, ...]:
    """The three axes of a stage in the view that `p` speaks of."""
    try:
        names = [mesh_axis(digit.axis) for digit in mesh.digits(*p.axes, *p.sums)]
    except ValueError as error:
        raise ValueError(f"{name}: {p}: {error}") from None
    return EXPERT[:3] if "edp" in names else DENSE[:3]


def as_p(spec: P | ParamSpec) -> P:
    """The `P` of a spec, with the axes over which its gradients are summands.

    Raises:
        ValueError: the gradients are to be averaged over an axis, which a door cannot do.
    """
    if isinstance(spec, P):
        return spec
    if "mean" in spec.grad.values():
        raise ValueError(
            f"a parameter {spec} cannot pass the door of `simulate`, which sums gradients or takes "
            "one of equal ones; declare `partial`, or give a P and average in the program"
        )
    sums = [axis for axis, kind in spec.grad.items() if kind == "partial"]
    expert = {"etp", "ep", "edp"} & set(map(mesh_axis, spec.p.axes))
    return P(*spec.p.entries, sums=(*(("edp",) if expert else ("dp", "cp")), *sums))


class Enter(torch.autograd.Function):
    """Pieces (..., K, local) -> ranks (..., n, local); `dim` from the end."""

    @staticmethod
    @signed
    def forward(x: Tensor, door: Door, dim: int) -> Tensor:
        """Every rank's copy of its piece."""
        return x.index_select(x.ndim + dim, torch.tensor(door.piece, device=x.device))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Static arguments only."""
        ctx.static = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Leave again."""
        door, dim = ctx.static
        door = attrs.evolve(door, name=f"the gradient of {door.name}")
        return Leave.apply(grad, door, dim), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Linear."""
        return Enter.apply(tangent, *ctx.static)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, door: Door, dim: int) -> tuple[Tensor, int]:
        """A batch dim goes to the front."""
        return Enter.apply(x.movedim(in_dims[0], 0), door, dim), 0


class Leave(torch.autograd.Function):
    """Ranks (..., n, local) -> pieces (..., K, local): the sum of what a piece's owners hold."""

    @staticmethod
    @signed
    def forward(x: Tensor, door: Door, dim: int) -> Tensor:
        """Check the copies, then add up what the owners hold."""
        if door.check:
            _check_copies(x, door, dim)
        shape = list(x.shape)
        shape[dim] = math.prod(door.cuts)
        owners = torch.tensor([i for i, own in enumerate(door.owner) if i == own], device=x.device)
        piece = torch.tensor(door.piece, device=x.device)[owners]
        axis = x.ndim + dim
        return x.new_zeros(shape).index_add_(axis, piece, x.index_select(axis, owners))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Static arguments only."""
        ctx.static = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Enter again: all ranks see the gradient, owners or not."""
        return Enter.apply(grad, *ctx.static), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Linear."""
        return Leave.apply(tangent, *ctx.static)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, door: Door, dim: int) -> tuple[Tensor, int]:
        """A batch dim goes to the front."""
        return Leave.apply(x.movedim(in_dims[0], 0), door, dim), 0


def _check_copies(x: Tensor, door: Door, dim: int) -> None:
    """Every rank must agree with the owner that stands for it."""
    owners = torch.tensor(door.owner, device=x.device)
    if gap(x, x.index_select(x.ndim + dim, owners)) is None:
        return
    x = x.movedim(dim, 0)
    for rank, own in enumerate(door.owner):
        worst = gap(x[rank], x[own])
        if worst is not None:
            raise ValueError(
                f"{door.name} is declared equal over the axes that its spec does not mention, but "
                f"rank {rank} differs from rank {own} by up to {worst:.3g}; a `reduce` or `gather` "
                "is missing, or the spec lacks an axis (or `sums`)"
            )


def _check_shape(x: Tensor, shape: tuple[int, ...], spec: ParamSpec, name: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {[*x.shape]}, but its spec {spec} means {[*shape]}")


def enter(x: Tensor, spec: P | ParamSpec, mesh: Mesh, check: bool, name: str) -> Tensor:
    """A whole tensor as rank-stacked pieces (n, local...); padded where a ParamSpec allows it.

    Raises:
        ValueError: a dim does not divide into its pieces, or a ParamSpec has another shape.
    """
    door = make_door(as_p(spec), x.ndim, mesh, check and x.is_floating_point(), name)
    if isinstance(spec, ParamSpec):
        _check_shape(x, spec.shape, spec, name)
        local = local_shape(spec, mesh)
        x = pad_to(x, [n * k for n, k in zip(local, door.cuts, strict=True)])
    for dim, cut in enumerate(door.cuts):
        if x.shape[dim] % cut:
            raise ValueError(
                f"{name}: dim {dim} of shape {[*x.shape]} does not divide into {cut} pieces over "
                f"{as_p(spec).cuts(dim)} ({spec}); make it a multiple of {cut}"
            )
    ndim = x.ndim
    for dim in reversed(range(ndim)):
        x = x.unflatten(dim, (door.cuts[dim], x.shape[dim] // door.cuts[dim]))
    x = x.movedim(tuple(range(0, 2 * ndim, 2)), tuple(range(ndim)))
    x = x.flatten(0, ndim - 1) if ndim else x.unsqueeze(0)
    if not x.is_floating_point():
        return x[torch.tensor(door.piece, device=x.device)]
    return Enter.apply(x, door, -ndim - 1)


def leave(x: Tensor, spec: P | ParamSpec, mesh: Mesh, check: bool, name: str) -> Tensor:
    """The whole tensor from rank-stacked pieces (n, local...); padding of a ParamSpec is cut off.

    Raises:
        ValueError: values declared equal differ, or a ParamSpec has another shape.
    """
    ndim = x.ndim - 1
    door = make_door(as_p(spec), ndim, mesh, check, name)
    if isinstance(spec, ParamSpec):
        _check_shape(x[0], local_shape(spec, mesh), spec, f"{name} on each rank")
    x = Leave.apply(x, door, -ndim - 1)
    if not ndim:
        return x.squeeze(0)
    x = x.unflatten(0, door.cuts)
    x = x.movedim(tuple(range(ndim)), tuple(range(0, 2 * ndim, 2)))
    for dim in range(ndim):
        x = x.flatten(dim, dim + 1)
    if isinstance(spec, ParamSpec):
        x = x[tuple(slice(0, n) for n in spec.shape)]
    return x
