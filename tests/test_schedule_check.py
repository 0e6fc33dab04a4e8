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
    Recv,
    Schedule,
    ScheduleError,
    Send,
    Sizes,
    batches,
    check,
    gpipe,
    none,
    plan,
    simulate_time,
)

PIPELINES = ["gpipe", "1f1b"]


def compute(ops):
    """The compute ops of a stream."""
    return [op for op in ops if isinstance(op, F | B)]


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


def run_threads(streams, step, seconds):
    """One thread a stage over the double; the values each stage computed, or None if it hangs.

    A stage's forward appends its number to what it got; the last stage's backward starts from its
    own forward, so a message that went astray shows in the values.
    """
    transport, values = Rendezvous(), [{} for _ in streams]
    last = len(streams) - 1

    def work(stage):
        inbox, outbox = {}, {}
        for item in step(streams[stage]):
            if isinstance(item, tuple):
                transport.run(stage, item, inbox, outbox)
            elif isinstance(item, F):
                got = inbox.pop(("act", item.mb, stage)) if stage else (item.mb,)
                values[stage][item] = outbox["act", item.mb, stage + 1] = (*got, stage)
            else:
                own = values[stage][F(item.mb)]
                got = inbox.pop(("grad", item.mb, stage)) if stage < last else own
                values[stage][item] = outbox["grad", item.mb, stage - 1] = (*got, -stage)

    threads = [threading.Thread(target=work, args=(s,), daemon=True) for s in range(len(streams))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0))
    return None if any(thread.is_alive() for thread in threads) else values


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 2), (3, 1)])
def test_sends_that_block_until_received_finish(name, stages, microbatches):
    """Both neighbours never wait in a send: bugs.md row 55."""
    values = run_threads(plan(name, stages, microbatches), batches, seconds=20)
    assert values is not None
    for stage in range(stages):
        for mb in range(microbatches):
            down = (mb, *range(stages))
            assert values[stage][F(mb)] == down[: stage + 2]
            assert values[stage][B(mb)] == (*down, *(-s for s in range(stages - 1, stage - 1, -1)))


def test_the_blocking_double_catches_one_message_at_a_time():
    """The double can fail: 1F1B's messages posted singly hang in a send on both stages."""

    def single(ops):
        return [(op,) if isinstance(op, Send | Recv) else op for op in ops]

    assert run_threads(plan("1f1b", 2, 4), single, seconds=0.5) is None


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
    """64 stages x 1024 microbatches: about 390,000 ops in well under 10 s."""
    start = time.process_time()
    streams = plan.__wrapped__("1f1b", 64, 1024)
    assert time.process_time() - start < 10
    assert sum(map(len, streams)) == 2 * 64 * 1024 + 4 * 63 * 1024


def test_checking_ten_times_the_ops_takes_about_ten_times_as_long():
    """Growth by 16 costs far less than the 256 of a quadratic checker."""

    def seconds(microbatches):
        start = time.process_time()
        plan.__wrapped__("1f1b", 8, microbatches)
        return time.process_time() - start

    seconds(8)
    assert seconds(1024) < 60 * max(min(seconds(64) for _ in range(3)), 0.005)
