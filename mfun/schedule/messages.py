"""Puts the messages between the compute ops of all stages, so that they cannot get stuck.

A send stands right after the op that makes the message, a receive right before the op that uses it.
Where that would get stuck (neighbours both in a send: interleaved, waves, two directions), the
receive of the message made first moves up to where its stage waits anyway: the neighbours meet in
one batch. Nothing else is received early, since that takes memory, and holds up its stage when ops
do not take the time that they were said to.

Proof that no transport gets stuck, not even one without buffers: the streams are written in the
order of such a run. A stage is written past a send only when the receive has been written, so the
order of writing is a run; and what one run finishes, every run finishes (`rendezvous`). If nothing
can be written and no message is open, the data flow itself has a cycle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from mfun.schedule.ops import Compute, Op, Recv, ScheduleError, Send, Tag
from mfun.schedule.rendezvous import Stuck, stuck_grid
from mfun.schedule.sizes import Costs
from mfun.schedule.streams import Placement, Route, routes

_FOREIGN = Route(), 1.0
"""Route and cost of a chunk that the placement has not: `check` refuses the op."""


class _Writer:
    """The streams being written.

    Args:
      computes: every stage's compute ops.
      place: where virtual stages are.
      costs: of the ops.
    """

    def __init__(
        self, computes: Sequence[Sequence[Compute]], place: Placement, costs: Costs
    ) -> None:
        self.computes = computes
        self.routes = [
            {
                (kind, chunk): (route, costs.of(kind(0, chunk), place.slice(route.here)))
                for (kind, chunk), route in routes(stage, place).items()
            }
            for stage in range(len(computes))
        ]
        self.streams: list[list[Op]] = [[] for _ in computes]
        self.at = [0 for _ in computes]
        self.clock = [0.0 for _ in computes]
        self.made: dict[Tag, float] = {}  # messages not used yet, and when they were made
        self.awaits: list[Tag | None] = [None for _ in computes]  # what a stage's next op takes
        self.open: list[tuple[Tag, int] | None] = [None for _ in computes]  # sent, not received
        self.overdue: list[tuple[float, int, Tag]] = []  # heap of these, received since or not
        self.ready = deque(range(len(computes)))

    def write(self) -> None:
        """Write every stage as far as it gets."""
        while self.ready:
            while self.ready:
                self.run(self.ready.popleft())
            self.unblock()

    def run(self, stage: int) -> None:
        """Write one stage until it lacks an input, or its last message has not been received."""
        table, stream, opened = self.routes[stage], self.streams[stage], self.open
        clock, made, ops, at = self.clock[stage], self.made, self.computes[stage], self.at[stage]
        taken: Tag | None = None
        while at < len(ops):
            op = ops[at]
            (takes, here, source, gives, there, target), cost = table.get(
                (type(op), op.chunk), _FOREIGN
            )
            if takes:
                taken = (takes, op.mb, here)
                if taken not in made:
                    break
                sent = opened[source]
                if sent and sent[0] == taken:
                    self.receive(source)
                    self.ready.append(source)
                if opened[stage]:
                    break
                clock = max(clock, made.pop(taken))
                taken = None
            elif opened[stage]:
                break
            clock += cost
            stream.append(op)
            at += 1
            if gives:
                tag = (gives, op.mb, there)
                made[tag] = clock
                if target != stage:
                    self.send(stage, tag, target, clock)
        self.clock[stage], self.at[stage], self.awaits[stage] = clock, at, taken

    def send(self, stage: int, tag: Tag, target: int, made: float) -> None:
        """Send a message, and receive it at once if its user is next."""
        kind, mb, to = tag
        self.streams[stage].append(Send(mb, to, kind, target))
        self.open[stage] = tag, target
        if self.awaits[target] == tag:
            self.receive(stage)
            self.ready.append(target)
        else:
            heappush(self.overdue, (made, stage, tag))

    def receive(self, stage: int) -> None:
        """Receive what a stage has sent, where its receiver is now."""
        sent = self.open[stage]
        assert sent
        (kind, mb, to), target = sent
        self.streams[target].append(Recv(mb, to, kind, stage))
        self.open[stage] = None

    def unblock(self) -> None:
        """Every stage waits: receive the open message that was made first, if there is one."""
        while self.overdue:
            _, stage, tag = heappop(self.overdue)
            sent = self.open[stage]
            if sent and sent[0] == tag:
                self.receive(stage)
                self.ready.extend((stage, sent[1]))
                return

    def cycle(self) -> list[Stuck]:
        """The stages that wait, if each waits for what an op further down some stream makes."""
        rest = [
            (stage, op) for stage, ops in enumerate(self.computes) for op in ops[self.at[stage] :]
        ]
        coming: set[Tag] = set()
        for stage, op in rest:
            route, _ = self.routes[stage].get((type(op), op.chunk), _FOREIGN)
            if route.gives:
                coming.add((route.gives, op.mb, route.there))
        waiting = [(stage, tag) for stage, tag in enumerate(self.awaits) if tag]
        if not all(tag in coming for _, tag in waiting):
            return []
        return [self.stuck(stage, tag) for stage, tag in waiting]

    def stuck(self, stage: int, tag: Tag) -> Stuck:
        """What a waiting stage did and waits for."""
        op = self.computes[stage][self.at[stage]]
        kind, mb, to = tag
        peer = self.routes[stage][type(op), op.chunk][0].source
        return Stuck(stage, tuple(self.streams[stage]), (Recv(mb, to, kind, peer),))

    def write_stuck(self) -> None:
        """The ops that never get their inputs, as if they did, for `check` to refuse."""
        for stage, ops in enumerate(self.computes):
            for op in ops[self.at[stage] :]:
                route, _ = self.routes[stage].get((type(op), op.chunk), _FOREIGN)
                stream = self.streams[stage]
                had = (route.takes, op.mb, route.here) in self.made  # and received: none is open
                if route.takes and route.source != stage and not had:
                    stream.append(Recv(op.mb, route.here, route.takes, route.source))
                stream.append(op)
                if route.gives and route.target != stage:
                    stream.append(Send(op.mb, route.there, route.gives, route.target))


def with_p2p(
    streams: Sequence[Iterable[Compute]],
    place: Placement,
    costs: Costs = Costs(),  # noqa: B008  # frozen
) -> tuple[tuple[Op, ...], ...]:
    """Insert the receive before and the send after each compute op that has one.

    A message whose two ends are on one stage is handed over in place and gets no op. Any streams
    whose data flow has no cycle come out without a deadlock; where an input is missing, what can
    never run is written as it stands, and `check` refuses it.

    Args:
      streams: every stage's compute ops.
      place: where virtual stages are.
      costs: of the ops; where stages wait for each other they decide which message comes first.
    Returns: the streams with `Send` and `Recv`, in time about linear in the ops.
    Raises:
      ScheduleError: ops wait for each other in a cycle, whatever the messages; all that wait.
    Example:
      >>> from mfun.schedule.ops import B, F
      >>> for ops in with_p2p([[F(0), B(0)], [F(0), B(0)]], Placement(stages=2)):
      ...     print(*ops)
      F0 Send(act0>1) Recv(grad0>0) B0
      Recv(act0>1) F0 B0 Send(grad0>0)

    Source: Megatron-LM core/pipeline_parallel/p2p_communication.py, for the batched pairs.
    Proof: at the head of this file, with proofs/Network.v, one_run_decides; every interleaving in
    tests/test_schedule_interleavings.py.
    """
    writer = _Writer(list(map(list, streams)), place, costs)
    writer.write()
    if cycle := writer.cycle():
        raise ScheduleError(f"deadlock: these stages wait for ever\n{stuck_grid(cycle)}")
    writer.write_stuck()
    return tuple(map(tuple, writer.streams))
