"""What `check` refuses, and streams over a transport whose sends block."""

import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.schedule import (
    SCHEDULES,
    B,
    F,
    I,
    Placement,
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Sizes,
    W,
    batches,
    check,
    gives,
    gpipe,
    needs,
    none,
    plan,
    simulate_time,
    split,
)

PIPELINES = ["gpipe", "1f1b"]


def compute(ops):
    """The compute ops of a stream."""
    return [op for op in ops if isinstance(op, F | B | I | W)]


def edited(streams, stage, ops):
    """The streams with one stage's ops replaced."""
    return [list(ops) if s == stage else list(old) for s, old in enumerate(streams)]


class Rendezvous:
    """A transport double: a send blocks until its receive takes it; channels keep order."""

    def __init__(self):
        self.lock = threading.Condition()
        self.queues = {}

    def post(self, end, other, item):
        """Post one end; meet the first of the opposite end, if it is there."""
        done = {"event": threading.Event(), **item}
        with self.lock:
            waiting = self.queues.setdefault(other, [])
            if not waiting:
                self.queues.setdefault(end, []).append(done)
                return done
            partner = waiting.pop(0)
        send, recv = (done, partner) if end[0] == "send" else (partner, done)
        recv["value"], recv["tag"] = send["value"], send["tag"]
        send["event"].set()
        recv["event"].set()
        return done

    def run(self, stage, batch, inbox, outbox):
        """Post a whole batch, then block until all of it is complete."""
        posted = []
        for op in batch:
            a, b = (stage, op.peer) if isinstance(op, Send) else (op.peer, stage)
            ends = ("send", a, b), ("recv", a, b)
            mine, other = ends if isinstance(op, Send) else ends[::-1]
            item = {"value": outbox.pop(op.tag), "tag": op.tag} if isinstance(op, Send) else {}
            posted.append((op, self.post(mine, other, item)))
        for op, done in posted:
            done["event"].wait()
            if isinstance(op, Recv):
                assert done["tag"] == op.tag
                inbox[op.tag] = done["value"]


def run_threads(streams, place, step, seconds):
    """One thread a stage over the double; the values each stage computed, or None if it hangs.

    A forward appends its virtual stage to what it got; the last slice's backward starts from its
    own forward, so a message that went astray shows in the values.
    """
    transport, values = Rendezvous(), [{} for _ in streams]

    def work(stage):
        inbox, outbox = {}, {}
        for item in step(streams[stage]):
            if isinstance(item, tuple):
                transport.run(stage, item, inbox, outbox)
                continue
            virtual = place.virtual(stage, item.chunk)
            forward = isinstance(item, F)
            own = (item.mb,) if forward else values[stage].get(F(item.mb, item.chunk))
            taken, given = needs(item, virtual, place), gives(item, virtual, place)
            got = inbox.pop(taken) if taken else own
            made = values[stage][item] = (*got, virtual if forward else -virtual)
            if given:
                (inbox if place.stage(given[2]) == stage else outbox)[given] = made

    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in range(len(streams))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return None if any(thread.is_alive() for thread in threads) else values


BLOCKING = [
    *((name, 1, p, m) for name in PIPELINES for p, m in ((2, 4), (4, 8), (4, 2), (3, 1))),
    *(("interleaved", 2, p, m) for p, m in ((2, 4), (4, 8), (4, 6), (3, 1))),
    *((name, 2, p, m) for name in ("dualpipev", "dualpipe") for p, m in ((2, 4), (4, 8), (3, 5))),
    ("interleaved", 3, 2, 7),
]


@pytest.mark.parametrize(("name", "chunks", "stages", "microbatches"), BLOCKING)
def test_sends_that_block_until_received_finish(name, chunks, stages, microbatches):
    """Both neighbours never wait in a send: bugs.md row 55 (pytorch#172668, pytorch#127332)."""
    place = SCHEDULES[name].place(Sizes(stages, microbatches, chunks))
    streams = plan(name, stages, microbatches, chunks=chunks)
    values = run_threads(streams, place, batches, seconds=20)
    assert values is not None
    for stage, ops in enumerate(streams):
        for op in compute(ops):
            if isinstance(op, W):
                continue
            virtual = place.virtual(stage, op.chunk)
            first = virtual - place.slice(virtual)
            down = (op.mb, *range(first, first + place.depth))
            if isinstance(op, F):
                assert values[stage][op] == down[: place.slice(virtual) + 2]
            else:
                back = range(first + place.depth - 1, virtual - 1, -1)
                assert values[stage][op] == (*down, *(-v for v in back))


def test_the_blocking_double_catches_one_message_at_a_time():
    """The double can fail: 1F1B's messages posted singly hang in a send on both stages."""

    def single(ops):
        return [(op,) if isinstance(op, Send | Recv) else op for op in ops]

    assert run_threads(plan("1f1b", 2, 4), Placement(2), single, seconds=0.5) is None


# --- what check refuses ---

GOOD = plan("1f1b", 3, 4)
EVERY_OP = [(stage, at) for stage, ops in enumerate(GOOD) for at in range(len(ops))]


@given(st.sampled_from(PIPELINES), st.integers(1, 24), st.integers(1, 40), st.booleans())
def test_every_plan_passes_its_own_check(name, stages, microbatches, forwards):
    """`plan` checks completeness, messages, deadlock and the bound for any sizes."""
    streams = plan(name, stages, microbatches, forwards)
    assert [len(compute(ops)) for ops in streams] == [microbatches * (2 - forwards)] * stages


@pytest.mark.parametrize(("stage", "at"), EVERY_OP)
def test_a_removed_op_is_refused_by_name(stage, at):
    """No op of a stream can be left out; the message has the stage and the microbatch's op."""
    ops = GOOD[stage]
    with pytest.raises(ScheduleError) as error:
        check(edited(GOOD, stage, ops[:at] + ops[at + 1 :]), microbatches=4)
    message = str(error.value)
    assert f"stage {stage}" in message
    gone = ops[at]
    if isinstance(gone, Send | Recv):
        assert f"{gone.kind}{gone.mb}>{gone.to}" in message
    else:
        assert str(gone) in message or f"{gone.mb}>" in message


@pytest.mark.parametrize(("stage", "at"), EVERY_OP)
def test_a_repeated_op_is_refused_by_name(stage, at):
    """No op may come twice, wherever the second one stands."""
    ops = GOOD[stage]
    for again in range(at + 1, len(ops) + 1):
        with pytest.raises(ScheduleError, match=f"stage {stage}") as error:
            check(edited(GOOD, stage, [*ops[:again], ops[at], *ops[again:]]))
        assert str(ops[at]) in str(error.value)


@pytest.mark.parametrize("kind", ["act", "grad"])
@pytest.mark.parametrize("end", [Send, Recv])
def test_two_swapped_messages_are_refused(kind, end):
    """A pair of messages of one channel in the wrong order never passes."""
    pairs = 0
    for stage, ops in enumerate(GOOD):
        messages = [(i, op) for i, op in enumerate(ops) if isinstance(op, Send | Recv)]
        places = [i for i, op in messages if isinstance(op, end) and op.kind == kind]
        for i, j in pairwise(places):
            swapped = list(ops)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            with pytest.raises(ScheduleError, match=f"stage {stage}"):
                check(edited(GOOD, stage, swapped))
            pairs += 1
    assert pairs == 2 * 3


def test_receives_swapped_in_one_batch_are_refused():
    """Where each stage alone is right, the channel's two orders are compared."""
    first = [F(0), F(1), Send(0, 1, "act", 1), Send(1, 1, "act", 1)]
    second = [Recv(1, 1, "act", 0), Recv(0, 1, "act", 0), F(0), F(1)]
    with pytest.raises(ScheduleError) as error:
        check([first, second], forward_only=True)
    message = "message 0 from stage 0 to stage 1: Send(act0>1) meets Recv(act1>1)"
    assert message in str(error.value)


def test_a_message_missing_on_both_ends_is_refused():
    """With the pair gone the channels agree, so the op without its input is what is named."""
    streams = [[op for op in ops if getattr(op, "tag", None) != ("act", 2, 1)] for ops in GOOD]
    with pytest.raises(ScheduleError, match=r"never sends act2>1"):
        check(streams)
    with pytest.raises(ScheduleError, match=r"F2 runs before its input: no Recv\(act2>1\)"):
        check(edited(GOOD, 1, streams[1]))


def test_a_backward_moved_early_is_refused():
    """Before its forward, and before its gradient has come."""
    last, first = list(GOOD[2]), list(GOOD[0])
    last.remove(B(1))
    last.insert(last.index(F(1)), B(1))
    with pytest.raises(ScheduleError, match=r"stage 2, op \d+: B1 runs before F1"):
        check(edited(GOOD, 2, last))
    first.remove(B(0))
    first.insert(first.index(F(0)) + 1, B(0))
    with pytest.raises(ScheduleError, match=r"B0 runs before its input: no Recv\(grad0>0\)"):
        check(edited(GOOD, 0, first))


def test_crossed_sends_that_deadlock_are_refused_with_the_grid():
    """Stage 0 keeps an activation back until a gradient that depends on it has come."""
    first, second = map(list, plan("1f1b", 2, 2))
    kept = first.pop(first.index(Send(0, 1, "act", 1)))
    with pytest.raises(ScheduleError) as error:
        check([[*first[:-1], kept, first[-1]], second])
    message = str(error.value)
    # act1 now overtakes act0 on the channel, which is found before the run
    assert "Send(act1>1) meets Recv(act0>1)" in message

    first, second = map(list, plan("gpipe", 2, 1))
    with pytest.raises(ScheduleError) as error:
        check([[F(0), first[2], B(0), first[1]], second])
    assert str(error.value).split("\n") == [
        "deadlock: these stages wait for ever",
        "stage 0 | F0 | waits for Recv(grad0>0)",
        "stage 1 | - | waits for Recv(act0>1)",
    ]


def test_a_cycle_of_sends_over_three_stages_is_a_deadlock():
    """Every stage's ops are right and every channel in order; only the run finds it."""
    streams = [list(ops) for ops in plan("gpipe", 3, 2)]
    middle = streams[1]
    # the middle stage keeps both activations until the last stage's first gradient
    sends = [op for op in middle if isinstance(op, Send) and op.kind == "act"]
    middle = [op for op in middle if op not in sends]
    at = middle.index(B(0))
    streams[1] = [*middle[: at + 1], *sends, *middle[at + 1 :]]
    with pytest.raises(ScheduleError, match="deadlock") as error:
        check(streams)
    rows = str(error.value).split("\n")[1:]
    assert [row.split(" | ")[0] for row in rows] == ["stage 0", "stage 1", "stage 2"]
    assert rows[1].endswith("F0 Recv(act1>1) F1 | waits for Recv(grad0>1)")
    assert rows[2].endswith("waits for Recv(act0>2)")


def test_a_message_to_or_from_the_wrong_stage_is_refused():
    """The peer of a message is the stage that uses it, or makes it."""
    streams = [list(ops) for ops in GOOD]
    streams[0][1] = Send(0, 1, "act", peer=2)
    with pytest.raises(ScheduleError, match=r"Send\(act0>1\) goes to stage 2, but stage 1 uses it"):
        check(streams)
    streams = [list(ops) for ops in GOOD]
    streams[2][0] = Recv(0, 2, "act", peer=0)
    with pytest.raises(ScheduleError, match=r"Recv\(act0>2\) comes from stage 0, but stage 1 make"):
        check(streams)
    streams[2][0] = Recv(0, 1, "act", peer=1)
    with pytest.raises(ScheduleError, match="virtual stage 1, which is not on this stage"):
        check(streams)


def test_foreign_and_missing_ops_are_refused():
    """A microbatch or chunk that the schedule has not, a backward in evaluation, a short stream."""
    with pytest.raises(ScheduleError, match="F4 is not an op of this schedule"):
        check([[*none(0, Sizes(1, 4)), F(4), B(4)]], microbatches=4)
    with pytest.raises(ScheduleError, match=r"F0\.1 is not an op of this schedule"):
        check([[F(0), F(0, 1)]], forward_only=True)
    with pytest.raises(ScheduleError, match="B0 is not an op of this schedule"):
        check([[F(0), B(0)]], forward_only=True)
    with pytest.raises(ScheduleError, match="never runs F3, B3"):
        check([list(none(0, Sizes(1, 3)))], microbatches=4)
    with pytest.raises(ScheduleError, match="never runs B0"):
        check([[F(0)]])
    with pytest.raises(ScheduleError, match="stage 1: the stream ends, but never uses act9>1"):
        check(edited(GOOD, 1, [*GOOD[1], Recv(9, 1, "act", 0)]))


SPLIT = Schedule(
    "split", lambda s, n: split(SCHEDULES["1f1b"].ops(s, n)), SCHEDULES["1f1b"].in_flight
)
APART = plan(SPLIT, 2, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ((I(0), W(0)), (W(0), I(0)), "W0 runs before I0"),
        ((F(0), I(0)), (I(0), F(0)), "I0 runs before F0"),
        ((W(0),), (), "the stream ends, but never runs W0"),
        ((W(0),), (W(0), W(0)), "W0 runs twice"),
        ((I(0),), (I(0), I(0)), "I0 runs twice"),
        ((I(0),), (I(0), B(0)), "B0 runs, but its backward was given by another op"),
        ((I(0), W(0)), (B(0), W(0)), "W0 runs, but its backward was given by another op"),
        ((I(0), W(0)), (B(0), I(0)), "I0 runs, but its backward was given by another op"),
        ((F(0),), (F(0), F(0)), "F0 runs twice"),
        ((W(1),), (W(1), W(2)), "W2 is not an op of this schedule"),
    ],
)
def test_wrong_halves_of_a_backward_are_refused_by_name(old, new, message):
    """W before I, halves missing, twice, or beside the whole; the ops around are shown."""
    ops = [op for op in APART[1] if op not in old]
    at = APART[1].index(old[0])
    with pytest.raises(ScheduleError) as error:
        check(edited(APART, 1, [*ops[:at], *new, *ops[at:]]), microbatches=2)
    assert message in str(error.value) and "stage 1" in str(error.value)
    assert message.startswith("the stream ends") or ">>" in str(error.value)


INTERLEAVED = plan("interleaved", 2, 4, chunks=2)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("change", ["removed", "swapped", "twice"])
def test_every_wrong_message_of_an_interleaved_schedule_is_refused(stage, change):
    """One message removed, two neighbours of one channel swapped, or one twice: each by name."""
    place, ops = Placement(2, 2), INTERLEAVED[stage]
    ends = [at for at, op in enumerate(ops) if isinstance(op, Send | Recv)]
    tried = 0
    for at in ends:
        wrong = list(ops)
        if change == "removed":
            del wrong[at]
        elif change == "twice":
            wrong.insert(at, ops[at])
        else:
            later = [i for i in ends if i > at and type(ops[i]) is type(ops[at])]
            if not later:
                continue
            wrong[at], wrong[later[0]] = wrong[later[0]], wrong[at]
        with pytest.raises(ScheduleError, match=r"stage \d") as error:
            check(edited(INTERLEAVED, stage, wrong), place=place)
        assert f"{ops[at].mb}>" in str(error.value) or change == "swapped"
        tried += 1
    assert tried > 20


def test_a_schedule_above_its_bound_is_refused():
    """GPipe under 1F1B's memory bound: the forward that goes over is named."""
    greedy = Schedule("greedy", gpipe, SCHEDULES["1f1b"].in_flight)
    with pytest.raises(ScheduleError, match=r"stage 0, op .*F2 makes 3 in flight.* bound of 2"):
        plan(greedy, 2, 4)


def test_a_schedule_of_ones_own_is_planned_like_the_rest():
    """Backwards in reverse order, as in the first GPipe: a few lines, no registration."""

    def reverse(stage, sizes):
        yield from map(F, range(sizes.microbatches))
        yield from map(B, reversed(range(sizes.microbatches)))

    own = Schedule("reverse", reverse, lambda stage, sizes: sizes.microbatches)
    assert compute(plan(own, 2, 2)[0]) == [F(0), F(1), B(1), B(0)]
    ends = [simulate_time(plan(name, 4, 6)).makespan for name in (own, "gpipe")]
    assert ends[0] == ends[1]


@pytest.mark.full
def test_checking_is_linear_in_the_ops():
    """64 stages x 4 chunks x 1024 microbatches: 1.6 million ops checked in 10 s.

    (Writing the streams, which the bound does not cover, takes about as long again.)
    """
    streams = plan.__wrapped__("interleaved", 64, 1024, chunks=4)
    assert sum(map(len, streams)) == 2 * 4 * 64 * 1024 + 4 * 255 * 1024
    start = time.process_time()
    check(streams, microbatches=1024, place=Placement(64, chunks=4))
    assert time.process_time() - start < 10


def test_checking_ten_times_the_ops_takes_about_ten_times_as_long():
    """Growth by 16 costs far less than the 256 of a quadratic checker."""

    def seconds(microbatches):
        start = time.process_time()
        plan.__wrapped__("1f1b", 8, microbatches)
        return time.process_time() - start

    seconds(8)
    assert seconds(1024) < 60 * max(min(seconds(64) for _ in range(3)), 0.005)
