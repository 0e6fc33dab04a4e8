"""List scheduling: gives every op of a pipeline its time, from an order, costs and a memory limit.

A stage that is free takes the first op of its order that can run: its input has arrived, and for
an `F` there is room. A `W` waits for nobody, so it fills the gaps, and makes room where memory
stops an `F`. What the stages take, one after the other, is the schedule.

All stages run in one global time, from a heap; the work is linear in the ops (times the chunks of
a stage), but for the heap's logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from heapq import heappop, heappush

import attrs

from mfun.schedule.greedy_stage import KINDS, Rule, Stage
from mfun.schedule.ops import Compute, F
from mfun.schedule.sizes import Sizes
from mfun.schedule.streams import Placement


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


class _Run:
    """All stages, the messages between them, and the times at which a stage has something to do.

    An op that can run at some time is queued before the heap reaches that time, since ops take
    time.
    """

    def __init__(self, rule: Rule, sizes: Sizes, place: Placement, limit: int) -> None:
        self.costs, self.place, self.chunks = sizes.costs, place, sizes.chunks
        self.stages = [Stage(rule, s, sizes, place, limit) for s in range(sizes.stages)]
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

    def step(self, at: int, stage: Stage, queue: int, now: float) -> None:
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

    def deliver(self, at: int, stage: Stage, to: int, queue: int, end: float) -> None:
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
