"""Recomputing by the stream: bitwise the same numbers, and the memory that the formula says."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mfun import rng, tree
from mfun.config import ConfigError
from mfun.models.gpt import gpt
from mfun.pipeline import executor, mailbox
from mfun.schedule.ops import AnyOp, Recompute
from mfun.train.extras import recomputed
from mfun.train.memory import live_activations
from mfun.train.plan import Plan, plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, reference_history
from tests.pool import Pool
from tests.properties import small
from tests.test_schedule_overlap import assert_same_bits, on_rank
from tests.threads import in_threads

WAYS = ("full", "first recompute_layers=1", "selective")
BASE = "pp=2 layers=5 microbatches=3 global_batch=4 dropout=0.1 tied=true"


def pair(text: str, way: str) -> tuple[Plan, Plan]:
    """Without and with; only the latter's streams recompute."""
    plain, again = plan(small(text)), plan(small(f"{text} recompute={way}"))
    assert not any(isinstance(op, Recompute) for ops in plain.streams for op in ops)
    assert all(any(isinstance(op, Recompute) for op in ops) for ops in again.streams)
    return plain, again


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "vmap"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "interleaved"])
def test_recomputing_changes_no_bit(name: str, way: str, plain: bool) -> None:
    """Dropout on, tied, split backwards; and right: the reference's numbers."""
    want, have = pair(f"{BASE} parallel.schedule={name}", way)
    results = in_mailbox(want, plain=plain)
    assert_same_bits(results, in_mailbox(have, plain=plain))
    report = judge(have, results, reference_history(have.config))
    assert report.ok, report.notes


@pytest.mark.parametrize("way", WAYS)
def test_recomputing_changes_no_bit_on_strict_ranks(way: str) -> None:
    """With the collectives of tensor parallelism run again, and reductions beside."""
    text = f"{BASE} tp=2 sequence_parallel=true parallel.overlap=true bucket_size=300"
    plain, again = (plan(small(t)) for t in (text, f"{text} recompute={way}"))
    assert_same_bits(in_threads(plain), in_threads(again))


@pytest.mark.parametrize("way", WAYS)
def test_recomputing_changes_no_bit_on_processes(pool: Pool, way: str) -> None:
    """Over gloo."""
    text = f"{BASE} dp=2 global_batch=8"
    runs = [pool.run(on_rank, one, world=4) for one in (text, f"{text} recompute={way}")]
    assert_same_bits(*runs)


def names(layout: Plan, stage: int) -> list[str]:
    """Of the layers that run again, in order."""
    own, which = layout.stages[stage], recomputed(layout.config, layout.stages[stage])
    assert which is not None and which != "full"
    return [own.chunks[chunk][i].name for chunk, i in sorted(which)]


def test_first_counts_blocks_of_each_chunk() -> None:
    """Not the embedding; a chunk with fewer has them all."""
    text = "pp=2 layers=5 parallel.schedule=interleaved parallel.layers_per_stage=2,2,1,0 "
    layout = plan(small(f"{text} recompute=first recompute_layers=2"))
    assert names(layout, 0) == ["blocks.0", "blocks.1", "blocks.4"]
    assert names(layout, 1) == ["blocks.2", "blocks.3"]


def test_selective_is_the_attention_half_of_every_block() -> None:
    """The halves are layers of their own; together they hold the block's parameters."""
    layout = plan(small("pp=2 layers=3 recompute=selective bias=all"))
    have = [name for stage in (0, 1) for name in names(layout, stage)]
    assert have == [f"blocks.{i}.attn" for i in range(3)]
    whole = plan(small("pp=2 layers=3 bias=all"))
    assert layout.specs == whole.specs


@pytest.mark.parametrize(
    "model", ["", "dropout=0.2 packed=true", "activation=swiglu norm=rmsnorm position=rotary"]
)
def test_a_block_is_its_parts(model: str) -> None:
    """Bit for bit, with dropout's keys."""
    config = small(f"layers=2 bias=all {model}")
    layer = gpt(config)[2]
    program = plan(config)
    world = mailbox.worlds(program.mesh, plain=True)[0]
    trainer = Trainer(program, world)
    run = trainer.params.program(trainer.init().params)
    batch = rank_batches(config, {"dp": 0, "cp": 0}, 0)[0]
    shape = (*batch["tokens"].shape, config.model.hidden)
    x = {"h": torch.randn(*shape, dtype=torch.float64)}
    key = rng.key(0, "dropout", 0)
    want = run.layer(layer, batch, key)(run.own(layer), x)
    for part in layer.parts:
        x = run.layer(part, batch, key)(run.own(part), x)
    assert len(layer.parts) == 2 and torch.equal(want["h"], x["h"])
    leaves = [path for part in layer.parts for path in tree.flatten(part.specs)]
    assert sorted(leaves) == sorted(tree.flatten(layer.specs))


@pytest.mark.parametrize("text", ["recompute=first", "recompute=full recompute_layers=2"])
def test_a_number_of_layers_belongs_to_first(text: str) -> None:
    """And only to it; both keys are named."""
    with pytest.raises(ConfigError, match=r"parallel\.recompute_layers is [02]"):
        small(text)


# ---------------------------------------------------------------------- memory


class Storages(TorchDispatchMode):
    """Bytes of all storages that were made under the mode and are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note what an op returns."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.note(x.untyped_storage())
        return out

    def note(self, storage: torch.UntypedStorage) -> None:
        """Count a storage once, until its end."""
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())

    def _gone(self, name: int, size: int) -> None:
        self._seen.discard(name)
        self.live -= size


def measured(layout: Plan, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Most bytes that the (only) stage has made and not freed, looked at between its ops."""
    found: list[int] = []
    mode = Storages()

    def looking(stream: Any) -> Iterator[Any]:
        for op in batches(stream):
            found.append(mode.live)
            yield op

    batches = executor.batches_of
    monkeypatch.setattr(executor, "batches_of", looking)
    trainer = Trainer(layout, mailbox.worlds(layout.mesh, plain=True)[0])
    state = trainer.init()
    grads = trainer.buffers()
    count = layout.config.train.microbatches
    data = [rank_batches(layout.config, {"dp": 0, "cp": 0}, 0)[i] for i in range(count)]
    for x in (*tree.flatten(state.params).values(), *grads.buffers):
        mode.note(x.untyped_storage())
    for x in (x for batch in data for x in batch.values()):
        mode.note(x.untyped_storage())
    before = mode.live
    with mode:
        mailbox.run([trainer.gradients(state, data)])
    monkeypatch.undo()
    return [max(0, live - before) for live in found]


WIDE = (
    "layers=4 hidden=64 heads=4 ffn=256 seq_len=64 vocab=64 microbatches=4 global_batch=4 "
    "parallel.schedule=gpipe pp=1 tied=false"
)


@pytest.mark.parametrize("dropout", ["0", "0.1"])
def test_live_bytes_fall_as_the_formula_says(dropout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of every way within a quarter of it, and in the same order."""
    have, want = {}, {}
    for way in ("none", "selective", "first recompute_layers=2", "full"):
        layout = plan(small(f"{WIDE} dropout={dropout} recompute={way}"))
        have[way] = max(measured(layout, monkeypatch))
        want[way] = max(live_activations(layout, 0))
    for way, bytes_ in have.items():
        assert bytes_ == pytest.approx(want[way], rel=0.25), (have, want)
    assert have["full"] < have["selective"] < have["none"]
    assert have["full"] < have["first recompute_layers=2"] < have["none"]


def test_live_bytes_are_nothing_after_the_last_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is gone, but for the losses."""
    layout = plan(small(f"{WIDE} recompute=full"))
    assert measured(layout, monkeypatch)[-1] < 0.1 * max(measured(layout, monkeypatch))


def ops_text(ops: tuple[AnyOp, ...]) -> str:
    """The first ops of a stream."""
    return " ".join(map(str, ops[:12]))


def test_the_stream_says_what_runs_again() -> None:
    """One stage, one microbatch, by hand."""
    text = "layers=2 microbatches=1 global_batch=2"
    (first,) = plan(small(f"{text} recompute=first recompute_layers=1")).streams
    assert ops_text(first) == "F0[0] F0[1] F0[2] F0[3] B0[3] B0[2] Recompute0[1] B0[1] B0[0]"
    (halves,) = plan(small(f"{text} recompute=selective")).streams
    assert ops_text(halves[6:]) == (
        "B0[5] B0[4] Recompute0[3] B0[3] B0[2] Recompute0[1] B0[1] B0[0]"
    )
