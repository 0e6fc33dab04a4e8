"""Runs the messages of a set of streams with no buffer at all, to see whether they can get stuck.

The semantics are the strictest of the transports': each ordered pair of stages is one channel, in
order; a send completes only when its receive is posted (and the reverse); a batch is posted at
once, and its stage moves on only when all of it is complete. A transport that buffers, or an
executor that waits for less, gets at least as far.

One run decides: a stage has one next step, and a step of one stage never disables a step of
another, so every interleaving ends in the same state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import attrs

from mfun.schedule.ops import Message, Op, Recv, Send

ENDS = Send, Recv


@attrs.frozen
class Stuck:
    """A stage that cannot move: what it did, and the messages it waits for."""

    stage: int
    done: tuple[Op, ...]
    waiting: tuple[Message, ...]


class _Network:
    """Each stage's position and what it waits for; how much each channel end has posted."""

    def __init__(self, streams: Sequence[Sequence[Op]]) -> None:
        count = len(streams)
        self.streams = streams
        self.at = [0] * count
        self.sends = [[0] * count for _ in streams]  # posted, by sender and receiver
        self.recvs = [[0] * count for _ in streams]  # posted, by receiver and sender
        self.waiting: list[list[tuple[Message, list[int], int]]] = [[] for _ in streams]

    def post(self, stage: int, message: Message) -> None:
        """Post a message: it waits until the other end, a counter of its stage's, goes past it."""
        mine, other = self.sends, self.recvs
        if isinstance(message, Recv):
            mine, other = other, mine
        counts, peer = mine[stage], message.peer
        self.waiting[stage].append((message, other[peer], counts[peer]))
        counts[peer] += 1

    def advance(self, stage: int) -> set[int]:
        """Run a stage until it waits or ends; returns the stages that it may have woken."""
        woken: set[int] = set()
        ops = self.streams[stage]
        while True:
            waiting = self.waiting[stage]
            if waiting := [w for w in waiting if w[1][stage] <= w[2]] if waiting else waiting:
                self.waiting[stage] = waiting
                return woken
            self.waiting[stage] = []
            at = self.at[stage]
            while at < len(ops) and not isinstance(ops[at], ENDS):
                at += 1
            if at == len(ops):
                self.at[stage] = at
                return woken
            while at < len(ops) and isinstance(message := ops[at], ENDS):
                self.post(stage, message)
                woken.add(message.peer)
                at += 1
            self.at[stage] = at

    def stuck(self, stage: int) -> Stuck:
        """What a waiting stage did and waits for."""
        waiting = tuple(message for message, _, _ in self.waiting[stage])
        done = self.streams[stage][: self.at[stage]]
        return Stuck(stage, tuple(op for op in done if op not in waiting), waiting)


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
