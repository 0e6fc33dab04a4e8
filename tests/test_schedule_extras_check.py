"""What `check_extras` refuses: every planted corruption, naming the op."""

import re
from itertools import pairwise

import pytest
from extras_cases import dress, dressed, forward_streams, holds
from hypothesis import assume, given
from hypothesis import strategies as st

from mfun.schedule import (
    B,
    F,
    I,
    Recv,
    ScheduleError,
    Send,
    W,
    check,
)
from mfun.schedule.collective_check import check_extras
from mfun.schedule.ops import Gather, Offload, Recompute, Reduce, Release, Reload
from mfun.schedule.transforms import Extras, with_extras

BOTH = (frozenset({(0, 0)}), frozenset({(0, 1)}))


def refused(ops, extras):
    """The message with which one stage's stream is refused."""
    with pytest.raises(ScheduleError) as error:
        check_extras([ops], [extras])
    return str(error.value)


# --- one by one ---


def test_an_early_reduction_is_refused_with_the_ops_around_it():
    """The op, what still adds to its bucket, and the neighbours, as `check` prints them."""
    ops = list(with_extras([F(0), B(0), F(1), B(1)], Extras(layers=(2,), reduce=BOTH)))
    at = ops.index(Reduce(1))
    check([ops], extras=[Extras(layers=(2,), reduce=BOTH)])
    ops[at - 1], ops[at] = ops[at], ops[at - 1]
    assert refused(ops, Extras(layers=(2,), reduce=BOTH)) == (
        "stage 0, op 6: Reduce1 runs before B1[1], which adds to bucket 1\n"
        "stage 0 | ... B0[0] F1[0] F1[1] >>Reduce1<< B1[1] B1[0] Reduce0"
    )


LAYERS = Extras(layers=(2,))
STEP = Extras(reduce=(frozenset({(0, 0)}),))
EACH = Extras(reduce=(frozenset({(0, 0)}),), window="microbatch")
SHARDED = Extras(gather=(frozenset({(0, 0)}),))
AGAIN = Extras(recompute="full")
AWAY = Extras(offload=1)
SEND, RECV = Send(0, 1, "act", 1), Recv(0, 0, "grad", 1)


@pytest.mark.parametrize(
    ("extras", "ops", "message"),
    [
        # layers
        (LAYERS, [F(0, 0, 1), F(0, 0, 0)], "op 0: F0[1] runs before F0[0]"),
        (LAYERS, [F(0, 0, 0), F(0, 0, 0)], "op 1: F0[0] runs twice"),
        (LAYERS, [F(0, 0, 0), F(0, 0, 1), F(0, 0, 1)], "op 2: F0[1] runs twice"),
        (LAYERS, [F(0, 0, 0), F(1, 0, 0)], "op 1: F1[0] runs before F0[1]"),
        (LAYERS, [F(0, 0, 0)], "the stream ends, but never runs F0[1]"),
        (LAYERS, [B(0, 0, 0)], "op 0: B0[0] runs before B0[1]"),
        (LAYERS, [F(0)], "op 0: F0 is not an op of this schedule: chunk 0 is cut in 2 layers"),
        (LAYERS, [F(0, 1, 0)], "F0.1[0] is not an op of this schedule: chunk 1 is cut in 0"),
        (LAYERS, [F(0, 0, 0), SEND], "op 1: Send(act0>1) runs before F0[1], in the middle"),
        (LAYERS, [W(0, 0, 1)], "op 0: W0[1] runs before I0[1]"),
        (LAYERS, [I(0, 0, 1), W(0, 0, 1), W(0, 0, 0)], "op 2: W0[0] runs before I0[0]"),
        (LAYERS, [I(0, 0, 1), W(0, 0, 0)], "op 1: W0[0] runs before W0[1]"),
        (LAYERS, [I(0, 0, 1), W(0, 0, 1), I(0, 0, 0)], "ends, but never runs W0[0]"),
        (LAYERS, [I(0, 0, 1), W(0, 0, 1), W(0, 0, 1)], "op 2: W0[1] runs twice"),
        (Extras(), [F(0, 0, 0)], "op 0: F0[0] is not an op of this schedule"),
        (Extras(), [Gather(0)], "op 0: Gather0 is not an op of this schedule"),
        (Extras(), [Offload(0)], "op 0: Offload0 is not an op of this schedule"),
        (STEP, [B(0), SEND, Reduce(0), RECV], "Reduce0 parts Send(act0>1) and Recv(grad0>0)"),
        # reductions
        (STEP, [B(0)], "the stream ends, but never runs Reduce0"),
        (STEP, [B(0), Reduce(0), Reduce(0)], "op 2: Reduce0 runs twice: it did so at op 1"),
        (STEP, [I(0), Reduce(0), W(0)], "op 1: Reduce0 runs before W0, which adds to bucket 0"),
        (STEP, [W(0), Reduce(0), I(1)], "op 1: Reduce0 runs before I1, which adds to bucket 0"),
        (STEP, [B(0), Reduce(1)], "op 1: Reduce1 is not an op of this schedule"),
        (STEP, [B(0), Reduce(0, 0)], "op 1: Reduce0@0 is not an op of this schedule"),
        (EACH, [B(0), Reduce(0)], "op 1: Reduce0 is not an op of this schedule"),
        (EACH, [B(0), Reduce(0, 0), B(1)], "the stream ends, but never runs Reduce0@1"),
        (EACH, [I(0), W(0), I(1), Reduce(0, 1)], "the stream ends, but never runs Reduce0@0"),
        (EACH, [I(1), Reduce(0, 1), W(1)], "op 1: Reduce0@1 runs before W1"),
        # gathers
        (SHARDED, [F(0)], "op 0: F0 runs before Gather0, whose parameters it uses"),
        (SHARDED, [Recompute(0)], "op 0: Recompute0"),
        (SHARDED, [Gather(0), Gather(0)], "op 1: Gather0 runs twice: at op 0 too"),
        (SHARDED, [Gather(0), Release(0), Release(0)], "op 2: Release0 gives up what is not"),
        (SHARDED, [Gather(0), F(0)], "the stream ends, but never runs Release0"),
        (SHARDED, [Gather(0), F(0), Release(0), B(0)], "B0 uses bucket 0, which Release0 (op 2)"),
        (SHARDED, [Gather(1)], "op 0: Gather1 is not an op of this schedule"),
        # recomputing
        (AGAIN, [F(0), B(0)], "op 1: B0 runs before Recompute0"),
        (AGAIN, [Recompute(0)], "op 0: Recompute0 runs before F0, or after its backward"),
        (AGAIN, [F(0), Recompute(0), Recompute(0)], "op 2: Recompute0 runs twice"),
        (AGAIN, [F(0), Recompute(0), I(0), Recompute(0)], "op 3: Recompute0 runs before F0, or"),
        (
            Extras(layers=(2,), recompute=1),
            [F(0, 0, 0), F(0, 0, 1), Recompute(0, 0, 1)],
            "op 2: Recompute0[1] is not an op of this schedule",
        ),
        # offloading
        (AWAY, [F(0), F(1), B(0)], "op 1: F1 makes 2 on the device, above the depth of 1"),
        (AWAY, [F(0), Offload(0), B(0)], "op 2: B0 runs before Reload0: Offload0 (op 1) took"),
        (AWAY, [F(0), Offload(0), Offload(0)], "op 2: Offload0 runs twice"),
        (AWAY, [F(0), Offload(0), F(1), Reload(0), B(0)], "op 3: Reload0 makes 2 on the device"),
        (AWAY, [F(0), I(0), Offload(0)], "op 2: Offload0 runs before F0, or after its backward"),
        (AWAY, [Offload(0)], "op 0: Offload0 runs before F0, or after its backward"),
        (AWAY, [F(0), Reload(0)], "op 1: Reload0 brings back what is not away"),
        (AWAY, [F(0), Offload(0)], "the stream ends, but never runs Reload0"),
        (AWAY, [F(0), B(0), F(1), I(1), W(1), F(2), F(3)], "op 6: F3 makes 2 on the device"),
    ],
    ids=str,
)
def test_refusals_name_the_op(extras, ops, message):
    """Each rule, broken once; the op is marked in the excerpt."""
    text = refused(ops, extras)
    assert message in text
    at = re.match(r"stage 0, op (\d+)", text)
    assert at is None or f">>{ops[int(at[1])]}<<" in text


def test_check_takes_extras_and_refuses_what_it_was_not_told():
    """The schedule's own rules hold with them; without them an inserted op is foreign."""
    ops = list(with_extras([F(0), B(0), F(1), B(1)], STEP))
    check([ops], extras=[STEP])
    with pytest.raises(ScheduleError, match="stage 0, op 4: Reduce0 is not an op of this schedule"):
        check([ops])
    with pytest.raises(ScheduleError, match=r"F0\[1\] is of one layer, but nothing was said of"):
        check([list(with_extras([F(0), B(0)], LAYERS))])
    with pytest.raises(ScheduleError, match="op 0: B0 runs before F0"):
        check([[B(0), F(0), Reduce(0)]], extras=[STEP])


# --- every schedule ---


def named(op):
    """What a message about an op has to contain, as a pattern."""
    if isinstance(op, Gather | Release):
        return rf"(Gather|Release){op.bucket}\b"
    if isinstance(op, Offload | Reload):
        at = repr(op).removeprefix(type(op).__name__)
        return rf"(Offload|Reload){re.escape(at)}\b|on the device"
    return re.escape(repr(op))


def uses(op, other, extras):
    """Whether an inserted op is for another op of its stream."""
    if isinstance(op, Reduce):
        return (
            isinstance(other, B | I | W)
            and holds(extras.reduce[op.bucket], other)
            and op.window in (None, other.mb)
        )
    if isinstance(op, Gather | Release):
        return isinstance(other, F | B | I | Recompute) and holds(extras.gather[op.bucket], other)
    kinds = (F,) if isinstance(op, Offload) else (B, I)
    return isinstance(other, kinds) and (op.mb, op.chunk) == (other.mb, other.chunk)


def moved(draw, ops, at, extras):
    """An op moved to the wrong side of one that it is for."""
    op, places = ops[at], range(len(ops))
    if isinstance(op, Gather | Recompute | Reload):  # later, behind its first use
        found = [i for i in places[at + 1 :] if uses(op, ops[i], extras)]
        if isinstance(op, Recompute):
            found = [i for i in found if op.layer == ops[i].layer]
        after = draw(st.integers(found[0], len(ops) - 1))
        return [*ops[:at], *ops[at + 1 : after + 1], op, *ops[after + 1 :]]
    found = [i for i in places[:at] if uses(op, ops[i], extras)]  # earlier, before its last
    assume(found)
    before = draw(st.integers(0, found[-1]))
    return [*ops[:before], op, *ops[before:at], *ops[at + 1 :]]


@given(st.data())
def test_every_corruption_of_what_was_inserted_is_refused(data):
    """One inserted op of one stage dropped, doubled, or moved past an op that it is for."""
    _, streams, asked = data.draw(dressed())
    full = dress(streams, asked)
    places = [
        (stage, at)
        for stage, ops in enumerate(full)
        for at, op in enumerate(ops)
        if isinstance(op, Reduce | Gather | Release | Recompute | Offload | Reload)
    ]
    assume(places)
    stage, at = data.draw(st.sampled_from(places))
    ops, op = full[stage], full[stage][at]
    how = data.draw(st.sampled_from(["dropped", "doubled", "moved"]))
    if how == "dropped":
        full[stage] = [*ops[:at], *ops[at + 1 :]]
    elif how == "doubled":
        full[stage] = [*ops[: at + 1], *ops[at:]]
    else:
        full[stage] = moved(data.draw, ops, at, asked[stage])
    with pytest.raises(ScheduleError) as error:
        check_extras(full, asked)
    message = str(error.value).splitlines()[0]
    assert message.startswith(f"stage {stage}")
    assert re.search(named(op), message), (op, message)


@given(st.data())
def test_layers_in_the_wrong_order_are_refused(data):
    """Two layers of a chunk's op swapped, one dropped, one doubled."""
    _, streams, asked = data.draw(dressed())
    full = dress(streams, [Extras(layers=one.layers) for one in asked])
    stage = data.draw(st.sampled_from(range(len(full))))
    ops, bare = full[stage], Extras(layers=asked[stage].layers)
    places = [
        at
        for at, (op, after) in enumerate(pairwise(ops))
        if isinstance(op, F | B | I | W)
        and type(op) is type(after)
        and (op.mb, op.chunk) == (after.mb, after.chunk)
    ]
    assume(places)
    at = data.draw(st.sampled_from(places))
    wrong = data.draw(
        st.sampled_from([(ops[at + 1], ops[at]), (ops[at + 1],), (ops[at], ops[at], ops[at + 1])])
    )
    message = refused([*ops[:at], *wrong, *ops[at + 2 :]], bare).splitlines()[0]
    assert repr(ops[at]) in message or repr(ops[at + 1]) in message


@given(dressed())
def test_evaluation_has_gathers_only(case):
    """Forwards alone: nothing is reduced, kept or run again."""
    place, streams, asked = case
    forward = forward_streams(place, streams)
    full = [list(with_extras(ops, one)) for ops, one in zip(forward, asked, strict=True)]
    check(full, forward_only=True, place=place, extras=asked)
    kinds = {type(op) for ops in full for op in ops}
    assert kinds <= {F, Send, Recv, Gather, Release}
