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
    """How far each stage is and what it waits for; how much each channel end has posted."""

    def __init__(self, streams: Sequence[Sequence[Op]]) -> None:
        count = len(streams)
        self.streams = streams
        self.batches = [_batches(ops) for ops in streams]
        self.at = [0] * count  # batches posted
        self.sends = [[0] * count for _ in streams]  # posted, by sender and receiver
        self.recvs = [[0] * count for _ in streams]  # posted, by receiver and sender
        self.waiting: list[list[Waiting]] = [[] for _ in streams]
        self.ready = deque(range(count))

    def run(self, stage: int) -> None:
        """Run a stage until it waits or ends; stages whose waiting has ended become ready."""
        for _, other, needed in self.waiting[stage]:
            if other[stage] <= needed:
                return
        waiting: list[Waiting] = []
        batches, at = self.batches[stage], self.at[stage]
        while not waiting and at < len(batches):
            waiting = self.post(stage, batches[at])
            at += 1
        self.at[stage], self.waiting[stage] = at, waiting

    def post(self, stage: int, batch: Sequence[Message]) -> list[Waiting]:
        """Post a batch; returns its messages whose other end has not been posted."""
        sends, recvs, waiting = self.sends, self.recvs, []
        for message in batch:
            peer = message.peer
            if type(message) is Send:
                counts, other = sends[stage], recvs[peer]
            else:
                counts, other = recvs[stage], sends[peer]
            posted = counts[peer]
            counts[peer] = posted + 1
            if other[stage] <= posted:
                waiting.append((message, other, posted))
            elif self.waiting[peer]:  # perhaps for this message
                self.ready.append(peer)
        return waiting

    def stuck(self, stage: int) -> Stuck:
        """What a waiting stage did and waits for."""
        waiting = tuple(
            message for message, other, needed in self.waiting[stage] if other[stage] <= needed
        )
        last = self.batches[stage][self.at[stage] - 1][-1]
        ops = self.streams[stage]
        done = ops[: next(at for at, op in enumerate(ops) if op is last) + 1]
        return Stuck(stage, tuple(op for op in done if op not in waiting), waiting)


def _batches(ops: Sequence[Op]) -> list[list[Message]]:
    """The messages of a stream, those together that are posted together."""
    batches: list[list[Message]] = []
    apart = True
    for op in ops:
        if isinstance(op, ENDS):
            if apart:
                batches.append([])
            batches[-1].append(op)
            apart = False
        else:
            apart = True
    return batches


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

    Proof: proofs/Network.v, one_run_decides, one_run_refutes; and against every interleaving,
    tests/test_schedule_interleavings.py.
    """
    network = _Network(streams)
    while network.ready:
        network.run(network.ready.popleft())
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
