"""Decides before a run whether a set of streams is right, and says which ops are wrong if not.

Three passes, each linear in the ops: every stage by itself (complete, in order, each op has its
input, memory bound); every channel (each send has its receive, in the same order); all stages
together (no deadlock).
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import zip_longest
from operator import attrgetter
from typing import TypeVar, cast

from mfun.schedule.collective_check import check_extras, excerpt, paired
from mfun.schedule.generators import forward_only as forwards
from mfun.schedule.layers import COMPUTES, bare
from mfun.schedule.messages import with_p2p
from mfun.schedule.ops import AnyOp, Op, Recv, ScheduleError, Send
from mfun.schedule.rendezvous import rendezvous, stuck_grid
from mfun.schedule.sizes import Costs, Sizes
from mfun.schedule.streams import Placement
from mfun.schedule.table import SCHEDULES, Schedule
from mfun.schedule.transforms import Extras, with_extras
from mfun.schedule.walk import Walk


def _check_stage(walk: Walk, ops: Sequence[Op]) -> None:
    """Refuse a stage whose stream is incomplete, out of order, without inputs, or too large."""
    step = walk.steps
    for at, op in enumerate(ops):
        if wrong := step[type(op)](op):
            where = f"stage {walk.stage}, op {at}"
            raise ScheduleError(f"{where}: {wrong}\n{excerpt(walk.stage, ops, at)}")
    if wrong := walk.ending():
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
    tag = attrgetter("mb", "to", "kind")
    for a, b in sorted({*sends, *recvs}):
        pair = sends[a, b], recvs[a, b]
        if [*map(tag, pair[0])] == [*map(tag, pair[1])]:
            continue
        for at, (sent, taken) in enumerate(zip_longest(*pair)):
            if sent is None or taken is None or sent.tag != taken.tag:
                raise ScheduleError(
                    f"message {at} from stage {a} to stage {b}: {_unmet(a, b, sent, taken)}"
                )


def _unmet(a: int, b: int, sent: Send | None, taken: Recv | None) -> str:
    """Why a send and a receive do not meet."""
    if sent is None:
        return f"{taken} has no send on stage {a}"
    if taken is None:
        return f"{sent} has no receive on stage {b}"
    return f"{sent} meets {taken}; both stages must use one order"


def _microbatches(streams: Sequence[Sequence[Op]]) -> int:
    """One more than the largest microbatch of any compute op."""
    return 1 + max((op.mb for ops in streams for op in ops if isinstance(op, COMPUTES)), default=0)


def _plain(
    streams: Sequence[Sequence[AnyOp]], extras: Sequence[Extras] | None
) -> Sequence[Sequence[Op]]:
    """The schedule's own ops, once what was inserted is right."""
    if extras is None:  # any other op is refused by the walk
        return cast(Sequence[Sequence[Op]], streams)
    check_extras(streams, extras)
    return [list(bare(ops, asked.layers)) for ops, asked in paired(streams, extras)]


OpT = TypeVar("OpT", bound=AnyOp, covariant=True)


class Checked(tuple[OpT, ...]):
    """One stage's stream that `check` accepted together with the other stages'."""

    __slots__ = ()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: it would go through a million new ops over and over, in vain."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@_uncollected()
def check(
    streams: Sequence[Sequence[OpT]],
    forward_only: bool = False,
    *,
    microbatches: int | None = None,
    place: Placement | None = None,
    in_flight: Sequence[int] | None = None,
    extras: Sequence[Extras] | None = None,
) -> tuple[Checked[OpT], ...]:
    """Refuse streams that are incomplete or out of order, would hang, or keep too much in memory.

    Args:
      streams: one stream a stage, messages included (`with_p2p`).
      forward_only: there are no backwards.
      microbatches: of the step; None takes one more than the largest microbatch seen.
      place: where virtual stages are; None is one chunk a stage.
      in_flight: per stage, the most forwards that may wait for their `B` or `W`; None sets no
        bound.
      extras: per stage, what was inserted (`with_extras`); None is nothing.
    Returns: the streams, as the executor takes them.
    Raises:
      ScheduleError: the stage, the ops and their neighbours; for a deadlock, the stuck stages.
    Example:
      >>> ops, sizes = SCHEDULES["1f1b"].ops, Sizes(2, 3)
      >>> streams = with_p2p([ops(stage, sizes) for stage in range(2)], Placement(2))
      >>> check(streams, in_flight=[2, 1])[1][:3]
      (Recv(act0>1), F0, B0)
      >>> early = [streams[0], [streams[1][0], streams[1][2], streams[1][1], *streams[1][3:]]]
      >>> check(early)
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: stage 1, op 1: B0 runs before F0
      stage 1 | Recv(act0>1) >>B0<< F0 Send(grad0>0) Recv(act1>1) ...
    """
    accepted = tuple(Checked(ops) for ops in streams)
    plain = _plain(streams, extras)
    count = _microbatches(plain) if microbatches is None else microbatches
    Sizes(len(plain), count)  # refuses numbers out of range
    place = Placement(len(streams)) if place is None else place
    for stage, ops in enumerate(plain):
        bound = None if in_flight is None or forward_only else in_flight[stage]
        _check_stage(Walk(stage, place, count, forward_only, bound), ops)
    _check_channels(plain)
    if stuck := rendezvous(plain):
        raise ScheduleError(f"deadlock: these stages wait for ever\n{stuck_grid(stuck)}")
    return accepted


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
) -> tuple[Checked[Op], ...]:
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
    bounds = [row.in_flight(stage, sizes) for stage in range(stages)]
    with _uncollected():
        streams = with_p2p(computes, place, costs)
        return check(
            streams, forward_only, microbatches=microbatches, place=place, in_flight=bounds
        )


def dress(streams: Sequence[Sequence[Op]], extras: Sequence[Extras]) -> tuple[Checked[AnyOp], ...]:
    """Every stage's stream with its extras, checked: what the executor runs.

    Args:
      streams: of all stages, as `plan` gives them.
      extras: of all stages.
    Returns: one tuple of ops a stage.
    Raises:
      ScheduleError: numbers that do not fit, or an order that not all members agree on.
    Example:
      >>> from mfun.schedule.ops import B, F
      >>> layer = frozenset({(0, 0)})
      >>> print(*dress([[F(0), B(0)]], [Extras(reduce=(layer,), recompute="full")])[0])
      F0 Recompute0 B0 Reduce0
    """
    with _uncollected():
        dressed = tuple(Checked(with_extras(*each)) for each in paired(streams, extras))
        check_extras(dressed, extras)
    return dressed
