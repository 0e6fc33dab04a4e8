"""Where each element of each leaf lies in the flat gradient buffers: integers only, no torch.

A *bucket* is one flat buffer that is reduced by one collective. It holds *spans*, one a leaf, in
backward order: the leaves of the last layers come first, because their gradients do. With sharding
a bucket is cut into equal *shards*, which cut across leaves. All positions count elements.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import attrs

ALIGN = 64  # elements at which a leaf starts, when sharded
PAD = 128  # a sharded bucket's size is a multiple of lcm(shards, PAD)
HIGH_BANDWIDTH_PAD = 1 << 16  # instead of PAD: keeps large collectives at full speed


class Leaf(NamedTuple):
    """What the plan needs to know of one leaf of the parameter tree.

    Args:
      path: its key path.
      shape: rank-local shape.
      key: what must be equal for two leaves to share a bucket (dtypes, groups to reduce over).
      tied: used by several layers or stages: it is complete late, so it gets its own bucket.
    """

    path: str
    shape: tuple[int, ...]
    key: Hashable = None
    tied: bool = False


@attrs.frozen
class Span:
    """The elements [start, stop) of a bucket, which hold one leaf, row-major."""

    path: str
    start: int
    stop: int
    shape: tuple[int, ...]


@attrs.frozen
class Bucket:
    """One flat buffer.

    Args:
      index: place in the order in which backward completes the buckets.
      key: the leaves' common key.
      spans: in backward order, disjoint.
      used: end of the last span.
      size: used and end padding; what is allocated and reduced.
    """

    index: int
    key: Hashable
    spans: tuple[Span, ...]
    used: int
    size: int


class Piece(NamedTuple):
    """Part of a leaf in a shard: [start, stop) in the bucket is [offset, end) in the leaf."""

    path: str
    start: int
    stop: int
    offset: int
    end: int


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is at least n.

    Example:
      >>> round_up(65, 64), round_up(64, 64), round_up(0, 64)
      (128, 64, 0)
    """
    return -(-n // multiple) * multiple


def default_bucket_size(dp: int) -> int:
    """Elements at which a bucket is closed: max(40 million, 1 million a data-parallel rank).

    Args:
      dp: data-parallel ranks that reduce together, context parallelism included.
    Example:
      >>> default_bucket_size(8), default_bucket_size(64)
      (40000000, 64000000)

    Source: Megatron-LM core/distributed/distributed_data_parallel.py.
    """
    return max(40_000_000, 1_000_000 * dp)


def choose_bucket_size(
    dp: int, *, overlap: bool, asked: int = 0, stage: int = 0, chunk: int = 0
) -> int | None:
    """The bucket size of one model chunk: None, one bucket, where nothing is gained by overlap.

    Args:
      dp: data-parallel ranks that reduce together.
      overlap: gradients are reduced during backward.
      asked: elements, from the configuration; 0 takes the default.
      stage: pipeline stage; later ones reduce in the bubble.
      chunk: the stage's chunk; only the first is the last to finish.
    Example:
      >>> choose_bucket_size(2, overlap=True), choose_bucket_size(2, overlap=False)
      (40000000, None)

    Source: Megatron-LM core/distributed/distributed_data_parallel.py.
    """
    if not overlap or stage > 0 or chunk > 0:
        return None
    return asked or default_bucket_size(dp)


class _Filling:
    """A bucket while its leaves are added."""

    def __init__(self, key: Hashable, align: int) -> None:
        self.key, self.align = key, align
        self.spans: list[Span] = []
        self.used = 0
        self.last = 0  # place of the last leaf in backward order

    def add(self, leaf: Leaf, place: int) -> None:
        """Put a leaf at the next aligned position."""
        start = round_up(self.used, self.align)
        self.used = start + math.prod(leaf.shape)
        self.spans.append(Span(leaf.path, start, self.used, leaf.shape))
        self.last = place


def _refuse(leaves: Sequence[Leaf], **numbers: int | None) -> None:
    """Refuse numbers below 1, a leaf with a negative dim, and two leaves of one path."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    seen: set[str] = set()
    for leaf in leaves:
        if any(n < 0 for n in leaf.shape):
            raise ValueError(f"{leaf.path}: shape {leaf.shape} has a negative dim")
        if leaf.path in seen:
            raise ValueError(f"{leaf.path}: given twice; a tied tensor is one leaf")
        seen.add(leaf.path)


def plan_buckets(
    leaves: Iterable[Leaf | tuple[str, tuple[int, ...], Hashable, bool]],
    *,
    bucket_size: int | None = None,
    shards: int | None = None,
    align: int = ALIGN,
    pad: int = PAD,
) -> tuple[Bucket, ...]:
    """Lay leaves out in buckets.

    Leaves are walked backward. Each goes to the open bucket of its key; the bucket is closed once
    `used >= bucket_size`. A tied leaf first closes that bucket, then has one of its own. Sharded:
    a leaf starts at a multiple of `align` and size = round_up(used, lcm(shards, pad)).
    Not sharded: no padding at all, size = used.

    Args:
      leaves: in forward order: `Leaf`, or plain (path, rank-local shape, key, tied).
      bucket_size: elements; None gives one bucket a key (and one a tied leaf).
      shards: equal shards of each bucket; None if gradients and optimizer are not sharded.
      align: elements.
      pad: elements; `HIGH_BANDWIDTH_PAD` for collectives at full speed.
    Returns: buckets in the order in which backward completes them.
    Raises:
      ValueError: a number below 1, a negative dim, or a path given twice.
    Example:
      >>> leaves = [Leaf("a", (100,)), Leaf("b", (50,)), Leaf("c", (7, 10))]
      >>> for bucket in plan_buckets(leaves, bucket_size=100, shards=2):
      ...     print([(s.path, s.start, s.stop) for s in bucket.spans], bucket.used, bucket.size)
      [('c', 0, 70), ('b', 128, 178)] 178 256
      [('a', 0, 100)] 100 128

    Source: Megatron-LM core/distributed/param_and_grad_buffer.py.
    Proof: proofs/Buckets.v, plan_keeps_leaves, spans_disjoint, padded_divides, padding_inert.
    """
    leaves = [Leaf(*leaf) for leaf in leaves]
    _refuse(leaves, bucket_size=bucket_size, shards=shards, align=align, pad=pad)
    closed = _fill(leaves, bucket_size, 1 if shards is None else align)
    multiple = 1 if shards is None else math.lcm(shards, pad)
    closed.sort(key=lambda filling: filling.last)
    return tuple(
        Bucket(index, f.key, tuple(f.spans), f.used, round_up(f.used, multiple))
        for index, f in enumerate(closed)
    )


def _fill(leaves: Sequence[Leaf], bucket_size: int | None, align: int) -> list[_Filling]:
    """Walk the leaves backward and cut them into buckets."""
    filling: dict[Hashable, _Filling] = {}
    closed: list[_Filling] = []
    for place, leaf in enumerate(reversed(leaves)):
        if leaf.tied and leaf.key in filling:
            closed.append(filling.pop(leaf.key))
        bucket = filling.setdefault(leaf.key, _Filling(leaf.key, align))
        bucket.add(leaf, place)
        if leaf.tied or (bucket_size is not None and bucket.used >= bucket_size):
            closed.append(filling.pop(leaf.key))
    return [*closed, *filling.values()]


def locate(buckets: Iterable[Bucket]) -> Mapping[str, tuple[int, Span]]:
    """Each leaf's bucket index and span, by path.

    Example:
      >>> locate(plan_buckets([Leaf("a", (2,)), Leaf("b", (3,))]))["a"]
      (0, Span(path='a', start=3, stop=5, shape=(2,)))
    """
    return {span.path: (bucket.index, span) for bucket in buckets for span in bucket.spans}


def shard_range(bucket: Bucket, shards: int, i: int) -> tuple[int, int]:
    """The elements [start, stop) of a bucket that shard i holds: size / shards each.

    Args:
      bucket: planned with a `shards` that this one divides.
      shards: how many.
      i: which, 0-based.
    Raises:
      ValueError: i out of range, or a bucket whose size is not a multiple of shards.
    Example:
      >>> (bucket,) = plan_buckets([Leaf("a", (100,))], shards=2)
      >>> shard_range(bucket, 2, 0), shard_range(bucket, 2, 1)
      ((0, 64), (64, 128))
    """
    if shards < 1 or not 0 <= i < shards:
        raise ValueError(f"shard is {i}, but with shards={shards} it is 0..{shards - 1}")
    if bucket.size % shards:
        raise ValueError(
            f"bucket {bucket.index} has {bucket.size} elements, not a multiple of shards={shards}: "
            f"plan the buckets with shards={shards}"
        )
    size = bucket.size // shards
    return i * size, (i + 1) * size


def shard_pieces(bucket: Bucket, shards: int, i: int) -> tuple[Piece, ...]:
    """Which slice of which leaf shard i holds: span and shard, intersected.

    Args:
      bucket: the bucket.
      shards: how many.
      i: which, 0-based.
    Returns: non-empty pieces in the bucket's order; none for a shard that is all padding.
    Raises:
      ValueError: as `shard_range`.
    Example:
      >>> (bucket,) = plan_buckets([Leaf("a", (100,)), Leaf("b", (50,))], shards=2)
      >>> shard_pieces(bucket, 2, 1)
      (Piece(path='a', start=128, stop=164, offset=64, end=100),)

    Proof: proofs/Buckets.v, pieces_partition.
    """
    low, high = shard_range(bucket, shards, i)
    pieces = []
    for span in bucket.spans:
        start, stop = max(span.start, low), min(span.stop, high)
        if start < stop:
            pieces.append(Piece(span.path, start, stop, start - span.start, stop - span.start))
    return tuple(pieces)


def owner_of(bucket: Bucket, shards: int, path: str, element: int) -> int:
    """The shard that holds one element of a leaf.

    Args:
      bucket: the leaf's bucket.
      shards: how many shards it has.
      path: the leaf.
      element: row-major position in the leaf.
    Raises:
      ValueError: a path that is not in the bucket, or an element that is not in the leaf.
    Example:
      >>> (bucket,) = plan_buckets([Leaf("a", (100,))], shards=2)
      >>> owner_of(bucket, 2, "a", 63), owner_of(bucket, 2, "a", 64)
      (0, 1)
    """
    _, size = shard_range(bucket, shards, 0)
    for span in bucket.spans:
        if span.path == path:
            if not 0 <= element < span.stop - span.start:
                raise ValueError(f"{path}: element {element} is outside shape {span.shape}")
            return (span.start + element) // size
    raise ValueError(f"{path}: not in bucket {bucket.index}; use `locate` to find its bucket")
