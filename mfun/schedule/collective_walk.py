"""What is wrong with one stage's collectives: a class a concern, each a table of rules.

As in `layer_walk`: a rule takes the place of an op and the op, and returns what is wrong with it;
`ending` says what is missing. None of it knows the transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from mfun.schedule.layer_walk import Rules
from mfun.schedule.layers import Buckets, holders
from mfun.schedule.ops import AnyOp, B, Compute, F, Gather, I, Recompute, Reduce, Release, W
from mfun.schedule.transforms import Window
from mfun.schedule.walk import some


class Reduces:
    """Each bucket is reduced once a window, when all that adds to it has run.

    Args:
      stream: the stage's ops.
      buckets: the layers of each bucket.
      window: what is summed before it is reduced.
    """

    def __init__(self, stream: Sequence[AnyOp], buckets: Buckets, window: Window) -> None:
        self.stream, self.held = stream, holders(buckets)
        last: dict[tuple[int | None, int, int | None], int] = {}  # place, by window and layer
        step = window == "step"
        for at, op in enumerate(stream):
            if isinstance(op, (B, I, W)):
                last[None if step else op.mb, op.chunk, op.layer] = at
        self.last: dict[tuple[int, int | None], int] = {}  # place, by bucket and window
        if step and last:
            self.last = {(bucket, None): -1 for bucket in range(len(buckets))}
        for (mb, chunk, layer), at in last.items():
            for bucket in self.held.get((chunk, layer), ()):
                self.last[bucket, mb] = max(at, self.last.get((bucket, mb), -1))
        self.done: dict[tuple[int, int | None], int] = {}
        self.rules: Rules = {Reduce: self.reduce}

    def reduce(self, at: int, op: Reduce) -> str | None:
        """Once, and not early."""
        key = op.bucket, op.window
        if key not in self.last:
            return f"{op} is not an op of this schedule: nothing adds to that bucket and window"
        if key in self.done:
            return f"{op} runs twice: it did so at op {self.done[key]}"
        if self.last[key] > at:
            return f"{op} runs before {self.adding(at, op)}, which adds to bucket {op.bucket}"
        self.done[key] = at
        return None

    def adding(self, at: int, reduce: Reduce) -> AnyOp:
        """The next op that adds to a bucket's window."""
        return next(
            op
            for op in self.stream[at:]
            if isinstance(op, (B, I, W))
            and reduce.bucket in self.held.get((op.chunk, op.layer), ())
            and reduce.window in (None, op.mb)
        )

    def ending(self) -> str | None:
        """What was never reduced."""
        rest = [Reduce(*key) for key in self.last if key not in self.done]
        return f"never runs {some(rest)}" if rest else None


class Gathers:
    """A bucket's parameters are there when an op uses them, gathered once, and given up at last.

    Args:
      buckets: the layers of each bucket.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.held, self.count = holders(buckets), len(buckets)
        self.now: dict[int, int] = {}  # gathered buckets, and the place of their gather
        self.gone: dict[int, int] = {}  # released ones, and of their release
        uses = dict.fromkeys((F, B, I, Recompute), self.use)
        self.rules: Rules = {**uses, Gather: self.gather, Release: self.release}

    def use(self, at: int, op: Compute | Recompute) -> str | None:
        """Only what is gathered."""
        for bucket in self.held.get((op.chunk, op.layer), ()):
            if bucket not in self.now:
                if bucket in self.gone:
                    where = self.gone[bucket]
                    return (
                        f"{op} uses bucket {bucket}, which {Release(bucket)} (op {where}) gave up"
                    )
                return f"{op} runs before {Gather(bucket)}, whose parameters it uses"
        return None

    def gather(self, at: int, op: Gather) -> str | None:
        """Only what is not there."""
        if not 0 <= op.bucket < self.count:
            return f"{op} is not an op of this schedule: it has {self.count} buckets to gather"
        if op.bucket in self.now:
            return f"{op} runs twice: at op {self.now[op.bucket]} too, and no release since"
        self.now[op.bucket] = at
        return None

    def release(self, at: int, op: Release) -> str | None:
        """Only what is there."""
        if op.bucket not in self.now:
            return f"{op} gives up what is not gathered"
        del self.now[op.bucket]
        self.gone[op.bucket] = at
        return None

    def ending(self) -> str | None:
        """What is still gathered."""
        return f"never runs {some(map(Release, self.now))}" if self.now else None
