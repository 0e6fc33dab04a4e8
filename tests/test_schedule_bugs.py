"""Faults of other systems' pipelines, each with what is right instead (bugs.md rows 37, 51-58)."""

from itertools import pairwise, product

import pytest
import torch
import toys
from properties import small, train
from test_p2p import transport
from test_pipeline import VALUES, two_tensor_model

from mfun.config import ConfigError
from mfun.mesh import Mesh
from mfun.pipeline import mailbox
from mfun.schedule import SCHEDULES, B, F, I, Recv, Send, Sizes, W, batches, plan
from mfun.train.plan import plan as plan_train
from mfun.verify import run


@pytest.mark.parametrize("schedule", ["zb-h2", "zb-interleaved chunks=2 layers=4", "dualpipev"])
def test_row_37_a_deferred_weight_gradient_is_in_the_reduction(schedule):
    """Megatron-LM#1012: the embedding's deferred weight gradient came after its reduction.

    Tied embedding, 2 stages, 4 microbatches, W deferred: every gradient equals one device's.
    """
    sizes = "pp=2 layers=4 tied=true microbatches=4 global_batch=4"
    train(f"{sizes} parallel.schedule={schedule}").check()


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_row_51_fewer_microbatches_than_stages(name):
    """Primus#1003: no min(warm-up, microbatches), so a crash.

    pp 1-8, v 1-4, mb 1-9: each forward once, before its whole backward or its I, and that its W.
    """
    row = SCHEDULES[name]
    chunks = [row.chunks] if row.chunks else [1, 2, 3, 4]
    for p, v, m in product(range(1, 9), chunks, range(1, 10)):
        if name == "none" and p > 1:
            continue
        sizes = Sizes(p, m, v)
        place = row.place(sizes)
        for stage in range(p):
            at = {op: position for position, op in enumerate(row.ops(stage, sizes))}
            expected = 0
            for chunk in range(v):
                for mb in place.microbatches(chunk, m):
                    whole = B(mb, chunk) in at
                    ops = (F, B) if whole else (F, I, W)
                    steps = [at[kind(mb, chunk)] for kind in ops]
                    assert all(a < b for a, b in pairwise(steps))
                    expected += len(steps)
            assert len(at) == expected == len(list(row.ops(stage, sizes)))


@pytest.mark.parametrize("microbatches", [1, 3, 5])
def test_row_52_interleaved_needs_no_multiple_of_the_stages(microbatches):
    """pytorch#129597, RL#1126: microbatches must be a multiple of the stages, or a late failure."""
    sizes = f"pp=2 layers=4 chunks=2 microbatches={microbatches} global_batch={microbatches}"
    train(f"{sizes} parallel.schedule=interleaved").check()


def test_row_52_what_cannot_run_is_refused_with_the_configuration():
    """A group below the stages is named, with all the numbers, when the configuration is built."""
    sizes = "pp=4 layers=8 chunks=2 microbatches=8 global_batch=8 microbatch_group=3"
    with pytest.raises(ConfigError, match="group is 3, but with 4 stages and 2 chunks"):
        small(f"{sizes} parallel.schedule=interleaved")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "interleaved chunks=2 layers=6"])
def test_row_53_microbatches_of_two_sizes(schedule):
    """pytorch#126600: receive buffers of the first microbatch's size were used again.

    3 stages, 8 sequences as 3, 3 and 2: equal to one device.
    """
    train(f"pp=3 layers=3 global_batch=8 microbatches=3 parallel.schedule={schedule}").check()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_row_53_sequence_lengths_in_turn(schedule):
    """Lengths 16 and 12 in turn over 3 stages: d/da and d/db of the toy model by hand."""
    rows = [tuple(float(i + m) for i in range(12 if m % 2 else 16)) for m in range(4)]
    data = [[(row, (1,) * len(row)) for row in rows]]
    result = toys.run(
        two_tensor_model(), [1, 1, 1], data, mesh=Mesh(pp=3), schedule=schedule, params=VALUES
    )
    n, total = sum(map(len, rows)), sum(map(sum, rows))
    assert result.grad("a").item() == pytest.approx((5 * total + 12 * n) / n, rel=1e-14)
    assert result.grad("b").item() == pytest.approx((3 * total + 2 * n) / n, rel=1e-14)


def two_tensors(rank, name, chunks, steps, size=6):
    """Send what a schedule sends, two tensors a message, step after step; how many came right."""
    way, right = transport(), 0
    for step in range(steps):
        for batch in batches(plan(name, 2, 4, chunks=chunks)[rank]):
            if not isinstance(batch, tuple):
                continue
            number = lambda op: 1000.0 * step + 10 * op.mb + op.to  # noqa: E731, B023
            bodies = {
                op: {"h": torch.full((size,), number(op)), "r": torch.full((5,), -number(op))}
                for op in batch
                if isinstance(op, Send)
            }
            way.post(batch, bodies, [0] * 4)
            for op in (op for op in batch if isinstance(op, Recv)):
                got = way.take(op)
                right += bool((got["h"] == number(op)).all() and (got["r"] == -number(op)).all())
    way.drain()
    return right


@pytest.mark.parametrize(
    ("name", "chunks", "messages"),
    [("1f1b", 1, 4), ("interleaved", 2, 12), ("dualpipev", 2, 8)],
)
def test_row_54_every_handle_of_a_batch_is_waited_for(pool, name, chunks, messages):
    """pytorch#152938: of several handles only the last was waited for, and gloo deadlocked.

    Two ranks on gloo, two tensors a boundary: 20 steps finish, each message whole.
    """
    assert pool.run(two_tensors, name, chunks, 20) == [20 * messages] * 2


@pytest.mark.parametrize(("name", "chunks", "messages"), [("1f1b", 1, 4), ("interleaved", 2, 12)])
def test_row_55_large_messages_do_not_block_both_neighbours(pool, name, chunks, messages):
    """pytorch#172668: activations of 8 MB, which no transport buffers, on two ranks of gloo."""
    assert pool.run(two_tensors, name, chunks, 1, 1 << 21) == [messages] * 2


def results(config, **office):
    """A configuration's gradients and losses by rank, over a transport of the mailbox."""
    layout = plan_train(config)
    letters = mailbox.Office(**office)
    worlds = mailbox.worlds(layout.mesh, letters)
    return mailbox.run([run.program(layout, world) for world in worlds], letters)


@pytest.mark.parametrize(
    "sizes",
    [
        "pp=2 layers=4 chunks=2 microbatches=4 global_batch=4 parallel.schedule=interleaved",
        "pp=4 layers=4 microbatches=8 global_batch=8 parallel.schedule=1f1b",
        "pp=2 layers=4 microbatches=4 global_batch=4 parallel.schedule=dualpipev",
    ],
)
@pytest.mark.parametrize("office", ["rendezvous", "late"])
def test_rows_55_and_56_blocking_and_late_transports_change_no_bit(sizes, office):
    """pytorch#172668: both neighbours wait in send. Megatron-LM#4047: a buffer is reused too early.

    Sends that block until received, and payloads copied only when taken: the run ends, in the same
    bits. (The schedules alone: test_sends_that_block_until_received_finish.)
    """
    for ours, theirs in zip(
        results(small(sizes)), results(small(sizes), **{office: True}), strict=True
    ):
        assert ours["losses"] == theirs["losses"]
        assert all(torch.equal(grad, theirs["grads"][path]) for path, grad in ours["grads"].items())


@pytest.mark.parametrize(
    ("layers", "stages", "schedule"),
    [
        *((layers, pp, "1f1b") for layers, pp in ((7, 2), (5, 4), (30, 4))),
        *((layers, 2, "interleaved chunks=2") for layers in (4, 5, 7)),
        *((layers, 2, "zbv") for layers in (5, 7)),
    ],
)
def test_row_57_no_layer_vanishes(layers, stages, schedule):
    """Megatron-LM#1304: 30 layers on 4 stages ran 28. Slices hold every block once, in order."""
    config = small(f"pp={stages} layers={layers} parallel.schedule={schedule}")
    made = plan_train(config).stages
    place = made[0].place
    names = [
        layer.name
        for virtual in range(place.depth)
        for layer in made[place.stage(virtual)].chunks[place.chunk(virtual)]
    ]
    whole = [layer.name for layer in plan_train(small(f"layers={layers}")).stages[0].chunks[0]]
    assert names == whole and len(whole) >= layers


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved chunks=2 layers=4", "zbv layers=4"])
def test_row_58_every_rank_has_the_loss(schedule):
    """nanotron#422, torchtitan#1232: the loss is on the last stage only, elsewhere it is -1."""
    config = small(f"pp=2 dp=2 layers=2 parallel.schedule={schedule}")
    want = run.reference_history(config).losses
    found = [result.losses for result in run.in_mailbox(plan_train(config))]
    assert len(found) == 4
    for losses in found:
        assert losses == pytest.approx(want, rel=1e-10)
