"""What is inserted into streams: written by hand, and as properties of every schedule."""

from collections import Counter
from itertools import pairwise
from typing import Any, cast

import pytest
from extras_cases import dress, dressed, holds, text
from hypothesis import given

from mfun.schedule import (
    SCHEDULES,
    B,
    F,
    I,
    ScheduleError,
    Sizes,
    W,
    check,
    gives,
    plan,
    sends_first,
    simulate_time,
    split,
    whole,
    with_p2p,
)
from mfun.schedule.collective_check import check_extras
from mfun.schedule.gather import with_gather
from mfun.schedule.layers import bare, expand
from mfun.schedule.offload import with_offload
from mfun.schedule.ops import Gather, Offload, Recompute, Recv, Reduce, Release, Reload, Send
from mfun.schedule.transforms import Extras, with_recompute, with_reduce


def words(string):
    """A stream written over several lines, as one."""
    return " ".join(string.split())


# --- ops ---


def test_ops_print_short_and_compare_by_layer():
    """None is the whole chunk, and not any of its layers."""
    ops = [B(3, 1), B(3, 1, 2), Recompute(3, 1, 0), Reduce(2), Reduce(2, 3), Gather(0), Release(1)]
    assert text(ops) == "B3.1 B3.1[2] Recompute3.1[0] Reduce2 Reduce2@3 Gather0 Release1"
    assert text([Offload(1), Reload(1, 1)]) == "Offload1 Reload1.1"
    assert len({B(0), B(0, 0), B(0, 0, 0), B(0, 0, 1), F(0, 0, 1)}) == 4


# --- 1F1B, the last of two stages, 3 microbatches, 2 layers; with messages ---

LAST = plan("1f1b", 2, 3)[1]
EACH = [{(0, 1)}, {(0, 0)}]  # a bucket a layer, in backward order


def test_expand_1f1b():
    """Forwards ascend, backwards descend, messages stay around the whole."""
    assert text(expand(LAST, [2])) == words(
        """Recv(act0>1) F0[0] F0[1] B0[1] B0[0] Send(grad0>0)
        Recv(act1>1) F1[0] F1[1] B1[1] B1[0] Send(grad1>0)
        Recv(act2>1) F2[0] F2[1] B2[1] B2[0] Send(grad2>0)"""
    )


def test_reduce_1f1b():
    """Each bucket after its layer's last backward, ahead of the message that follows."""
    tail = text(with_reduce(expand(LAST, [2]), EACH)).split("Recv(act2>1) ")[1]
    assert tail == "F2[0] F2[1] B2[1] Reduce0 B2[0] Reduce1 Send(grad2>0)"
    each = text(with_reduce(LAST, EACH, "microbatch"))
    assert each == words(
        """Recv(act0>1) F0 B0 Reduce0@0 Reduce1@0 Send(grad0>0)
        Recv(act1>1) F1 B1 Reduce0@1 Reduce1@1 Send(grad1>0)
        Recv(act2>1) F2 B2 Reduce0@2 Reduce1@2 Send(grad2>0)"""
    )


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 4, 9])
def test_gradients_leave_before_weights_are_computed(p: int, m: int) -> None:
    """1F1B by hand: the last gradient's way to stage 0 is shorter by p - 1 weights' products.

    Source: own arithmetic; with F = I = W = 1 1F1B takes 3 (m + p - 1), and each of the p - 1
    stages that the last gradient passes sends it one unit earlier.
    """
    row, sizes = SCHEDULES["1f1b"], Sizes(p, m)
    place = row.place(sizes)
    streams = [[*sends_first(row.ops(s, sizes), s, place)] for s in range(p)]
    whole = Counter(type(op) for ops in streams for op in ops)
    assert whole == Counter({F: p * m, B: m, I: (p - 1) * m, W: (p - 1) * m})
    sent = check(with_p2p(streams, place), place=place)
    for ops in sent[1:]:
        after = [b for a, b in pairwise(ops) if isinstance(a, I)]
        assert len(after) == m and all(isinstance(op, Send) for op in after)
    assert simulate_time(sent, place=place).makespan == 3 * (m + p - 1) - (p - 1)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
def test_only_what_is_sent_to_another_stage_is_split(name: str) -> None:
    """In every schedule: a backward that stays whole sends nothing, and none is lost."""
    row = SCHEDULES[name]
    sizes = Sizes(3, 6, row.chunks or 2)
    place = row.place(sizes)
    for stage in range(3):
        ops = [*row.ops(stage, sizes)]
        have = [*sends_first(ops, stage, place)]
        assert [*whole(have)] == [*whole(ops)]
        for op in have:
            if isinstance(op, B):
                to = gives(op, place.virtual(stage, op.chunk), place)
                assert to is None or place.stage(to[2]) == stage


def test_reduce_of_a_leaf_tied_within_a_stage():
    """A bucket that two layers share waits for the last of them: bugs.md row 37's order."""
    ops = expand([F(0), B(0)], [3])
    assert text(with_reduce(ops, [{(0, 0), (0, 2)}, {(0, 1)}])) == (
        "F0[0] F0[1] F0[2] B0[2] B0[1] Reduce1 B0[0] Reduce0"
    )


def test_joined_buckets_keep_the_common_order():
    """A joined bucket waits for those before it; the stage's own do not."""
    ops = list(expand([F(0), B(0)], [2]))
    buckets = [{(0, 1)}, {(0, 0)}, {(0, 1)}]
    assert text(with_reduce(ops, buckets, joined=[1, 0])) == (
        "F0[0] F0[1] B0[1] Reduce2 B0[0] Reduce1 Reduce0"
    )
    with pytest.raises(ScheduleError, match=r"buckets \[1, 0\] are joined"):
        list(with_reduce(ops, buckets, "microbatch", joined=[1, 0]))


def test_a_bucket_without_gradients_is_reduced_last():
    """Others of its group may have some: half of DualPipe's microbatches go the other way."""
    assert text(with_reduce([F(0), B(0)], [{(1, 0)}, {(0, 0)}])) == "F0 B0 Reduce0 Reduce1"
    assert text(with_reduce([F(0), F(1)], [{(0, 0)}])) == "F0 F1"


def test_gather_1f1b():
    """Without prefetch a layer at a time; what the next op uses too is kept."""
    stream = with_gather(expand(LAST, [2]), [{(0, 0)}, {(0, 1)}], prefetch=0)
    assert text(stream) == words(
        """Recv(act0>1) Gather0 F0[0] Release0 Gather1 F0[1] B0[1] Release1 Gather0 B0[0]
        Send(grad0>0) Recv(act1>1) F1[0] Release0 Gather1 F1[1] B1[1] Release1 Gather0 B1[0]
        Send(grad1>0) Recv(act2>1) F2[0] Release0 Gather1 F2[1] B2[1] Release1 Gather0 B2[0]
        Release0 Send(grad2>0)"""
    )


def test_gather_looks_ahead():
    """Three layers, one ahead: gathered an op before its use, given up right after it."""
    stream = with_gather(expand([F(0), B(0)], [3]), [{(0, 0)}, {(0, 1)}, {(0, 2)}], prefetch=1)
    assert text(stream) == words(
        """Gather0 Gather1 F0[0] Release0 Gather2 F0[1] F0[2] B0[2] Release2
        Gather0 B0[1] Release1 B0[0] Release0"""
    )


# --- interleaved, the first of two stages, 4 microbatches, 2 chunks ---

FIRST = [op for op in plan("interleaved", 2, 4, chunks=2)[0] if not isinstance(op, Send | Recv)]


def test_interleaved_by_hand():
    """Reductions at the ends of the chunks; a gather lasts as long as its chunk runs."""
    assert text(FIRST) == "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    assert text(with_reduce(FIRST, [{(1, 0)}, {(0, 0)}])).endswith(
        "B1 B2.1 B3.1 Reduce0 B2 B3 Reduce1"
    )
    assert text(with_gather(FIRST, [{(0, 0)}, {(1, 0)}], prefetch=0)) == words(
        """Gather0 F0 F1 Release0 Gather1 F0.1 F1.1 Release1 Gather0 F2 Release0 Gather1 B0.1
        Release1 Gather0 F3 Release0 Gather1 B1.1 F2.1 Release1 Gather0 B0 Release0 Gather1 F3.1
        Release1 Gather0 B1 Release0 Gather1 B2.1 B3.1 Release1 Gather0 B2 B3 Release0"""
    )
    assert Counter(map(type, with_gather(FIRST, [{(0, 0)}, {(1, 0)}], prefetch=1)))[Gather] == 2


def test_offload_interleaved():
    """At most 3 on the device: F1.1 drives out 1, F2 0, the return of 0 drives out 3, of 1 2."""
    assert text(with_offload(FIRST, depth=3)) == words(
        """F0 Offload0 F1 Offload1 F0.1 F1.1 F2 Offload2 B0.1 F3 Offload3 B1.1 F2.1 Reload0 B0
        F3.1 Reload1 B1 B2.1 B3.1 Reload2 B2 Reload3 B3"""
    )


def test_offload_refuses_what_cannot_be():
    """Between I and W nothing leaves; B at once is never offloaded."""
    assert text(with_offload([F(0), B(0), F(1), B(1)], depth=1)) == "F0 B0 F1 B1"
    assert text(with_offload([F(0), F(1)], depth=1)) == "F0 F1"
    with pytest.raises(ScheduleError, match=r"depth is 1, but at F1 \(op 2\).* keep 1 on the"):
        list(with_offload([F(0), I(0), F(1), W(0), I(1), W(1)], depth=1))
    with pytest.raises(ScheduleError, match="depth is 0"):
        list(with_offload([F(0)], depth=0))


# --- a zero-bubble order with I and W ---

ZERO = [F(0), F(1), I(0), F(2), I(1), W(0), I(2), W(1), W(2)]


def test_zero_bubble_by_hand():
    """Complete after the last W; W uses no parameters; the forward runs again before I."""
    assert list(split([F(0), F(1), B(0), F(2), B(1), B(2)], delay=1)) == ZERO
    assert text(with_reduce(expand(ZERO, [2]), EACH)).endswith("W2[1] Reduce0 W2[0] Reduce1")
    assert text(with_reduce(ZERO, [{(0, 0)}], "microbatch")) == (
        "F0 F1 I0 F2 I1 W0 Reduce0@0 I2 W1 Reduce0@1 W2 Reduce0@2"
    )
    assert text(with_gather(ZERO, [{(0, 0)}], 0)) == ("Gather0 F0 F1 I0 F2 I1 W0 I2 Release0 W1 W2")
    assert text(with_recompute(ZERO)) == (
        "F0 F1 Recompute0 I0 F2 Recompute1 I1 W0 Recompute2 I2 W1 W2"
    )


def test_i_after_the_last_w_of_its_layer_completes_too():
    """Parameters that are not matrices get their gradients in I."""
    ops = [F(0), F(1), I(0), W(0), F(2, 1), I(1), W(1)]
    assert text(with_reduce([op for op in ops if op != W(1)], [{(0, 0)}])).endswith("I1 Reduce0")


def test_recompute_by_layers():
    """The first layer of each chunk, or the layers named; whole chunks cannot be cut."""
    ops = list(expand([F(0), B(0)], [2]))
    assert text(with_recompute(ops, 1)) == "F0[0] F0[1] B0[1] Recompute0[0] B0[0]"
    assert text(with_recompute(ops, {(0, 1)})) == "F0[0] F0[1] Recompute0[1] B0[1] B0[0]"
    assert text(expand(with_recompute([F(0), B(0)]), [2])) == (
        "F0[0] F0[1] Recompute0[0] Recompute0[1] B0[1] B0[0]"
    )
    with pytest.raises(ScheduleError, match="B0 is on a whole chunk: `expand` it"):
        list(with_recompute([F(0), B(0)], 1))
    with pytest.raises(ScheduleError, match="B0 is on a whole chunk: `expand` it"):
        list(with_recompute([F(0), B(0)], {(0, 1)}))
    assert list(with_recompute([F(0), B(0)], {(1, 1)})) == [F(0), B(0)]


def test_splitting_after_expanding_keeps_layers():
    """Layer by layer, which is one more order that the checker takes."""
    ops = list(split(expand([F(0), B(0)], [2])))
    assert text(ops) == "F0[0] F0[1] I0[1] W0[1] I0[0] W0[0]"
    assert list(bare(ops, [2])) == [F(0), I(0), W(0)]
    check_extras([ops], [Extras(layers=(2,))])


def test_bad_numbers_are_refused_by_name():
    """A chunk or layer that there is not, and a negative prefetch."""
    one, half = frozenset({(0, 2)}), cast(Any, "half")
    for wrong, message in (
        (lambda: Extras(layers=(2,), reduce=(one,)), "reduce bucket 0 names layer 2 of chunk 0"),
        (lambda: Extras(layers=(2,), recompute=one), "recompute names layer 2 of chunk 0, .* 2"),
        (
            lambda: Extras(recompute=half),
            'recompute is "half", but the only word is "full"',
        ),
        (lambda: Extras(reduce=(one,), joined=((1, "a"),)), "joined are buckets .1., .* are 1"),
        (lambda: Extras(reduce=(one,), window="microbatch", joined=((0, "a"),)), "once a step"),
    ):
        with pytest.raises(ScheduleError, match=message):
            wrong()
    with pytest.raises(ScheduleError, match=r"F0\.1: chunk 1, but layers are given of 1"):
        list(expand([F(0, 1)], [2]))
    with pytest.raises(ScheduleError, match="prefetch is -1"):
        list(with_gather([F(0)], [], -1))


# --- every schedule ---

GATHERS = (Gather, Release)


@given(dressed())
def test_transformers_compose_and_are_undone(case):
    """What is inserted is accepted, and without it the stream is what it was."""
    place, streams, asked = case
    full = dress(streams, asked)
    check(full, place=place, extras=asked)
    plain = [tuple(bare(ops, one.layers)) for ops, one in zip(full, asked, strict=True)]
    assert plain == list(streams)


@given(dressed())
def test_transformers_compose_in_other_orders(case):
    """Gathers first, then recomputing, offloading and reductions; layers at any time."""
    _, streams, asked = case
    dress(streams, asked)
    for ops, one in zip(streams, asked, strict=True):
        ops = with_gather(expand(ops, one.layers), one.gather, one.prefetch)
        if one.reduce:
            ops = with_reduce(ops, one.reduce, one.window)
        if one.which is not None:
            ops = with_recompute(ops, one.which)
        if one.offload is not None:
            ops = with_offload(ops, one.offload)
        check_extras([list(ops)], [one])


@given(dressed())
def test_no_more_is_gathered_and_kept_than_asked_for(case):
    """Buckets: what an op uses and the prefetch; activations: the depth; nothing in vain."""
    _, streams, asked = case
    for ops, one in zip(dress(streams, asked), asked, strict=True):
        here, used, device = set(), set(), set()
        main = [op for op in ops if isinstance(op, F | B | I | W | Offload)]
        for op, after in pairwise(main):  # never what is used at once
            assert not isinstance(op, Offload) or (op.mb, op.chunk) != (after.mb, after.chunk)
        for op in ops:
            match op:
                case Gather(k):
                    here.add(k)
                    used.discard(k)
                case Release(k):
                    here.remove(k)
                    assert k in used
                case F() | B() | I() | Recompute():
                    needs = {k for k, b in enumerate(one.gather) if holds(b, op)}
                    assert needs <= here and (not needs or len(here) <= len(needs) + one.prefetch)
                    used |= needs
            match op:
                case F() | Reload():
                    device.add((op.mb, op.chunk))
                case Offload():
                    device.remove((op.mb, op.chunk))
                case B(_, _, layer) | W(_, _, layer) if not layer:
                    device.discard((op.mb, op.chunk))
            assert one.offload is None or len(device) <= one.offload


@given(dressed())
def test_nothing_is_gathered_again_that_is_used_next(case):
    """Without prefetch: one gather for each run of ops that use the bucket."""
    _, streams, asked = case
    for ops, one in zip(dress(streams, asked), asked, strict=True):
        alone = list(with_gather((op for op in ops if not isinstance(op, GATHERS)), one.gather, 0))
        for bucket, members in enumerate(one.gather):
            uses = [
                holds(members, op)
                for op in alone
                if isinstance(op, F | B | I | Recompute)
                and any(holds(other, op) for other in one.gather)
            ]
            runs = sum(now and not before for before, now in pairwise([False, *uses]))
            assert alone.count(Gather(bucket)) == runs == alone.count(Release(bucket))
