"""A stream by layers: `expand` cuts the ops of a chunk, `bare` puts them together again.

Buckets name layers as (chunk, layer), both counted on one stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from mfun.schedule.ops import (
    AnyOp,
    B,
    Compute,
    F,
    Gather,
    I,
    Offload,
    Op,
    Recompute,
    Recv,
    Reduce,
    Release,
    Reload,
    ScheduleError,
    Send,
    W,
)

Buckets = Sequence[Collection[tuple[int, int]]]
"""For each bucket the layers, (chunk, layer), that have a weight in it."""

Some = TypeVar("Some", F, B, I, W, Recompute)

EXTRAS = (Reduce, Gather, Release, Recompute, Offload, Reload)
ENDS = (Send, Recv)
COMPUTES = (F, B, I, W)
ON_LAYERS = (*COMPUTES, Recompute)


def expand(ops: Iterable[AnyOp], layers: Sequence[int]) -> Iterator[AnyOp]:
    """Each op on a chunk as ops on its layers: forwards ascend, backwards descend.

    Messages stay around the whole, so `with_p2p` comes before. A chunk without layers keeps its op.

    Args:
      ops: one stage's stream.
      layers: how many layers each of the stage's chunks has.
    Raises:
      ScheduleError: an op on a chunk that `layers` does not give.
    Example:
      >>> print(*expand([F(0), B(0), F(1, chunk=1)], layers=[2, 3]))
      F0[0] F0[1] B0[1] B0[0] F1.1[0] F1.1[1] F1.1[2]
    """
    for op in ops:
        if not isinstance(op, ON_LAYERS) or op.layer is not None:
            yield op
            continue
        if op.chunk >= len(layers):
            raise ScheduleError(f"{op}: chunk {op.chunk}, but layers are given of {len(layers)}")
        kind, order = type(op), range(layers[op.chunk])
        for layer in order if kind is F or kind is Recompute else reversed(order):
            yield _op(kind, op.mb, op.chunk, layer)
        if not order:
            yield op


@lru_cache(maxsize=1 << 18)
def _op(kind: type[Some], mb: int, chunk: int, layer: int | None = None) -> Some:
    """An op; all stages and steps share it, since it is a value."""
    return kind(mb, chunk, layer)


def bare(ops: Iterable[AnyOp], layers: Sequence[int] = ()) -> Iterator[Op]:
    """The stream without what was inserted, with ops on whole chunks: what a schedule gave.

    A chunk's op stands where its last layer was.

    Args:
      ops: one stage's stream.
      layers: how many layers each chunk has.
    Example:
      >>> print(*bare([F(0, layer=0), Gather(1), F(0, layer=1), Reduce(0)], layers=[2]))
      F0
    """
    for op in ops:
        if isinstance(op, ENDS):
            yield op
        elif isinstance(op, COMPUTES):
            if op.layer is None:
                yield op
            elif last_layer(op, layers):
                yield _op(type(op), op.mb, op.chunk)


def inserted(
    stream: Sequence[AnyOp],
    before: Mapping[int, Sequence[AnyOp]],
    after: Mapping[int, Sequence[AnyOp]],
) -> Iterator[AnyOp]:
    """A stream with ops before and after some of its own, which are given by place.

    Example:
      >>> print(*inserted([F(0), B(0)], {0: [Gather(0)]}, {1: [Release(0), Reduce(0)]}))
      Gather0 F0 B0 Release0 Reduce0
    """
    done = 0
    for at in sorted({*before, *after}):
        yield from stream[done:at]
        yield from before.get(at, ())
        yield stream[at]
        yield from after.get(at, ())
        done = at + 1
    yield from stream[done:]


def holders(buckets: Buckets) -> Mapping[tuple[int, int | None], tuple[int, ...]]:
    """The buckets of each layer, (chunk, layer), and of each whole chunk, (chunk, None).

    Example:
      >>> table = holders([{(0, 1)}, {(0, 0), (1, 0)}])
      >>> table[0, 1], table[0, None], table[1, None]
      ((0,), (0, 1), (1,))
    """
    table: dict[tuple[int, int | None], dict[int, None]] = {}
    for bucket, members in enumerate(buckets):
        for chunk, layer in members:
            table.setdefault((chunk, layer), {})[bucket] = None
            table.setdefault((chunk, None), {})[bucket] = None
    return {at: tuple(found) for at, found in table.items()}


def last_layer(op: Compute, layers: Sequence[int]) -> bool:
    """Whether an op is the last of its chunk's: the whole of it, or the last of its layers."""
    if op.layer is None:
        return True
    return op.layer == (layers[op.chunk] - 1 if isinstance(op, F) else 0)
