"""What each collective does to data, without derivatives: on a process group and on stacked ranks.

`on_ranks` is plain indexing and is the definition; `on_group` says the same with messages. `dim`
and `rank_dim` count from the end.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import Tensor

from mfun.comm.axis import Axis
from mfun.comm.exchange import start_exchange, start_sum, start_sum_pieces, wait

Params = tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _order(partition: tuple[tuple[int, ...], ...]) -> tuple[list[int], list[int]]:
    """Positions group by group, and the inverse permutation; numbers, for tensors have levels."""
    order = [p for group in partition for p in group]
    return order, sorted(range(len(order)), key=order.__getitem__)


def _grouped(x: Tensor, axis: Axis, rank_dim: int) -> Tensor:
    """(..., ranks, ...) -> (groups, members, ...)."""
    assert axis.partition is not None
    order, _ = _order(axis.partition)
    return x.movedim(rank_dim, 0)[order].unflatten(0, (-1, axis.size))


def _ungrouped(g: Tensor, axis: Axis, rank_dim: int) -> Tensor:
    assert axis.partition is not None
    _, inverse = _order(axis.partition)
    return g.flatten(0, 1)[inverse].movedim(0, rank_dim)


def _cut(x: Tensor, dim: int, size: int, to: int) -> Tensor:
    """Cut `dim` into `size` pieces and put the new dim of pieces at position `to`."""
    return x.unflatten(dim, (size, x.shape[dim] // size)).movedim(dim - 1, to)


def _glue(x: Tensor, pieces: int, dim: int) -> Tensor:
    """Concatenate the dim of pieces (at position `pieces`) along `dim`."""
    return x.movedim(pieces, dim - 1).flatten(dim - 1, dim)


def on_ranks(name: str, x: Tensor, axis: Axis, params: Params, rank_dim: int) -> Tensor:
    """One collective on rank-stacked data; the meaning of its name.

    Args:
        name: a key of `DUALS`, or "max".
        x: (..., ranks, ...): every rank's tensor.
        axis: a simulated axis.
        params: the collective's dims or offset.
        rank_dim: where the ranks are, from the end.

    Returns:
        The results of all ranks, stacked alike.
    """
    if name == "copy":
        return x.clone()
    g = _grouped(x, axis, rank_dim)
    return _ungrouped(_on_members(name, g, axis.size, params), axis, rank_dim)


def _on_members(name: str, g: Tensor, size: int, params: Params) -> Tensor:
    match name, params:
        case (("reduce" | "all_reduce"), ()):
            return g.sum(1, keepdim=True).expand_as(g)
        case "max", ():
            return g.amax(1, keepdim=True).expand_as(g)
        case (("gather" | "unsplit"), (dim,)):
            whole = _glue(g, 1, dim)
            return whole.unsqueeze(1).expand(-1, size, *[-1] * (whole.ndim - 1))
        case "reduce_scatter", (dim,):
            return _cut(g.sum(1), dim, size, 1)
        case "split", (dim,):
            return _cut(g, dim, size, 2).diagonal(dim1=1, dim2=2).movedim(-1, 1)
        case "all_to_all", (cut, concat):
            return _glue(_cut(g, cut, size, 2).transpose(1, 2), 2, concat)
        case "shift", (offset,):
            return g.roll(offset, 1)
        case "broadcast", (root,):
            return g[:, root : root + 1].expand_as(g)
        case "collect", (root,):
            is_root = torch.arange(size, device=g.device) == root
            is_root = is_root.view(size, *[1] * (g.ndim - 2))
            return torch.where(is_root, g.sum(1, keepdim=True), torch.zeros_like(g))
    raise ValueError(f"no collective {name!r} with parameters {params}")


ROUNDING = 1024
"""Units in the last place, of the largest value, by which values declared equal may differ."""


def gap(x: Tensor, first: Tensor) -> float | None:
    """Largest difference from what `x` should equal, or None if it is rounding at most.

    CPU kernels of sigmoid, gelu and others round the end of a buffer differently from its middle,
    so equal ranks in one stack may differ in the last bits. Equal infinities and NaNs are equal.

    Example:
        >>> gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        0.5
        >>> gap(torch.tensor([1.0 + 2**-20]), torch.tensor([1.0])) is None
        True
    """
    same = (x == first) | ((x != x) & (first != first))
    if bool(same.all()):
        return None
    if not x.is_floating_point():
        return (x.double() - first.double()).abs().max().item()
    worst = torch.where(same, 0.0, (x - first).abs()).max().item()
    scale = torch.where(first.isfinite(), first.abs(), 0.0).max().item()
    return None if worst <= ROUNDING * torch.finfo(x.dtype).eps * scale else worst


def check_equal(x: Tensor, axis: Axis, rank_dim: int, what: str) -> None:
    """Raise unless the stacked values are equal, up to rounding, within each group of the axis.

    Raises:
        ValueError: they differ; the message names the value, the axis and the largest difference.
    """
    g = _grouped(x, axis, rank_dim)
    worst = gap(g, g[:, :1])
    if worst is not None:
        raise ValueError(
            f"{what} must be equal over axis {axis.name!r} (size {axis.size}) but its ranks differ "
            f"by up to {worst:.3g}; a `reduce`, `gather` or `copy` is missing before it"
        )


def on_group(name: str, x: Tensor, axis: Axis, params: Params) -> Tensor:
    """One collective by messages over the axis' process group.

    Raises:
        RuntimeError: the axis has none: a simulated axis used outside `simulate`.
    """
    if axis.group is None:
        raise RuntimeError(
            f"`{name}` over axis {axis.name!r} (size {axis.size}) has neither a process group nor "
            "simulated ranks here; take the axis from the `groups` argument of the running function"
        )
    size = axis.size
    match name, params:
        case "copy", ():
            return x.view_as(x)
        case (("reduce" | "all_reduce"), ()):
            return _all_reduce(x, axis, dist.ReduceOp.SUM)
        case "max", ():
            return _all_reduce(x, axis, dist.ReduceOp.MAX)
        case (("gather" | "unsplit"), (dim,)):
            return _glue(_all_gather(x, axis), 0, dim)
        case "reduce_scatter", (dim,):
            return _reduce_scatter(_cut(x, dim, size, 0).contiguous(), axis)
        case "split", (dim,):
            return _cut(x, dim, size, 0)[axis.position].contiguous()
        case "all_to_all", (cut, concat):
            return _glue(_all_to_all(_cut(x, cut, size, 0), axis), 0, concat)
        case "shift", (offset,):
            return _shift(x, axis, offset)
        case "broadcast", (root,):
            out = x.clone(memory_format=torch.contiguous_format)
            dist.broadcast(out, axis.ranks[root], group=axis.group)
            return out
        case "collect", (root,):
            out = x.clone(memory_format=torch.contiguous_format)
            dist.reduce(out, axis.ranks[root], group=axis.group)
            return out if axis.position == root else torch.zeros_like(out)
    raise ValueError(f"no collective {name!r} with parameters {params}")


def _all_reduce(x: Tensor, axis: Axis, op: dist.ReduceOp.RedOpType) -> Tensor:
    # A contiguous copy first: an expanded or transposed gradient reduced in a temporary and thrown
    # away is a published silent fault.
    out = x.clone(memory_format=torch.contiguous_format)
    if op == dist.ReduceOp.SUM:
        wait(start_sum(out, axis))
    else:
        dist.all_reduce(out, op=op, group=axis.group)
    return out


def _all_gather(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty(axis.size, *x.shape)
    if x.device.type == "cpu":
        out[axis.position] = x
        wait(start_exchange(out, [out[axis.position]] * axis.size, axis))
        return out
    dist.all_gather_single(out.flatten(0, 1) if x.ndim else out, x.contiguous(), group=axis.group)
    return out


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.device.type == "cpu":
        out[axis.position] = x[axis.position]
        wait(start_exchange(out, x, axis))
        return out
    dist.all_to_all_single(out, x, group=axis.group)
    return out


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """(size, ...) summands -> this rank's sum; on CPU exchanged, then added here."""
    if x.device.type == "cpu":
        works, total = start_sum_pieces(x, axis)
        wait(works)
        return total()
    out = x.new_empty(x.shape[1:])
    dist.reduce_scatter_single(out, x.flatten(0, 1) if x.ndim > 1 else x, group=axis.group)
    return out


def _shift(x: Tensor, axis: Axis, offset: int) -> Tensor:
    if offset % axis.size == 0:
        return x.clone()
    x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to = axis.ranks[(axis.position + offset) % axis.size]
    source = axis.ranks[(axis.position - offset) % axis.size]
    ops = [
        dist.P2POp(dist.isend, x, to, group=axis.group),
        dist.P2POp(dist.irecv, out, source, group=axis.group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out
