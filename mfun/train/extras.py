"""What a configuration asks of a stage's stream besides its schedule: the stage's `Extras`."""

from __future__ import annotations

from collections.abc import Sequence

from mfun.config import Config
from mfun.flat import Bucket, choose_bucket_size
from mfun.grads import GradBuffers
from mfun.pipeline.stage import Stage
from mfun.schedule import Extras

Places = frozenset[tuple[int, int]]
"""Layers of a stage, as (chunk, layer)."""


def extras(config: Config, stage: Stage, grads: GradBuffers) -> Extras:
    """All that a stage does besides its schedule; the default `Extras` where that is nothing.

    Where gradients are let go of after every microbatch, each has its reductions. A bucket that is
    tied over stages meets the others once a step, in `finalize_steps`.

    Args:
        config: resolved.
        stage: its layers.
        grads: its gradient buffers, perhaps without memory.
    """
    sharding = config.parallel.sharding
    if not (config.parallel.overlap or grads.release):
        return Extras()
    joined = [i for i in grads.order() if grads.row(i).joined is not None]
    places = bucket_layers(stage, grads.buckets)
    reduce = [frozenset() if grads.release and i in joined else p for i, p in enumerate(places)]
    return Extras(
        layers=tuple(map(len, stage.chunks)),
        reduce=tuple(reduce),
        window="microbatch" if grads.release else "step",
        joined=() if grads.release else tuple((i, _name(grads, i)) for i in joined),
        gather=places if sharding == "optim_grads_params" else (),
        prefetch=config.parallel.prefetch,
    )


def _name(grads: GradBuffers, bucket: int) -> str:
    """What all stages that reduce a bucket call it."""
    return min(span.path for span in grads.buckets[bucket].spans)


def bucket_layers(stage: Stage, buckets: Sequence[Bucket]) -> tuple[Places, ...]:
    """For each bucket the layers of a stage that have a parameter in it.

    Args:
        stage: the layers.
        buckets: of its parameters or their gradients.

    Example:
        >>> from mfun.config import load, resolve
        >>> from mfun.train.plan import plan
        >>> p = plan(resolve(load("tiny", ["parallel.tp=1", "model.layers=2"]), 2))
        >>> for places in bucket_layers(p.stages[1], p.buffers(1).buckets):
        ...     print(sorted(places))
        [(0, 1)]
        [(0, 0), (0, 1)]
    """
    return tuple(stage.holders({span.path for span in bucket.spans}) for bucket in buckets)


def bucket_size(config: Config, stage: int) -> int | None:
    """Elements at which a gradient bucket of a stage closes; None is one bucket a group.

    `parallel.bucket_size` is for all stages. Its default is one bucket, except where the gradients
    are reduced during the backward and the stage is the first, which ends last.
    """
    parallel = config.parallel
    ranks = (parallel.dp or 1) * parallel.cp
    default = choose_bucket_size(ranks, overlap=parallel.overlap, stage=stage)
    return parallel.bucket_size or default
