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
Waiting = tuple[Message, list[int], int]
"""A message, how much its peer has posted of the other end, and how much of it is not enough."""


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
        self.waiting: list[list[Waiting]] = [[] for _ in streams]

    def advance(self, stage: int) -> set[int]:
        """Run a stage until it waits or ends; returns the stages that it may have woken."""
        woken: set[int] = set()
        waiting = [w for w in self.waiting[stage] if w[1][stage] <= w[2]]
        while not waiting and self.at[stage] < len(self.streams[stage]):
            self.compute(stage)
            waiting = self.post(stage, woken)
        self.waiting[stage] = waiting
        return woken

    def compute(self, stage: int) -> None:
        """Go past compute ops."""
        ops, at = self.streams[stage], self.at[stage]
        while at < len(ops) and not isinstance(ops[at], ENDS):
            at += 1
        self.at[stage] = at

    def post(self, stage: int, woken: set[int]) -> list[Waiting]:
        """Post a batch; returns its messages whose other end has not been posted."""
        ops, at, waiting = self.streams[stage], self.at[stage], []
        while at < len(ops) and isinstance(message := ops[at], ENDS):
            peer = message.peer
            if isinstance(message, Send):
                counts, other = self.sends[stage], self.recvs[peer]
            else:
                counts, other = self.recvs[stage], self.sends[peer]
            if other[stage] <= counts[peer]:
                waiting.append((message, other, counts[peer]))
            counts[peer] += 1
            woken.add(peer)
            at += 1
        self.at[stage] = at
        return waiting

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
