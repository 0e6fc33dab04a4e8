"""Properties of what is inserted into streams, for planted faults (tests/faults.py)."""

from __future__ import annotations

from collections.abc import Iterable

from mfun.schedule import (
    AnyOp,
    B,
    Extras,
    F,
    Gather,
    I,
    Offload,
    Recompute,
    Recv,
    Reduce,
    Release,
    Reload,
    ScheduleError,
    Send,
    W,
    check_extras,
    check_order,
    expand,
    with_gather,
    with_offload,
    with_recompute,
    with_reduce,
)
from mfun.schedule.collective_check import Names
from tests.properties import Broken, named, refused

ONE = frozenset({(0, 0)})
EACH = [{(0, 1)}, {(0, 0)}]
STEP, SHARDED = Extras(reduce=(ONE,)), Extras(gather=(ONE,))


def _same(what: str, ops: Iterable[AnyOp], want: str) -> None:
    if (have := " ".join(map(str, ops))) != want:
        raise Broken(f"{what}: {have}, not {want}")


@named
def transformed() -> None:
    """inserted ops stand where they stand when written by hand."""
    ops = list(expand([F(0), B(0)], [2]))
    apart = [F(0), F(1), I(0), I(1), W(0), W(1)]
    _same("layers", ops, "F0[0] F0[1] B0[1] B0[0]")
    _same("reductions", with_reduce(ops, EACH), "F0[0] F0[1] B0[1] Reduce0 B0[0] Reduce1")
    _same("split", with_reduce(apart, [ONE]), "F0 F1 I0 I1 W0 W1 Reduce0")
    _same(
        "windows", with_reduce(apart, [ONE], "microbatch"), "F0 F1 I0 I1 W0 Reduce0@0 W1 Reduce0@1"
    )
    joined = with_reduce(ops, EACH, joined=[1, 0])
    _same("joined", joined, "F0[0] F0[1] B0[1] B0[0] Reduce1 Reduce0")
    _same("unused", with_reduce([F(0), B(0)], [{(1, 0)}]), "F0 B0 Reduce0")
    _same(
        "gathers",
        with_gather(ops, EACH[::-1], 0),
        "Gather0 F0[0] Release0 Gather1 F0[1] B0[1] Release1 Gather0 B0[0] Release0",
    )
    _same(
        "prefetch",
        with_gather(expand([F(0)], [3]), [{(0, 0)}, {(0, 1)}, {(0, 2)}], 1),
        "Gather0 Gather1 F0[0] Release0 Gather2 F0[1] Release1 F0[2] Release2",
    )
    _same("recomputing", with_recompute([F(0), I(0), W(0)]), "F0 Recompute0 I0 W0")
    _same(
        "offloading",
        with_offload([F(0), F(1), F(2), B(0), B(1), B(2)], 2),
        "F0 F1 Offload1 F2 B0 Reload1 B1 B2",
    )


@named
def bad_extras() -> None:
    """inserted ops that are early, late, missing, doubled or in another order are refused."""
    send, recv = Send(0, 1, "act", 1), Recv(0, 0, "grad", 1)
    wrong: dict[str, tuple[Extras, list[AnyOp]]] = {
        "an early reduction": (STEP, [F(0), I(0), Reduce(0), W(0)]),
        "a reduction twice": (STEP, [F(0), B(0), Reduce(0), Reduce(0)]),
        "a missing reduction": (STEP, [F(0), B(0)]),
        "a use of what is released": (SHARDED, [Gather(0), F(0), Release(0), B(0)]),
        "a gather twice": (SHARDED, [Gather(0), Gather(0), F(0), Release(0)]),
        "a missing recomputation": (Extras(recompute="full"), [F(0), B(0)]),
        "a late recomputation": (Extras(recompute="full"), [F(0), B(0), Recompute(0)]),
        "a use of what is away": (Extras(offload=1), [F(0), Offload(0), B(0), Reload(0)]),
        "too much on the device": (Extras(offload=1), [F(0), F(1), B(0), B(1)]),
        "layers out of order": (
            Extras(layers=(2,)),
            [F(0, 0, 0), F(1, 0, 0), F(0, 0, 1), F(1, 0, 1)],
        ),
        "a batch of messages that is parted": (STEP, [B(0), send, Reduce(0), recv]),
        "an op that nobody asked for": (Extras(), [Gather(0)]),
    }
    for what, (extras, ops) in wrong.items():
        refused(what, ScheduleError, lambda o=ops, e=extras: check_extras([o], [e]))
    apart = [[Reduce(0), Reduce(1)], [Reduce(1), Reduce(0)]]
    names: list[Names] = [{(Reduce, 0): "a", (Reduce, 1): "b"}] * 2
    refused("another order on one member", ScheduleError, lambda: check_order(apart, names))
