"""What is known of a schedule's time: events, messages, and the numbers that follow."""

from __future__ import annotations

from typing import NamedTuple

import attrs

from mfun.schedule.ops import Aside, Compute, Recompute, Tag


class Event(NamedTuple):
    """One compute op on one stage, or a forward that runs again, from start to end."""

    stage: int
    op: Compute | Recompute
    start: float
    end: float


class Trip(NamedTuple):
    """One collective of a stage, or a copy to or from its host, from start to end."""

    stage: int
    op: Aside
    link: str
    start: float
    end: float


class Flight(NamedTuple):
    """One message: made by its sender, on its link from start, usable by its receiver at end."""

    tag: Tag
    source: int
    target: int
    made: float
    start: float
    end: float


@attrs.frozen
class Timing:
    """What `simulate_time` finds. Every tuple of numbers has one a stage.

    Args:
      events: all compute ops, by (start, stage).
      flights: all messages, by (start, source, target).
      makespan: from 0, where the first op starts, to the end of the last op or reduction.
      busy: time spent in compute ops, those that run again included.
      bubble: makespan - busy.
      bubble_span: the stage's own last end - its own first start - busy.
      peak_in_flight: most chunks whose activations are kept: `F` adds one, `B` or `W` frees it;
        none while it is on the host.
      exposed: time in which the stage waits only because a message travels, or moves messages
        itself: from the later of its last op's end and the making of what the next op needs, to
        that op's start; and from its last op's end to that of its last reduction.
      beside: collectives and copies, by (start, stage).
    """

    events: tuple[Event, ...]
    flights: tuple[Flight, ...]
    makespan: float
    busy: tuple[float, ...]
    bubble: tuple[float, ...]
    bubble_span: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    exposed: tuple[float, ...]
    beside: tuple[Trip, ...] = ()

    @property
    def messages(self) -> int:
        """How many messages travel between stages."""
        return len(self.flights)

    @property
    def idle(self) -> float:
        """The idle part of all stages' time, 0 to 1."""
        whole = self.makespan * len(self.bubble)
        return sum(self.bubble) / whole if whole else 0
