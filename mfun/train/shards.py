"""A training state by parameter, as checkpoints and people read it, and by flat shards, as it runs.

Sharded, the optimizer sees one flat piece of every bucket instead of leaves. Any dict in its state
that has the shards' names is such leaves too, and is converted along. An optimizer may treat some
buckets otherwise than the rest (Muon does), so a dict may have some of the names only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from mfun.comm.world import Waits, World, finish
from mfun.flat import Bucket
from mfun.grads.buffers import allocate
from mfun.grads.params import ParamBuffers, shard_name
from mfun.optim import Matrices, Matrix, matrices_of
from mfun.train.plan import Plan

Leaves = Mapping[str, Tensor]


def flat_params(plan: Plan, world: World, like: Leaves, *, released: bool = False) -> ParamBuffers:
    """Buffers for this stage's parameters or as many numbers, of the types and device of `like`.

    Args:
        plan: the layout.
        world: of this rank.
        like: leaves by path, or shards.
        released: without memory, until a bucket is gathered.
    """
    stage = plan.stages[world.stage]
    buckets = plan.buckets(stage.index)
    names = [b.spans[0].path if b.spans[0].path in like else shard_name(b.index) for b in buckets]
    first = next(iter(like.values()), None)
    device = first.device if first is not None else "cpu"
    dtypes = [like.get(name, first).dtype for name in names]  # type: ignore[union-attr]
    return ParamBuffers(world, stage.specs, plan.table, buckets, dtypes, device, released)


def shard_of(plan: Plan, world: World, bucket: Bucket, leaves: Leaves) -> Tensor:
    """This rank's piece of one bucket of these leaves."""
    first = leaves[bucket.spans[0].path]
    specs = {span.path: plan.specs[span.path] for span in bucket.spans}
    (buffer,), views = allocate(
        (bucket,), (first.dtype,), specs, lead=world.lead, device=first.device
    )
    for path, view in views.items():
        view.copy_(leaves[path])
    return world.shard(buffer, plan.table[bucket.spans[0].path].shard_axes).clone()


def by_path(plan: Plan, world: World, value: Any) -> Waits[Any]:
    """Every dict of shards in a value as leaves by path.

    Args:
        plan: whose buckets they are pieces of.
        world: of this rank; all of a bucket's group call together.
        value: nested dicts and named tuples: an optimizer's state, or the shards themselves.
    """

    def gathered(shards: Leaves) -> Waits[Leaves]:
        whole = flat_params(plan, world, shards)
        yield from whole.fill(shards)
        bucket = whole.bucket_of
        return {path: x for path, x in whole.views.items() if shard_name(bucket[path]) in shards}

    names = [shard_name(i) for i in range(len(plan.buckets(world.stage)))]
    return (yield from _converted(value, names, gathered))


def by_shard(plan: Plan, world: World, value: Any) -> Any:
    """Every dict of leaves by path in a value as this rank's shards: the inverse of `by_path`."""

    def cut(leaves: Leaves) -> Waits[Leaves]:
        whole = flat_params(plan, world, leaves)
        for path, x in leaves.items():
            whole.views[path].copy_(x)
        held = {shard_name(whole.bucket_of[path]) for path in leaves}
        return {name: shard.clone() for name, shard in whole.shards().items() if name in held}
        yield ""

    steps = _converted(value, [*flat_paths(plan, world)], cut)
    try:
        next(steps)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("cutting waits for nobody")


def flat_paths(plan: Plan, world: World) -> list[str]:
    """The paths of this stage's parameters."""
    return [span.path for bucket in plan.buckets(world.stage) for span in bucket.spans]


def sharded_matrices(plan: Plan, world: World) -> Matrices:
    """How hidden matrices that shards cut across are made whole for Muon, and shards again.

    Args:
        plan: whose buckets hold hidden matrices only, or none.
        world: of this rank.
    """
    inner = matrices_of(plan.specs, world)
    buckets = plan.buckets(world.stage)
    names = [shard_name(b.index) for b in buckets if b.spans[0].path in inner.matrices]

    def whole(shards: Leaves) -> dict[str, Tensor]:
        return inner.whole(finish(by_path(plan, world, shards)))

    def cut(leaves: Leaves) -> dict[str, Tensor]:
        return by_shard(plan, world, inner.cut({**leaves}))

    return Matrices({**inner.matrices, **dict.fromkeys(names, Matrix())}, whole, cut)


def _converted(
    node: Any, names: Collection[str], convert: Callable[[Leaves], Waits[Leaves]]
) -> Waits[Any]:
    """The value with every dict of these names, or of some buckets' of them, converted."""
    if isinstance(node, Mapping):
        if node and node.keys() <= set(names):
            return (yield from convert(node))
        out = {}
        for name, child in node.items():
            out[name] = yield from _converted(child, names, convert)
        return out
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        children = []
        for child in node:
            children.append((yield from _converted(child, names, convert)))
        return type(node)(*children)
    return node
