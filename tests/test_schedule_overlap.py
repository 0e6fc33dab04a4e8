"""Reductions during the backward: `parallel.overlap` moves them, and changes no bit."""

from __future__ import annotations

import pytest
import torch

from mfun.comm import ProcessWorld, distribute, finish
from mfun.grads import needed_groups
from mfun.pipeline import executor
from mfun.pipeline.flight import Flight
from mfun.schedule import ScheduleError, check
from mfun.schedule.ops import B, I, Reduce, W
from mfun.train.extras import bucket_layers, bucket_size, extras
from mfun.train.plan import Plan, plan, streams
from mfun.verify.compare import RankResult, judge
from mfun.verify.run import in_mailbox, program, reference_history
from tests.pool import Pool
from tests.properties import small
from tests.threads import in_threads

SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "gpipe")
COUNTS = (1, 3, 5)


def settings(name: str, count: int, more: str = "") -> str:
    """Uneven layers, a tied embedding, dropout, unequal microbatches, small buckets."""
    layers = "2,1" if name in ("1f1b", "zb-h1", "gpipe", "dualpipe") else "2,1,0,1"
    total = sum(map(int, layers.split(",")))
    return (
        f"pp=2 layers={total} parallel.layers_per_stage={layers} parallel.schedule={name} "
        f"microbatches={count} tied=true dropout=0.1 bucket_size=200 {more}"
    )


def both(text: str) -> tuple[Plan, Plan]:
    """The plan without and with overlap; only the latter reduces in its streams."""
    off, on = (plan(small(f"{text} parallel.overlap={word}")) for word in ("false", "true"))
    assert not any(isinstance(op, Reduce) for ops in off.streams for op in ops)
    assert all(any(isinstance(op, Reduce) for op in ops) for ops in on.streams)
    return off, on


def assert_same_bits(want: list[RankResult], have: list[RankResult]) -> None:
    """Every loss, norm, gradient and parameter of every rank."""
    for a, b in zip(want, have, strict=True):
        assert (a.losses, a.norms) == (b.losses, b.norms)
        assert a.grads.keys() == b.grads.keys()
        for kind in ("grads", "params"):
            one, other = getattr(a, kind), getattr(b, kind)
            assert all(torch.equal(one[path], other[path]) for path in one)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_overlap_changes_no_bit_in_the_mailbox(name: str, count: int) -> None:
    """With data parallel ranks, and right: the reference's numbers."""
    off, on = both(settings(name, count, f"dp=2 global_batch={2 * count + 2}"))
    want = in_mailbox(off)
    assert_same_bits(want, in_mailbox(on))
    report = judge(off, want, reference_history(off.config))
    assert report.ok, report.notes


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_overlap_changes_no_bit_on_strict_ranks(name: str) -> None:
    """Sums that are there at their wait and no sooner; tensor and data parallel ranks."""
    off, on = both(settings(name, 3, "tp=2 dp=2 sequence_parallel=true global_batch=6"))
    assert_same_bits(in_threads(off), in_threads(on))


def on_rank(rank: int, text: str) -> RankResult:
    """Train as one process."""
    layout = plan(small(text))
    groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    result = finish(program(layout, ProcessWorld(groups)))
    return RankResult(coords=layout.mesh.coords(rank), **result)


@pytest.mark.parametrize(
    ("name", "count"), [("1f1b", 5), ("interleaved", 3), ("zb-h1", 1), ("zbv", 3), ("dualpipe", 3)]
)
def test_overlap_changes_no_bit_on_processes(pool: Pool, name: str, count: int) -> None:
    """Over gloo, beside real messages and the embedding's sum over stages."""
    text = settings(name, count, f"dp=2 global_batch={2 * count}")
    runs = [
        pool.run(on_rank, f"{text} parallel.overlap={word}", world=4) for word in ("false", "true")
    ]
    assert_same_bits(*runs)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_bucket_is_reduced_right_after_its_last_gradient(name: str) -> None:
    """By hand from the stream: the last backward on a layer that holds one of its leaves."""
    _, on = both(settings(name, 3, "dp=2 global_batch=6"))
    for stage, ops in zip(on.stages, on.streams, strict=True):
        grads = on.buffers(stage.index)
        done = {op.bucket: at for at, op in enumerate(ops) if isinstance(op, Reduce)}
        assert done.keys() == set(range(len(grads.buckets)))
        for bucket, at in done.items():
            paths = {span.path for span in grads.buckets[bucket].spans}
            adding = [
                i
                for i, op in enumerate(ops)
                if isinstance(op, (B, I, W))
                and op.layer is not None
                and paths & set(leaves(stage.chunks[op.chunk][op.layer].specs))
            ]
            between = ops[adding[-1] + 1 : at]
            tied = any(on.table[path].joined for path in paths)
            assert adding[-1] < at
            assert tied or all(isinstance(op, Reduce) for op in between)


def leaves(specs: dict, prefix: str = "") -> list[str]:
    """Paths of a nested dict."""
    out = []
    for key, value in specs.items():
        inner = isinstance(value, dict)
        out += leaves(value, f"{prefix}{key}.") if inner else [f"{prefix}{key}"]
    return out


def test_reductions_run_before_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on their way while layers are still to come, which is the point."""
    _, on = both(settings("1f1b", 3, "dp=2 global_batch=6"))
    ran: list[str] = []
    start, backward = executor.start_reduce, Flight.backward
    monkeypatch.setattr(
        executor,
        "start_reduce",
        lambda world, grads, i: (ran.append(f"R{world.stage}"), start(world, grads, i))[1],
    )
    monkeypatch.setattr(Flight, "backward", lambda *a, **k: (ran.append("B"), backward(*a, **k))[1])
    in_mailbox(on)
    assert "B" in ran[ran.index("R0") :]


def test_a_reduction_too_early_is_refused() -> None:
    """By `check`, naming the op that still adds to the bucket."""
    _, on = both(settings("zb-h1", 3, "dp=2 global_batch=6"))
    asked = [extras(on.config, stage, on.buffers(stage.index)) for stage in on.stages]
    moved = [list(ops) for ops in on.streams]
    at = next(i for i, op in enumerate(moved[0]) if isinstance(op, Reduce))
    moved[0].insert(at - 1, moved[0].pop(at))
    with pytest.raises(ScheduleError, match=r"Reduce\d+ runs before .*, which adds to bucket"):
        check(moved, extras=asked)


def test_a_missing_reduction_is_refused() -> None:
    """By `check`, naming it."""
    _, on = both(settings("1f1b", 3, "dp=2 global_batch=6"))
    asked = [extras(on.config, stage, on.buffers(stage.index)) for stage in on.stages]
    fewer = [[op for op in ops if op != Reduce(1)] for ops in on.streams]
    with pytest.raises(ScheduleError, match="never runs Reduce1"):
        check(fewer, extras=asked)


def test_buckets_name_every_layer_that_holds_one_of_their_leaves() -> None:
    """Against the specs; a tied leaf is in two layers of one stage."""
    layout = plan(small("layers=2 tied=true bucket_size=100"))
    stage, grads = layout.stages[0], layout.buffers(0)
    places = bucket_layers(stage, grads.buckets)
    for bucket, members in zip(grads.buckets, places, strict=True):
        paths = {span.path for span in bucket.spans}
        want = {(0, i) for i, x in enumerate(stage.chunks[0]) if paths & set(leaves(x.specs))}
        assert members == want and want
    assert any({(0, 0), (0, 3)} <= members for members in places)  # the embedding's table


@pytest.mark.parametrize(
    ("text", "stage", "size"),
    [
        ("pp=2 layers=2", 0, None),
        ("pp=2 layers=2 parallel.overlap=true", 0, 40_000_000),
        ("pp=2 layers=2 parallel.overlap=true", 1, None),
        ("pp=2 layers=2 parallel.overlap=true bucket_size=7", 1, 7),
        ("pp=2 layers=2 bucket_size=7", 0, 7),
    ],
)
def test_bucket_sizes(text: str, stage: int, size: int | None) -> None:
    """One bucket unless something is gained by more, or the configuration says so."""
    assert bucket_size(small(text), stage) == size


def test_evaluation_has_no_reductions() -> None:
    """A forward-only stream is the schedule's own."""
    config = small("pp=2 layers=2 parallel.overlap=true")
    ops = [op for stream in streams(config, 2, forward_only=True) for op in stream]
    assert ops and not any(isinstance(op, Reduce) for op in ops)
