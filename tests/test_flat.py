"""Buckets, spans and shards: worked by hand with Megatron's rule, and for all sizes by property."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.flat import (
    HIGH_BANDWIDTH_PAD,
    Leaf,
    choose_bucket_size,
    default_bucket_size,
    locate,
    owner_of,
    plan_buckets,
    shard_pieces,
    shard_range,
)

THREE = [Leaf("a", (100,)), Leaf("b", (50,)), Leaf("c", (7, 10))]


def layout(buckets):
    """Each bucket as ({path: (start, stop)}, used, size)."""
    return [({s.path: (s.start, s.stop) for s in b.spans}, b.used, b.size) for b in buckets]


@st.composite
def plans(draw, sharded=None):
    """Leaves, and the arguments of a plan over them."""
    count = draw(st.integers(0, 12))
    shape = st.lists(st.integers(0, 40), max_size=3).map(tuple)
    leaves = [
        Leaf(f"leaf{i}", draw(shape), draw(st.sampled_from("xy")), draw(st.booleans()))
        for i in range(count)
    ]
    shards = draw(st.integers(1, 5)) if sharded else None
    size = draw(st.none() | st.integers(1, 3000))
    return leaves, {"bucket_size": size, "shards": shards}


# --- by hand ---


def test_unsharded_buckets_by_hand():
    """c then b reach 120 >= 100 and close; a stands alone; nothing is padded."""
    assert layout(plan_buckets(THREE, bucket_size=100)) == [
        ({"c": (0, 70), "b": (70, 120)}, 120, 120),
        ({"a": (0, 100)}, 100, 100),
    ]


@pytest.mark.parametrize(
    ("shards", "first", "second"), [(1, 256, 128), (2, 256, 128), (3, 384, 384), (5, 640, 640)]
)
def test_sharded_buckets_by_hand(shards, first, second):
    """b starts at the next multiple of 64 after 70; ends go up to lcm(shards, 128)."""
    assert layout(plan_buckets(THREE, bucket_size=100, shards=shards)) == [
        ({"c": (0, 70), "b": (128, 178)}, 178, first),
        ({"a": (0, 100)}, 100, second),
    ]


def test_one_bucket_by_hand():
    """Without a bucket size everything goes into one bucket: 70 -> 128, 178 -> 192, 292 -> 384."""
    assert layout(plan_buckets(THREE, shards=4)) == [
        ({"c": (0, 70), "b": (128, 178), "a": (192, 292)}, 292, 384)
    ]
    assert layout(plan_buckets(THREE)) == [
        ({"c": (0, 70), "b": (70, 120), "a": (120, 220)}, 220, 220)
    ]


def test_alignment_counts_towards_the_close_rule():
    """Sharded, 70 + 50 elements end at 178, so a size of 150 closes there; unsharded, not."""
    assert [len(b.spans) for b in plan_buckets(THREE, bucket_size=150, shards=2)] == [2, 1]
    assert [len(b.spans) for b in plan_buckets(THREE, bucket_size=150)] == [3]


def test_a_bucket_closes_at_exactly_its_size():
    """The rule is used >= bucket_size: 120 closes a bucket of 120, and not one of 121."""
    assert [len(b.spans) for b in plan_buckets(THREE, bucket_size=120)] == [2, 1]
    assert [len(b.spans) for b in plan_buckets(THREE, bucket_size=121)] == [3]


def test_padding_for_high_bandwidth_by_hand():
    """lcm(dp, 128, 2^16): 65,536 for dp 2, three times that for dp 3."""
    for shards, size in [(1, 65_536), (2, 65_536), (3, 196_608)]:
        (bucket,) = plan_buckets(THREE, shards=shards, pad=HIGH_BANDWIDTH_PAD)
        assert bucket.size == size


def test_a_tied_leaf_has_its_own_bucket():
    """It closes the open bucket before it, and its own; dp 3 divides every size."""
    leaves = [
        Leaf("embed", (10, 3), tied=True),
        Leaf("a", (5,)),
        Leaf("head", (11,), tied=True),
        Leaf("b", (7,)),
    ]
    assert layout(plan_buckets(leaves)) == [
        ({"b": (0, 7)}, 7, 7),
        ({"head": (0, 11)}, 11, 11),
        ({"a": (0, 5)}, 5, 5),
        ({"embed": (0, 30)}, 30, 30),
    ]
    assert [b.size for b in plan_buckets(leaves, shards=3)] == [384] * 4


def test_leaves_of_two_keys_never_share_and_buckets_come_as_backward_completes_them():
    """x: d, b; y: c, a. Backward meets d c b a, so x is complete at b, y at a."""
    leaves = [Leaf(path, (1,), key) for path, key in zip("abcd", "yxyx", strict=True)]
    buckets = plan_buckets(leaves)
    assert [(b.index, b.key, [s.path for s in b.spans]) for b in buckets] == [
        (0, "x", ["d", "b"]),
        (1, "y", ["c", "a"]),
    ]


def test_one_element_buckets():
    """A bucket size of 1 gives each leaf a bucket of its own."""
    assert layout(plan_buckets(THREE, bucket_size=1)) == [
        ({"c": (0, 70)}, 70, 70),
        ({"b": (0, 50)}, 50, 50),
        ({"a": (0, 100)}, 100, 100),
    ]


def test_a_scalar_is_one_element_and_its_other_shards_are_empty():
    """dp 5 cuts 640 elements in 128 each; shard 0 has the scalar, the rest hold padding only."""
    (bucket,) = plan_buckets([Leaf("scale", ())], shards=5)
    assert bucket.size == 640
    assert [len(shard_pieces(bucket, 5, i)) for i in range(5)] == [1, 0, 0, 0, 0]
    assert shard_range(bucket, 5, 4) == (512, 640)


def test_default_bucket_size_by_hand():
    """max(40 million, 1 million * dp), first stage and chunk only, and only with overlap."""
    assert [default_bucket_size(dp) for dp in (1, 40, 41, 1000)] == [
        *(40_000_000, 40_000_000),
        *(41_000_000, 1_000_000_000),
    ]
    assert choose_bucket_size(64, overlap=True) == 64_000_000
    assert choose_bucket_size(64, overlap=True, asked=7) == 7
    assert choose_bucket_size(64, overlap=False, asked=7) is None
    assert choose_bucket_size(64, overlap=True, stage=1) is None
    assert choose_bucket_size(64, overlap=True, chunk=1) is None


def test_plain_tuples_are_leaves():
    """(path, shape, key, tied) is what other modules may pass."""
    assert plan_buckets([("a", (2, 3), None, False)]) == plan_buckets([Leaf("a", (2, 3))])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_buckets(THREE, bucket_size=0), "bucket_size is 0"),
        (lambda: plan_buckets(THREE, shards=0), "shards is 0"),
        (lambda: plan_buckets(THREE, shards=1, align=0), "align is 0"),
        (lambda: plan_buckets(THREE, shards=1, pad=-1), "pad is -1"),
        (lambda: plan_buckets([Leaf("a", (2, -1))]), r"a: shape \(2, -1\)"),
        (lambda: plan_buckets([Leaf("a", (2,)), Leaf("a", (2,))]), "a: given twice"),
        (lambda: shard_range(plan_buckets(THREE)[0], 3, 3), r"shard is 3, .* 0\.\.2"),
        (lambda: shard_range(plan_buckets(THREE)[0], 3, 0), "220 elements, not a multiple of sh"),
        (lambda: owner_of(plan_buckets(THREE)[0], 2, "d", 0), "d: not in bucket 0"),
        (
            lambda: owner_of(plan_buckets(THREE)[0], 2, "b", 50),
            r"b: element 50 is outside shape \(50",
        ),
    ],
)
def test_wrong_numbers_are_refused_by_name(call, message):
    """The message names the argument or the path, and the value."""
    with pytest.raises(ValueError, match=message):
        call()


# --- for all sizes ---


def by_global_offsets(leaves, bucket_size, dp):
    """Megatron's rule told the other way, for one key: one running offset over the whole buffer."""
    offset, first, bounds, spans, inside = 0, 0, [], {}, 0
    divisor = dp * 128 // math.gcd(dp, 128) if dp else 1

    def close():
        nonlocal offset, first, inside
        used = offset - first
        while (offset - first) % divisor:
            offset += 1
        bounds.append((used, offset - first))
        first, inside = offset, 0

    for leaf in leaves[::-1]:
        if leaf.tied and inside:
            close()
        while dp and offset % 64:
            offset += 1
        spans[leaf.path] = (len(bounds), offset - first)
        offset += int(np.prod(leaf.shape, dtype=int))
        inside += 1
        if leaf.tied or (bucket_size and offset - first >= bucket_size):
            close()
    if inside:
        close()
    return bounds, spans


@given(st.booleans().flatmap(plans))
def test_plan_is_megatrons_rule(case):
    """Bucket by bucket equal to a running offset over the whole buffer, written apart."""
    leaves, arguments = case
    leaves = [leaf._replace(key=None) for leaf in leaves]
    buckets = plan_buckets(leaves, **arguments)
    bounds, spans = by_global_offsets(leaves, arguments["bucket_size"], arguments["shards"] or 0)
    assert [(b.used, b.size) for b in buckets] == bounds
    assert {path: (index, span.start) for path, (index, span) in locate(buckets).items()} == spans


@given(st.booleans().flatmap(plans))
def test_spans_are_disjoint_and_hold_every_element_once(case):
    """Each bucket's elements, marked one by one: no element twice, and padding only if sharded."""
    leaves, arguments = case
    buckets = plan_buckets(leaves, **arguments)
    paths = [span.path for bucket in buckets for span in bucket.spans]
    assert sorted(paths) == sorted(leaf.path for leaf in leaves)
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    for bucket in buckets:
        marks = np.zeros(bucket.size, int)
        for span in bucket.spans:
            assert span.shape == shapes[span.path]
            assert span.stop - span.start == np.prod(span.shape, dtype=int)
            assert 0 <= span.start <= span.stop <= bucket.used
            marks[span.start : span.stop] += 1
        assert marks.max(initial=0) <= 1
        assert bucket.used == max(span.stop for span in bucket.spans)
        assert arguments["shards"] or marks.all()


@given(plans(sharded=True))
def test_sharded_buckets_are_aligned_and_padded(case):
    """Starts at multiples of 64, sizes at the least multiple of lcm(shards, 128)."""
    leaves, arguments = case
    for bucket in plan_buckets(leaves, **arguments):
        multiple = np.lcm(arguments["shards"], 128)
        assert all(span.start % 64 == 0 for span in bucket.spans)
        assert bucket.size % multiple == 0
        assert 0 <= bucket.size - bucket.used < multiple


@given(plans(sharded=True))
def test_every_element_of_every_leaf_has_one_owner(case):
    """The shards' pieces, marked leaf by leaf, cover each element once, and `owner_of` agrees."""
    leaves, arguments = case
    shards = arguments["shards"]
    owners = {leaf.path: np.full(int(np.prod(leaf.shape, dtype=int)), -1) for leaf in leaves}
    buckets = plan_buckets(leaves, **arguments)
    where = {path: span for path, (_, span) in locate(buckets).items()}
    for bucket in buckets:
        for i in range(shards):
            for piece in shard_pieces(bucket, shards, i):
                mine = owners[piece.path][piece.offset : piece.end]
                assert len(mine) == piece.stop - piece.start > 0
                assert (mine == -1).all()
                assert piece.start - piece.offset == where[piece.path].start
                mine[:] = i
        for span in bucket.spans:
            elements = range(0, span.stop - span.start, 17)
            found = [owner_of(bucket, shards, span.path, e) for e in elements]
            assert found == owners[span.path][::17].tolist()
    assert all((owner >= 0).all() for owner in owners.values())


@given(plans(sharded=True))
def test_shards_are_equal_and_cover_the_bucket(case):
    """Shard after shard from 0 to the bucket's size, all of one length."""
    leaves, arguments = case
    shards = arguments["shards"]
    for bucket in plan_buckets(leaves, **arguments):
        ranges = [shard_range(bucket, shards, i) for i in range(shards)]
        assert [start for start, _ in ranges] == [i * bucket.size // shards for i in range(shards)]
        assert [stop for _, stop in ranges] == [start for start, _ in ranges[1:]] + [bucket.size]


@given(st.booleans().flatmap(plans))
def test_buckets_follow_backward_order(case):
    """Inside a bucket leaves come last to first; buckets come as their last leaf does."""
    leaves, arguments = case
    place = {leaf.path: i for i, leaf in enumerate(leaves[::-1])}
    buckets = plan_buckets(leaves, **arguments)
    for bucket in buckets:
        places = [place[span.path] for span in bucket.spans]
        assert places == sorted(places)
    complete = [place[bucket.spans[-1].path] for bucket in buckets]
    assert complete == sorted(complete)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))


@given(st.booleans().flatmap(plans))
def test_keys_ties_and_sizes_decide_who_shares(case):
    """One key a bucket, a tied leaf alone, and no bucket goes on once it is full."""
    leaves, arguments = case
    by_path = {leaf.path: leaf for leaf in leaves}
    for bucket in plan_buckets(leaves, **arguments):
        members = [by_path[span.path] for span in bucket.spans]
        assert {leaf.key for leaf in members} == {bucket.key}
        assert len(members) == 1 or not any(leaf.tied for leaf in members)
        if arguments["bucket_size"] and len(members) > 1:
            assert bucket.spans[-2].stop < arguments["bucket_size"]
