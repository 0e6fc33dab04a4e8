"""A training state by parameter, as checkpoints and people read it, and by flat shards, as it runs.

Sharded, the optimizer sees one flat piece of every bucket instead of leaves. Any dict in its state
that has the shards' names is such leaves too, and is converted along.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from mfun.comm.world import Waits, World
from mfun.grads.params import ParamBuffers, shard_name
from mfun.train.plan import Plan

Leaves = Mapping[str, Tensor]


def flat_params(plan: Plan, world: World, like: Leaves) -> ParamBuffers:
    """Buffers for this stage's parameters or as many numbers, of the types and device of `like`.

    Args:
        plan: the layout.
        world: of this rank.
        like: leaves by path, or shards.
    """
    stage = plan.stages[world.stage]
    buckets = plan.buckets(stage.index)
    names = [b.spans[0].path if b.spans[0].path in like else shard_name(b.index) for b in buckets]
    device = like[names[0]].device if names else "cpu"
    dtypes = [like[name].dtype for name in names]
    return ParamBuffers(world, stage.specs, plan.table, buckets, dtypes, device)


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
        return whole.views

    names = [shard_name(i) for i in range(len(plan.buckets(world.stage)))]
    return (yield from _converted(value, names, gathered))


def by_shard(plan: Plan, world: World, value: Any) -> Any:
    """Every dict of leaves by path in a value as this rank's shards: the inverse of `by_path`."""

    def cut(leaves: Leaves) -> Waits[Leaves]:
        whole = flat_params(plan, world, leaves)
        whole.load(leaves)
        return {name: shard.clone() for name, shard in whole.shards().items()}
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


def _converted(
    node: Any, names: Collection[str], convert: Callable[[Leaves], Waits[Leaves]]
) -> Waits[Any]:
    """The value with every dict of exactly these names converted."""
    if isinstance(node, Mapping):
        if node.keys() == set(names):
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
