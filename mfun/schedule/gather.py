"""Sharded parameters: gathers and releases around the ops that use them.

The ops that use parameters are cut into phases, in which the same buckets are used. In a phase
there are gathered: these, and the `prefetch` buckets that are used next after it. What is there in
the phase before and in this one is neither released nor gathered again, so no stream with the same
prefetch gathers less; and what was gathered stays until it is used, since nothing overtakes it in
the order of next use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mfun.schedule.layers import Buckets, holders, inserted
from mfun.schedule.ops import AnyOp, B, F, Gather, I, Recompute, Release, ScheduleError

USES = (F, B, I, Recompute)
"""Ops that read parameters; a `W` multiplies what `F` and `I` have left."""


class _Phase(NamedTuple):
    """Consecutive ops that use the same buckets: places of the first and last, and the buckets."""

    first: int
    last: int
    needs: tuple[int, ...]


def _phases(
    stream: Sequence[AnyOp], held: Mapping[tuple[int, int | None], tuple[int, ...]]
) -> list[_Phase]:
    phases: list[_Phase] = []
    for at, op in enumerate(stream):
        if not isinstance(op, USES) or not (needs := held.get((op.chunk, op.layer))):
            continue
        if phases and phases[-1].needs == needs:
            phases[-1] = phases[-1]._replace(last=at)
        else:
            phases.append(_Phase(at, at, needs))
    return phases


def _wanted(phases: Sequence[_Phase], prefetch: int) -> list[tuple[int, ...]]:
    """Per phase the buckets that are gathered in it, first what it needs, then the next ones.

    From the last phase to the first; `soon` has the buckets by next use, the nearest last.
    """
    soon: OrderedDict[int, None] = OrderedDict()
    wanted: list[tuple[int, ...]] = []
    for phase in reversed(phases):
        ahead = islice(reversed(soon), prefetch)
        wanted.append(tuple(dict.fromkeys((*phase.needs, *ahead))))
        for bucket in reversed(phase.needs):
            soon[bucket] = None
            soon.move_to_end(bucket)
    return wanted[::-1]


def with_gather(ops: Iterable[AnyOp], buckets: Buckets, prefetch: int = 1) -> Iterator[AnyOp]:
    """Insert a gather before the ops that use a bucket, and a release after them.

    Between a forward and its backward a bucket is given up, unless it is among the next ones. At
    no time are more gathered than an op uses, plus `prefetch`.

    Args:
      ops: one stage's stream, on layers (`expand`) or on chunks, with its recomputing if any.
      buckets: for each bucket the layers whose weights it holds.
      prefetch: how many buckets are gathered before they are needed.
    Raises:
      ScheduleError: prefetch is negative.
    Example:
      >>> from mfun.schedule.layers import expand
      >>> ops = list(expand([F(0), B(0)], layers=[3]))
      >>> layers = [{(0, 0)}, {(0, 1)}, {(0, 2)}]
      >>> print(*with_gather(ops, layers, prefetch=0))
      Gather0 F0[0] Release0 Gather1 F0[1] Release1 Gather2 F0[2] B0[2] Release2
      Gather1 B0[1] Release1 Gather0 B0[0] Release0
      >>> print(*with_gather(ops, layers, prefetch=1))
      Gather0 Gather1 F0[0] Release0 Gather2 F0[1] F0[2] B0[2] Release2
      Gather0 B0[1] Release1 B0[0] Release0

    Source: Zhao et al. 2023 (arXiv 2304.11277), FSDP's prefetch; here the order is known before.
    """
    if prefetch < 0:
        raise ScheduleError(f"prefetch is {prefetch}, but must be 0 or more")
    stream = list(ops)
    phases = _phases(stream, holders(buckets))
    gathers = [Gather(bucket) for bucket in range(len(buckets))]
    releases = [Release(bucket) for bucket in range(len(buckets))]
    before: dict[int, list[Gather]] = {}
    after: dict[int, list[Release]] = {}
    now: tuple[int, ...] = ()
    end = 0
    for phase, wanted in zip(phases, _wanted(phases, prefetch), strict=True):
        if gone := [releases[bucket] for bucket in now if bucket not in wanted]:
            after[end] = gone
        if new := [gathers[bucket] for bucket in wanted if bucket not in now]:
            before[phase.first] = new
        now, end = wanted, phase.last
    if now:
        after[end] = [releases[bucket] for bucket in now]
    yield from inserted(stream, before, after)
