"""Schedules against what is published of them: orders, bubbles, memory."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.schedule import (
    SCHEDULES,
    B,
    Costs,
    F,
    I,
    Placement,
    ScheduleError,
    Sizes,
    W,
    dualpipe,
    dualpipev,
    forward_only,
    interleaved,
    looped_bfs,
    plan,
    simulate_time,
)
from mfun.schedule.looped import groups, order_table

UNIT = Costs(F=1, I=1, W=1)
MANY = ["interleaved", "looped-bfs", "dualpipev", "dualpipe"]
LIVE = {F: 1, I: 0, B: -1, W: -1}


def grid(
    name: str,
    stages: Iterable[int] = range(1, 9),
    chunks: Iterable[int] = range(1, 4),
    microbatches: Iterable[int] = range(1, 13),
) -> list[tuple[int, int, int]]:
    """All (stages, chunks, microbatches) that a schedule has."""
    own = SCHEDULES[name].chunks
    return [(p, v, m) for p in stages for v in ([own] if own else chunks) for m in microbatches]


def timing(name, stages, microbatches, chunks=1, costs=UNIT, **sizes):
    """A plan with these costs, and how it runs at them."""
    streams = plan.__wrapped__(name, stages, microbatches, chunks=chunks, costs=costs, **sizes)
    place = SCHEDULES[name].place(Sizes(stages, microbatches, chunks))
    return simulate_time(streams, costs, place)


def peaks(streams):
    """Per stage, the most forwards whose B or W is still to come."""
    found = []
    for ops in streams:
        live = peak = 0
        for op in ops:
            live += LIVE.get(type(op), 0)
            peak = max(peak, live)
        found.append(peak)
    return found


# --- orders ---


def test_megatrons_order_table():
    """Its own example, group 3, 5 microbatches, 2 chunks (reference/megatron.md 1.3)."""
    table = order_table(Sizes(2, 5, chunks=2, group=3))
    assert "".join(str(mb) for mb, _ in table) == "0120123434"
    assert "".join(str(chunk) for _, chunk in table) == "0001110011"


@pytest.mark.parametrize("stage", [0, 1])
def test_megatrons_chunk_order_on_two_stages(stage):
    """2 stages, 2 chunks, 4 microbatches: 00110011 on both (reference/megatron.md 1.3)."""
    ops = interleaved(stage, Sizes(2, 4, chunks=2))
    assert "".join(str(op.chunk) for op in ops if isinstance(op, F)) == "00110011"


def test_interleaved_by_hand():
    """Warm-up 2 (2 - 0 - 1) + (2 - 1) 2 = 4 forwards, then in turn; backwards from chunk 1."""
    first = [F(0), F(1), F(0, 1), F(1, 1), F(2), B(0, 1), F(3), B(1, 1), F(2, 1), B(0)]
    last = [F(3, 1), B(1), B(2, 1), B(3, 1), B(2), B(3)]
    assert list(interleaved(0, Sizes(2, 4, chunks=2))) == first + last


def test_looped_bfs_by_hand():
    """Each chunk at once, forwards and then backwards."""
    forwards = [F(0), F(1), F(0, 1), F(1, 1), F(0, 2), F(1, 2)]
    backwards = [B(0, 2), B(1, 2), B(0, 1), B(1, 1), B(0), B(1)]
    assert list(looped_bfs(0, Sizes(2, 2, chunks=3))) == forwards + backwards


def test_dualpipe_by_hand():
    """The eight parts of the published order on 4 stages with 8 microbatches, stage 1.

    It is the inner one of its half: 0 forwards ahead, 2 of both ways, 2 full rounds, then the
    drain; microbatches 0-3 go down and 4-7 up.
    """
    warm = [F(0), F(4, 1), F(1), F(5, 1)]
    first = [F(2), B(4, 1), F(6, 1), B(0)]
    second = [F(3), B(5, 1), F(7, 1), B(1)]
    drain = [B(6, 1), B(2), I(7, 1), I(3), W(7, 1), W(3)]
    assert list(dualpipe(1, Sizes(4, 8, chunks=2))) == warm + first + second + drain


def test_dualpipe_is_mirrored():
    """Stage p - 1 - s runs what stage s runs, the two directions exchanged."""
    for stages, half in ((2, 2), (4, 4), (6, 9), (3, 4)):
        sizes = Sizes(stages, 2 * half, chunks=2)
        for stage in range(stages // 2):
            turned = [
                type(op)((op.mb + half) % (2 * half), 1 - op.chunk) for op in dualpipe(stage, sizes)
            ]
            assert list(dualpipe(stages - 1 - stage, sizes)) == turned


def test_dualpipev_by_hand():
    """2 stages, 4 microbatches, stage 0: 2 ahead, 1 of both, one round with W, the drain."""
    ahead = [F(0), F(1), F(2), F(0, 1)]
    filled = [I(0, 1), W(0, 1), F(1, 1)]
    full = [F(3), B(1, 1), F(2, 1), B(0)]
    drain = [B(2, 1), F(3, 1), B(1), B(3, 1), I(2), W(2), I(3), W(3)]
    assert list(dualpipev(0, Sizes(2, 4, chunks=2))) == ahead + filled + full + drain


@pytest.mark.parametrize("name", MANY)
def test_every_chunk_runs_every_microbatch_once(name):
    """One forward, and one B or one I and a later W; fewer microbatches than stages too."""
    for p, v, m in grid(name):
        sizes = Sizes(p, m, chunks=v)
        place = SCHEDULES[name].place(sizes)
        for stage in range(p):
            ops = {op: at for at, op in enumerate(SCHEDULES[name].ops(stage, sizes))}
            count = 0
            for chunk in range(v):
                for mb in place.microbatches(chunk, m):
                    whole = (F(mb, chunk), B(mb, chunk))
                    steps = (
                        whole if B(mb, chunk) in ops else (F(mb, chunk), I(mb, chunk), W(mb, chunk))
                    )
                    assert all(ops[a] < ops[b] for a, b in pairwise(steps))
                    count += len(steps)
            assert count == len(ops)


# --- time and memory ---

# name, stages, chunks, microbatches, bubble, peaks: reference/peers.md 4.1, in chunk units
TABLE = [
    ("gpipe", 4, 1, 8, 9, [8] * 4),
    ("gpipe", 4, 1, 16, 9, [16] * 4),
    ("gpipe", 4, 1, 6, 9, [6] * 4),
    ("gpipe", 8, 1, 16, 21, [16] * 8),
    ("looped-bfs", 4, 2, 8, 9, [16] * 4),
    ("looped-bfs", 4, 2, 16, 9, [32] * 4),
    ("looped-bfs", 4, 2, 6, 9, [12] * 4),
    ("looped-bfs", 8, 2, 16, 21, [32] * 8),
    ("interleaved", 4, 2, 8, 9, [11, 9, 7, 5]),
    ("interleaved", 4, 2, 16, 9, [11, 9, 7, 5]),
    ("interleaved", 4, 2, 6, 9, [12, 11, 9, 7]),
    ("interleaved", 8, 2, 16, 21, [23, 21, 19, 17, 15, 13, 11, 9]),
    ("dualpipev", 4, 2, 8, 3, [9] * 4),
    ("dualpipev", 4, 2, 16, 3, [9] * 4),
    ("dualpipev", 8, 2, 16, 7, [17] * 8),
]


@pytest.mark.parametrize(("name", "stages", "chunks", "microbatches", "idle", "kept"), TABLE)
def test_the_table_of_bubbles_and_peaks(name, stages, chunks, microbatches, idle, kept):
    """F = I = W = 1: every number that torch's schedules have."""
    done = timing(name, stages, microbatches, chunks)
    assert done.bubble == (idle,) * stages
    assert done.peak_in_flight == tuple(kept)
    assert peaks(plan(name, stages, microbatches, chunks=chunks)) == kept


@pytest.mark.parametrize("name", ["interleaved", "looped-bfs"])
@pytest.mark.parametrize("costs", [(1, 2), (1, 1), (2, 5), (0.25, 0.5)])
def test_bubble_of_the_looped_schedules(name, costs):
    """(p - 1)(F + B) of one chunk on every stage, for any m >= p, divisible or not."""
    f, b = costs
    for p, v, m in [
        (1, 2, 3),
        (2, 2, 5),
        (3, 4, 11),
        (4, 2, 8),
        (4, 3, 14),
        (7, 2, 9),
        (16, 2, 17),
    ]:
        done = timing(name, p, m, v, Costs(F=f, B=b))
        assert done.bubble == ((p - 1) * (f + b),) * p


@pytest.mark.parametrize("stages", range(1, 17))
def test_bubble_of_dualpipev(stages):
    """p - 1 for m >= 2p: (PP / 2 - 1) for the 2p slices, below the published bound."""
    for microbatches in (2 * stages, 2 * stages + 1, 3 * stages):
        assert timing("dualpipev", stages, microbatches, 2).bubble == (stages - 1,) * stages


@pytest.mark.parametrize("stages", range(2, 17, 2))
def test_bubble_of_dualpipe(stages):
    """p / 2 - 1 for even p and even m >= 2p; published: (p/2 - 1)(F&B + B - 3W) = p - 2."""
    for microbatches in (2 * stages, 2 * stages + 2, 4 * stages):
        done = timing("dualpipe", stages, microbatches, 2)
        assert done.bubble == (stages // 2 - 1,) * stages


@pytest.mark.parametrize("name", MANY)
def test_small_sizes_are_never_worse_than_one_microbatch_after_the_other(name):
    """Any sizes run, in at most the time of GPipe on as many slices."""
    for p, v, m in grid(name, (1, 2, 3, 5, 8), microbatches=(1, 2, 3, 5, 9)):
        sizes = Sizes(p, m, chunks=v)
        depth = SCHEDULES[name].place(sizes).depth
        assert timing(name, p, m, v).makespan <= 3 * (depth - 1 + m * v)


@pytest.mark.parametrize("name", MANY)
def test_stated_memory_is_the_measured_peak(name):
    """The closed form of in-flight chunks is reached on every stage, for all small sizes."""
    for p, v, m in grid(name):
        sizes = Sizes(p, m, chunks=v)
        stated = [SCHEDULES[name].in_flight(stage, sizes) for stage in range(p)]
        assert peaks(SCHEDULES[name].ops(stage, sizes) for stage in range(p)) == stated


def test_memory_of_dualpipe_for_many_microbatches():
    """p + 1 for DualPipe, 2p + 1 half chunks for DualPipeV (reference/peers.md 4.3)."""
    for p in (2, 4, 8, 16):
        assert peaks(plan("dualpipe", p, 2 * p, chunks=2)) == [p + 1] * p
        assert peaks(plan("dualpipev", p, 2 * p, chunks=2)) == [2 * p + 1] * p


# --- groups ---


@given(st.integers(1, 8), st.integers(1, 40), st.integers(0, 12))
def test_groups_take_every_microbatch_and_none_is_too_small(stages, microbatches, size):
    """All of at least as many microbatches as stages, unless there are fewer in all."""
    sizes = Sizes(stages, microbatches, chunks=2, group=0 if size < stages else size)
    assert sum(groups(sizes)) == microbatches
    assert min(groups(sizes)) >= min(stages, microbatches)


@pytest.mark.parametrize("stages", range(1, 9))
def test_any_group_is_free_of_bubbles(stages):
    """Every group of at least p, every m >= p: bubble (p - 1)(F + B), no deadlock."""
    for microbatches in range(stages, 3 * stages + 3, 2):
        for group in range(stages, 2 * stages + 2, 2):
            done = timing("interleaved", stages, microbatches, 2, group=group)
            assert done.bubble == (3 * (stages - 1),) * stages


def test_a_group_below_the_stages_is_refused_with_the_numbers():
    """The first microbatch of the group would not be back before the group's next chunk."""
    with pytest.raises(ScheduleError) as error:
        plan("interleaved", 4, 8, chunks=2, group=3)
    assert str(error.value) == (
        'schedule "interleaved": group is 3, but with 4 stages and 2 chunks it is at least 4; '
        "0 takes that"
    )


# --- evaluation ---


def test_forward_only_by_hand():
    """Loop: groups of p through each chunk. Wave: one microbatch every `chunks` steps."""
    loop = forward_only(0, Sizes(2, 3, chunks=2), Placement(2, 2))
    assert list(loop) == [F(0), F(1), F(0, 1), F(1, 1), F(2), F(2, 1)]
    wave = forward_only(1, Sizes(2, 3, chunks=2), Placement(2, 2, wave=True))
    assert list(wave) == [F(0), F(0, 1), F(1), F(1, 1), F(2), F(2, 1)]
    twice = forward_only(0, Sizes(2, 3, chunks=2), Placement(2, 2, wave=True, replicas=2))
    assert list(twice) == [F(0), F(2, 1), F(1)]


@pytest.mark.parametrize("wave", [False, True])
def test_forward_only_bubble(wave):
    """A loop with whole groups: p - 1. A wave of 2 chunks: 2p - 1 slices, then 2 units each."""
    for p in range(1, 9):
        for rounds in (1, 2, 5):
            name = "dualpipev" if wave else "interleaved"
            done = timing(name, p, rounds * p, 2, forward_only=True)
            want = 2 * (rounds * p - 1) + 2 * p if wave else 2 * rounds * p + p - 1
            assert done.makespan == want
