"""Schedules of several chunks a stage, laid around the pipeline in a loop (`Placement`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise

from mfun.schedule.ops import B, Compute, F
from mfun.schedule.sizes import Sizes


def groups(sizes: Sizes) -> list[int]:
    """How many microbatches go through one chunk before the next, group by group.

    `sizes.group` of them (0: as many as stages), the last group takes the rest. A rest smaller than
    the stages would leave the pipeline empty or deadlock, and Megatron-LM refuses it: here the
    groups share it out, which keeps the bubble of whole groups.

    Args:
      sizes: of the pipeline.
    Example:
      >>> groups(Sizes(4, 8)), groups(Sizes(4, 13, group=5)), groups(Sizes(4, 14, group=5))
      ([4, 4], [7, 6], [5, 5, 4])

    Source: Megatron-LM, microbatch_group_size_per_vp_stage; the sharing out is ours.
    """
    size, count = min(sizes.group or sizes.stages, sizes.microbatches), sizes.microbatches
    whole, rest = divmod(count, size)
    if rest == 0 or rest >= sizes.stages:
        return [size] * whole + [rest] * (rest > 0)
    each, more = divmod(count, whole)
    return [each + 1] * more + [each] * (whole - more)


def order_table(sizes: Sizes) -> list[tuple[int, int]]:
    """The order of the forwards, (microbatch, chunk): a group through each chunk in turn.

    Args:
      sizes: of the pipeline.
    Example:
      >>> order_table(Sizes(2, 5, chunks=2, group=3))
      [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]

    Source: Megatron-LM core/pipeline_parallel/schedules.py, get_schedule_table.
    """
    ends = list(accumulate(groups(sizes)))
    return [
        (mb, chunk)
        for start, end in pairwise([0, *ends])
        for chunk in range(sizes.chunks)
        for mb in range(start, end)
    ]


def warmup(stage: int, sizes: Sizes) -> int:
    """How many forwards a stage runs before its first backward.

    2 (stages - stage - 1) + (chunks - 1) group, and no more than there are. One chunk is 1F1B and
    needs half as many.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> [warmup(stage, Sizes(4, 8, chunks=2)) for stage in range(4)]
      [10, 8, 6, 4]

    Source: Megatron-LM core/pipeline_parallel/schedules.py, get_pp_rank_microbatches.
    """
    after, size = sizes.stages - stage - 1, max(groups(sizes))
    wanted = after if sizes.chunks == 1 else 2 * after + (sizes.chunks - 1) * size
    return min(wanted, sizes.microbatches * sizes.chunks)


def refuse_group(sizes: Sizes) -> str | None:
    """A group smaller than the pipeline: its first microbatch would not be back in time."""
    if sizes.chunks == 1 or not 0 < sizes.group < min(sizes.stages, sizes.microbatches):
        return None
    return (
        f"group is {sizes.group}, but with {sizes.stages} stages and {sizes.chunks} chunks it is "
        f"at least {sizes.stages}; 0 takes that"
    )


def interleaved(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """1F1B over several chunks: the bubble of 1F1B divided by the number of chunks.

    With at least as many microbatches as stages, every stage idles (stages - 1) (F + B) of one
    chunk. It keeps at most warmup + 1 chunks' activations.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, with `chunks` and `group`.
    Example:
      >>> list(interleaved(1, Sizes(2, 2, chunks=2)))
      [F0, F1, F0.1, B0.1, F1.1, B1.1, B0, B1]

    Source: Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; Megatron-LM's order of it.
    """
    table, ahead = order_table(sizes), warmup(stage, sizes)
    for at in range(len(table) + ahead):
        if at < len(table):
            mb, chunk = table[at]
            yield F(mb, chunk)
        if at >= ahead:
            mb, chunk = table[at - ahead]
            yield B(mb, sizes.chunks - 1 - chunk)


def looped_bfs(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """All microbatches through a chunk before the next chunk; then all backwards likewise.

    Bubble as `interleaved`; every chunk's parameters are used in one run (one gather, one
    reduction), at the price of keeping every activation.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> list(looped_bfs(0, Sizes(2, 2, chunks=2)))
      [F0, F1, F0.1, F1.1, B0.1, B1.1, B0, B1]

    Source: Lamy-Poirier 2022 (arXiv 2211.05953), breadth-first pipeline parallelism.
    """
    for chunk in range(sizes.chunks):
        yield from (F(mb, chunk) for mb in range(sizes.microbatches))
    for chunk in reversed(range(sizes.chunks)):
        yield from (B(mb, chunk) for mb in range(sizes.microbatches))
