"""Stream transformers of what a step does besides its schedule, and `Extras`, which names it all.

Each takes a stage's stream, messages included, and yields it with more ops; what was there stays
in its order. Insertions touch compute ops only, so that a batch of messages stays one batch.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from mfun.schedule.gather import with_gather
from mfun.schedule.layers import Buckets, expand, holders, inserted
from mfun.schedule.offload import with_offload
from mfun.schedule.ops import AnyOp, B, I, Recompute, Reduce, ScheduleError, W

Window = Literal["step", "microbatch"]
Which = Literal["full"] | int | Collection[tuple[int, int]]

BACKWARD = (B, I, W)


def with_reduce(
    ops: Iterable[AnyOp],
    buckets: Buckets,
    window: Window = "step",
    joined: Sequence[int] = (),
) -> Iterator[AnyOp]:
    """Insert each bucket's reduction right after the last op that adds to it.

    `I` and `W` both add: parameters that are not matrices get their gradients in `I`. Buckets that
    are complete at the same op are reduced by index. A bucket to which nothing is added is reduced
    at the last backward: others of its group may have added to theirs.

    Args:
      ops: one stage's stream, on layers (`expand`) or on chunks.
      buckets: for each bucket the layers whose weights it holds.
      window: what is summed before it is reduced: the whole step, or one microbatch. In the latter
        case the buffer may hold other microbatches' first gradients; they are then summed earlier.
      joined: buckets that other stages reduce too, in the order on which all stages agree; none is
        reduced before one that precedes it.
    Raises:
      ScheduleError: joined buckets in the window of a microbatch.
    Example:
      >>> from mfun.schedule.ops import F
      >>> ops = list(expand([F(0), B(0), F(1), B(1)], layers=[2]))
      >>> print(*with_reduce(ops, [{(0, 1)}, {(0, 0)}]))
      F0[0] F0[1] B0[1] B0[0] F1[0] F1[1] B1[1] Reduce0 B1[0] Reduce1
      >>> print(*with_reduce([F(0), B(0), F(1), B(1)], [{(0, 0)}], "microbatch"))
      F0 B0 Reduce0@0 F1 B1 Reduce0@1

    Source: Li et al. 2020 (arXiv 2006.15704); here completion is known, not counted.
    """
    _refuse_joined(joined, window)
    stream = list(ops)
    due: dict[int, list[Reduce]] = {}
    for op, at in _complete(stream, buckets, window, joined).items():
        due.setdefault(at, []).append(op)
    yield from inserted(stream, {}, due)


def _refuse_joined(joined: Sequence[int], window: Window) -> None:
    """Stages do not have the same microbatches (two directions), but meet once a step."""
    if joined and window == "microbatch":
        raise ScheduleError(
            f"buckets {list(joined)} are joined with other stages, which reduce once a step: "
            'window is "microbatch", but must be "step"'
        )


def _complete(
    stream: Sequence[AnyOp], buckets: Buckets, window: Window, joined: Sequence[int]
) -> Mapping[Reduce, int]:
    """Each reduction and the place of the op that completes its bucket, in the order to insert."""
    held, last, end = holders(buckets), dict[tuple[int, int | None], int](), -1
    for at, op in enumerate(stream):
        if isinstance(op, BACKWARD):
            end = at
            for bucket in held.get((op.chunk, op.layer), ()):
                last[bucket, None if window == "step" else op.mb] = at
    if window == "microbatch":
        return {Reduce(*key): at for key, at in sorted(last.items())}
    if end < 0:
        return {}
    own = [bucket for bucket in range(len(buckets)) if bucket not in joined]
    done = {Reduce(bucket): last.get((bucket, None), end) for bucket in own}
    at = 0
    for bucket in joined:
        done[Reduce(bucket)] = at = max(at, last.get((bucket, None), end))
    return done


def recomputes(which: Which, op: B | I | Recompute) -> bool:
    """Whether the forward of a backward runs again.

    Args:
      which: "full", every layer; a number, the first so many layers of each chunk; or the layers,
        (chunk, layer).
      op: the backward.
    Raises:
      ScheduleError: layers are named, but the op is on a whole chunk.
    """
    if which == "full":
        return True
    if op.layer is None:
        if isinstance(which, int) or any(chunk == op.chunk for chunk, _ in which):
            raise ScheduleError(f"{op} is on a whole chunk: `expand` it to recompute some layers")
        return False
    if isinstance(which, int):
        return op.layer < which
    return (op.chunk, op.layer) in which


def with_recompute(ops: Iterable[AnyOp], which: Which = "full") -> Iterator[AnyOp]:
    """Insert, right before a backward, the forward that runs again.

    Args:
      ops: one stage's stream, on layers (`expand`) or, if all is recomputed, on chunks.
      which: "full", every layer; a number, the first so many layers of each chunk; or the layers,
        (chunk, layer).
    Raises:
      ScheduleError: layers are named, but an op is on a whole chunk.
    Example:
      >>> from mfun.schedule.ops import F
      >>> print(*with_recompute([F(0), I(0), W(0)]))
      F0 Recompute0 I0 W0
      >>> print(*with_recompute(expand([F(0), B(0)], layers=[2]), which=1))
      F0[0] F0[1] B0[1] Recompute0[0] B0[0]

    Source: Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv 2205.05198).
    """
    for op in ops:
        if isinstance(op, (B, I)) and recomputes(which, op):
            yield Recompute(op.mb, op.chunk, op.layer)
        yield op


@attrs.frozen(kw_only=True)
class Extras:
    """What one stage does besides its schedule; the default is nothing.

    Args:
      layers: how many layers each chunk has; () leaves ops on whole chunks.
      reduce: buckets of gradients, each the layers that it holds.
      window: of the reductions (`with_reduce`).
      joined: (bucket, name) of those that other stages reduce too, in the order on which all
        agree; the bucket's name is the same on every stage that has it.
      gather: buckets of sharded parameters, each the layers that it holds.
      prefetch: how many of these are gathered ahead.
      recompute: which layers (`with_recompute`); None is none.
      offload: most microbatches, counted by chunks, that stay on the device; None is all.
    Raises:
      ScheduleError: a layer or bucket that there is not, or joined buckets with a window of a
        microbatch.
    """

    layers: tuple[int, ...] = ()
    reduce: tuple[frozenset[tuple[int, int]], ...] = ()
    window: Window = "step"
    joined: tuple[tuple[int, Hashable], ...] = ()
    gather: tuple[frozenset[tuple[int, int]], ...] = ()
    prefetch: int = 1
    recompute: Which | None = None
    offload: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse names of what is not there."""
        for name, buckets in (("reduce", self.reduce), ("gather", self.gather)):
            for bucket, members in enumerate(buckets):
                self._refuse_layers(f"{name} bucket {bucket}", members)
        if isinstance(self.recompute, str) and self.recompute != "full":
            raise ScheduleError(f'recompute is "{self.recompute}", but the only word is "full"')
        if not isinstance(self.recompute, int | str | None):
            self._refuse_layers("recompute", self.recompute)
        joined = [bucket for bucket, _ in self.joined]
        if len({*joined} & {*range(len(self.reduce))}) < len(joined):
            raise ScheduleError(f"joined are buckets {joined}, but there are {len(self.reduce)}")
        _refuse_joined(joined, self.window)

    @property
    def which(self) -> Which | None:
        """What is recomputed, without a number where layers are known: some chunks have none."""
        if not isinstance(self.recompute, int) or not self.layers:
            return self.recompute
        counts = [min(self.recompute, count) for count in self.layers]
        return frozenset((chunk, i) for chunk, count in enumerate(counts) for i in range(count))

    def _refuse_layers(self, what: str, members: Collection[tuple[int, int]]) -> None:
        for chunk, layer in members if self.layers else ():
            count = self.layers[chunk] if chunk < len(self.layers) else 0
            if not 0 <= layer < count:
                raise ScheduleError(
                    f"{what} names layer {layer} of chunk {chunk}, which has {count} layers"
                )


def with_extras(ops: Iterable[AnyOp], extras: Extras) -> Iterator[AnyOp]:
    """All that `extras` asks for, in the order in which one transformer sees another's ops.

    Args:
      ops: one stage's stream on chunks, messages included.
      extras: of this stage.
    Raises:
      ScheduleError: numbers that do not fit the stream.
    Example:
      >>> from mfun.schedule.ops import F
      >>> both = (frozenset({(0, 0), (0, 1)}),)
      >>> extras = Extras(layers=(2,), reduce=both, gather=both, recompute=1)
      >>> print(*with_extras([F(0), B(0)], extras))
      Gather0 F0[0] F0[1] B0[1] Recompute0[0] B0[0] Release0 Reduce0
    """
    if extras.layers:
        ops = expand(ops, extras.layers)
    if extras.which is not None:
        ops = with_recompute(ops, extras.which)
    if extras.offload is not None:
        ops = with_offload(ops, extras.offload)
    if extras.reduce:
        joined = [bucket for bucket, _ in extras.joined]
        ops = with_reduce(ops, extras.reduce, extras.window, joined)
    if extras.gather:
        ops = with_gather(ops, extras.gather, extras.prefetch)
    yield from ops
