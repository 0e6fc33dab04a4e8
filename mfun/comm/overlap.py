"""Collectives that run while something else is computed: first order only, on process groups.

The autograd Functions of `collectives` stay the definition; a layer's backward uses these where no
further derivative is asked for, and a test holds both equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from mfun.comm.axis import Axis
from mfun.comm.exchange import start_exchange, start_sum, start_sum_pieces, wait


class Pending(NamedTuple):
    """A value on its way: `wait()` gives it."""

    works: list[Any]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The result; blocks until it is there."""
        wait(self.works)
        return self.finish()


def can_overlap(x: Tensor, axis: Axis) -> bool:
    """Whether `start_*` may be used: real processes, no derivative recorded, no transform running.

    Tensors inside `torch.func` transforms have the plain type, and torch.distributed would give
    them unreduced data or drop their tangents without an error.
    """
    return (
        axis.group is not None
        and not torch.is_grad_enabled()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad.unpack_dual(x).tangent is None
    )


def start_all_reduce(x: Tensor, axis: Axis) -> Pending:
    """Start summing x over the axis; x must not be touched again by the caller.

    Args:
        x: a summand, P over `axis`.
        axis: a process axis.

    Returns:
        The pending sum.
    """
    x = x.contiguous()
    return Pending(start_sum(x, axis), lambda: x)


def start_reduce_scatter(
    x: Tensor, axis: Axis, dim: int, *, over: int = 1, wide: bool = False
) -> Pending:
    """Start summing x over the axis, each rank keeping its piece along `dim`.

    Args:
        x: a whole-sized summand, P over `axis`.
        axis: a process axis.
        dim: tensor dim to cut.
        over: what the sum is divided by.
        wide: 16-bit summands are exchanged as they are and added up in float32; as many bytes
            travel as otherwise, and a whole buffer is received.

    Returns:
        The pending piece, V over `axis`.
    """
    dim %= x.ndim
    cut = x.unflatten(dim, (axis.size, x.shape[dim] // axis.size)).movedim(dim, 0).contiguous()
    if x.device.type == "cpu" or wide:
        return Pending(*start_sum_pieces(cut, axis, over=over, wide=wide))
    out = cut.new_empty(cut.shape[1:])
    work = dist.reduce_scatter_single(out, cut.flatten(0, 1), group=axis.group, async_op=True)
    return Pending([work], lambda: out.div_(over) if over > 1 else out)


def start_gather(x: Tensor, axis: Axis, dim: int) -> Pending:
    """Start concatenating the ranks' pieces along `dim`.

    Args:
        x: rank-local piece, V over `axis`.
        axis: a process axis.
        dim: tensor dim the pieces are cut along.

    Returns:
        The pending whole.
    """
    dim %= x.ndim
    parts = x.new_empty(axis.size, *x.shape)
    works = start_all_gather(parts, x.contiguous(), axis)
    return Pending(works, lambda: parts.movedim(0, dim).flatten(dim, dim + 1))


def start_all_gather(parts: Tensor, x: Tensor, axis: Axis) -> list[Any]:
    """Start to fill parts (size, ...) with every rank's x.

    Args:
        parts: contiguous.
        x: contiguous; may be this rank's row of `parts`.
        axis: a process axis.

    Returns:
        Work to wait for.
    """
    if x.device.type != "cpu":
        out = parts.flatten(0, 1)
        return [dist.all_gather_single(out, x, group=axis.group, async_op=True)]
    own = parts[axis.position]
    if own.data_ptr() != x.data_ptr():
        own.copy_(x)
    return start_exchange(parts, [own] * axis.size, axis)
