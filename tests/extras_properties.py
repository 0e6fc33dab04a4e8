"""Properties of what is inserted into streams, for planted faults (tests/faults.py)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from mfun.pipeline import mailbox
from mfun.pipeline.flight import Flight
from mfun.pipeline.offload import Shelf
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
from mfun.train.extras import extras, recomputed
from mfun.train.plan import plan as plan_run
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from tests.properties import Broken, named, refused, small

ONE = frozenset({(0, 0)})
EACH = [{(0, 1)}, {(0, 0)}]
STEP, SHARDED = Extras(reduce=(ONE,)), Extras(gather=(ONE,))


def _same(what: str, ops: Iterable[AnyOp | str], want: str) -> None:
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
    for what, (asked, ops) in wrong.items():
        refused(what, ScheduleError, lambda o=ops, e=asked: check_extras([o], [e]))
    apart = [[Reduce(0), Reduce(1)], [Reduce(1), Reduce(0)]]
    names: list[Names] = [{(Reduce, 0): "a", (Reduce, 1): "b"}] * 2
    refused("another order on one member", ScheduleError, lambda: check_order(apart, names))


# ---------------------------------------------------------------------- what configurations ask for


@named
def tied_are_named() -> None:
    """a bucket that is tied over stages is joined, under one name and in one order on all."""
    config = small("pp=2 layers=2 tied=true parallel.overlap=true bucket_size=100")
    layout = plan_run(config)
    asked = [extras(config, stage, layout.buffers(stage.index)) for stage in layout.stages]
    names = [[name for _, name in one.joined] for one in asked]
    if names != [["embed.tokens"]] * 2:
        raise Broken(f"joined are {names}")


def again(settings: str) -> list[str]:
    """The names of the layers that run again on one stage."""
    config = small(settings)
    (stage,) = plan_run(config).stages
    which = recomputed(config, stage)
    assert which is not None and which != "full"
    return [stage.chunks[chunk][i].name for chunk, i in sorted(which)]


@named
def first_blocks() -> None:
    """recompute=first counts blocks."""
    _same("the first", again("layers=2 recompute=first recompute_layers=1"), "blocks.0")


@named
def attention_halves() -> None:
    """recompute=selective is the attention half of every block."""
    _same("halves", again("layers=2 recompute=selective"), "blocks.0.attn blocks.1.attn")


@named
def parameters_stay() -> None:
    """only what a layer has made goes to the host."""
    shelf, w = Shelf(), torch.ones(2, requires_grad=True)
    with shelf.saving([w]):
        y = (3 * w * w).exp()
    moved = sum(x.numel() for x in shelf._bytes)
    if moved != 2 * y.nbytes:  # 3 w and the exponential
        raise Broken(f"{moved} bytes are moved, not {2 * y.nbytes}")


@named
def inputs_leave() -> None:
    """a layer's input has no memory on the device once it was offloaded."""
    layout = plan_run(small("layers=2 microbatches=1 global_batch=1"))
    world = mailbox.worlds(layout.mesh, plain=True)[0]
    trainer = Trainer(layout, world)
    state = trainer.init()
    run, layer = trainer.params.program(state.params), layout.stages[0].chunks[0][1]
    batch = rank_batches(layout.config, {"dp": 0, "cp": 0}, 0)[0]
    flight = Flight(trainer.buffers(), run.paths(), 1, leaves=True)
    flight.value = {"h": torch.randn(1, 6, 8, dtype=torch.float64)}
    gone: list[bool] = []
    weakref.finalize(flight.value["h"].untyped_storage(), gone.append, True)
    flight.forward(0, run, layer, batch, None)
    flight.move(Offload(0))
    if not gone:
        raise Broken("the input is still on the device")
