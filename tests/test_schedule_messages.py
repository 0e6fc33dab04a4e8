"""Messages of any streams: matched, in order, in place where they can be, and never stuck."""

from itertools import product

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
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Sizes,
    W,
    check,
    gives,
    merge,
    needs,
    one_f_one_b,
    plan,
    rendezvous,
    split,
    with_p2p,
)
from mfun.schedule.streams import source


def chunks_of(name):
    """1, 2 and 3, or the one number that a schedule has."""
    return [SCHEDULES[name].chunks] if SCHEDULES[name].chunks else [1, 2, 3]


def plain(ops, stage, place):
    """Receive right before use, send right after: what each stage would write by itself."""
    for op in ops:
        virtual = place.virtual(stage, op.chunk)
        taken, made = needs(op, virtual, place), gives(op, virtual, place)
        if taken and (peer := source(taken, place)) != stage:
            yield Recv(taken[1], taken[2], taken[0], peer)
        yield op
        if made and (peer := place.stage(made[2])) != stage:
            yield Send(made[1], made[2], made[0], peer)


@pytest.mark.parametrize("forwards", [False, True])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
def test_no_schedule_deadlocks(name, forwards):
    """p 1-8, v 1-3, m 1-12, sends that block until received (bugs.md row 55)."""
    for p, v, m in product(range(1, 9), chunks_of(name), range(1, 13)):
        streams = plan.__wrapped__(name, p, m, forwards, chunks=v)
        assert not rendezvous(streams)


@pytest.mark.parametrize("name", ["interleaved", "dualpipev", "dualpipe"])
def test_messages_right_before_use_would_deadlock(name):
    """The test can fail: each stage's own messages get stuck, both neighbours in a send."""
    sizes = Sizes(4, 8, chunks=2)
    place = SCHEDULES[name].place(sizes)
    streams = [list(plain(SCHEDULES[name].ops(s, sizes), s, place)) for s in range(4)]
    assert rendezvous(streams)
    with pytest.raises(ScheduleError):
        check(streams, place=place)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_nothing_is_early_where_nothing_would_be_stuck(name):
    """GPipe and 1F1B keep receives right before use, whatever ops cost."""
    for p, m, costs in product((2, 3, 5), (1, 4, 7), (Costs(), Costs(F=3, I=1, W=1, latency=2))):
        sizes = Sizes(p, m)
        want = [tuple(plain(SCHEDULES[name].ops(s, sizes), s, Placement(p))) for s in range(p)]
        assert list(plan(name, p, m, costs=costs)) == want


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("forwards", [False, True])
def test_a_waves_turning_point_hands_over_in_place(stages, forwards):
    """Chunk c to c + 1 is one stage: no message there, and none at all on one stage."""
    for name in (name for name, row in SCHEDULES.items() if row.wave and row.replicas == 1):
        streams = plan(name, stages, 5, forwards, chunks=2)
        sent = {(op.kind, op.to) for ops in streams for op in ops if isinstance(op, Send)}
        crossed = [to for to in range(1, 2 * stages) if to != stages]
        acts = {("act", to) for to in crossed}
        assert sent == acts | (set() if forwards else {("grad", to - 1) for to in crossed})


def test_two_replicas_do_not_mix():
    """The last slice of one direction gives nothing to the first of the other."""
    streams = plan("dualpipe", 4, 8, chunks=2)
    sent = {op.tag for ops in streams for op in ops if isinstance(op, Send)}
    down = {("act", mb, to) for mb in range(4) for to in (1, 2, 3)}
    up = {("act", mb, to) for mb in range(4, 8) for to in (5, 6, 7)}
    assert {tag for tag in sent if tag[0] == "act"} == down | up
    assert {(kind, mb, to + 1) for kind, mb, to in sent if kind == "grad"} == {
        ("grad", mb, to) for _, mb, to in down | up
    }


@st.composite
def random_streams(draw):
    """Any order of all stages' ops that some run without messages has: (streams, placement)."""
    stages, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    wave = draw(st.booleans())
    replicas = 2 if chunks == 2 and wave and draw(st.booleans()) else 1
    place, count = Placement(stages, chunks, wave, replicas), draw(st.integers(1, 4))
    split_all = draw(st.booleans())
    todo = {}
    for stage, chunk in product(range(stages), range(chunks)):
        for mb in place.microbatches(chunk, count):
            kinds = (F, I, W) if split_all else (F, B)
            todo[stage, chunk, mb] = [kind(mb, chunk) for kind in kinds]
    streams, made = [[] for _ in range(stages)], set()
    random = draw(st.randoms(use_true_random=False))
    while todo:
        can = []
        for key, (op, *_) in todo.items():
            taken = needs(op, place.virtual(key[0], key[1]), place)
            if taken is None or taken in made:
                can.append(key)
        key = random.choice(can)
        op = todo[key].pop(0)
        streams[key[0]].append(op)
        made.add(gives(op, place.virtual(key[0], key[1]), place))
        if not todo[key]:
            del todo[key]
    return streams, place, count


@given(random_streams(), st.sampled_from([Costs(), Costs(F=3, B=1), Costs(I=2, latency=4)]))
def test_any_streams_whose_data_flow_has_no_cycle_run(drawn, costs):
    """Whatever the order, placement and costs: matched messages, in order, and no deadlock."""
    streams, place, count = drawn
    written = with_p2p(streams, place, costs)
    check(written, microbatches=count, place=place)
    for ops, full in zip(streams, written, strict=True):
        assert [op for op in full if not isinstance(op, Send | Recv)] == ops


def test_a_cycle_in_the_data_flow_is_refused_with_the_grid():
    """A backward before a forward that its own gradient depends on: no order of messages helps."""

    def crossed(stage, sizes):
        yield from ([F(0), B(0), F(1), B(1)], [F(1), F(0), B(1), B(0)])[stage]

    own = Schedule("crossed", crossed, lambda stage, sizes: 2)
    with pytest.raises(ScheduleError, match="deadlock: these stages wait for ever") as error:
        plan(own, 2, 2)
    assert str(error.value).split("\n")[1:] == [
        "stage 0 | F0 Send(act0>1) | waits for Recv(grad0>0)",
        "stage 1 | Recv(act0>1) | waits for Recv(act1>1)",
    ]


# --- split and merge ---


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 9))
def test_split_keeps_everything_but_the_weights_in_place(stages, microbatches, delay):
    """I where B was; the W's in the same order, `delay` backwards later or at the end."""
    for stage in range(stages):
        ops = list(one_f_one_b(stage, Sizes(stages, microbatches)))
        parts = list(split(ops, delay))
        assert [
            B(op.mb) if isinstance(op, I) else op for op in parts if not isinstance(op, W)
        ] == ops
        order = [op for op in parts if isinstance(op, I | W)]
        for mb in range(microbatches):
            after = order[order.index(I(mb)) + 1 : order.index(W(mb))]
            assert sum(isinstance(op, I) for op in after) == min(delay, microbatches - 1 - mb)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "dualpipev", "dualpipe"])
def test_merge_undoes_split(name):
    """The same stream again; and merging what cannot be merged changes nothing."""
    sizes = Sizes(3, 7, SCHEDULES[name].chunks or 2)
    for stage in range(3):
        ops = list(SCHEDULES[name].ops(stage, sizes))
        whole = list(merge(ops))
        assert list(merge(split(whole))) == whole


def test_merge_takes_only_what_stands_together():
    """An op between I and W, or the W of another microbatch, keeps them apart."""
    apart = [I(0), F(1), W(0), I(1), W(0, 1), I(2), I(3), W(3), W(2), W(1)]
    assert list(merge(apart)) == [I(0), F(1), W(0), I(1), W(0, 1), I(2), B(3), W(2), W(1)]


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "looped-bfs", "dualpipe"])
def test_split_schedules_are_planned_like_the_rest(name, delay):
    """With `delay` more activations in the bound, any schedule runs split."""
    row = SCHEDULES[name]
    apart = Schedule(
        f"{name} split",
        lambda stage, sizes: split(row.ops(stage, sizes), delay),
        lambda stage, sizes: row.in_flight(stage, sizes) + delay,
        row.chunks,
        row.wave,
        row.replicas,
    )
    for p, v, m in product((1, 2, 4), chunks_of(name), (1, 3, 6)):
        streams = plan.__wrapped__(apart, p, m, chunks=v)
        assert not any(isinstance(op, B) for ops in streams for op in ops)
