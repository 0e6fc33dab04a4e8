"""Schedules: their order, their messages, and when each op runs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.schedule import (
    SCHEDULES,
    B,
    Costs,
    F,
    Placement,
    Recv,
    ScheduleError,
    Send,
    Sizes,
    batches,
    check,
    forward_only,
    gpipe,
    none,
    one_f_one_b,
    plan,
    simulate_time,
    timeline,
    with_p2p,
)

SIZES = [(p, m) for p in range(1, 9) for m in range(1, 10)]
PIPELINES = ["gpipe", "1f1b"]


def compute(ops):
    """The compute ops of a stream."""
    return [op for op in ops if isinstance(op, F | B)]


# --- the generators ---


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
def test_each_stage_runs_every_microbatch_once_forward_then_backward(schedule):
    """Fewer microbatches than stages too: bugs.md row 51."""
    for stages, microbatches in SIZES:
        for stage in range(stages):
            ops = list(schedule(stage, Sizes(stages, microbatches)))
            assert len(ops) == 2 * microbatches
            for mb in range(microbatches):
                assert ops.index(F(mb)) < ops.index(B(mb))


@pytest.mark.parametrize("name", PIPELINES)
def test_peak_in_flight_is_the_closed_form(name):
    """The bound that a schedule states is reached, on every stage."""
    for stages, microbatches in SIZES:
        for stage, ops in enumerate(plan(name, stages, microbatches)):
            live, peak = 0, 0
            for op in compute(ops):
                live += 1 if isinstance(op, F) else -1
                peak = max(peak, live)
            assert peak == (microbatches if name == "gpipe" else min(stages - stage, microbatches))
            assert peak == SCHEDULES[name].in_flight(stage, Sizes(stages, microbatches))


def test_1f1b_orders_written_by_hand():
    """Megatron's warm-up rule min(stages - stage - 1, microbatches), by hand."""
    assert list(one_f_one_b(0, Sizes(4, 2))) == [F(0), F(1), B(0), B(1)]
    assert list(one_f_one_b(2, Sizes(4, 3))) == [F(0), F(1), B(0), F(2), B(1), B(2)]
    assert list(one_f_one_b(3, Sizes(4, 2))) == [F(0), B(0), F(1), B(1)]


def test_none_and_forward_only_orders():
    """Without a pipeline each backward follows its forward; evaluation has forwards alone."""
    assert list(none(0, Sizes(1, 3))) == [F(0), B(0), F(1), B(1), F(2), B(2)]
    assert list(forward_only(1, Sizes(2, 3), Placement(2))) == [F(0), F(1), F(2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Sizes(2, 0), "microbatches is 0"),
        (lambda: Sizes(0, 4), "stages is 0"),
        (lambda: Sizes(2, 4, chunks=0), "chunks is 0"),
        (lambda: plan("none", 3, 4), '"none": it runs 1 stage, but stages is 3'),
        (lambda: plan("none", 3, 4, forward_only=True), '"none": it runs 1 stage, but stages is 3'),
        (lambda: plan("1f1b", 3, 4, chunks=2), '"1f1b" has 1 chunks a stage, but chunks is 2'),
        (lambda: plan("1f1b", 2, -1), "microbatches is -1"),
        (lambda: plan("1f1b", 0, 1), "stages is 0"),
        (
            lambda: plan("zigzag", 2, 2),
            "'zigzag', but must be one of none, gpipe, 1f1b",
        ),
        (lambda: check([]), "stages is 0"),
        (lambda: Costs(F=0), "cost F is 0"),
        (lambda: timeline(plan("1f1b", 2, 2), Costs(F=0.5)), "cost F is 0.5"),
    ],
)
def test_bad_numbers_are_refused_by_name(call, message):
    """A number out of range is named with its value before any op runs."""
    with pytest.raises(ScheduleError) as error:
        call()
    assert message in str(error.value)


# --- messages ---


def test_messages_by_hand():
    """The middle of three stages; the messages between two compute ops are a batch."""
    middle = plan("1f1b", 3, 2)[1]
    assert middle == (
        *(Recv(0, 1, "act", 0), F(0), Send(0, 2, "act", 2)),
        *(Recv(1, 1, "act", 0), F(1), Send(1, 2, "act", 2)),
        *(Recv(0, 1, "grad", 2), B(0), Send(0, 0, "grad", 0)),
        *(Recv(1, 1, "grad", 2), B(1), Send(1, 0, "grad", 0)),
    )
    assert [len(step) for step in batches(middle) if isinstance(step, tuple)] == [1, 2, 2, 2, 1]


def test_messages_of_one_stage_stay_in_place():
    """One stage has no messages, whatever its chunks; a second chunk of two stages wraps around."""
    assert with_p2p([[F(0), F(0, 1)]], Placement(1, 2)) == ((F(0), F(0, 1)),)
    first, _ = with_p2p([[F(0), F(0, 1)]] * 2, Placement(2, 2))
    assert first == (
        *(F(0), Send(0, to=1, kind="act", peer=1)),
        *(Recv(0, to=2, kind="act", peer=1), F(0, 1), Send(0, to=3, kind="act", peer=1)),
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_every_boundary_is_crossed_once_a_microbatch_each_way(name):
    """(stages - 1) * microbatches activations and as many gradients are sent, and received."""
    for stages, microbatches in SIZES:
        ops = [op for stream in plan(name, stages, microbatches) for op in stream]
        count = Counter((type(op), op.kind) for op in ops if isinstance(op, Send | Recv))
        assert set(count.values()) <= {(stages - 1) * microbatches}
        assert len(count) == (4 if stages > 1 else 0)


def test_forward_only_plan_has_no_backward_and_no_gradient_message():
    """Evaluation sends activations only."""
    ops = [op for stream in plan("1f1b", 3, 4, forward_only=True) for op in stream]
    assert Counter(map(type, ops)) == {F: 12, Send: 8, Recv: 8}
    assert all(op.kind == "act" for op in ops if isinstance(op, Send | Recv))


def test_plan_is_made_once():
    """The executor asks at every step and gets the same checked tuple."""
    assert plan("1f1b", 2, 3) is plan("1f1b", 2, 3)


# --- time ---

# drawn by hand: an op starts one column after the later of its stage's last op and its input
PICTURE = """
stage 0 | F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
stage 1 |  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
stage 2 |  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
stage 3 |  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .
"""


def test_timeline_of_1f1b_by_hand():
    """Four stages, six microbatches, one column an op."""
    assert timeline(plan("1f1b", 4, 6)) == PICTURE.strip("\n")


def test_timeline_with_backward_twice_a_forward_by_hand():
    """Two stages, three microbatches: stage 1 is busy from its first op to its last."""
    rows = [
        "stage 0 | F0 F1  .  . B0 -- F2 B1 --  . B2 --",
        "stage 1 |  . F0 B0 -- F1 B1 -- F2 B2 --  .  .",
    ]
    assert timeline(plan("1f1b", 2, 3), Costs(F=1, B=2)) == "\n".join(rows)


def test_timeline_aligns_two_digit_numbers():
    """Ten stages and eleven microbatches: labels and cells are as wide as the widest."""
    lines = timeline(plan("gpipe", 11, 11)).split("\n")
    assert lines[0].startswith("stage  0 |  F0  F1 ")
    assert lines[10].startswith("stage 10 |   .   . ")
    assert len({len(line) for line in lines}) == 1
    assert " F10 " in lines[0]


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("costs", [(1, 2), (1, 1), (2, 5), (0.25, 0.5)])
def test_makespan_and_bubble_are_the_closed_forms(name, costs):
    """makespan = (m + p - 1)(F + B) and every stage idles (p - 1)(F + B)."""
    f, b = costs
    for stages, microbatches in SIZES:
        done = simulate_time(plan(name, stages, microbatches), Costs(F=f, B=b))
        assert done.makespan == (microbatches + stages - 1) * (f + b)
        assert done.bubble == ((stages - 1) * (f + b),) * stages


def test_no_pipeline_has_no_bubble():
    """One stage is always busy: microbatches * (F + B)."""
    done = simulate_time(plan("none", 1, 5))
    assert done.makespan == 15
    assert done.bubble == (0,)


@given(st.sampled_from(PIPELINES), st.integers(1, 6), st.integers(1, 8))
def test_events_respect_order_and_data(name, stages, microbatches):
    """An event starts exactly at the later of its stage's last end and its input's end."""
    streams = plan(name, stages, microbatches)
    when = {(e.stage, e.op): e for e in simulate_time(streams).events}
    for stage, ops in enumerate(streams):
        free = 0
        for op in compute(ops):
            source = stage - 1 if isinstance(op, F) else stage + 1
            given_at = when[source, op].end if 0 <= source < stages else 0
            assert when[stage, op].start == max(free, given_at)
            free = when[stage, op].end


def test_the_order_inside_a_batch_does_not_matter_for_time():
    """A batch is posted together, so a receive listed before a send does not wait for it."""
    streams = [list(ops) for ops in plan("1f1b", 2, 3)]
    flipped = [
        [op for step in batches(ops) for op in (step[::-1] if isinstance(step, tuple) else [step])]
        for ops in streams
    ]
    assert flipped != streams
    check(flipped)
    assert simulate_time(flipped) == simulate_time(streams)


def test_events_of_a_stream_that_hangs_are_refused():
    """A message that nobody sends is named with the stage that waits for it."""
    first, *others = plan("1f1b", 3, 4)
    streams = [[op for op in first if not isinstance(op, Send)], *others]
    with pytest.raises(ScheduleError, match=r"never sent: .*stage 1 for act0>1, stage 2"):
        simulate_time(streams)
