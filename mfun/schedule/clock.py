"""When each op runs, by an event-driven simulation: time, idle time, memory, messages.

An op starts when its stage is free and the message it needs has arrived, wherever before it the
`Recv` stands: receives are posted early and waited for late, as the executor does. A message is
handed over when the op before its `Send` has ended; messages of one directed link leave one after
the other, `transfer` apart, and arrive `latency` later. Where messages do not overlap with
computation, a stage is also occupied for `transfer` by each message that it sends, right after it
was made, and by each that it takes, right before it is used. What is inserted into streams
(`Extras`) runs beside, on links of each stage (`beside`), or occupies it likewise.

The result does not depend on the order in which stages are looked at: a stage's times follow from
its own stream and the arrivals it waits for. So one pass over a work list is enough, linear in
the ops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import attrs

from mfun.schedule.beside import LINKS, Beside
from mfun.schedule.layers import COMPUTES
from mfun.schedule.ops import (
    ASIDE,
    AnyOp,
    Aside,
    B,
    Compute,
    F,
    I,
    Kind,
    Offload,
    Recompute,
    Recv,
    Reload,
    ScheduleError,
    Send,
    Tag,
    W,
    tag_text,
)
from mfun.schedule.sizes import Costs
from mfun.schedule.streams import Placement, needs
from mfun.schedule.timing import Event, Flight, Timing, Trip
from mfun.schedule.transforms import Extras

LIVE = {F: 1, I: 0, B: -1, W: -1, Recompute: 0, Offload: -1, Reload: 1}
"""How an op changes the number of chunks whose activations are on the device."""


@attrs.define
class _Stage:
    """One stage's clock: where its stream is, since when it is free, what it has added up."""

    ops: Sequence[AnyOp]
    beside: Beside
    at: int = 0  # in its ops
    aside: bool = False  # whether anything has run beside
    posted: set[Tag] = attrs.field(factory=set)  # receives whose message was not taken
    waits: Tag | None = None
    free: float = 0  # no op starts earlier
    ended: float = 0  # its last op
    made: float = 0  # what the next op needs
    first: float | None = None
    busy: float = 0
    exposed: float = 0
    live: int = 0
    peak: int = 0

    def run(self, op: Compute | Recompute, cost: float) -> float:
        """Run an op as early as the stage and what it has taken allow; returns its start."""
        start = self.free = max(self.free, self.beside.ready(op)) if self.aside else self.free
        if self.first is None:
            self.first = start
        self.exposed += start - max(self.ended, self.made)
        self.busy += cost
        self.free = self.ended = start + cost
        self.made = 0
        if not op.layer:  # a chunk's first forward, or last backward
            self.live += LIVE[type(op)]
            self.peak = max(self.peak, self.live)
        return start


class _Clock:
    """All stages, links and messages."""

    def __init__(
        self,
        streams: Sequence[Sequence[AnyOp]],
        costs: Costs,
        place: Placement,
        extras: Sequence[Extras] | None,
    ) -> None:
        self.costs, self.place = costs, place
        gathers = [None] * len(streams) if extras is None else [asked.gather for asked in extras]
        self.stages = [
            _Stage(ops, Beside(costs, gather)) for ops, gather in zip(streams, gathers, strict=True)
        ]
        self.layers = layer_counts(streams)
        self.trips: list[Trip] = []
        self.links: dict[tuple[int, int], float] = {}  # directed: when it is free
        self.flights: dict[Tag, Flight] = {}
        self.events: list[Event] = []
        self.known: dict[Any, tuple[float, Kind | None, int]] = {}

    def advance(self, index: int) -> set[int]:
        """Run a stage until it waits or ends; returns the stages that it may have woken."""
        stage, woken = self.stages[index], set[int]()
        while stage.at < len(stage.ops):
            op = stage.ops[stage.at]
            if isinstance(op, Recv):
                stage.posted.add(op.tag)
            elif isinstance(op, Send):
                self.send(index, op)
                woken.add(op.peer)
            elif isinstance(op, ASIDE):
                self.aside(index, op)
            elif not self.compute(index, op):
                break
            stage.at += 1
        return woken

    def aside(self, index: int, op: Aside) -> None:
        """Start a collective or a copy."""
        stage = self.stages[index]
        start, end = stage.beside.run(op, stage.free)
        stage.aside = True
        stage.live += LIVE.get(type(op), 0)
        stage.peak = max(stage.peak, stage.live)
        if link := LINKS[type(op)]:
            self.trips.append(Trip(index, op, link.name, start, end))
            if not self.costs.overlap:
                stage.free = end

    def compute(self, index: int, op: Compute | Recompute) -> bool:
        """Run an op, unless its message has not been sent."""
        cost, kind, virtual = self.facts(index, op)
        stage = self.stages[index]
        stage.waits = (kind, op.mb, virtual) if kind else None
        if stage.waits in stage.posted and not self.take(stage, stage.waits):
            return False
        start = stage.run(op, cost)
        self.events.append(Event(index, op, start, start + cost))
        return True

    def facts(self, index: int, op: Compute | Recompute) -> tuple[float, Kind | None, int]:
        """The cost of an op, the kind of message it needs if any, and its virtual stage.

        A layer has its share of a chunk's cost, and the first that runs takes the message.
        """
        key = (index, type(op), op.chunk, op.layer)
        if key not in self.known:
            virtual = self.place.virtual(index, op.chunk)
            count = 1 if op.layer is None else self.layers[index, op.chunk]
            need = None if isinstance(op, Recompute) else needs(op, virtual, self.place)
            cost = self.costs.of(op, self.place.slice(virtual))
            self.known[key] = (cost if count == 1 else cost / count, need and need[0], virtual)
        return self.known[key]

    def send(self, index: int, op: Send) -> None:
        """Put a message on its link."""
        stage, link = self.stages[index], (index, op.peer)
        start = max(stage.free, self.links.get(link, 0))
        self.links[link] = gone = start + self.costs.transfer
        self.flights[op.tag] = Flight(op.tag, *link, stage.ended, start, gone + self.costs.latency)
        if not self.costs.overlap:
            stage.free = gone

    def take(self, stage: _Stage, tag: Tag) -> bool:
        """Wait for a message, if it has been sent."""
        if not (flight := self.flights.get(tag)):
            return False
        stage.posted.discard(tag)
        stage.made = flight.made
        if self.costs.overlap:
            stage.free = max(stage.free, flight.end)
        else:
            head = flight.start + self.costs.latency
            stage.free = max(stage.free, head) + self.costs.transfer
        return True

    def refuse_rest(self) -> None:
        """Refuse what waits for ever, and messages that no op has taken."""
        waiting = {i: stage for i, stage in enumerate(self.stages) if stage.at < len(stage.ops)}
        if texts := [f"stage {i} for {tag_text(s.waits)}" for i, s in waiting.items() if s.waits]:
            raise ScheduleError(f"messages are never sent: {', '.join(texts)}")
        for index, stage in enumerate(self.stages):
            if stage.posted:
                raise ScheduleError(
                    f"stage {index} receives {tag_text(min(stage.posted))}, but no op needs it: "
                    "name the placement of these streams"
                )

    def timing(self) -> Timing:
        """What has been added up."""
        ends = [max(stage.ended, stage.beside.end) for stage in self.stages]
        makespan = max(ends, default=0)
        return Timing(
            events=tuple(sorted(self.events, key=attrgetter("start", "stage"))),
            flights=tuple(
                sorted(self.flights.values(), key=attrgetter("start", "source", "target"))
            ),
            makespan=makespan,
            busy=tuple(stage.busy for stage in self.stages),
            bubble=tuple(makespan - stage.busy for stage in self.stages),
            bubble_span=tuple(s.ended - (s.first or 0) - s.busy for s in self.stages),
            peak_in_flight=tuple(stage.peak for stage in self.stages),
            exposed=tuple(
                stage.exposed + end - stage.ended
                for stage, end in zip(self.stages, ends, strict=True)
            ),
            beside=tuple(sorted(self.trips, key=attrgetter("start", "stage"))),
        )


def simulate_time(
    streams: Sequence[Sequence[AnyOp]],
    costs: Costs | None = None,
    place: Placement | None = None,
    extras: Sequence[Extras] | None = None,
) -> Timing:
    """When each op of a schedule runs, in time linear in the ops, and what follows from it.

    Args:
      streams: one stream a stage, messages included, as `plan` or `dress` gives them.
      costs: of ops and messages; None is F = I = W = 1, B = 2, all else at once.
      place: where virtual stages are; None is looped, with as many chunks as the ops name.
      extras: per stage, what was inserted: which layers wait for which gathers.
    Raises:
      ScheduleError: a stage waits for a message that nobody sends, the placement is not that of
        the streams, or costs do not fit the slices.
    Example:
      >>> from mfun.schedule.check import plan
      >>> timing = simulate_time(plan("1f1b", stages=4, microbatches=6))
      >>> timing.makespan, timing.bubble, timing.peak_in_flight, timing.messages
      (27, (9, 9, 9, 9), (4, 3, 2, 1), 36)
      >>> simulate_time(plan("1f1b", stages=2, microbatches=1), Costs(latency=5)).exposed
      (5, 5)

    Source: the bubble that is counted to the optimizer's barrier, and the one of a stage's own
    span, are both of Qi et al. 2023 (arXiv 2401.10241).
    """
    place = looped(streams) if place is None else place
    costs = (costs or Costs()).fit(place.depth)
    clock = _Clock(streams, costs, place, extras)
    ready = deque(range(len(streams)))
    while ready:
        ready.extend(clock.advance(ready.popleft()))
    clock.refuse_rest()
    return clock.timing()


def layer_counts(streams: Sequence[Sequence[AnyOp]]) -> dict[tuple[int, int], int]:
    """How many layers each chunk, (stage, chunk), is cut in, as far as ops name them."""
    counts: dict[tuple[int, int], int] = {}
    for stage, ops in enumerate(streams):
        for op in ops:
            if isinstance(op, F) and op.layer is not None:
                counts[stage, op.chunk] = max(counts.get((stage, op.chunk), 0), op.layer + 1)
    return counts


def looped(streams: Sequence[Sequence[AnyOp]]) -> Placement:
    """The placement without waves, with as many chunks as the ops name."""
    chunks = (op.chunk for ops in streams for op in ops if isinstance(op, COMPUTES))
    return Placement(len(streams), 1 + max(chunks, default=0))
