"""Schedules: each is a short generator of one stage's compute ops, and a row of `table.SCHEDULES`.

A generator takes `(stage, sizes)` and yields the compute ops in the order in which that stage runs
them. Messages are not its business: `messages.with_p2p` inserts them.
"""

from __future__ import annotations

from collections.abc import Iterator

from mfun.schedule.ops import B, Compute, F
from mfun.schedule.sizes import Sizes
from mfun.schedule.streams import Placement


def none(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """No pipeline: each microbatch forward, then backward.

    Args:
      stage: 0.
      sizes: of the pipeline.
    Example:
      >>> list(none(0, Sizes(1, 2)))
      [F0, B0, F1, B1]
    """
    for mb in range(sizes.microbatches):
        yield F(mb)
        yield B(mb)


def gpipe(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """All forwards, then all backwards, both in microbatch order.

    Makespan (microbatches + stages - 1) * (F + B); a stage keeps every microbatch's activations.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> list(gpipe(0, Sizes(4, 3)))
      [F0, F1, F2, B0, B1, B2]

    Source: Huang et al. 2018 (arXiv 1811.06965).
    """
    yield from map(F, range(sizes.microbatches))
    yield from map(B, range(sizes.microbatches))


def one_f_one_b(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Warm-up forwards, then forward and backward in turn, then the remaining backwards.

    warmup = min(stages - stage - 1, microbatches): also right with fewer microbatches than stages.
    Makespan as GPipe's; a stage keeps at most min(stages - stage, microbatches) microbatches'
    activations.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> list(one_f_one_b(1, Sizes(3, 4)))
      [F0, F1, B0, F2, B1, F3, B2, B3]

    Source: Narayanan et al. 2021 (arXiv 2104.04473); Megatron-LM pipeline_parallel/schedules.py.
    Proof: proofs/OneFOneB.v, one_f_one_b_never_stuck.
    """
    microbatches = sizes.microbatches
    warmup = min(sizes.stages - stage - 1, microbatches)
    yield from map(F, range(warmup))
    for mb in range(microbatches - warmup):
        yield F(warmup + mb)
        yield B(mb)
    yield from map(B, range(microbatches - warmup, microbatches))


def forward_only(stage: int, sizes: Sizes, place: Placement) -> Iterator[Compute]:
    """All forwards, for evaluation and sampling: the same with every schedule of one placement.

    In a loop a group of as many microbatches as stages goes through one chunk before the next, so
    that no stage waits. In a wave a microbatch follows the one before it at a distance of `chunks`:
    stage s runs slice i of microbatch k at time chunks * k + i.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
      place: where virtual stages are.
    Example:
      >>> list(forward_only(1, Sizes(2, 3), Placement(2)))
      [F0, F1, F2]
      >>> list(forward_only(0, Sizes(2, 3, chunks=2), Placement(2, 2)))
      [F0, F1, F0.1, F1.1, F2, F2.1]
      >>> list(forward_only(0, Sizes(2, 3, chunks=2), Placement(2, 2, wave=True)))
      [F0, F1, F0.1, F2, F1.1, F2.1]
    """

    def turn(op: Compute) -> tuple[int, int]:
        if not place.wave:
            return op.mb // place.stages, op.chunk
        virtual = place.virtual(stage, op.chunk)
        nth = op.mb - place.microbatches(op.chunk, sizes.microbatches).start
        return place.chunks * nth + place.slice(virtual), -op.chunk

    ops = (
        F(mb, chunk)
        for chunk in range(place.chunks)
        for mb in place.microbatches(chunk, sizes.microbatches)
    )
    yield from sorted(ops, key=turn)
