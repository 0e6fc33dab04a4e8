"""`finalize`: from each rank's summands to whole gradients, equal where a parameter is repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mfun import tree
from mfun.comm import all_reduce, copy
from mfun.comm.groups import Groups
from mfun.comm.world import Waits, World
from mfun.grads.buffers import GradBuffers
from mfun.grads.table import Group, Reduction
from mfun.mesh import AxisLike, Mesh
from mfun.spec import axis_index


def finalize(grads: Any, groups: Groups, table: Mapping[str, Reduction]) -> Any:
    """Make a tree of rank-local gradients whole: weight, then sum over each leaf's group.

    g = sum over the group of weight * g_rank.

    For research code under `simulate` or `distribute`. The training step uses
    `finalize_steps`, the same table on flat buffers. It can be differentiated: what is equal on all
    ranks of an axis is I there, so it is not summed with weight 1/n (in whose derivative each rank
    would get the n-th part) but handed on by `copy`.

    Args:
        grads: tree of gradients, rank-local shapes, P over the data axes and as declared over tp.
        groups: this rank's groups.
        table: from `reductions`.

    Returns:
        The tree of whole gradients, equal over every axis a leaf is replicated on, and over the
        stages it is tied over.

    Raises:
        KeyError: a group that a row names was not made; stages are not there under `simulate`.

    Proof: proofs/Sync.v, replicated_gradient, replicated_gradient_unique, partial_and_equal.
    """

    def one(path: str, grad: Tensor) -> Tensor:
        row = table[path]
        pairs = list(zip(row.axes, row.rows, strict=False))
        for axis in [axis for axis, how in pairs if how.kind == "equal"]:
            grad = copy(grad, groups.over(axis))
        summed = [axis for axis, how in pairs if how.kind != "equal"]
        weight = math.prod(how.weight for how in row.rows if how.kind != "equal")
        grad = grad if weight == 1.0 else grad * weight
        if summed or row.joined:
            grad = all_reduce(grad, groups.over(*summed, stages=row.joined))
        return grad

    return tree.map_with_path(one, grads)


def start_reduce(world: World, grads: GradBuffers, bucket: int) -> None:
    """Close a bucket and start to make it whole; `finalize_steps` waits for it.

    Args:
        world: of this rank.
        grads: the buffers.
        bucket: whose gradients are all there.

    Raises:
        RuntimeError: it was reduced in this window already.
    """
    if grads.release:
        for other in list(grads.sums):  # one on its way at a time: each holds a whole buffer
            grads.settle(other)
    elif bucket in grads.sums:
        raise RuntimeError(f"bucket {bucket} is reduced twice in a window")
    grads.close(bucket)
    if grads.guard is not None:
        grads.guard(grads, bucket)
    row, buffer = grads.row(bucket), grads.buffers[bucket]
    op = "mean" if grads.mean else "sum"
    if grads.sharded:
        grads.sums[bucket] = world.reduce_scatter(buffer, row.shard_axes, op, wide=grads.wide)
        if grads.release:
            grads.reopen(bucket)
    else:
        alone = not row.axes and not row.joined
        whole = _as_it_is(buffer) if alone else world.all_reduce(buffer, *row.group, op)
        grads.sums[bucket] = whole


def _as_it_is(x: Tensor) -> Waits[Tensor]:
    return x
    yield ""


def finalize_steps(world: World, grads: GradBuffers) -> Waits[None]:
    """Make the gradients in flat buffers whole: weights, then one collective a bucket.

    In place; or, sharded, each rank gets its shards of the sums, and a shard that other ranks or
    (of a tied leaf) other stages hold too is then added up over these. Buckets that the stream has
    reduced already are only waited for.

    Args:
        world: of this rank.
        grads: the buffers of this stage, after the last backward.
    """
    late = [i for i in grads.order() if not grads.reduced(i)]
    for (axes, stages), buckets in groupby(late, key=partial(_travels, grads)):
        with world.together(axes, stages):
            for i in buckets:
                start_reduce(world, grads, i)
    for i in list(grads.sums):
        if grads.release:
            grads.settle(i)
            continue
        whole = yield from grads.sums.pop(i)
        if grads.sharded:  # its place in the buffer is as good as memory of its own
            place = world.shard(grads.buffers[i], grads.row(i).shard_axes)
            grads.shards[i] = place.copy_(whole)
        elif whole is not grads.buffers[i]:
            grads.buffers[i].copy_(whole)
    joined: dict[int, Waits[Tensor]] = {}
    for i in grads.order() if grads.sharded else ():
        row = grads.row(i)
        if row.copy_axes or row.joined:
            joined[i] = world.all_reduce(grads.shards[i], row.copy_axes, row.joined)
    for i, whole in joined.items():
        grads.shards[i] = yield from whole


def _travels(grads: GradBuffers, bucket: int) -> Group:
    """The group of a bucket's collective; none where each is waited for before the next."""
    if grads.release or grads.wide:
        return (), None
    row = grads.row(bucket)
    return (row.shard_axes, None) if grads.sharded else row.group


def owns(
    row: Reduction, mesh: Mesh, stage: int, sharded: bool = False
) -> Callable[[Mapping[str, int]], Tensor]:
    """Whether the rank at some coordinates counts a leaf in the norm: 1 for one holder, else 0.

    The data axes are left out: every data rank sums up for itself. Of a shard only copies are not
    counted.
    """
    whole: list[AxisLike] = [axis for axis in row.axes if axis not in ("dp", "cp")]
    axes = row.copy_axes if sharded else whole

    def value(coords: Mapping[str, int]) -> Tensor:
        first = all(axis_index(axis, mesh, coords) == 0 for axis in axes)
        return torch.tensor(float(first and stage == row.stages[0]), dtype=torch.float64)

    return value


def global_norm(world: World, grads: GradBuffers) -> Waits[Tensor]:
    """Euclidean norm of the whole gradient, each logical element counted once in any layout.

    Args:
        world: of this rank.
        grads: finalized buffers.

    Returns:
        The norm, float64, of shape `world.lead`; the same on all ranks.
    """
    total = torch.zeros(world.lead, dtype=torch.float64)
    for i, buffer in grads.finished().items():
        row = grads.row(i)
        own = world.build(owns(row, world.mesh, world.stage, grads.sharded))
        total = total.to(buffer.device) + sum_of_squares(buffer) * own
    everywhere = tuple(range(world.mesh.pp))
    axes = ("tp", "dp", "cp") if grads.sharded else ("tp",)
    total = yield from world.all_reduce(total, axes, everywhere)
    return total.sqrt()


NORM_CHUNK = 1024


def sum_of_squares(buffer: Tensor) -> Tensor:
    """Sum of squares over the last dim, in float64.

    A running sum of 10^6 float32 squares is off by 10^-5, by another amount in every layout, and
    clipping would pass that on; so norms of short pieces are taken and summed in float64.

    Example:
        >>> float(sum_of_squares(torch.full((102_400,), 0.5)))
        25600.0
    """
    whole = buffer.shape[-1] // NORM_CHUNK * NORM_CHUNK
    pieces = buffer[..., :whole].unflatten(-1, (-1, NORM_CHUNK)) if whole else buffer[..., None, :]
    total = torch.linalg.vector_norm(pieces, dim=-1).double().square().sum(-1)
    rest = buffer[..., whole or buffer.shape[-1] :]
    return total + torch.linalg.vector_norm(rest, dim=-1).double().square()
