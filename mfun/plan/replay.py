"""Buffers that come and go in a step, replayed from a stage's stream without running it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mfun.schedule import B, I, W
from mfun.schedule.layers import expand, holders
from mfun.schedule.ops import Gather, Reduce, Release
from mfun.train.extras import bucket_layers
from mfun.train.plan import Plan


class Sizes(NamedTuple):
    """A bucket's bytes of whole parameters and of whole gradients, and how many ranks cut it."""

    params: int
    grads: int
    n: int

    @property
    def shard(self) -> int:
        """Bytes of a rank's gradients."""
        return self.grads // self.n


class Temporary(NamedTuple):
    """Bytes on top of what is held between steps.

    Args:
        gathered: whole parameters.
        unreduced: whole gradients, less the shards of the step that are not there yet.
        scratch: of collectives and of the update.
    """

    gathered: int = 0
    unreduced: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def replay(
    plan: Plan, stage: int, buckets: Sequence[Sizes], *, exchanged: bool
) -> Iterator[Temporary]:
    """The worst moment of each op of a stage's stream, on layers, and then of `finalize`.

    Args:
        plan: a sharded layout.
        stage: which.
        buckets: of the stage.
        exchanged: a reduce-scatter receives a whole buffer, not only its result, as on CPU.
    """
    own = plan.stages[stage]
    held_by = holders(bucket_layers(own, plan.buckets(stage)))
    grads = _Grads(buckets, exchanged=exchanged, release=plan.shards_grads)
    gathered: set[int] = set()
    for op in expand(plan.streams[stage], [*map(len, own.chunks)]):
        match op:
            case Gather(bucket):
                gathered.add(bucket)
            case Release(bucket):
                gathered.discard(bucket)
            case Reduce(bucket):
                grads.reduce(bucket)
            case B() | I() | W():
                grads.use(held_by.get((op.chunk, op.layer), ()))
            case _:
                pass
        yield grads.worst()._replace(gathered=sum(buckets[i].params for i in gathered))
    grads.finalize(plan.buffers(stage).order())
    yield grads.worst()


class _Grads:
    """Gradient buffers in a step, as `GradBuffers`, `start_reduce` and `finalize_steps` do it.

    Args:
        buckets: their sizes.
        exchanged: as `replay`.
        release: each has memory from its first gradient to its reduction only.
    """

    def __init__(self, buckets: Sequence[Sizes], *, exchanged: bool, release: bool) -> None:
        self._buckets, self._exchanged, self._release = buckets, exchanged, release
        self._whole: set[int] = set()
        self._shards: set[int] = set()
        self._going: list[int] = []
        self._dirty = set(range(len(buckets)))
        self._worst = self._now()

    def worst(self) -> Temporary:
        """The worst moment since it was last asked for."""
        worst, self._worst = self._worst, self._now()
        return worst

    def use(self, buckets: Sequence[int]) -> None:
        """A layer with parameters in these buckets gets its gradients."""
        self._dirty |= {*buckets}
        if self._release:
            for i in buckets:
                self._settle(i)
                self._whole.add(i)
        self._note()

    def reduce(self, bucket: int) -> None:
        """A reduction starts; where buffers are released, those before it are over."""
        for i in [*self._going] if self._release else ():
            self._settle(i)
        self._whole |= {bucket} if self._release else set()
        self._dirty.discard(bucket)
        self._going.append(bucket)
        self._note()

    def finalize(self, order: Sequence[int]) -> None:
        """What the stream has not reduced is, and all are waited for."""
        for i in order:
            if i in self._dirty:
                self.reduce(i)
        for i in [*self._going]:
            self._settle(i)

    def _settle(self, i: int) -> None:
        """Wait for a reduction: its shard is there before the buffer is gone."""
        if i not in self._going:
            return
        if self._release:
            self._shards.add(i)
        self._note()
        self._going.remove(i)
        self._whole.discard(i)

    def _note(self) -> None:
        self._worst = max(self._worst, self._now(), key=lambda t: t.total)

    def _now(self) -> Temporary:
        unreduced = sum(self._buckets[i].grads for i in self._whole)
        if self._release:
            late = set(range(len(self._buckets))) - self._shards
            unreduced -= sum(self._buckets[i].shard for i in late)
        return Temporary(unreduced=unreduced, scratch=sum(map(self._scratch, self._going)))

    def _scratch(self, i: int) -> int:
        sizes = self._buckets[i]
        if sizes.n == 1:
            return 0
        return sizes.grads if self._exchanged else sizes.shard
