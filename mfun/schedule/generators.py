"""Schedules: each is a short generator of one stage's compute ops, and a row of `SCHEDULES`.

A generator takes `(stage, stages, microbatches)` and yields `F` and `B` in the order in which that
stage runs them. Messages are not its business: `streams.with_p2p` inserts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import attrs

from mfun.schedule.ops import B, Compute, F, ScheduleError

Generate = Callable[[int, int, int], Iterator[Compute]]


def refuse_numbers(stage: int, stages: int, microbatches: int) -> None:
    """Refuse sizes that no schedule can run.

    Args:
      stage: this stage, 0-based.
      stages: pipeline stages, at least 1.
      microbatches: microbatches of a step, at least 1.
    Raises:
      ScheduleError: naming the number and its range.
    Example:
      >>> refuse_numbers(2, 2, 4)
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: stage is 2, but with stages=2 it is 0..1
    """
    if stages < 1:
        raise ScheduleError(f"stages is {stages}, but a pipeline has at least 1 stage")
    if not 0 <= stage < stages:
        raise ScheduleError(f"stage is {stage}, but with stages={stages} it is 0..{stages - 1}")
    if microbatches < 1:
        raise ScheduleError(f"microbatches is {microbatches}, but a step has at least 1 microbatch")


def none(stage: int, stages: int, microbatches: int) -> Iterator[Compute]:
    """No pipeline: each microbatch forward, then backward.

    Args:
      stage: 0.
      stages: 1.
      microbatches: at least 1.
    Raises:
      ScheduleError: more than one stage, or a number out of range (at the first op asked for).
    Example:
      >>> list(none(0, 1, 2))
      [F0, B0, F1, B1]
    """
    refuse_numbers(stage, stages, microbatches)
    if stages > 1:
        raise ScheduleError(
            f'schedule "none" runs 1 stage, but stages is {stages}: use "1f1b" or "gpipe"'
        )
    for mb in range(microbatches):
        yield F(mb)
        yield B(mb)


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Compute]:
    """All forwards, then all backwards, both in microbatch order.

    Makespan (microbatches + stages - 1) * (F + B); a stage keeps every microbatch's activations.

    Args:
      stage: this stage, 0-based.
      stages: pipeline stages.
      microbatches: at least 1.
    Raises:
      ScheduleError: a number out of range (at the first op asked for).
    Example:
      >>> list(gpipe(0, 4, 3))
      [F0, F1, F2, B0, B1, B2]

    Source: Huang et al. 2018 (arXiv 1811.06965).
    """
    refuse_numbers(stage, stages, microbatches)
    yield from map(F, range(microbatches))
    yield from map(B, range(microbatches))


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[Compute]:
    """Warm-up forwards, then forward and backward in turn, then the remaining backwards.

    warmup = min(stages - stage - 1, microbatches): also right with fewer microbatches than stages.
    Makespan as GPipe's; a stage keeps at most min(stages - stage, microbatches) microbatches'
    activations.

    Args:
      stage: this stage, 0-based.
      stages: pipeline stages.
      microbatches: at least 1.
    Raises:
      ScheduleError: a number out of range (at the first op asked for).
    Example:
      >>> list(one_f_one_b(1, 3, 4))
      [F0, F1, B0, F2, B1, F3, B2, B3]

    Source: Narayanan et al. 2021 (arXiv 2104.04473); Megatron-LM pipeline_parallel/schedules.py.
    Proof: no interleaving deadlocks, by exhaustion (tests/test_schedule_interleavings.py).
    """
    refuse_numbers(stage, stages, microbatches)
    warmup = min(stages - stage - 1, microbatches)
    yield from map(F, range(warmup))
    for mb in range(microbatches - warmup):
        yield F(warmup + mb)
        yield B(mb)
    yield from map(B, range(microbatches - warmup, microbatches))


def forward_only(stage: int, stages: int, microbatches: int) -> Iterator[Compute]:
    """Forwards in microbatch order, for evaluation and sampling: the same with every schedule.

    Args:
      stage: this stage, 0-based.
      stages: pipeline stages.
      microbatches: at least 1.
    Raises:
      ScheduleError: a number out of range (at the first op asked for).
    Example:
      >>> list(forward_only(1, 2, 3))
      [F0, F1, F2]
    """
    refuse_numbers(stage, stages, microbatches)
    yield from map(F, range(microbatches))


@attrs.frozen
class Schedule:
    """A generator and its closed-form memory bound: all that the checker and the executor need.

    Args:
      name: as in `parallel.schedule`.
      ops: the generator, `(stage, stages, microbatches) -> ops`.
      in_flight: of the same numbers, the most microbatches whose activations the stage keeps.
    Example:
      >>> SCHEDULES["1f1b"].in_flight(0, 4, 6)
      4
    """

    name: str
    ops: Generate
    in_flight: Callable[[int, int, int], int]

    def __call__(self, stage: int, stages: int, microbatches: int) -> Iterator[Compute]:
        """The stage's compute ops, as the generator's."""
        return self.ops(stage, stages, microbatches)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        row.name: row
        for row in (
            Schedule("none", none, lambda stage, stages, microbatches: 1),
            Schedule("gpipe", gpipe, lambda stage, stages, microbatches: microbatches),
            Schedule("1f1b", one_f_one_b, lambda s, stages, m: min(stages - s, m)),
        )
    }
)
