"""What a configuration asks of a stage's stream besides its schedule: the stage's `Extras`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs

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
    parallel = config.parallel
    asked = Extras(
        layers=tuple(map(len, stage.chunks)),
        recompute=recomputed(config, stage),
        offload=parallel.offload or None,
    )
    if not (parallel.overlap or grads.release):
        return asked if parallel.recompute != "none" or parallel.offload else Extras()
    joined = [i for i in grads.order() if grads.row(i).joined is not None]
    places = bucket_layers(stage, grads.buckets)
    reduce = [frozenset() if grads.release and i in joined else p for i, p in enumerate(places)]
    return attrs.evolve(
        asked,
        reduce=tuple(reduce),
        window="microbatch" if grads.release else "step",
        joined=() if grads.release else tuple((i, _name(grads, i)) for i in joined),
        gather=places if parallel.sharding == "optim_grads_params" else (),
        prefetch=parallel.prefetch,
    )


def recomputed(config: Config, stage: Stage) -> Literal["full"] | Places | None:
    """Which layers of a stage run again for their backward; None is none.

    Example:
        >>> from mfun.config import load, resolve
        >>> from mfun.train.plan import plan
        >>> p = plan(resolve(load("tiny", ["parallel.recompute=selective", "parallel.tp=1"]), 2))
        >>> for chunk, i in sorted(recomputed(p.config, p.stages[1])):
        ...     print(p.stages[1].chunks[chunk][i].name)
        blocks.2.attn
        blocks.3.attn
    """
    if config.parallel.recompute == "full":
        return "full"
    blocks = [
        [(chunk, i) for i, layer in enumerate(layers) if layer.name.startswith("blocks.")]
        for chunk, layers in enumerate(stage.chunks)
    ]
    if config.parallel.recompute == "first":
        return frozenset(at for chunk in blocks for at in chunk[: config.parallel.recompute_layers])
    if config.parallel.recompute == "selective":
        halves = (at for chunk in blocks for at in chunk)
        return frozenset(at for at in halves if stage.chunks[at[0]][at[1]].name.endswith(".attn"))
    return None


def apart(stage: Stage) -> Stage:
    """A stage whose layers are the parts of its layers, so that some can run again by themselves.

    Its gradients are bitwise the same: between two halves of a block passes the residual stream,
    which each half adds to, and a sum of two does not depend on their order.
    """
    chunks = (tuple(part for x in chunk for part in x.parts or (x,)) for chunk in stage.chunks)
    return attrs.evolve(stage, chunks=tuple(chunks))


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
    are reduced during the backward or the parameters gathered during the forward, and the stage is
    the first, which ends last.
    """
    parallel = config.parallel
    ranks = (parallel.dp or 1) * parallel.cp
    overlap = parallel.overlap or parallel.gather_ahead
    default = choose_bucket_size(ranks, overlap=overlap, stage=stage)
    return parallel.bucket_size or default
