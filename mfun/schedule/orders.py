"""Orders of forwards and backwards that are known to be good, for the scheduler in `greedy`.

Each is per stage a list of (kind, chunk): the k-th of a pair is of microbatch k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mfun.schedule.greedy_stage import Step
from mfun.schedule.looped import order_table
from mfun.schedule.ops import Compute, F, I, W
from mfun.schedule.sizes import Sizes

Order = list[list[Step]]  # per stage


def _turns(forwards: Sequence[Step], inputs: Sequence[Step], ahead: int) -> Iterator[Step]:
    """Some forwards, then one forward and one backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    for at in range(len(forwards) + ahead):
        if at < len(forwards):
            yield forwards[at]
        if at >= ahead:
            yield inputs[at - ahead]


def looped(sizes: Sizes, ahead: Callable[[int], int]) -> Order:
    """Chunks in a loop, microbatches in groups; `ahead` forwards first. One chunk is 1F1B."""
    chunks = [chunk for _, chunk in order_table(sizes)]
    forwards = [(F, chunk) for chunk in chunks]
    inputs = [(I, sizes.chunks - 1 - chunk) for chunk in chunks]
    return [list(_turns(forwards, inputs, ahead(stage))) for stage in range(sizes.stages)]


def by_kind(sizes: Sizes, *steps: Step) -> Order:
    """All ops of one kind and chunk before those of the next."""
    return [[step for step in steps for _ in range(sizes.microbatches)]] * sizes.stages


def delayed(order: Sequence[Step], by: int) -> list[Step]:
    """With a `W` after each `I`, of the backward `by` earlier."""
    waiting: list[Step] = []
    steps: list[Step] = []
    for kind, chunk in order:
        steps.append((kind, chunk))
        if kind is I:
            waiting.append((W, chunk))
            if len(waiting) > by:
                steps.append(waiting.pop(0))
    return steps + waiting


def _wave_steps(stage: int, sizes: Sizes) -> Iterator[Step]:
    """ZBV's order on one stage, for at least 2 stages - 1 microbatches.

    A wave of forwards fills the pipeline: 2 (stages - stage) - 1 of chunk 0, by when microbatch 0
    is back in chunk 1. From then on each op of chunk 1 is followed by one of chunk 0.
    """
    count, after = max(sizes.microbatches, 2 * sizes.stages - 1), sizes.stages - stage
    yield from [(F, 0)] * (2 * after - 1)
    yield from [(F, 1), (F, 0)] * stage
    yield from [(F, 1), (I, 1), (W, 1)] * after
    steady: list[Step] = [(I, 0), (W, 0), (F, 1), (I, 1), (W, 1)]
    begun = 2 * after - 1 + stage
    for _ in range(count - begun):
        yield from [(F, 0), *steady]
    yield from steady * (begun - sizes.stages)
    yield from [(I, 0), (I, 1)] * stage
    yield from [(I, 0), (W, 0)] * after
    yield from [(W, 1)] * stage + [(W, 0)] * stage


def wave(sizes: Sizes, *kinds: type[Compute]) -> Order:
    """ZBV by hand; for few microbatches, without the ops of those that are not there."""
    order: Order = []
    for stage in range(sizes.stages):
        counts: dict[Step, int] = {}
        steps: list[Step] = []
        for step in _wave_steps(stage, sizes):
            counts[step] = counts.get(step, 0) + 1
            if step[0] in kinds and counts[step] <= sizes.microbatches:
                steps.append(step)
        order.append(steps)
    return order


def _repeated(sizes: Sizes, starts: Callable[[int], Sequence[int]]) -> Order:
    """A pattern of F, F of chunk 1, I of chunk 1, I, repeated every 6 units of time.

    Args:
      sizes: of the pipeline.
      starts: of a stage, when the four ops of microbatch 0 start.
    """
    steps: tuple[Step, ...] = ((F, 0), (F, 1), (I, 1), (I, 0))
    order: Order = []
    for stage in range(sizes.stages):
        times = [
            (start + 6 * mb, at)
            for at, start in enumerate(starts(stage))
            for mb in range(sizes.microbatches)
        ]
        order.append([steps[at] for _, at in sorted(times)])
    return order


def half_pattern(sizes: Sizes) -> Order:
    """V-Half's pattern: chunk 0 goes down two units a stage, chunk 1 up one, backward likewise."""
    p, shift = sizes.stages, 3 * (sizes.stages % 2 == 0)  # even: two ops would meet
    return _repeated(
        sizes, lambda s: (2 * s, 3 * p - s - 2, 3 * p + shift + 2 * s - 1, 6 * p + shift - s - 2)
    )


def min_pattern(sizes: Sizes) -> Order:
    """V-Min's pattern: one unit a stage on all four ways, so a microbatch is back soonest."""
    p, shift = sizes.stages, 2 * (sizes.stages % 3 == 0)  # as above
    return _repeated(sizes, lambda s: (s, 2 * p - s - 1, 2 * p + shift + s, 4 * p + shift - s - 1))
