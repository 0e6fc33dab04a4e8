"""Schedules: each is a short generator of one stage's compute ops, and a row of `SCHEDULES`.

A generator takes `(stage, sizes)` and yields the compute ops in the order in which that stage runs
them. Messages are not its business: `streams.with_p2p` inserts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import attrs

from mfun.schedule.ops import B, Compute, F, ScheduleError
from mfun.schedule.sizes import Sizes
from mfun.schedule.streams import Placement

Generate = Callable[[int, Sizes], Iterator[Compute]]


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
    Proof: no interleaving deadlocks, by exhaustion (tests/test_schedule_interleavings.py).
    """
    microbatches = sizes.microbatches
    warmup = min(sizes.stages - stage - 1, microbatches)
    yield from map(F, range(warmup))
    for mb in range(microbatches - warmup):
        yield F(warmup + mb)
        yield B(mb)
    yield from map(B, range(microbatches - warmup, microbatches))


def forward_only(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Forwards in microbatch order, for evaluation and sampling: the same with every schedule.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> list(forward_only(1, Sizes(2, 3)))
      [F0, F1, F2]
    """
    yield from map(F, range(sizes.microbatches))


@attrs.frozen
class Schedule:
    """A generator, where its chunks live, and its memory bound: what checker and executor need.

    Args:
      name: as in `parallel.schedule`.
      ops: the generator, `(stage, sizes) -> ops`.
      in_flight: of the same numbers, the most chunks whose activations the stage keeps.
      chunks: how many chunks a stage has; 0 is any number.
      wave: every second chunk runs the stages backwards (`Placement`).
      replicas: how often the model is held (`Placement`).
      refuse: what is wrong with sizes that this schedule cannot run, or None.
    Example:
      >>> SCHEDULES["1f1b"].in_flight(0, Sizes(4, 6))
      4
    """

    name: str
    ops: Generate
    in_flight: Callable[[int, Sizes], int]
    chunks: int = 1
    wave: bool = False
    replicas: int = 1
    refuse: Callable[[Sizes], str | None] = lambda sizes: None

    def place(self, sizes: Sizes) -> Placement:
        """Where the virtual stages live.

        Raises:
          ScheduleError: the schedule cannot run these sizes; naming the numbers.
        """
        if self.chunks and sizes.chunks != self.chunks:
            raise ScheduleError(
                f'schedule "{self.name}" has {self.chunks} chunks a stage, but chunks is '
                f"{sizes.chunks}"
            )
        if wrong := self.refuse(sizes):
            raise ScheduleError(f'schedule "{self.name}": {wrong}')
        return Placement(sizes.stages, sizes.chunks, self.wave, self.replicas)


def _refuse_none(sizes: Sizes) -> str | None:
    if sizes.stages == 1:
        return None
    return f'it runs 1 stage, but stages is {sizes.stages}: use "1f1b" or "gpipe"'


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        row.name: row
        for row in (
            Schedule("none", none, lambda stage, sizes: 1, refuse=_refuse_none),
            Schedule("gpipe", gpipe, lambda stage, sizes: sizes.microbatches),
            Schedule("1f1b", one_f_one_b, lambda s, n: min(n.stages - s, n.microbatches)),
        )
    }
)
