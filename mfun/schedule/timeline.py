"""When each op runs, by an event-driven simulation, and the picture of it.

An op starts when its stage is free and the messages received before it have been made. Messages
take no time, and a send does not hold up its stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from mfun.schedule.ops import Compute, Message, Op, ScheduleError, Send, Tag, tag_text
from mfun.schedule.sizes import Costs
from mfun.schedule.streams import batches


@attrs.frozen
class Event:
    """One compute op on one stage, from start to end."""

    stage: int
    op: Compute
    start: float
    end: float


class _Clock:
    """Each stage's position and times, and when each message was made."""

    def __init__(self, streams: Sequence[Sequence[Op]], costs: Costs) -> None:
        self.steps = [list(batches(ops)) for ops in streams]
        self.costs = costs
        self.position = [0] * len(streams)
        self.end: list[float] = [0] * len(streams)  # of the stage's last compute op
        self.awaited: list[set[Tag]] = [set() for _ in streams]  # of the batch a stage is in
        self.ready: list[float] = [0] * len(streams)  # when all it received had been made
        self.made: dict[Tag, float] = {}
        self.events: list[Event] = []

    def advance(self, stage: int) -> set[int]:
        """Run a stage until it waits or ends; returns the stages that it may have woken."""
        woken: set[int] = set()
        while self.arrived(stage) and self.position[stage] < len(self.steps[stage]):
            step = self.steps[stage][self.position[stage]]
            self.position[stage] += 1
            if isinstance(step, tuple):
                woken |= self.post(stage, step)
            else:
                self.compute(stage, step)
        return woken

    def arrived(self, stage: int) -> bool:
        """Take the awaited messages that have been made; are they all?"""
        for tag in [tag for tag in self.awaited[stage] if tag in self.made]:
            self.ready[stage] = max(self.ready[stage], self.made[tag])
            self.awaited[stage].discard(tag)
        return not self.awaited[stage]

    def post(self, stage: int, batch: Sequence[Message]) -> set[int]:
        """Hand over a batch's sends, all made by now, and wait for its receives."""
        for message in batch:
            if isinstance(message, Send):
                self.made[message.tag] = self.end[stage]
            else:
                self.awaited[stage].add(message.tag)
        return {message.peer for message in batch if isinstance(message, Send)}

    def compute(self, stage: int, op: Compute) -> None:
        """Run an op as early as its stage and its inputs allow."""
        start = max(self.end[stage], self.ready[stage])
        self.end[stage] = start + self.costs.of(op)
        self.events.append(Event(stage, op, start, self.end[stage]))


def events(streams: Sequence[Sequence[Op]], costs: Costs | None = None) -> tuple[Event, ...]:
    """When each compute op runs, in time linear in the ops.

    Args:
      streams: one stream a stage, messages included, as `plan` gives them.
      costs: of each op; None is F = 1, B = 2.
    Returns: all events, by (start, stage).
    Raises:
      ScheduleError: a stage waits for a message that nobody sends.
    Example:
      >>> from mfun.schedule.check import plan
      >>> for event in events(plan("1f1b", stages=2, microbatches=1)):
      ...     print(event)
      Event(stage=0, op=F0, start=0, end=1)
      Event(stage=1, op=F0, start=1, end=2)
      Event(stage=1, op=B0, start=2, end=4)
      Event(stage=0, op=B0, start=4, end=6)
    """
    clock = _Clock(streams, costs or Costs())
    ready = deque(range(len(streams)))
    while ready:
        ready.extend(clock.advance(ready.popleft()))
    if hung := [(stage, sorted(tags)) for stage, tags in enumerate(clock.awaited) if tags]:
        waits = [f"stage {stage} for {' '.join(map(tag_text, tags))}" for stage, tags in hung]
        raise ScheduleError(f"messages are never sent: {', '.join(waits)}")
    return tuple(sorted(clock.events, key=lambda event: (event.start, event.stage)))


def makespan(events: Sequence[Event]) -> float:
    """The time from the first op's start, 0, to the last op's end; 0 without events.

    Example:
      >>> from mfun.schedule.check import plan
      >>> from mfun.schedule.timeline import events
      >>> makespan(events(plan("1f1b", stages=4, microbatches=6)))
      27
    """
    return max((event.end for event in events), default=0)


def bubble(events: Sequence[Event]) -> tuple[float, ...]:
    """Each stage's idle time: makespan - busy.

    For 1F1B and GPipe it is (stages - 1) * (F + B) on every stage.

    Args:
      events: from `events`.
    Returns: one number a stage.
    Example:
      >>> from mfun.schedule.check import plan
      >>> from mfun.schedule.timeline import events
      >>> bubble(events(plan("1f1b", stages=4, microbatches=6)))
      (9, 9, 9, 9)
    """
    whole = makespan(events)
    idle = [whole] * (1 + max((event.stage for event in events), default=-1))
    for event in events:
        idle[event.stage] -= event.end - event.start
    return tuple(idle)


def timeline(streams: Sequence[Sequence[Op]], costs: Costs | None = None) -> str:
    """The picture of a schedule: a row a stage, a column a unit of time, a dot where it is idle.

    An op that takes several units is drawn in its first and continued by dashes.

    Args:
      streams: one stream a stage, messages included, as `plan` gives them.
      costs: of each op, whole numbers; None draws every op one column wide, to show the order.
    Returns: text without a trailing newline.
    Raises:
      ScheduleError: a cost that is not a whole number, or a stage that waits for ever.
    Example:
      >>> from mfun.schedule.check import plan
      >>> print(timeline(plan("1f1b", stages=4, microbatches=6)))
      stage 0 | F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
      stage 1 |  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
      stage 2 |  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
      stage 3 |  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .
      >>> print(timeline(plan("gpipe", stages=2, microbatches=2), Costs(F=1, B=2)))
      stage 0 | F0 F1  .  .  . B0 -- B1 --
      stage 1 |  . F0 F1 B0 -- B1 --  .  .
    """
    costs = costs or Costs(F=1, B=1)
    for name, cost in attrs.asdict(costs).items():
        if cost != int(cost):
            raise ScheduleError(f"cost {name} is {cost}, but must be whole: scale the costs")
    drawn = events(streams, costs)
    width = max((len(str(event.op)) for event in drawn), default=1)
    rows = [["." for _ in range(int(makespan(drawn)))] for _ in streams]
    for event in drawn:
        start, end = int(event.start), int(event.end)
        rows[event.stage][start:end] = [str(event.op)] + ["-" * width] * (end - start - 1)
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"stage {stage:{label}} | " + " ".join(cell.rjust(width) for cell in row)
        for stage, row in enumerate(rows)
    )
