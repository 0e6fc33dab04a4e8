"""What a stage does beside its computation, in time: reductions, gathers, copies to the host.

Each link takes one thing after the other: the network all collectives of a stage, and the way to
the host and the way back one copy each. An op starts when what it uses has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mfun.schedule.layers import Buckets, holders
from mfun.schedule.ops import (
    AnyOp,
    Aside,
    Compute,
    Gather,
    Offload,
    Recompute,
    Reduce,
    Release,
    Reload,
)
from mfun.schedule.sizes import Costs


class Link(NamedTuple):
    """Where an op travels, and the name of its cost."""

    name: str
    cost: str


LINKS: Mapping[type[AnyOp], Link | None] = MappingProxyType(
    {
        Reduce: Link("network", "reduce"),
        Gather: Link("network", "gather"),
        Offload: Link("to host", "offload"),
        Reload: Link("from host", "offload"),
        Release: None,  # takes no time
    }
)


class Beside:
    """One stage's links.

    Args:
      costs: of collectives and copies.
      gather: the layers of each bucket of parameters; None has every op wait for all gathers
        before it.
    """

    def __init__(self, costs: Costs, gather: Buckets | None = None) -> None:
        self.costs = costs
        self.held = None if gather is None else holders(gather)
        self.free: dict[str, float] = {}  # links
        self.moved: dict[tuple[int, int], float] = {}  # ends of a microbatch's copies, by chunk
        self.gathered: dict[int, float] = {}  # ends, by bucket
        self.end: float = 0

    def run(self, op: Aside, now: float) -> tuple[float, float]:
        """Start an op at `now`, or when its link is free; returns its start and end."""
        if not (link := LINKS[type(op)]):
            return now, now
        copied = self.moved.get((op.mb, op.chunk), 0) if isinstance(op, (Offload, Reload)) else 0
        start = max(now, self.free.get(link.name, 0), copied)
        end = start + getattr(self.costs, link.cost)
        self.free[link.name] = end
        if isinstance(op, Gather):
            self.gathered[op.bucket] = end
        elif isinstance(op, (Offload, Reload)):
            self.moved[op.mb, op.chunk] = end
        self.end = max(self.end, end)
        return start, end

    def ready(self, op: Compute | Recompute) -> float:
        """When all that an op uses is on the device."""
        buckets = self.gathered if self.held is None else self.held.get((op.chunk, op.layer), ())
        there = (self.gathered.get(bucket, 0) for bucket in buckets)
        return max(self.moved.get((op.mb, op.chunk), 0), *there, 0)
