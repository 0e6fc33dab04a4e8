"""Flat buckets: every small list of leaves, laid out by the real planner; integers only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm, prod

from mfun.flat import (
    Bucket,
    Leaf,
    locate,
    owner_of,
    plan_buckets,
    shard_pieces,
    shard_range,
)
from proofs.claims import Claim, claim

SIZES = (0, 1, 3, 4)
LIMITS = (None, 1, 4, 6)
SHARDS = ((None, 1, 1), (1, 4, 4), (2, 4, 4), (3, 4, 2), (4, 1, 1))  # with align and pad


def lists(most: int) -> Iterator[list[Leaf]]:
    """Every list of up to so many leaves, of two keys, the middle one perhaps tied."""
    for count in range(most + 1):
        for sizes in product(SIZES, repeat=count):
            for pattern in ("aaaa", "abab", "aabb"):
                for tied in {None, count // 2} if count else {None}:
                    yield [
                        Leaf(f"leaf{i}", (size,), pattern[i], i == tied)
                        for i, size in enumerate(sizes)
                    ]


def plans(most: int) -> Iterator[tuple[list[Leaf], tuple[Bucket, ...], int | None, int, int]]:
    """Every such list with every limit and sharding, and its buckets."""
    for leaves in lists(most):
        for limit, (shards, align, pad) in product(LIMITS, SHARDS):
            buckets = plan_buckets(leaves, bucket_size=limit, shards=shards, align=align, pad=pad)
            yield leaves, buckets, shards, align, pad


def spans(
    leaves: Sequence[Leaf],
    buckets: Sequence[Bucket],
    shards: int | None,
    align: int,
    pad: int,
) -> Iterator[str]:
    """Each leaf once; spans in order, disjoint, aligned; the least padding there can be."""
    placed = [span.path for bucket in buckets for span in bucket.spans]
    if sorted(placed) != sorted(leaf.path for leaf in leaves) or set(locate(buckets)) != {*placed}:
        yield f"{leaves}: the buckets hold {placed}"
    shape = {leaf.path: leaf.shape for leaf in leaves}
    for bucket in buckets:
        end = 0
        for span in bucket.spans:
            start = -(-end // align) * align
            if span.start != start or span.stop != start + prod(shape[span.path]):
                yield f"{leaves}: {span} does not start at {start}, or has another size"
            end = span.stop
        multiple = 1 if shards is None else lcm(shards, pad)
        size = min(n for n in range(end, end + multiple) if n % multiple == 0)
        if (bucket.used, bucket.size) != (end, size):
            yield f"{leaves}: {bucket} should end at {end} and have size {size}"


def pieces(
    leaves: Sequence[Leaf],
    buckets: Sequence[Bucket],
    shards: int | None,
    align: int,
    pad: int,
) -> Iterator[str]:
    """Shards partition a bucket, and their pieces every leaf; the owner of an element has it."""
    for bucket in buckets if shards else ():
        assert shards is not None
        ranges = [shard_range(bucket, shards, i) for i in range(shards)]
        if [x for low, high in ranges for x in range(low, high)] != list(range(bucket.size)):
            yield f"{bucket}: its shards are {ranges}"
        held = [
            (piece.path, element, i, piece.start + element - piece.offset)
            for i in range(shards)
            for piece in shard_pieces(bucket, shards, i)
            for element in range(piece.offset, piece.end)
        ]
        expected = [
            (span.path, element, owner_of(bucket, shards, span.path, element), span.start + element)
            for span in bucket.spans
            for element in range(span.stop - span.start)
        ]
        if sorted(held) != sorted(expected):
            yield f"{bucket}: its shards' pieces are not its leaves"


def views(
    leaves: Sequence[Leaf],
    buckets: Sequence[Bucket],
    shards: int | None,
    align: int,
    pad: int,
) -> Iterator[str]:
    """Leaves written to the buffers are read back; sums and squares do not see the padding."""
    values = {leaf.path: [i + 1] * prod(leaf.shape) for i, leaf in enumerate(leaves)}
    total = squares = 0
    for bucket in buckets:
        buffer = [0] * bucket.size
        for span in bucket.spans:
            buffer[span.start : span.stop] = values[span.path]
        if len(buffer) != bucket.size:
            yield f"{leaves}: a view is not as large as its leaf"
        for span in bucket.spans:
            if buffer[span.start : span.stop] != values[span.path]:
                yield f"{leaves}: {span.path} was written over"
        total += sum(buffer)
        squares += sum(x * x for x in buffer)
    flat = [x for value in values.values() for x in value]
    if (total, squares) != (sum(flat), sum(x * x for x in flat)):
        yield f"{leaves}: the buffers do not sum up to the leaves"


def claims(most: int = 3) -> Iterator[Claim]:
    """All lists of up to `most` leaves."""
    every = list(plans(most))
    for says, check in (
        ("spans partition the buffers, aligned and with the least padding", spans),
        ("shards partition the buffers, and their pieces the leaves", pieces),
        ("views and concatenation are inverse, padding is inert", views),
    ):
        yield claim(f"{says}, {len(every)} plans", (p for case in every for p in check(*case)))
