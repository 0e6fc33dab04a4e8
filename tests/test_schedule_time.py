"""When ops run: by hand, by closed forms, and by a second simulator that steps through time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.schedule import (
    B,
    Compute,
    Costs,
    F,
    I,
    Placement,
    Recv,
    ScheduleError,
    Send,
    Sizes,
    W,
    gpipe,
    needs,
    one_f_one_b,
    plan,
    simulate_time,
    with_p2p,
)


def streams_of(orders, place):
    """Compute orders of all stages, with their messages."""
    return [list(ops) for ops in with_p2p(orders, place)]


def spans(timing, stage):
    """Each op of a stage with its start and end."""
    return {str(e.op): (e.start, e.end) for e in timing.events if e.stage == stage}


# by hand


def test_uneven_stages_by_hand():
    """Three stages whose forwards take 1, 3, 1 and backwards 2, 4, 2; two microbatches."""
    costs = Costs(F=(1, 3, 1), B=(2, 4, 2))
    timing = simulate_time(plan("gpipe", 3, 2), costs)
    assert spans(timing, 0) == {"F0": (0, 1), "F1": (1, 2), "B0": (14, 16), "B1": (18, 20)}
    assert spans(timing, 1) == {"F0": (1, 4), "F1": (4, 7), "B0": (10, 14), "B1": (14, 18)}
    assert spans(timing, 2) == {"F0": (4, 5), "F1": (7, 8), "B0": (8, 10), "B1": (10, 12)}
    assert timing.makespan == 20
    assert timing.busy == (6, 14, 6)
    assert timing.bubble == (14, 6, 14)
    assert timing.bubble_span == (14, 3, 2)
    assert timing.peak_in_flight == (2, 2, 2)
    assert timing.exposed == (0, 0, 0)
    assert timing.messages == 8
    assert timing.idle == pytest.approx(34 / 60)


def test_latency_by_hand():
    """Two stages, latency 3: each crossing adds 3, and each stage waits 3 for its first message."""
    timing = simulate_time(plan("1f1b", 2, 2), Costs(latency=3))
    assert spans(timing, 0) == {"F0": (0, 1), "F1": (1, 2), "B0": (10, 12), "B1": (13, 15)}
    assert spans(timing, 1) == {"F0": (4, 5), "B0": (5, 7), "F1": (7, 8), "B1": (8, 10)}
    # stage 0 starts B0 at 10 and could at 7; B1's gradient is made at 10 and arrives at 13
    assert timing.exposed == (3 + 1, 3)
    assert timing.makespan == 15


def test_messages_of_one_link_queue():
    """Forwards of 1 over a link that takes 4: message k leaves at 1 + 4 k and arrives 1 later."""
    timing = simulate_time(plan("1f1b", 2, 3, forward_only=True), Costs(latency=1, transfer=4))
    assert [(f.made, f.start, f.end) for f in timing.flights] == [(1, 1, 6), (2, 5, 10), (3, 9, 14)]
    assert spans(timing, 1) == {"F0": (6, 7), "F1": (10, 11), "F2": (14, 15)}
    assert timing.exposed == (0, 5 + 3 + 3)


def test_opposite_directions_do_not_queue():
    """A gradient and an activation between two stages travel at once."""
    place = Placement(2)
    orders = [[F(0), F(1), B(0), B(1)], [F(0), B(0), F(1), B(1)]]
    timing = simulate_time(streams_of(orders, place), Costs(F=1, B=1, transfer=1))
    leave = {f.tag: f.start for f in timing.flights}
    assert leave["act", 1, 1] == 2
    assert leave["grad", 0, 0] == 4
    assert timing.makespan == 8


def test_without_overlap_a_transfer_occupies_both_stages():
    """Forward 2, transfer 1: the sender is free again at 3, the receiver starts at 3."""
    costs = Costs(F=2, transfer=1, overlap=False)
    timing = simulate_time(plan("1f1b", 2, 3, forward_only=True), costs)
    assert spans(timing, 0) == {"F0": (0, 2), "F1": (3, 5), "F2": (6, 8)}
    # message 1 leaves at 5 and is in at 6; the stage is done with F0 at 5, so takes it from 5
    assert spans(timing, 1) == {"F0": (3, 5), "F1": (6, 8), "F2": (9, 11)}
    assert timing.exposed == (2, 3)
    # with a slow receiver its own time is spent after its op: F ends at 8, takes until 9
    slow = simulate_time(
        plan("1f1b", 2, 3, forward_only=True), Costs(F=(2, 5), transfer=1, overlap=False)
    )
    assert spans(slow, 1) == {"F0": (3, 8), "F1": (9, 14), "F2": (15, 20)}


def test_an_early_receive_holds_up_only_the_op_that_needs_it():
    """Both receives first, last first: without overlap message 0 is in at 3, message 1 at 6."""
    streams = streams_of([[F(0), F(1)], [F(0), F(1)]], Placement(2))
    first, a, second, b = streams[1]
    streams[1] = [second, first, a, b]
    timing = simulate_time(streams, Costs(F=1, transfer=2, overlap=False))
    assert spans(timing, 0) == {"F0": (0, 1), "F1": (3, 4)}
    assert spans(timing, 1) == {"F0": (3, 4), "F1": (6, 7)}
    assert timing.exposed == (2, 2 + 2)


def test_split_backwards_by_hand():
    """I gives the gradient, W frees the memory and lets nobody wait."""
    place = Placement(2)
    orders = [[F(0), F(1), I(0), W(0), I(1), W(1)], [F(0), I(0), F(1), I(1), W(0), W(1)]]
    timing = simulate_time(streams_of(orders, place), Costs(F=1, I=2, W=3))
    assert spans(timing, 1) == {
        **{"F0": (1, 2), "I0": (2, 4), "F1": (4, 5), "I1": (5, 7)},
        **{"W0": (7, 10), "W1": (10, 13)},
    }
    assert spans(timing, 0)["I0"] == (4, 6)
    assert spans(timing, 0)["I1"] == (9, 11)
    assert timing.peak_in_flight == (2, 2)
    assert timing.bubble == (2, 2)  # W1 ends at 14 on stage 0; each has 12 to do
    assert timing.bubble_span == (2, 0)


def test_chunks_of_a_wave_are_costed_by_slice():
    """Stage 1 of a wave of two holds slices 1 and 2; the turn needs no message."""
    place = Placement(2, 2, wave=True)
    orders = [[F(0), F(0, 1), B(0, 1), B(0)], [F(0), F(0, 1), B(0, 1), B(0)]]
    timing = simulate_time(streams_of(orders, place), Costs(F=(1, 2, 4, 8), B=1), place)
    assert spans(timing, 0) == {"F0": (0, 1), "F0.1": (7, 15), "B0.1": (15, 16), "B0": (18, 19)}
    assert spans(timing, 1) == {"F0": (1, 3), "F0.1": (3, 7), "B0.1": (16, 17), "B0": (17, 18)}
    assert timing.messages == 4
    assert timing.peak_in_flight == (2, 2)


def test_replicas_share_costs_of_their_slices():
    """Both directions of DualPipe's placement: stage 0 holds slices 0 and 1."""
    place = Placement(2, 2, wave=True, replicas=2)
    orders = [[F(0), F(1, 1), B(1, 1), B(0)], [F(1, 1), F(0), B(0), B(1, 1)]]
    timing = simulate_time(streams_of(orders, place), Costs(F=(1, 5), B=1), place)
    assert spans(timing, 0) == {"F0": (0, 1), "F1.1": (1, 6), "B1.1": (6, 7), "B0": (7, 8)}


# closed forms


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 5), (0.25, 0.5, 0.125)])
def test_synchronous_schedules_idle_p_minus_1_times(name, f, i, w):
    """(p - 1)(F + B) on every stage; of it 2 (p - 1 - s) ... lies inside the stage's span."""
    for p in range(1, 9):
        for m in (1, 3, p, 2 * p + 1):
            timing = simulate_time(plan(name, p, m), Costs(F=f, I=i, W=w))
            b = i + w
            assert timing.makespan == (m + p - 1) * (f + b)
            assert timing.bubble == ((p - 1) * (f + b),) * p
            assert timing.bubble_span == tuple((p - 1 - s) * (f + b) for s in range(p))
            assert timing.busy == (m * (f + b),) * p
            assert timing.messages == 2 * m * (p - 1)
            assert timing.exposed == (0,) * p


def test_one_microbatch_pays_every_latency():
    """A lone microbatch crosses 2 (p - 1) links."""
    for p in range(1, 7):
        timing = simulate_time(plan("1f1b", p, 1), Costs(latency=0.5, transfer=0.25))
        assert timing.makespan == 3 * p + 2 * (p - 1) * 0.75


# a second simulator


class Slow:
    """Steps through integer time; stages and links are coroutines that are polled until all rest.

    It shares nothing with `simulate_time` but the streams.
    """

    def __init__(self, streams, costs, place):
        self.costs, self.place, self.now = costs, place, 0
        self.log, self.arrived = [], set()
        self.queues = defaultdict(list)
        pairs = {(s, op.peer) for s, ops in enumerate(streams) for op in ops if type(op) is Send}
        self.procs = [self.stage(s, ops) for s, ops in enumerate(streams)]
        self.procs += [self.link(pair) for pair in pairs]

    def wait(self, ticks):
        """Yield as long as a time has not gone by."""
        until = self.now + ticks
        while self.now < until:
            yield False

    def stage(self, s, ops):
        """One stage: yields True when it has moved, False when it has to wait."""
        due = set()
        for op in ops:
            if type(op) is Recv:
                due.add((op.kind == "act", op.mb, op.to))
            elif type(op) is Send:
                self.queues[s, op.peer].append((op.kind == "act", op.mb, op.to))
                yield from self.occupied()
            else:
                virtual = self.place.virtual(s, op.chunk)
                need = (type(op) is F, op.mb, virtual)
                if type(op) is not W and need in due:
                    while need not in self.arrived:
                        yield False
                    yield from self.occupied()
                start = self.now
                yield from self.wait(self.costs.of(op, self.place.slice(virtual)))
                self.log.append((s, op, start, self.now))
            yield True

    def occupied(self):
        """The stage moves a message itself."""
        yield from self.wait(0 if self.costs.overlap else self.costs.transfer)

    def link(self, pair):
        """One directed link: takes a message at a time; each then travels by itself."""
        while True:
            while not self.queues[pair]:
                yield False
            tag = self.queues[pair].pop(0)
            if self.costs.overlap:
                yield from self.wait(self.costs.transfer)
            self.procs.append(self.fly(tag))
            yield True

    def fly(self, tag):
        """The latency of one message."""
        yield from self.wait(self.costs.latency)
        self.arrived.add(tag)
        yield True

    def run(self, limit=2000):
        """Poll everything until nothing moves, then let one unit go by."""
        while self.now < limit:
            moved = True
            while moved:
                moved = False
                for proc in list(self.procs):
                    moved |= next(proc, False)
            self.now += 1
        return sorted(self.log, key=lambda e: (e[2], e[0]))


def random_order(draw, place, m):
    """A stage's ops breadth first: forwards, then backwards, whole or split with late weights."""
    order: list[Compute] = [F(mb, c) for c in range(place.chunks) for mb in range(m)]
    backs = [(mb, c) for c in reversed(range(place.chunks)) for mb in range(m)]
    if draw(st.booleans()):
        return order + [B(*back) for back in backs]
    order += [I(*back) for back in backs]
    for back in backs:
        order.insert(draw(st.integers(order.index(I(*back)) + 1, len(order))), W(*back))
    return order


@st.composite
def cases(draw):
    """Streams of 1F1B, GPipe, or looped and wavy breadth-first orders, with random costs."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ints = st.integers(1, 4)
    if draw(st.booleans()):
        place = Placement(p)
        generate = draw(st.sampled_from([gpipe, one_f_one_b]))
        orders = [list(generate(s, Sizes(p, m))) for s in range(p)]
    else:
        place = Placement(p, draw(st.integers(1, 3)), wave=draw(st.booleans()))
        orders = [random_order(draw, place, m) for _ in range(p)]
    per_slice = st.tuples(*[ints] * place.depth)
    costs = Costs(
        F=draw(ints | per_slice),
        B=draw(st.none() | per_slice),
        I=draw(per_slice),
        W=draw(ints),
        latency=draw(st.integers(0, 3)),
        transfer=draw(st.integers(0, 3)),
        overlap=draw(st.booleans()),
    )
    return streams_of(orders, place), costs, place


@given(cases())
def test_times_equal_those_of_a_time_stepped_simulator(case):
    """Every event of every stage, for random costs, links and placements."""
    streams, costs, place = case
    timing = simulate_time(streams, costs, place)
    slow = Slow(streams, costs, place)
    slow = slow.run(int(timing.makespan) + 3)
    assert [(e.stage, e.op, e.start, e.end) for e in timing.events] == slow
    busy, last, first = defaultdict(int), {}, {}
    for stage, _, start, end in slow:
        busy[stage] += end - start
        first.setdefault(stage, start)
        last[stage] = max(last.get(stage, 0), end)
    whole = max(last.values())
    for s in range(len(streams)):
        assert timing.bubble[s] == whole - busy[s]
        assert timing.bubble_span[s] == last[s] - first[s] - busy[s]


def just_in_time(ops, stage, place):
    """The same ops with each receive right before the op that needs it."""
    due = {op.tag: op for op in ops if isinstance(op, Recv)}
    for op in ops:
        if isinstance(op, F | B | I) and (tag := needs(op, place.virtual(stage, op.chunk), place)):
            yield from [due[tag]] if tag in due else []
        if not isinstance(op, Recv):
            yield op


@given(cases())
def test_where_a_receive_stands_does_not_matter(case):
    """Receives are posted early and waited for late."""
    streams, costs, place = case
    late = [list(just_in_time(ops, stage, place)) for stage, ops in enumerate(streams)]
    assert simulate_time(late, costs, place) == simulate_time(streams, costs, place)


@given(cases())
def test_free_messages_are_never_exposed(case):
    """Without latency and transfer nothing is exposed, and overlap does not matter."""
    streams, costs, place = case
    ops = {name: getattr(costs, name) for name in "FBIW"}
    free = simulate_time(streams, Costs(**ops), place)
    assert free.exposed == (0,) * len(streams)
    assert simulate_time(streams, Costs(**ops, overlap=False), place) == free
    timing = simulate_time(streams, costs, place)
    assert timing.makespan >= free.makespan
    assert (timing.makespan == free.makespan) or sum(timing.exposed) > 0


# refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs(F=0), "cost F is 0, but an op takes more than 0"),
        (lambda: Costs(I=(1, -2)), "cost I is -2"),
        (lambda: Costs(W=float("inf")), "cost W is inf"),
        (lambda: Costs(B=float("nan")), "cost B is nan"),
        (
            lambda: Costs(F=cast(Any, [1, 2])),
            "cost F is a list: give a number, or a tup",
        ),
        (lambda: Costs(latency=-1), "cost latency is -1, but a message takes 0 or more"),
        (lambda: Costs(transfer=float("nan")), "cost transfer is nan"),
        (lambda: simulate_time(plan("1f1b", 3, 2), Costs(W=(1, 2))), "cost W has 2 numbers, but"),
    ],
)
def test_costs_out_of_range_are_named(make, message):
    """The cost, its value and what it may be."""
    with pytest.raises(ScheduleError, match=message):
        make()


def test_a_message_that_nobody_sends_is_named():
    """With the stage that waits, and without those that only wait for that one's."""
    streams = [list(ops) for ops in plan("gpipe", 2, 2)]
    streams[0] = [op for op in streams[0] if str(op) != "Send(act1>1)"]
    with pytest.raises(ScheduleError, match=r"^messages are never sent: .*stage 1 for act1>1$"):
        simulate_time(streams)


def test_a_placement_that_is_not_the_streams_is_refused():
    """A wave read as looped would drop what its ops wait for."""
    place = Placement(2, 2, wave=True)
    streams = streams_of([[F(0), F(0, 1), B(0, 1), B(0)]] * 2, place)
    simulate_time(streams, place=place)
    with pytest.raises(ScheduleError, match=r"stage 0 receives act0>3, but no op needs it: name"):
        simulate_time(streams)


def test_empty_streams_take_no_time():
    """A stage without ops is idle; no op at all is no time."""
    assert simulate_time([[], []]).makespan == 0
    assert simulate_time([[], []]).idle == 0
    timing = simulate_time([[F(0), B(0)], []])
    assert timing.bubble == (0, 3)
    assert timing.bubble_span == (0, 0)
