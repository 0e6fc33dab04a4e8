"""Decides before a run whether what was inserted into streams is right: `check` for `Extras`.

One pass a stage, in which each op meets the few rules of its type; then one over the collectives
that several streams run together. Both are linear in the ops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from mfun.schedule.collective_walk import Gathers, Reduces
from mfun.schedule.layer_walk import Layers, Offloads, Recomputes, Rule
from mfun.schedule.ops import (
    AnyOp,
    Gather,
    Offload,
    Recompute,
    Reduce,
    Release,
    Reload,
    ScheduleError,
)
from mfun.schedule.transforms import Extras

Names = Mapping[tuple[type[Reduce | Gather], int], Hashable]
"""Of one stream: its collectives by type and bucket, and a name that all who take part use."""

Ops = TypeVar("Ops", bound=Sequence[AnyOp])
Concern = Layers | Reduces | Gathers | Recomputes | Offloads

_ASKED: Mapping[type[AnyOp], str] = MappingProxyType(
    {
        Reduce: "reduce",
        Gather: "gather",
        Release: "gather",
        Recompute: "recompute",
        Offload: "offload",
        Reload: "offload",
    }
)
"""By which of the `Extras` an op is asked for."""

Event = tuple[type[AnyOp], Hashable, int]  # the n-th collective of a type and name


def excerpt(
    stage: int, ops: Sequence[AnyOp], at: int, around: int = 3, label: str = "stage"
) -> str:
    """The ops around one, with it in marks.

    Example:
      >>> excerpt(1, [Gather(0), Gather(1), Release(0)], at=1)
      'stage 1 | Gather0 >>Gather1<< Release0'
    """
    first, end = max(at - around, 0), at + around + 1
    texts = [f">>{op}<<" if i == at else str(op) for i, op in enumerate(ops[first:end], first)]
    before, after = ["..."] * (first > 0), ["..."] * (end < len(ops))
    return f"{label} {stage} | {' '.join([*before, *texts, *after])}"


def _foreign(at: int, op: AnyOp) -> str:
    """An op that nobody has asked for."""
    return f"{op} is not an op of this schedule"


def _concerns(ops: Sequence[AnyOp], extras: Extras) -> list[Concern]:
    """The objects that have rules for a stage's stream."""
    found: list[Concern] = [Layers(ops, extras.layers)]
    if extras.reduce:
        found.append(Reduces(ops, extras.reduce, extras.window))
    if extras.gather:
        found.append(Gathers(extras.gather))
    if (which := extras.which) is not None:
        found.append(Recomputes(which))
    if extras.offload is not None:
        found.append(Offloads(ops, extras.offload, extras.layers))
    return found


def _rules(concerns: Sequence[Concern], extras: Extras) -> Mapping[type[AnyOp], Sequence[Rule]]:
    """The rules that an op has to keep, by its type."""
    rules: defaultdict[type[AnyOp], list[Rule]] = defaultdict(list)
    for concern in concerns:
        for kind, rule in concern.rules.items():
            rules[kind].append(rule)
    for kind, name in _ASKED.items():
        if not getattr(extras, name):
            rules[kind].append(_foreign)
    return rules


def _check_stage(stage: int, ops: Sequence[AnyOp], extras: Extras) -> None:
    """Refuse the first op of a stage that breaks a rule."""
    concerns = _concerns(ops, extras)
    rules = _rules(concerns, extras)
    for at, op in enumerate(ops):
        for rule in rules[type(op)]:
            if wrong := rule(at, op):
                raise ScheduleError(f"stage {stage}, op {at}: {wrong}\n{excerpt(stage, ops, at)}")
    for concern in concerns:
        if wrong := concern.ending():
            raise ScheduleError(f"stage {stage}: the stream ends, but {wrong}")


def paired(streams: Sequence[Ops], extras: Sequence[Extras]) -> Iterator[tuple[Ops, Extras]]:
    """Each stage's stream with its extras.

    Raises:
      ScheduleError: there are more of the ones than of the others.
    """
    if len(streams) != len(extras):
        raise ScheduleError(f"{len(streams)} streams, but extras of {len(extras)} stages")
    return zip(streams, extras, strict=True)


def check_extras(streams: Sequence[Sequence[AnyOp]], extras: Sequence[Extras]) -> None:
    """Refuse streams whose inserted ops are wrong; `check` looks at the rest (`bare`).

    Parameters are gathered when used, once, and given up at last; a bucket is reduced once a
    window, when it is complete; recomputing and reloading come before their use; what is on the
    device has room; layers are whole and in order; batches of messages are not parted; and stages
    that reduce together do so in one order.

    Args:
      streams: one a stage.
      extras: what each stage was asked to do.
    Raises:
      ScheduleError: the stage, the op, what it should have waited for, and its neighbours.
    Example:
      >>> from mfun.schedule.ops import B, F
      >>> extras = Extras(reduce=(frozenset({(0, 0)}),))
      >>> check_extras([[F(0), B(0), F(1), B(1), Reduce(0)]], [extras])
      >>> check_extras([[F(0), B(0), Reduce(0), F(1), B(1)]], [extras])
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: stage 0, op 2: Reduce0 runs before B1, which adds to bucket 0
      stage 0 | F0 B0 >>Reduce0<< F1 B1
    """
    for stage, (ops, asked) in enumerate(paired(streams, extras)):
        _check_stage(stage, ops, asked)
    check_order(
        streams, [{(Reduce, bucket): name for bucket, name in asked.joined} for asked in extras]
    )


class _Meetings:
    """The collectives of all streams: who takes part, and how far each stream is.

    Args:
      streams: of stages, or of ranks.
      names: of each stream's collectives.
      label: what a stream is of, for the message.
    """

    def __init__(
        self, streams: Sequence[Sequence[AnyOp]], names: Sequence[Names], label: str
    ) -> None:
        self.streams, self.label = streams, label
        self.queues = [self.events(ops, known) for ops, known in zip(streams, names, strict=True)]
        self.at = [0 for _ in streams]
        self.members: defaultdict[tuple[type[AnyOp], Hashable], list[int]] = defaultdict(list)
        for who, known in enumerate(names):
            for (kind, _), name in known.items():
                self.members[kind, name].append(who)

    def events(self, ops: Sequence[AnyOp], known: Names) -> list[tuple[Event, int]]:
        """A stream's named collectives and their places."""
        if not known:
            return []
        seen: Counter[tuple[type[AnyOp], Hashable]] = Counter()
        events: list[tuple[Event, int]] = []
        for at, op in enumerate(ops):
            if isinstance(op, (Reduce, Gather)) and (type(op), op.bucket) in known:
                key = type(op), known[type(op), op.bucket]
                events.append(((*key, seen[key]), at))
                seen[key] += 1
        return events

    def head(self, who: int) -> Event | None:
        """The collective that a stream runs next."""
        return self.queues[who][self.at[who]][0] if self.at[who] < len(self.queues[who]) else None

    def run(self) -> None:
        """Let every collective happen that all its members reach."""
        reached: Counter[Event] = Counter()
        ready = list(range(len(self.streams)))
        while ready:
            if (event := self.head(ready.pop())) is None:
                continue
            reached[event] += 1
            members = self.members[event[:2]]
            if reached[event] == len(members):
                for who in members:
                    self.at[who] += 1
                ready.extend(members)

    def wrong(self) -> str | None:
        """Two streams that do not meet, if any."""
        for who, queue in enumerate(self.queues):
            event = self.head(who)
            if event is None:
                continue
            at = queue[self.at[who]][1]
            other = next(o for o in self.members[event[:2]] if self.head(o) != event)
            waits = f"{self.streams[who][at]} waits for {self.label} {other}"
            return (
                f"{self.label} {who}, op {at}: {waits}, which {self.instead(other, event)}\n"
                f"{self.shown(who)}\n{self.shown(other)}"
            )
        return None

    def instead(self, who: int, event: Event) -> str:
        """What a stream does where another waits for it."""
        if self.head(who) is None:
            return "takes no part in it"
        op = self.streams[who][self.queues[who][self.at[who]][1]]
        later = any(found == event for found, _ in self.queues[who][self.at[who] :])
        return f"runs {op} first" if later else f"takes no part in it, and runs {op}"

    def shown(self, who: int) -> str:
        """Where a stream is."""
        ops, queue, done = self.streams[who], self.queues[who], self.at[who]
        at = queue[done][1] if done < len(queue) else len(ops) - 1
        return excerpt(who, ops, at, label=self.label)


def check_order(
    streams: Sequence[Sequence[AnyOp]], names: Sequence[Names], label: str = "stage"
) -> None:
    """Refuse collectives that their members run in different orders, or not all of them.

    Every member waits in every collective for all the others, the strictest that a transport can
    be; one order across all groups is what lets all streams end. Ranks that reduce by themselves
    see the same stream; for a check of what they really run, give one stream a rank.

    Args:
      streams: of stages, or of ranks.
      names: for each stream its collectives by type and bucket, and a name that is the same for
        all who take part.
      label: what a stream is of, "stage" or "rank", for the message.
    Raises:
      ScheduleError: two streams and their ops.
    Example:
      >>> names = [{(Reduce, 0): "head", (Reduce, 1): "table"}] * 2
      >>> check_order([[Reduce(0), Reduce(1)], [Reduce(1), Reduce(0)]], names)
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: stage 0, op 0: Reduce0 waits for stage 1, which runs
      Reduce1 first
      stage 0 | >>Reduce0<< Reduce1
      stage 1 | >>Reduce1<< Reduce0
    """
    meetings = _Meetings(streams, names, label)
    meetings.run()
    if wrong := meetings.wrong():
        raise ScheduleError(wrong)
