"""One stage in list scheduling: what has arrived, what its order says, and what it takes next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

import attrs

from mfun.schedule.ops import Compute, F, I, W
from mfun.schedule.sizes import Sizes
from mfun.schedule.streams import Placement

KINDS: tuple[type[Compute], ...] = (F, I, W)
Step = tuple[type[Compute], int]  # (kind, chunk): the k-th of a stage is of microbatch k


@attrs.frozen(eq=False)
class Rule:
    """An order of each stage's ops, and how it is kept.

    Args:
      order: per stage, every `F` and `I`. With a `W` in it, all of them; without, a `W` runs when
        nothing else can.
      overtake: which op may run before an earlier one of its stage that cannot run yet. "no": none.
        "room": an `I`, and an `F` that leaves room for the `F`s that it overtakes; the order
        itself must fit in memory. "ends": the same, but only before the first microbatch is all
        the way back, and after the last `F`. "free": any, but a chunk's `F` leaves room for one
        `F` of each later chunk, without which no activation would ever be freed.
      at_once: a `W` that is not in the order runs as soon as it can, as in a whole backward.
      patience: rather wait for an earlier op than run a later one, if it arrives within this part
        of the later one's time.
    """

    order: Sequence[Sequence[Step]]
    overtake: Literal["no", "ends", "room", "free"] = "no"
    at_once: bool = False
    patience: float = 0


class Stage:
    """One stage: what has arrived, what it has run, when it is free.

    Its queues are numbered kind * chunks + chunk, with F, I, W as 0, 1, 2. A queue's k-th op is of
    microbatch k.
    """

    def __init__(self, rule: Rule, stage: int, sizes: Sizes, place: Placement, limit: int) -> None:
        self.rule, self.limit, self.chunks = rule, limit, sizes.chunks
        chunks = range(sizes.chunks)
        slices = [place.slice(place.virtual(stage, chunk)) for chunk in chunks]
        self.cost = [sizes.costs.of(kind(0), slice) for kind in KINDS for slice in slices]
        self.arrivals: list[list[float]] = [[] for _ in self.cost]
        self.taken = [0] * len(self.cost)
        self.order = [KINDS.index(kind) * sizes.chunks + chunk for kind, chunk in rule.order[stage]]
        self.ordered = sizes.chunks * (3 if (W, 0) in rule.order[stage] else 2)  # queues
        self.ahead: set[int] = set()  # places in the order that ran before an earlier one
        self.read_places()
        self.gaps: deque[int] = deque()  # queues of the `W`s that can run
        self.count = 3 * sizes.chunks * sizes.microbatches
        self.busy = self.remaining = sizes.microbatches * sum(self.cost)
        self.free: float = 0  # no op starts earlier
        self.ended: float = 0  # its last op
        self.first: float | None = None
        self.done = self.live = self.peak = 0  # done: the order up to here
        self.out: list[int] = []

    def read_places(self) -> None:
        """Keep where in the order each op is, and how many forwards precede it."""
        self.places: list[list[int]] = [[] for _ in self.cost]
        self.before: list[list[int]] = [[] for _ in range(self.chunks)]
        forwards = 0
        for at, queue in enumerate(self.order):
            self.places[queue].append(at)
            if queue < self.chunks:
                self.before[queue].append(forwards)
                forwards += 1

    def pick(self, now: float) -> int | None:
        """The queue whose head runs now; None waits."""
        if self.rule.at_once and self.gaps:
            return self.gaps[0]
        best, soon = self.next(now)
        if best is None and self.overtakes():
            best, soon = self.earliest(now)
        if best is None and self.gaps:
            best = self.gaps[0]
        if best is not None and soon < now + self.rule.patience * self.cost[best]:
            return None
        return best

    def next(self, now: float) -> tuple[int | None, float]:
        """The next op of the order if it can run, else when it arrives, as far as is known."""
        if self.done == len(self.order):
            return None, math.inf
        queue = self.order[self.done]
        arrivals, at = self.arrivals[queue], self.taken[queue]
        if at == len(arrivals) or (queue < self.chunks and not self.room(queue)):
            return None, math.inf
        return (queue, math.inf) if arrivals[at] <= now else (None, arrivals[at])

    def overtakes(self) -> bool:
        """Whether an op may run before the next of the order, now."""
        match self.rule.overtake:
            case "no":
                return False
            case "ends":  # no microbatch came back yet, or there are no forwards left
                filling = self.taken[self.chunks] == 0
                return filling or sum(self.taken[: self.chunks]) == self.count // 3
            case "room" | "free":
                return True

    def earliest(self, now: float) -> tuple[int | None, float]:
        """The first op of the order that can run, and when an earlier one arrives."""
        heads = []
        for queue in range(self.ordered):
            at = self.taken[queue]
            if at < len(self.arrivals[queue]):
                heads.append((self.places[queue][at], queue, self.arrivals[queue][at]))
        heads.sort()
        soon = math.inf
        for _, queue, arrival in heads:
            if arrival >= soon or (queue < self.chunks and not self.room(queue)):
                continue
            if arrival <= now:
                return queue, soon
            soon = arrival
        return None, soon

    def room(self, chunk: int) -> bool:
        """Whether the next forward of a chunk may take memory."""
        if self.live == self.limit:
            return False
        if self.rule.overtake == "free":
            return self.leaves_room(chunk)
        overtaken = self.before[chunk][self.taken[chunk]] - sum(self.taken[: self.chunks])
        return self.live + 1 + max(0, overtaken) <= self.limit

    def leaves_room(self, chunk: int) -> bool:
        """Whether each later chunk could still run one forward."""
        freed, kept = 2 * self.chunks, 1
        for at in range(self.chunks):
            kept += self.taken[at] - self.taken[freed + at]
            if at >= chunk and kept > self.limit - (self.chunks - 1 - at):
                return False
        return True

    def run(self, queue: int, start: float) -> float:
        """Run the head of a queue; returns its end."""
        cost = self.cost[queue]
        if queue < self.ordered:
            self.pass_over(self.places[queue][self.taken[queue]])
        else:
            self.gaps.popleft()
        self.taken[queue] += 1
        self.out.append(queue)
        self.remaining -= cost
        self.free = self.ended = start + cost
        if self.first is None:
            self.first = start
        if queue < self.chunks:
            self.live += 1
            self.peak = max(self.peak, self.live)
        elif queue >= 2 * self.chunks:
            self.live -= 1
        return self.ended

    def pass_over(self, place: int) -> None:
        """An op of the order runs: find the next that has not."""
        self.ahead.add(place)
        while self.done in self.ahead:
            self.ahead.discard(self.done)
            self.done += 1

    def gap(self, queue: int, time: float) -> None:
        """A `W` can run from now on."""
        if queue < self.ordered:
            self.arrivals[queue].append(time)
        else:
            self.gaps.append(queue)

    def ops(self) -> tuple[Compute, ...]:
        """What has run."""
        counts, ops = [0] * len(self.cost), []
        for queue in self.out:
            kind, chunk = divmod(queue, self.chunks)
            ops.append(KINDS[kind](counts[queue], chunk))
            counts[queue] += 1
        return tuple(ops)
