"""List scheduling: gives every op of a pipeline its time, from an order, costs and a memory limit.

A stage that is free takes the first op of its order that can run: its input has arrived, and for
an `F` there is room. A `W` waits for nobody, so it fills the gaps, and makes room where memory
stops an `F`. What the stages take, one after the other, is the schedule.

All stages run in one global time, from a heap; the work is linear in the ops (times the chunks of
a stage), but for the heap's logarithm.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
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


@attrs.frozen
class Scheduled:
    """What a rule gives: each stage's ops, and the numbers by which results are compared.

    Args:
      streams: one a stage.
      makespan: the last end.
      span: the largest `bubble_span`: own last end - own first start - busy.
      peak: most chunks in flight on any stage.
    """

    streams: tuple[tuple[Compute, ...], ...]
    makespan: float
    span: float
    peak: int

    @property
    def rank(self) -> tuple[float, float, int]:
        """Less is better; times that differ by rounding alone are equal."""
        unit = self.makespan * 1e-9
        return (float(f"{self.makespan:.9g}"), round(self.span / unit), self.peak)


class _Stage:
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


class _Run:
    """All stages, the messages between them, and the times at which a stage has something to do.

    An op that can run at some time is queued before the heap reaches that time, since ops take
    time.
    """

    def __init__(self, rule: Rule, sizes: Sizes, place: Placement, limit: int) -> None:
        self.costs, self.place, self.chunks = sizes.costs, place, sizes.chunks
        self.stages = [_Stage(rule, s, sizes, place, limit) for s in range(sizes.stages)]
        self.sources = [self.ends(at, -1) for at in range(sizes.stages)]
        self.targets = [self.ends(at, 1) for at in range(sizes.stages)]
        self.links: dict[tuple[int, int], float] = {}
        self.times = [(0.0, stage) for stage in range(sizes.stages)]
        self.stages[place.stage(0)].arrivals[0] = [0.0] * sizes.microbatches

    def ends(self, at: int, way: int) -> list[tuple[int, int] | None]:
        """Per queue of a stage, the stage and queue that use (1) or make (-1) its messages."""
        found: list[tuple[int, int] | None] = []
        for kind in (0, 1):
            for chunk in range(self.chunks):
                other = self.place.virtual(at, chunk) + (way if kind == 0 else -way)
                there = 0 <= other < self.place.count
                queue = kind * self.chunks + self.place.chunk(other)
                found.append((self.place.stage(other), queue) if there else None)
        return found + [None] * self.chunks

    def until(self, bound: float) -> bool:
        """Run; False if it cannot end by a time, or never ends."""
        times, stages = self.times, self.stages
        while times:
            now, at = heappop(times)
            stage = stages[at]
            if stage.free > now or (queue := stage.pick(now)) is None:
                continue
            self.step(at, stage, queue, now)
            if stage.free + stage.remaining > bound:
                return False
            heappush(times, (stage.free, at))
        return all(len(stage.out) == stage.count for stage in stages)

    def step(self, at: int, stage: _Stage, queue: int, now: float) -> None:
        """Run one op and pass on what it makes."""
        source, target = self.sources[at][queue], self.targets[at][queue]
        if not self.costs.overlap and source and source[0] != at:
            now += self.costs.transfer
        end = stage.run(queue, now)
        if target:
            self.deliver(at, stage, *target, end)
        elif queue < stage.chunks:  # the loss
            stage.arrivals[queue + stage.chunks].append(end)
        if stage.chunks <= queue < 2 * stage.chunks:
            stage.gap(queue + stage.chunks, end)

    def deliver(self, at: int, stage: _Stage, to: int, queue: int, end: float) -> None:
        """Hand over an output: in place on the same stage, else over the link."""
        other = self.stages[to]
        if to != at:
            costs = self.costs
            if costs.transfer:
                start = max(end, self.links.get((at, to), 0))
                self.links[at, to] = gone = start + costs.transfer
                end = gone if costs.overlap else start
                stage.free = stage.free if costs.overlap else gone
            end += costs.latency
            if other.free < end:
                heappush(self.times, (end, to))
        other.arrivals[queue].append(end)

    def result(self) -> Scheduled:
        """The streams and their numbers."""
        return Scheduled(
            tuple(stage.ops() for stage in self.stages),
            max(stage.ended for stage in self.stages),
            max(stage.ended - (stage.first or 0) - stage.busy for stage in self.stages),
            max(stage.peak for stage in self.stages),
        )


def soonest(sizes: Sizes, place: Placement) -> float:
    """No schedule ends before: the first microbatch reaches a stage, which then never idles."""
    costs, reached = sizes.costs, 0.0
    starts: dict[int, float] = {}
    busy = [0.0] * sizes.stages
    for virtual in range(place.count):
        stage = place.stage(virtual)
        starts.setdefault(stage, reached)
        busy[stage] += sum(costs.of(kind(0), place.slice(virtual)) for kind in KINDS)
        reached += costs.of(F(0), place.slice(virtual))
        if virtual + 1 < place.count and place.stage(virtual + 1) != stage:
            reached += costs.latency + costs.transfer
    return max(starts[at] + sizes.microbatches * busy[at] for at in range(sizes.stages))


def best(rules: Iterable[Rule], sizes: Sizes, place: Placement, limit: int) -> Scheduled | None:
    """What the best of some rules gives: shortest makespan, then own span, then lowest peak.

    Args:
      rules: to try, the likeliest first: a rule is given up once it cannot be the best, and the
        first that ends as soon as any schedule could is taken.
      sizes: of the pipeline, with the costs.
      place: where virtual stages are.
      limit: most chunks whose activations a stage keeps; a rule that needs more is passed over.
    Returns: None if no rule ends within the limit.
    """
    found, least = None, soonest(sizes, place) * (1 + 1e-9)
    for rule in rules:
        run = _Run(rule, sizes, place, limit)
        if not run.until(math.inf if found is None else found.makespan * (1 + 1e-9)):
            continue
        result = run.result()
        if found is None or result.rank < found.rank:
            found = result
        if found.makespan <= least:
            break
    return found
