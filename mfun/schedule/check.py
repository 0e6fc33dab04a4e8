"""Decides before a run whether a set of streams is right, and says which ops are wrong if not.

Three passes, each linear in the ops: every stage by itself (complete, in order, each op has its
input, memory bound); every channel (each send has its receive, in the same order); all stages
together (no deadlock).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest

import attrs

from mfun.schedule.generators import forward_only as forwards
from mfun.schedule.messages import with_p2p
from mfun.schedule.ops import B, Compute, F, I, Op, Recv, ScheduleError, Send, Tag, W, tag_text
from mfun.schedule.rendezvous import rendezvous, stuck_grid
from mfun.schedule.sizes import Costs, Sizes
from mfun.schedule.streams import Placement, gives, needs, source
from mfun.schedule.table import SCHEDULES, Schedule


@attrs.define
class _Walk:
    """One stage's stream, op by op: what has run, what it holds, what it made and has not sent."""

    stage: int
    place: Placement
    bound: int | None
    ran: set[Compute] = attrs.field(factory=set)
    received: set[Tag] = attrs.field(factory=set)
    unsent: set[Tag] = attrs.field(factory=set)
    excluded: set[Compute] = attrs.field(factory=set)
    live: int = 0

    def step(self, op: Op) -> str | None:
        """Run one op; returns what is wrong with it, if anything."""
        match op:
            case F() | B() | I() | W():
                return self.compute(op)
            case Send():
                return self.send(op)
            case Recv():
                return self.recv(op)

    def compute(self, op: Compute) -> str | None:
        """Once, after what it depends on, and within the memory bound."""
        if op in self.ran:
            return f"{op} runs twice"
        for before in _after(op):
            if before not in self.ran:
                return f"{op} runs before {before}"
        if op in self.excluded:
            return f"{op} runs, but its backward was given by another op already"
        virtual = self.place.virtual(self.stage, op.chunk)
        taken = needs(op, virtual, self.place)
        if taken and taken not in self.received:
            return f"{op} runs before its input: no Recv({tag_text(taken)}) precedes it"
        if taken:
            self.received.discard(taken)
        self.ran.add(op)
        self.excluded.update(_instead(op))
        self.deliver(gives(op, virtual, self.place))
        self.live += {F: 1, I: 0}.get(type(op), -1)
        if self.bound is not None and self.live > self.bound:
            return f"{op} makes {self.live} in flight, above the schedule's bound of {self.bound}"
        return None

    def deliver(self, made: Tag | None) -> None:
        """Keep an output: to be sent, or in place if its virtual stage is on this stage too."""
        if made:
            here = self.place.stage(made[2]) == self.stage
            (self.received if here else self.unsent).add(made)

    def send(self, op: Send) -> str | None:
        """Only what was made and not sent yet, to the stage that uses it."""
        if op.tag not in self.unsent:
            return f"{op} sends what is not there: it was not made before, or is sent twice"
        if op.peer != self.place.stage(op.to):
            return f"{op} goes to stage {op.peer}, but stage {self.place.stage(op.to)} uses it"
        self.unsent.discard(op.tag)
        return None

    def recv(self, op: Recv) -> str | None:
        """Only what this stage uses, once, from the stage that makes it."""
        if not 0 <= op.to < self.place.count or self.place.stage(op.to) != self.stage:
            return f"{op} is for virtual stage {op.to}, which is not on this stage"
        if op.peer != (maker := source(op.tag, self.place)):
            return f"{op} comes from stage {op.peer}, but stage {maker} makes it"
        chunk = self.place.chunk(op.to)
        users = (F(op.mb, chunk),) if op.kind == "act" else (B(op.mb, chunk), I(op.mb, chunk))
        used = [user for user in users if user in self.ran]
        if op.tag in self.received or used:
            return f"{op} is received twice, or after {(used or users)[0]} that uses it"
        self.received.add(op.tag)
        return None

    def ending(self, expected: Iterable[Compute]) -> str | None:
        """What is missing or left over when the stream ends."""
        done = self.ran | self.excluded
        if missing := [op for op in expected if op not in done]:
            return f"never runs {_some(missing)}"
        if self.unsent:
            return f"never sends {_some(map(tag_text, sorted(self.unsent)))}"
        if self.received:
            return f"never uses {_some(map(tag_text, sorted(self.received)))}"
        return None


def _after(op: Compute) -> tuple[Compute, ...]:
    """The ops of the same stage that must have run before."""
    match op:
        case F():
            return ()
        case B(mb, chunk) | I(mb, chunk):
            return (F(mb, chunk),)
        case W(mb, chunk):
            return (I(mb, chunk),)


def _instead(op: Compute) -> tuple[Compute, ...]:
    """The ops that must not run when this one has: a backward is whole or split."""
    match op:
        case B(mb, chunk):
            return (I(mb, chunk), W(mb, chunk))
        case I(mb, chunk) | W(mb, chunk):
            return (B(mb, chunk),)
        case F():
            return ()


def _some(items: Iterable[object], most: int = 4) -> str:
    """The first few of a list, as text."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _excerpt(stage: int, ops: Sequence[Op], at: int, around: int = 3) -> str:
    """The ops around one, with it in marks: `stage 1 | ... F0 >>B1<< F2 ...`."""
    first, end = max(at - around, 0), at + around + 1
    texts = [f">>{op}<<" if i == at else str(op) for i, op in enumerate(ops[first:end], first)]
    before, after = ["..."] * (first > 0), ["..."] * (end < len(ops))
    return f"stage {stage} | {' '.join([*before, *texts, *after])}"


def _check_stage(walk: _Walk, ops: Sequence[Op], microbatches: int, forward_only: bool) -> None:
    """Refuse a stage whose stream is incomplete, out of order, without inputs, or too large."""
    kinds = (F,) if forward_only else (F, B, I, W)
    expected = {
        kind(mb, chunk): None
        for chunk in range(walk.place.chunks)
        for mb in walk.place.microbatches(chunk, microbatches)
        for kind in kinds
    }
    for at, op in enumerate(ops):
        foreign = isinstance(op, F | B | I | W) and op not in expected
        wrong = f"{op} is not an op of this schedule" if foreign else walk.step(op)
        if wrong:
            where = f"stage {walk.stage}, op {at}"
            raise ScheduleError(f"{where}: {wrong}\n{_excerpt(walk.stage, ops, at)}")
    if wrong := walk.ending(expected):
        raise ScheduleError(f"stage {walk.stage}: the stream ends, but {wrong}")


def _check_channels(streams: Sequence[Sequence[Op]]) -> None:
    """Refuse a channel whose k-th send and k-th receive are not the same message."""
    sends: defaultdict[tuple[int, int], list[Send]] = defaultdict(list)
    recvs: defaultdict[tuple[int, int], list[Recv]] = defaultdict(list)
    for stage, ops in enumerate(streams):
        for op in ops:
            if isinstance(op, Send):
                sends[stage, op.peer].append(op)
            elif isinstance(op, Recv):
                recvs[op.peer, stage].append(op)
    for a, b in sorted({*sends, *recvs}):
        for at, (sent, taken) in enumerate(zip_longest(sends[a, b], recvs[a, b])):
            _check_pair(a, b, at, sent, taken)


def _check_pair(a: int, b: int, at: int, sent: Send | None, taken: Recv | None) -> None:
    """Refuse one send and receive that do not meet."""
    where = f"message {at} from stage {a} to stage {b}"
    if sent is None:
        raise ScheduleError(f"{where}: {taken} has no send on stage {a}")
    if taken is None:
        raise ScheduleError(f"{where}: {sent} has no receive on stage {b}")
    if sent.tag != taken.tag:
        raise ScheduleError(f"{where}: {sent} meets {taken}; both stages must use one order")


def _microbatches(streams: Sequence[Sequence[Op]]) -> int:
    """One more than the largest microbatch of any compute op."""
    return 1 + max(
        (op.mb for ops in streams for op in ops if isinstance(op, F | B | I | W)), default=0
    )


def check(
    streams: Sequence[Sequence[Op]],
    forward_only: bool = False,
    *,
    microbatches: int | None = None,
    place: Placement | None = None,
    in_flight: Sequence[int] | None = None,
) -> None:
    """Refuse streams that are incomplete or out of order, would hang, or keep too much in memory.

    Args:
      streams: one stream a stage, messages included (`with_p2p`).
      forward_only: there are no backwards.
      microbatches: of the step; None takes one more than the largest microbatch seen.
      place: where virtual stages are; None is one chunk a stage.
      in_flight: per stage, the most forwards that may wait for their `B` or `W`; None sets no
        bound.
    Raises:
      ScheduleError: the stage, the ops and their neighbours; for a deadlock, the stuck stages.
    Example:
      >>> ops, sizes = SCHEDULES["1f1b"].ops, Sizes(2, 3)
      >>> streams = with_p2p([ops(stage, sizes) for stage in range(2)], Placement(2))
      >>> check(streams, in_flight=[2, 1])
      >>> early = [streams[0], [streams[1][0], streams[1][2], streams[1][1], *streams[1][3:]]]
      >>> check(early)
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: stage 1, op 1: B0 runs before F0
      stage 1 | Recv(act0>1) >>B0<< F0 Send(grad0>0) Recv(act1>1) ...
    """
    count = _microbatches(streams) if microbatches is None else microbatches
    Sizes(len(streams), count)  # refuses numbers out of range
    place = Placement(len(streams)) if place is None else place
    for stage, ops in enumerate(streams):
        bound = None if in_flight is None or forward_only else in_flight[stage]
        _check_stage(_Walk(stage, place, bound), ops, count, forward_only)
    _check_channels(streams)
    if stuck := rendezvous(streams):
        raise ScheduleError(f"deadlock: these stages wait for ever\n{stuck_grid(stuck)}")


def find(schedule: str | Schedule) -> Schedule:
    """A schedule by its name, or the schedule itself.

    Raises:
      ScheduleError: there is none of that name.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if schedule not in SCHEDULES:
        raise ScheduleError(f"schedule is {schedule!r}, but must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[schedule]


@lru_cache(maxsize=32)
def plan(
    schedule: str | Schedule,
    stages: int,
    microbatches: int,
    forward_only: bool = False,
    *,
    chunks: int = 1,
    group: int = 0,
    costs: Costs = Costs(),  # noqa: B008  # frozen
    memory: int = 0,
) -> tuple[tuple[Op, ...], ...]:
    """Every stage's stream, with messages, checked: what the executor runs.

    The result is kept for the next call with the same arguments.

    Args:
      schedule: a name of `SCHEDULES`, or a `Schedule` of your own.
      stages: pipeline stages.
      microbatches: microbatches of a step.
      forward_only: only the forwards, for evaluation.
      chunks: of a stage.
      group: see `Sizes`.
      costs: see `Sizes`.
      memory: see `Sizes`.
    Returns: one tuple of ops a stage.
    Raises:
      ScheduleError: an unknown name, a number out of range, or a schedule that `check` refuses.
    Example:
      >>> for ops in plan("1f1b", stages=2, microbatches=2):
      ...     print(*ops)
      F0 Send(act0>1) F1 Send(act1>1) Recv(grad0>0) B0 Recv(grad1>0) B1
      Recv(act0>1) F0 B0 Send(grad0>0) Recv(act1>1) F1 B1 Send(grad1>0)
    """
    row = find(schedule)
    sizes = Sizes(stages, microbatches, chunks, group, costs, memory)
    place = row.place(sizes)
    computes = [
        forwards(stage, sizes, place) if forward_only else row.ops(stage, sizes)
        for stage in range(stages)
    ]
    streams = with_p2p(computes, place, costs)
    bounds = [row.in_flight(stage, sizes) for stage in range(stages)]
    check(streams, forward_only, microbatches=microbatches, place=place, in_flight=bounds)
    return streams
