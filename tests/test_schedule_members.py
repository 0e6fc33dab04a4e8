"""Collectives that several members run together: stages that share weights, ranks of a stage."""

import time
from collections import Counter
from itertools import pairwise

import attrs
import pytest
from extras_cases import dress
from hypothesis import given
from hypothesis import strategies as st

from mfun.schedule import (
    Extras,
    Gather,
    Placement,
    Reduce,
    ScheduleError,
    check,
    check_extras,
    check_order,
    plan,
    with_extras,
)
from mfun.schedule import dress as dress_checked
from mfun.schedule.collective_check import Names

BOTH = (frozenset({(0, 0)}), frozenset({(0, 1)}))


@given(st.data())
def test_joined_buckets_in_one_order_on_all_stages(data):
    """Two pairs of tied weights, declared in opposite order on the two stages: bugs.md row 40."""
    name = data.draw(st.sampled_from(["gpipe", "1f1b", "zb-h1"]))
    stages = data.draw(st.integers(2, 4))
    streams = plan(name, stages, data.draw(st.integers(1, 4)))
    ends = {
        0: Extras(layers=(2,), reduce=BOTH, joined=((0, "table"), (1, "head"))),
        stages - 1: Extras(layers=(2,), reduce=BOTH[::-1], joined=((1, "table"), (0, "head"))),
    }
    asked = [ends.get(stage, Extras(layers=(2,), reduce=BOTH)) for stage in range(stages)]
    full = dress(streams, asked)
    check_extras(full, asked)
    stage = data.draw(st.sampled_from(list(ends)))
    first, second = (full[stage].index(Reduce(bucket)) for bucket, _ in asked[stage].joined)
    full[stage].insert(second, full[stage].pop(first))
    order = r"Reduce[01] waits for stage \d, which runs Reduce[01] first"
    with pytest.raises(ScheduleError, match=order):
        check_extras(full, asked)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_two_directions_reduce_with_the_mirrored_stage(microbatches):
    """DualPipe holds each slice twice; a stage reduces its copy even if nothing went through it."""
    place, streams = (
        Placement(4, 2, wave=True, replicas=2),
        plan("dualpipe", 4, microbatches, chunks=2),
    )

    def asked(stage):
        names = [(chunk, place.slice(place.virtual(stage, chunk))) for chunk in range(2)]
        joined = tuple(sorted(names, key=lambda pair: pair[1]))
        return Extras(reduce=(frozenset({(0, 0)}), frozenset({(1, 0)})), joined=joined)

    full = dress(streams, [asked(stage) for stage in range(4)])
    check(full, place=place, microbatches=microbatches, extras=[asked(s) for s in range(4)])
    assert all(Counter(ops)[Reduce(k)] == 1 for ops in full for k in range(2))


@given(st.data())
def test_all_ranks_of_a_stage_run_the_same_collectives(data):
    """Two collectives swapped, one dropped or doubled on one of three ranks."""
    layers = data.draw(st.integers(2, 3))
    buckets = tuple(frozenset({(0, layer)}) for layer in range(layers))
    asked = Extras(layers=(layers,), reduce=buckets, gather=buckets, prefetch=1)
    ops = list(with_extras(plan("1f1b", 2, 3)[data.draw(st.integers(0, 1))], asked))
    names = [{(kind, k): k for kind in (Reduce, Gather) for k in range(layers)}] * 3
    ranks = [ops, list(ops), list(ops)]
    check_order(ranks, names, "rank")
    places = [at for at, op in enumerate(ops) if isinstance(op, Reduce | Gather)]
    pairs = [(a, b) for a, b in pairwise(places) if ops[a] != ops[b]]
    a, b = data.draw(st.sampled_from(pairs))
    bad = ranks[data.draw(st.integers(0, 2))]
    how = data.draw(st.sampled_from(["swapped", "dropped", "doubled"]))
    if how == "swapped":
        bad[a], bad[b] = bad[b], bad[a]
    else:
        bad[a : a + 1] = [ops[a]] * (2 if how == "doubled" else 0)
    with pytest.raises(ScheduleError, match=r"rank \d, op \d+: .* waits for rank \d") as error:
        check_order(ranks, names, "rank")
    assert repr(ops[a]) in str(error.value) or repr(ops[b]) in str(error.value)


def test_one_order_across_groups():
    """Three groups of two, each in order by itself, but in a circle."""
    names: list[Names] = [
        {(Reduce, 0): "ab", (Reduce, 1): "ca"},
        {(Reduce, 0): "bc", (Reduce, 1): "ab"},
    ]
    names.append({(Reduce, 0): "ca", (Reduce, 1): "bc"})
    circle = [[Reduce(0), Reduce(1)]] * 3
    with pytest.raises(ScheduleError, match="stage 0, op 0: Reduce0 waits for stage 1, which runs"):
        check_order(circle, names)
    check_order([circle[0], [Reduce(1), Reduce(0)], [Reduce(1), Reduce(0)]], names)


def test_a_member_that_takes_no_part():
    """Its stream has ended, or it has none of that name."""
    names: list[Names] = [{(Reduce, 0): "a"}, {(Reduce, 0): "a"}]
    with pytest.raises(ScheduleError, match="waits for stage 1, which takes no part in it"):
        check_order([[Reduce(0)], []], names)
    with pytest.raises(ScheduleError, match="2 streams, but extras of 1 stages"):
        check_extras([[], []], [Extras()])
    with pytest.raises(ScheduleError, match="2 streams, but extras of 1 stages"):
        dress_checked([[], []], [Extras()])


@pytest.mark.full
def test_large_schedules_are_checked_in_seconds():
    """64 stages, 4 chunks, 1024 microbatches, all kinds of ops inserted: two million ops."""
    each = tuple(frozenset({(chunk, 0)}) for chunk in range(4))
    one = Extras(reduce=each, gather=each, recompute="full", offload=300)
    ends = attrs.evolve(one, joined=((0, "table"),))
    asked = [ends, *[one] * 62, ends]
    full = dress(plan("interleaved", 64, 1024, chunks=4), asked)
    assert sum(map(len, full)) > 1_800_000
    start = time.process_time()
    check(full, place=Placement(64, 4), microbatches=1024, extras=asked)
    assert time.process_time() - start < 10
