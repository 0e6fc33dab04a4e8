"""Activations on the host: `with_offload` keeps no more of them on the device than asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from mfun.schedule.layers import inserted
from mfun.schedule.ops import AnyOp, B, F, I, Offload, Recompute, Reload, ScheduleError, W

Item = tuple[int, int]  # (microbatch, chunk): what one forward of a chunk keeps


class _Spans:
    """For each item, the places of its forward's first and last op, and of its backward's.

    Args:
      stream: one stage's.
    """

    def __init__(self, stream: Sequence[AnyOp]) -> None:
        self.made: dict[Item, int] = {}
        self.kept: dict[Item, int] = {}
        self.used: dict[Item, int] = {}
        self.freed: dict[Item, int] = {}
        for at, op in enumerate(stream):
            if isinstance(op, F):
                self.made.setdefault((op.mb, op.chunk), at)
                self.kept[op.mb, op.chunk] = at
            elif isinstance(op, (Recompute, B, I, W)):
                self.used.setdefault((op.mb, op.chunk), at)
                self.freed[op.mb, op.chunk] = at


class _Device:
    """What is on the device as the stream runs, and what has to leave it.

    Args:
      depth: most items on it.
      spans: of the stream.
    """

    def __init__(self, depth: int, spans: _Spans) -> None:
        self.depth, self.spans = depth, spans
        self.here = 0
        self.away: set[Item] = set()
        self.waiting: list[tuple[int, Item]] = []  # heap, latest use first; perhaps used since

    def room(self, at: int, op: AnyOp) -> None:
        """Make room for one: what is used last leaves."""
        while self.here >= self.depth:
            if not self.waiting or -self.waiting[0][0] <= at:
                raise ScheduleError(
                    f"depth is {self.depth}, but at {op} (op {at}) backwards that have begun and "
                    f"not ended keep {self.here} on the device"
                )
            self.away.add(heappop(self.waiting)[1])
            self.here -= 1
        self.here += 1

    def run(self, at: int, op: F | B | I | W | Recompute) -> None:
        """Go past one op."""
        item, spans = (op.mb, op.chunk), self.spans
        if item not in spans.used:  # no backward: nothing is kept
            return
        if spans.made.get(item) == at:
            self.room(at, op)
            heappush(self.waiting, (-spans.used[item], item))
        elif spans.used[item] == at and item in self.away:
            self.room(at, op)
        if spans.freed[item] == at:
            self.here -= 1


def with_offload(ops: Iterable[AnyOp], depth: int) -> Iterator[AnyOp]:
    """Move activations to the host after the forward, and back before the backward.

    Only what does not fit leaves, and of it what is used last: a microbatch whose backward follows
    at once stays.

    Args:
      ops: one stage's stream, with its recomputing if any.
      depth: most microbatches, counted by chunks, whose activations are on the device.
    Raises:
      ScheduleError: depth is below 1, or more than it are between their `I` and `W`.
    Example:
      >>> print(*with_offload([F(0), F(1), F(2), B(0), B(1), B(2)], depth=2))
      F0 F1 Offload1 F2 B0 Reload1 B1 B2

    Source: Belady 1966: what is used last leaves first.
    """
    if depth < 1:
        raise ScheduleError(f"depth is {depth}, but at least 1 forward is on the device")
    stream = list(ops)
    spans = _Spans(stream)
    device = _Device(depth, spans)
    for at, op in enumerate(stream):
        if isinstance(op, (F, B, I, W, Recompute)):
            device.run(at, op)
    after = {spans.kept[item]: (Offload(*item),) for item in device.away}
    before = {spans.used[item]: (Reload(*item),) for item in device.away}
    yield from inserted(stream, before, after)
