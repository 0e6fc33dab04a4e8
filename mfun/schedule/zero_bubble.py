"""Schedules whose backward is split in `I` and `W`, so that `W` fills what would be idle time.

Each is a list of rules (an order that is known to be good for equal costs, the fixed schedule of
its paper, variations) and a limit of memory. The scheduler in `greedy` runs each rule with the
costs of `Sizes`, and the best result is the schedule: never worse than the fixed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import attrs

from mfun.schedule.greedy import best
from mfun.schedule.greedy_stage import Rule, Step
from mfun.schedule.looped import groups, refuse_group
from mfun.schedule.ops import Compute, F, I, ScheduleError, W
from mfun.schedule.orders import Order, by_kind, delayed, half_pattern, looped, min_pattern, wave
from mfun.schedule.sizes import Sizes
from mfun.schedule.streams import Placement

# --- rules: the order itself, the fixed schedule of the papers, and variations, likeliest first ---


def _variations(order: Order) -> Iterator[Rule]:
    """Other ways to keep an order; what is best depends on the costs."""
    yield Rule(order, "ends", patience=0.5)
    yield Rule(order, "room", patience=0.5)


def _free(sizes: Sizes, *steps: Step) -> Iterator[Rule]:
    """Whatever can run, by kind and chunk."""
    order = by_kind(sizes, *steps)
    yield Rule(order, "free")
    yield Rule(order, "free", patience=0.5)


def _rules_h1(sizes: Sizes) -> Iterator[Rule]:
    order = looped(sizes, lambda stage: sizes.stages - stage - 1)
    yield Rule(order)
    yield Rule(order, at_once=True)  # 1F1B
    yield Rule(order, patience=0.5)
    yield from _variations(order)
    yield from _free(sizes, (I, 0), (F, 0))


def _rules_h2(sizes: Sizes) -> Iterator[Rule]:
    order = looped(sizes, lambda stage: 2 * (sizes.stages - stage - 1))
    yield from _variations(order)
    yield Rule(order)
    yield Rule(order, patience=1)
    yield from _rules_h1(sizes)


def _rules_interleaved(sizes: Sizes) -> Iterator[Rule]:
    first = (sizes.chunks - 1) * max(groups(sizes))
    order = looped(sizes, lambda stage: first + sizes.stages - stage - 1)
    more = looped(sizes, lambda stage: first + 2 * (sizes.stages - stage - 1))
    yield Rule(order)
    yield Rule([delayed(steps, stage) for stage, steps in enumerate(order)])  # torch's ZB1P
    yield Rule(order, at_once=True)
    yield Rule(more, at_once=True)  # Megatron-LM's, where memory allows it
    yield Rule(more, "room")
    yield from _variations(order)
    chunks = range(sizes.chunks)[::-1]
    yield from _free(sizes, *((I, chunk) for chunk in chunks), *((F, chunk) for chunk in chunks))


def _rules_zbv(sizes: Sizes) -> Iterator[Rule]:
    order = wave(sizes, F, I)
    yield from _variations(order)
    yield Rule(order)
    yield Rule(order, patience=0.5)
    yield Rule(wave(sizes, F, I, W))  # fixed
    yield Rule(half_pattern(sizes), "ends", patience=0.5)
    yield from _free(sizes, (I, 1), (I, 0), (F, 1), (F, 0))


def _rules_half(sizes: Sizes) -> Iterator[Rule]:
    order = half_pattern(sizes)
    yield Rule(order, "ends")
    yield Rule(order)
    yield Rule(order, at_once=True)
    yield Rule(wave(sizes, F, I), "ends", patience=0.5)
    yield from _variations(order)
    yield from _free(sizes, (I, 1), (I, 0), (F, 1), (F, 0))


def _rules_min(sizes: Sizes) -> Iterator[Rule]:
    order, half = min_pattern(sizes), half_pattern(sizes)
    yield Rule(order, "ends")
    yield Rule(order)
    yield Rule(order, at_once=True)
    yield Rule(half, "room")
    yield Rule(half, "ends", patience=0.5)
    yield from _variations(order)
    yield from _free(sizes, (I, 1), (I, 0), (F, 1), (F, 0))


# --- schedules ---


@attrs.frozen
class _Family:
    """One of these schedules: its rules, its own limit of memory, whether it is a wave."""

    rules: Callable[[Sizes], Iterator[Rule]]
    limit: Callable[[Sizes], int]
    wave: bool = False


_FAMILIES = {
    "zb-h1": _Family(_rules_h1, lambda n: n.stages),
    "zb-h2": _Family(_rules_h2, lambda n: 2 * n.stages - 1),
    "zb-interleaved": _Family(
        _rules_interleaved, lambda n: (n.chunks - 1) * max(groups(n)) + n.stages
    ),
    "zbv": _Family(_rules_zbv, lambda n: 2 * n.stages, wave=True),
    "v-half": _Family(_rules_half, lambda n: n.stages + 2 - n.stages % 2, wave=True),
    "v-min": _Family(_rules_min, lambda n: 2 * ((n.stages + 1) // 3) + 2, wave=True),
}


def limit(name: str) -> Callable[[int, Sizes], int]:
    """The memory bound of a schedule, as in its row: `sizes.memory` chunks, or the schedule's own.

    Args:
      name: of the schedule.
    Example:
      >>> limit("v-min")(0, Sizes(8, 32, 2)), limit("v-min")(0, Sizes(8, 32, 2, memory=5))
      (8, 5)
    """

    def of(stage: int, sizes: Sizes) -> int:
        most = sizes.memory or _FAMILIES[name].limit(sizes)
        return min(most, sizes.microbatches * sizes.chunks)

    return of


def refuse_memory(sizes: Sizes) -> str | None:
    """Less memory than an activation of each chunk: no microbatch would ever come back."""
    if sizes.memory and sizes.memory < sizes.chunks:
        return (
            f"memory is {sizes.memory}, but a stage keeps an activation of each of its "
            f"{sizes.chunks} chunks at least"
        )
    return refuse_group(sizes)


@lru_cache(maxsize=64)
def _streams(name: str, sizes: Sizes) -> tuple[tuple[Compute, ...], ...]:
    """Every stage's ops; kept for the next stage."""
    family = _FAMILIES[name]
    place = Placement(sizes.stages, sizes.chunks, family.wave)
    sizes.costs.fit(place.depth)
    if wrong := refuse_memory(sizes):
        raise ScheduleError(f'schedule "{name}": {wrong}')
    found = best(family.rules(sizes), sizes, place, limit(name)(0, sizes))
    assert found is not None, "a free rule always ends"
    return found.streams


def zb_h1(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """1F1B with `W` put off: a third of its bubble for equal costs, in the same memory.

    bubble = (stages - 1) max(F, I, F + I - W) from 2 stages microbatches on, the last of the three
    where W is the shortest; every stage keeps at most `stages` activations, as 1F1B's first does.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, with the costs, and a memory limit of your own.
    Example:
      >>> list(zb_h1(1, Sizes(2, 3)))
      [F0, I0, F1, I1, W0, F2, I2, W1, W2]

    Source: Qi et al. 2023 (arXiv 2401.10241), section 2.1.
    """
    yield from _streams("zb-h1", sizes)[stage]


def zb_h2(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """More forwards at first, so that no stage idles between its first op and its last.

    bubble_span = 0 where F = I = W, from 2 stages - 1 microbatches on. For any costs, with enough
    microbatches, bubble = (stages - 1) max(F, I - F, F + I - 2 W), of which (stages - 1) F is the
    way to the last stage. A stage keeps at most 2 stages - 1 activations.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, with the costs, and a memory limit of your own.
    Example:
      >>> list(zb_h2(0, Sizes(2, 3)))
      [F0, F1, F2, I0, W0, I1, W1, I2, W2]

    Source: Qi et al. 2023 (arXiv 2401.10241), section 2.2.
    """
    yield from _streams("zb-h2", sizes)[stage]


def zb_interleaved(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Interleaved 1F1B with `W` put off: the bubble of ZB-H1 divided by the chunks.

    bubble = (stages - 1) of one chunk's F where F = I = W; a stage keeps at most
    (chunks - 1) group + stages activations, chunks * stages of them as a rule.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, with `chunks`, the costs, and a memory limit of your own.
    Example:
      >>> list(zb_interleaved(1, Sizes(2, 2, chunks=2)))
      [F0, F1, F0.1, I0.1, F1.1, I1.1, I0, I1, W0.1, W1.1, W0, W1]

    Source: torch.distributed.pipelining's ScheduleInterleavedZeroBubble; Qi et al. 2023
    (arXiv 2401.10241).
    """
    yield from _streams("zb-interleaved", sizes)[stage]


def zbv(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Two chunks in a wave: as ZB-H2, in the memory of 1F1B.

    bubble_span = 0 where F = I = W, and bubble = (stages - 1) of one chunk's F, from 2 stages
    microbatches on; every stage keeps at most 2 stages activations, of half a stage each.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, chunks 2, with the costs, and a memory limit of your own.
    Example:
      >>> list(zbv(0, Sizes(2, 2, chunks=2)))
      [F0, F1, F0.1, I0.1, F1.1, I1.1, I0, W0.1, I1, W1.1, W0, W1]

    Source: Qi et al. 2023 (arXiv 2401.10241), section 6.
    """
    yield from _streams("zbv", sizes)[stage]


def v_half(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Two chunks in a wave, in half of 1F1B's memory, with half its bubble.

    bubble <= 3 (stages - 1) of one chunk's F where F = I = W (1F1B: 6); a stage keeps at most
    stages + 1 activations, of half a stage each (stages + 2 if stages is even).

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, chunks 2, with the costs, and a memory limit of your own.
    Example:
      >>> list(v_half(1, Sizes(3, 1, chunks=2)))
      [F0, F0.1, I0.1, W0.1, I0, W0]

    Source: Qi et al. 2024 (arXiv 2405.15362).
    """
    yield from _streams("v-half", sizes)[stage]


def v_min(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Two chunks in a wave, in a third of 1F1B's memory, with two thirds of its bubble.

    bubble <= 4 (stages - 1) of one chunk's F where F = I = W (1F1B: 6); a stage keeps at most
    2 floor((stages + 1) / 3) + 2 activations, of half a stage each.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline, chunks 2, with the costs, and a memory limit of your own.
    Example:
      >>> list(v_min(1, Sizes(3, 1, chunks=2)))
      [F0, F0.1, I0.1, W0.1, I0, W0]

    Source: Qi et al. 2024 (arXiv 2405.15362).
    """
    yield from _streams("v-min", sizes)[stage]
