"""Streams of every schedule with anything inserted that can be: strategies for its tests."""

from hypothesis import assume
from hypothesis import strategies as st

from mfun.schedule import SCHEDULES, ScheduleError, Sizes, forward_only, plan, with_p2p
from mfun.schedule.transforms import Extras, with_extras


def text(ops):
    """A stream as it prints."""
    return " ".join(map(str, ops))


@st.composite
def dressed(draw):
    """A schedule's streams, and extras for each stage that fit them."""
    name = draw(st.sampled_from(list(SCHEDULES)))
    row = SCHEDULES[name]
    stages = 1 if name == "none" else draw(st.integers(1, 4))
    sizes = Sizes(stages, draw(st.integers(1, 9)), row.chunks or draw(st.integers(1, 3)))
    assume(not row.refuse(sizes))
    streams = plan(name, sizes.stages, sizes.microbatches, chunks=sizes.chunks)
    return row.place(sizes), streams, [draw(extras(sizes.chunks)) for _ in streams]


@st.composite
def extras(draw, chunks):
    """Buckets that cut, cover or share layers, and any choice of the rest."""
    counts = tuple(draw(st.lists(st.integers(0, 3), min_size=chunks, max_size=chunks)))
    layers = [(c, i) for c, count in enumerate(counts) for i in range(count)]
    one = st.frozensets(st.sampled_from(layers)) if layers else st.just(frozenset())
    buckets = st.lists(one, max_size=4).map(tuple)
    return Extras(
        layers=counts,
        reduce=draw(buckets),
        window=draw(st.sampled_from(["step", "microbatch"])),
        gather=draw(buckets),
        prefetch=draw(st.integers(0, 3)),
        recompute=draw(st.sampled_from([None, "full", 1, 2]) | one),
        offload=draw(st.none() | st.integers(2, 5)),
    )


def holds(bucket, op):
    """Whether a bucket has a layer of an op."""
    return any(chunk == op.chunk and op.layer in (None, layer) for chunk, layer in bucket)


def dress(streams, asked):
    """All streams with their extras; sizes that memory cannot hold are not looked at."""
    try:
        return [list(with_extras(s, e)) for s, e in zip(streams, asked, strict=True)]
    except ScheduleError as error:
        assert "between" in str(error) or "backwards that have begun" in str(error)
        assume(False)


def forward_streams(place, streams):
    """The streams of the same sizes for evaluation."""
    count = 1 + max(op.mb for ops in streams for op in ops)
    sizes = Sizes(place.stages, count, place.chunks)
    return with_p2p([forward_only(s, sizes, place) for s in range(place.stages)], place)
