"""Puts the messages between the compute ops of all stages, so that they cannot get stuck.

A send stands right after the op that makes the message. A receive stands before the op that uses
it, or earlier: a channel keeps order, so what was sent before it comes before it, and a sender must
not have to wait before its next op. This makes batches in which neighbours meet, also where both
send to each other (interleaved, waves, two directions).

Proof that no transport gets stuck, not even one without buffers: the events of a run with the given
costs, ordered by time, put every message at one moment, after the ops before it and before the ops
after it on both stages. Follow that order: when a message's turn comes, both stages have reached
the batches that contain it. `check` runs every plan, tests/test_schedule_messages.py small ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

import attrs

from mfun.schedule.ops import B, Compute, F, I, Kind, Op, Recv, Send, Tag, W
from mfun.schedule.sizes import Costs
from mfun.schedule.streams import Placement, gives, needs, source

Start = tuple[float, int, Compute]
"""When an op starts, and on which stage."""


@attrs.frozen
class _Route:
    """What all ops of one kind and chunk take and give: kind of message and virtual stage.

    Args:
      taken: None if they take nothing.
      source: the stage that makes it.
      given: None if they give nothing.
      target: the stage that uses it.
      cost: of one op.
    """

    taken: tuple[Kind, int] | None = None
    source: int = -1
    given: tuple[Kind, int] | None = None
    target: int = -1
    cost: float = 1


_FOREIGN = _Route()
"""Of a chunk that the placement has not: `check` refuses the op."""

Routes = dict[tuple[type[Compute], int], _Route]


def _routes(stage: int, place: Placement, costs: Costs) -> Routes:
    """A stage's routes by (type of op, chunk)."""
    routes: Routes = {}
    for chunk in range(place.chunks):
        virtual = place.virtual(stage, chunk)
        for op in (F(0, chunk), B(0, chunk), I(0, chunk), W(0, chunk)):
            taken, given = needs(op, virtual, place), gives(op, virtual, place)
            routes[type(op), chunk] = _Route(
                taken and (taken[0], taken[2]),
                source(taken, place) if taken else stage,
                given and (given[0], given[2]),
                place.stage(given[2]) if given else stage,
                costs.of(op, place.slice(virtual)),
            )
    return routes


def _starts(
    streams: Sequence[Sequence[Compute]], routes: Sequence[Routes], delay: float
) -> tuple[list[Start], list[Start]]:
    """Run by data flow alone: the ops by time of start, and those that can never start."""
    ran: list[list[Start]] = [[] for _ in streams]
    free: list[float] = [0] * len(streams)
    made: dict[Tag, float] = {}
    waiting: dict[Tag, int] = {}
    ready = deque(range(len(streams)))
    while ready:
        stage = ready.popleft()
        ops, mine, route_of = streams[stage], ran[stage], routes[stage]
        while len(mine) < len(ops):
            op = ops[len(mine)]
            route = route_of.get((type(op), op.chunk), _FOREIGN)
            if route.taken:
                tag = (route.taken[0], op.mb, route.taken[1])
                if tag not in made:
                    waiting[tag] = stage
                    break
                free[stage] = max(free[stage], made[tag])
            mine.append((free[stage], stage, op))
            free[stage] += route.cost
            if route.given:
                tag = (route.given[0], op.mb, route.given[1])
                made[tag] = free[stage] if route.target == stage else free[stage] + delay
                if tag in waiting:
                    ready.append(waiting.pop(tag))
    stuck = [(0.0, stage, op) for stage, ops in enumerate(streams) for op in ops[len(ran[stage]) :]]
    return sorted((start for mine in ran for start in mine), key=itemgetter(0)), stuck


class _Writer:
    """The streams being written, and of each stage the message it has sent and nobody received."""

    def __init__(self, routes: Sequence[Routes]) -> None:
        self.routes = routes
        self.streams: list[list[Op]] = [[] for _ in routes]
        self.open: list[tuple[Tag, int] | None] = [None for _ in routes]

    def close(self, stage: int) -> None:
        """Receive what a stage has sent, where its receiver is now."""
        if sent := self.open[stage]:
            (kind, mb, to), target = sent
            self.streams[target].append(Recv(mb, to, kind, stage))
            self.open[stage] = None

    def write(self, stage: int, op: Compute) -> None:
        """An op, its receive if it was not received yet, and its send."""
        route = self.routes[stage].get((type(op), op.chunk), _FOREIGN)
        if route.taken and route.source != stage:
            sent = self.open[route.source]
            if sent and sent[0] == (route.taken[0], op.mb, route.taken[1]):
                self.close(route.source)
        self.streams[stage].append(op)
        if route.given and route.target != stage:
            kind, to = route.given
            self.streams[stage].append(Send(op.mb, to, kind, route.target))
            self.open[stage] = (kind, op.mb, to), route.target

    def write_stuck(self, stage: int, op: Compute) -> None:
        """An op that never gets its input, with its receive before it, for `check` to refuse."""
        route = self.routes[stage].get((type(op), op.chunk), _FOREIGN)
        if route.taken and route.source != stage:
            self.streams[stage].append(Recv(op.mb, route.taken[1], route.taken[0], route.source))
        self.write(stage, op)
        self.open[stage] = None


def with_p2p(
    streams: Sequence[Iterable[Compute]],
    place: Placement,
    costs: Costs = Costs(),  # noqa: B008
) -> tuple[tuple[Op, ...], ...]:
    """Insert the receive before and the send after each compute op that has one.

    A message whose two ends are on one stage is handed over in place and gets no op. Any streams
    whose data flow has no cycle come out without a deadlock; the rest of those that have one is
    written as far as it goes, and `check` refuses it.

    Args:
      streams: every stage's compute ops.
      place: where virtual stages are.
      costs: of the ops; they decide which messages meet in one batch.
    Returns: the streams with `Send` and `Recv`, in time linear in the ops.
    Example:
      >>> for ops in with_p2p([[F(0), B(0)], [F(0), B(0)]], Placement(stages=2)):
      ...     print(*ops)
      F0 Send(act0>1) Recv(grad0>0) B0
      Recv(act0>1) F0 B0 Send(grad0>0)

    Source: Megatron-LM core/pipeline_parallel/p2p_communication.py, for the batched pairs.
    Proof: at the head of this file; every interleaving in tests/test_schedule_interleavings.py.
    """
    routes = [_routes(stage, place, costs) for stage in range(len(streams))]
    starts, stuck = _starts(list(map(list, streams)), routes, costs.latency + costs.transfer)
    writer = _Writer(routes)
    for _, together in groupby(starts, itemgetter(0)):
        now = [(stage, op) for _, stage, op in together]
        for stage, _ in now:
            writer.close(stage)
        for stage, op in now:
            writer.write(stage, op)
    for stage in range(len(streams)):
        writer.close(stage)
    for _, stage, op in stuck:
        writer.write_stuck(stage, op)
    return tuple(map(tuple, writer.streams))
