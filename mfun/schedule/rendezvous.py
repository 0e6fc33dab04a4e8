"""Runs the messages of a set of streams with no buffer at all, to see whether they can get stuck.

The semantics are the strictest of the transports': each ordered pair of stages is one channel, in
order; a send completes only when its receive is posted (and the reverse); a batch is posted at
once, and its stage moves on only when all of it is complete. A transport that buffers, or an
executor that waits for less, gets at least as far.

One run decides: a stage has one next step, and a step of one stage never disables a step of
another, so every interleaving ends in the same state.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import attrs

from mfun.schedule.ops import Message, Op, Send
from mfun.schedule.streams import batches

End = tuple[str, int, int]  # one end of a channel: ("send" | "recv", sender, receiver)


@attrs.frozen
class Stuck:
    """A stage that cannot move: what it did, and the messages it waits for."""

    stage: int
    done: tuple[Op, ...]
    waiting: tuple[Message, ...]


def ends(message: Message, stage: int) -> tuple[End, End]:
    """The channel end that a stage's message posts to, and the opposite one that must match."""
    if isinstance(message, Send):
        return ("send", stage, message.peer), ("recv", stage, message.peer)
    return ("recv", message.peer, stage), ("send", message.peer, stage)


class _Network:
    """Each stage's position and what it waits for; how much each channel end has posted."""

    def __init__(self, streams: Sequence[Sequence[Op]]) -> None:
        self.steps = [list(batches(ops)) for ops in streams]
        self.position = [0] * len(streams)
        self.waiting: list[list[tuple[Message, End, int]]] = [[] for _ in streams]
        self.posted: Counter[End] = Counter()

    def post(self, stage: int, batch: Iterable[Message]) -> set[int]:
        """Post a batch; returns the stages that it may wake."""
        for message in batch:
            mine, other = ends(message, stage)
            self.waiting[stage].append((message, other, self.posted[mine]))
            self.posted[mine] += 1
        return {message.peer for message in batch}

    def advance(self, stage: int) -> set[int]:
        """Run a stage until it waits or ends; returns the stages that it may have woken."""
        woken: set[int] = set()
        steps = self.steps[stage]
        while True:
            self.waiting[stage] = [w for w in self.waiting[stage] if self.posted[w[1]] <= w[2]]
            if self.waiting[stage] or self.position[stage] == len(steps):
                return woken
            step = steps[self.position[stage]]
            self.position[stage] += 1
            if isinstance(step, tuple):
                woken |= self.post(stage, step)

    def stuck(self, stage: int) -> Stuck:
        """What a waiting stage did and waits for."""
        waiting = tuple(message for message, _, _ in self.waiting[stage])
        flat: list[Op] = []
        for step in self.steps[stage][: self.position[stage]]:
            flat.extend(step if isinstance(step, tuple) else (step,))
        return Stuck(stage, tuple(op for op in flat if op not in waiting), waiting)


def rendezvous(streams: Sequence[Sequence[Op]]) -> tuple[Stuck, ...]:
    """Run all streams as far as they get, in time linear in the ops.

    Args:
      streams: one a stage, with messages; a channel's k-th send and k-th receive have one tag.
    Returns: the stages that never end; empty if there is no deadlock.
    Example:
      >>> from mfun.schedule.ops import Recv
      >>> a, b = Send(0, to=1, kind="act", peer=1), Recv(0, to=0, kind="grad", peer=1)
      >>> c, d = Send(0, to=0, kind="grad", peer=0), Recv(0, to=1, kind="act", peer=0)
      >>> rendezvous([[a, b], [c, d]])
      ()

    Proof: against every interleaving, tests/test_schedule_interleavings.py.
    """
    network = _Network(streams)
    ready = deque(range(len(streams)))
    while ready:
        ready.extend(network.advance(ready.popleft()))
    return tuple(network.stuck(stage) for stage, waiting in enumerate(network.waiting) if waiting)


def stuck_grid(stuck: Sequence[Stuck], last: int = 6) -> str:
    """The stuck stages as text: the ops each did last, then the messages it waits for.

    Args:
      stuck: from `rendezvous`.
      last: how many of the ops done are shown.
    Example:
      >>> from mfun.schedule.ops import F, Recv
      >>> print(stuck_grid(rendezvous([[F(0), Recv(0, to=0, kind="grad", peer=1)], []])))
      stage 0 | F0 | waits for Recv(grad0>0)
    """
    rows = []
    for item in stuck:
        done = [str(op) for op in item.done[-last:]] or ["-"]
        more = ["..."] if len(item.done) > last else []
        waiting = " ".join(map(str, item.waiting))
        rows.append(f"stage {item.stage} | {' '.join(more + done)} | waits for {waiting}")
    return "\n".join(rows)
