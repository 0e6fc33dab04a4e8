"""16 bits over layouts: errors beside one device's, one decision on all ranks, messages."""

from __future__ import annotations

import functools
import gc
from typing import Any

import pytest
import torch
from test_precision_run import config_of, in_threads, leaves, trainer_of
from torch import Tensor

from mfun import rng, tree
from mfun.comm import ProcessWorld, finish
from mfun.config import load, resolve
from mfun.grads import needed_groups
from mfun.optim.masters import whole_words
from mfun.pipeline import mailbox
from mfun.spec import shard_leaf, unshard_leaf
from mfun.train import loop
from mfun.train.lifecycle import RunError
from mfun.train.plan import Plan, plan
from mfun.train.rounding import words_by_path, words_by_shard
from mfun.train.shards import by_path
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.run import in_mailbox, reference_history
from tests import threads
from tests.threads import on_threads

FORMATS = {
    "bf16": ("precision.policy=bf16", 2.0**-8),
    "fp16": ("precision.policy=fp16 precision.initial_scale=1024", 2.0**-11),
}
ONE = "model.heads=4 train.global_batch=8 train.microbatches=4 train.steps=1"
LAYOUTS = [
    "parallel.dp=1 parallel.tp=2",
    "parallel.dp=1 parallel.tp=4 parallel.sequence_parallel=true",
    "parallel.dp=1 parallel.pp=2 parallel.schedule=zb-h1",
    "parallel.dp=2 parallel.sharding=optim_grads_params",
    "parallel.dp=2 parallel.tp=2 parallel.pp=2 parallel.sharding=optim parallel.overlap=true",
]


@functools.cache
def errors(text: str) -> dict[str, float]:
    """Each leaf's first gradient against float64's, |a - b| / |b|."""
    layout = plan(config_of(f"{ONE} {text}"))
    results = threads.in_threads(layout)
    right = reference_history(layout.config).first_grads
    out = {}
    for path, spec in layout.specs.items():
        parts = [(r.coords, r.grads[path]) for r in results if path in r.grads]
        have = unshard_leaf(parts, spec, layout.mesh).double()
        out[path] = float((have - right[path]).norm() / right[path].norm())
    return out


@pytest.mark.parametrize("policy", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_layouts(layout: str, policy: str) -> None:
    """No leaf is more than 8 half units off float64, and on average none more than one device's.

    Measured over all leaves: bf16 1.3e-2 on one device, 1.3e-2 to 1.5e-2 on the layouts, at most
    2.5e-2; fp16 1.6e-3, 1.5e-3 to 1.7e-3, at most 2.6e-3; float32 4.8e-7.
    """
    settings, unit = FORMATS[policy]
    one, found = errors(f"{settings} parallel.dp=1"), errors(f"{settings} {layout}")
    assert max(found.values()) < 8 * unit
    assert sum(found.values()) < 1.25 * sum(one.values())


@pytest.mark.parametrize(
    "policy",
    [
        "policy=bf16",
        "policy=bf16 precision.stochastic_rounding=true",
        "policy=bf16 precision.params=fp32",
    ],
    ids=["masters", "by-chance", "fp32-params"],
)
def test_stages_change_no_bit(policy: str) -> None:
    """Messages carry what layers pass on: two stages compute one's bits (untied, unclipped)."""
    text = f"precision.{policy} model.tied=false parallel.dp=1"
    ((one, seen),) = in_threads(plan(config_of(text)), 3)
    found: dict[str, Tensor] = {}
    for part, metrics in in_threads(plan(config_of(f"{text} parallel.pp=2")), 3):
        found |= {n: x for n, x in part.items() if n.startswith("params.")}
        assert [m.loss for m in metrics] == [m.loss for m in seen]
    assert found.keys() == {n for n in one if n.startswith("params.")}
    assert all(torch.equal(x, one[n]) for n, x in found.items())


@pytest.mark.parametrize(
    "formats", ["policy=bf16 precision.params=fp32", "policy=fp32 precision.masters=fp64"]
)
def test_formats_over_shardings(formats: str) -> None:
    """float32 parameters computed in bf16, float64 masters: as without sharding, to the bit."""
    text = f"precision.{formats} parallel.dp=2 train.global_batch=8"
    ((right, _), _) = in_threads(plan(config_of(text)), 3)
    for found, _ in in_threads(plan(config_of(f"{text} parallel.sharding=optim")), 3):
        assert found.keys() == right.keys()
        assert all(torch.equal(x, right[n]) for n, x in found.items())
    types = {n.partition(".")[0]: x.dtype for n, x in right.items()}
    wide = torch.float64 if "masters" in formats else torch.float32
    assert types == {"params": torch.float32, "opt": wide}


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
def test_messages_are_in_the_compute_format(policy: str, monkeypatch) -> None:
    """Activations and their gradients between stages, also where parameters are float32."""
    seen: set[torch.dtype] = set()
    post = mailbox.MailboxWorld.post

    def watched(self: Any, batch: Any, outgoing: Any, sizes: Any) -> None:
        seen.update(x.dtype for message in outgoing.values() for x in message.values())
        post(self, batch, outgoing, sizes)

    monkeypatch.setattr(mailbox.MailboxWorld, "post", watched)
    text = f"precision.policy={policy} precision.params=fp32 precision.norms=fp32 parallel.pp=2"
    layout = plan(config_of(f"{text} parallel.dp=1 train.steps=1 train.global_batch=4"))
    results = in_mailbox(layout, plain=True)
    assert seen == {layout.compute_dtype}
    for result in results:
        assert {x.dtype for x in result.params.values()} == {torch.float32}
        assert {x.dtype for x in result.grads.values()} == {torch.float32}


def test_norm_of_equal_steps() -> None:
    """Bug row 71: the same batch thrice at learning rate 0: one norm, in every sharding."""
    norms = set()
    for sharding in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        text = f"precision.policy=bf16 optim.lr=0 parallel.dp=2 parallel.sharding={sharding}"
        layout = plan(config_of(f"{text} train.global_batch=8"))

        def main(groups: Any, layout: Plan = layout) -> list[float]:
            trainer = trainer_of(layout, groups)
            assert isinstance(trainer.world, ProcessWorld)
            data, state = rank_batches(layout.config, trainer.world.coords, 0), trainer.init()
            found = []
            for _ in range(3):
                state, metrics = finish(trainer.step(state, data))
                found.append(metrics.grad_norm)
            return found

        for found in on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh)):
            assert len(set(found)) == 1
            norms.update(found)
    assert max(norms) < min(norms) * (1 + 1e-6)


# loss scaling


def overflows(text: str, on: int) -> list[bool]:
    """What every rank decides where one of them has an infinite gradient."""
    layout = plan(config_of(f"precision.policy=fp16 {text}"))

    def main(groups: Any) -> bool:
        trainer = trainer_of(layout, groups)
        grads = trainer.buffers()
        for i, buffer in enumerate(grads.buffers):
            buffer.fill_(8.0)
            grads.shards[i] = buffer[:1] if grads.sharded else buffer
        if int(groups.rank) == on:
            next(iter(grads.finished().values()))[0] = float("inf")
        found = finish(trainer._unscaled(grads, 4.0))
        assert all(x[-1] in (2.0, float("inf")) for x in grads.finished().values())
        return found

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_one_decision(sharding: str) -> None:
    """Whichever of eight ranks overflows, of any tp, dp or pp coordinate, all skip."""
    text = f"parallel.tp=2 parallel.dp=2 parallel.pp=2 parallel.sharding={sharding}"
    assert overflows(text, -1) == [False] * 8
    for rank in range(8):
        assert overflows(text, rank) == [True] * 8, rank


def test_skipped_steps_in_a_run() -> None:
    """Rows show scale and skip, a skipped step has the last update's rate and new data."""
    small = (
        "model.layers=1 model.hidden=16 model.seq_len=16 parallel.tp=1 parallel.pp=1 train.steps=6 "
        "train.eval_every=0 optim.warmup=10 precision.policy=fp16 precision.hysteresis=1 "
        "precision.initial_scale=1e12"
    )
    records = [*loop.train(loop.job(resolve(load("tiny", small.split()), 1)))]
    assert [r.loss_scale for r in records] == [1e12 / 2**n for n in range(6)]
    assert all(r.skipped and r.row()["skipped"] for r in records)
    assert [r.lr for r in records] == [0.0] * 6
    assert len({r.loss for r in records}) == 6
    assert "loss_scale" not in records[0]._replace(loss_scale=None).row()


def test_scale_that_cannot_fall_ends_the_run() -> None:
    """Rather than skip for ever."""
    small = (
        "model.layers=1 model.hidden=16 model.seq_len=16 parallel.tp=1 parallel.pp=1 train.steps=6 "
        "train.eval_every=0 precision.policy=fp16 precision.initial_scale=1e12 "
        "precision.min_scale=1e12"
    )
    with pytest.raises(RunError, match=r"precision.min_scale = 1e\+12.*policy=bf16"):
        list(loop.train(loop.job(resolve(load("tiny", small.split()), 1))))


def test_donation_of_a_skipped_step() -> None:
    """Bitwise the same state, whether its memory was given or not, and it trains on."""
    config = config_of("precision.policy=fp16 precision.initial_scale=1e12 parallel.dp=1")
    trainer = trainer_of(plan(config))
    state = trainer.init()
    before = {n: x.clone() for n, x in leaves(state).items()}
    for donate in (False, True):
        data = rank_batches(config, {"dp": 0}, state.step)
        state, metrics = finish(trainer.step(state, data, donate=donate))
        assert metrics.skipped
        after = leaves(state)
        assert after.keys() == before.keys()
        assert all(torch.equal(x, before[n]) for n, x in after.items())
    assert state.step == 2


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16 precision.params=fp32"])
def test_memory_does_not_grow(policy: str) -> None:
    """Bug row 132: from the third step on as many tensors and bytes; nothing wants a gradient."""
    config = config_of(f"precision.policy={policy} parallel.dp=1")
    trainer, counts = trainer_of(plan(config)), []
    state = trainer.init()
    for step in range(20):
        state, _ = finish(trainer.step(state, rank_batches(config, {"dp": 0}, step)))
        if step in (2, 3, 19):
            gc.collect()
            alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
            counts.append((len(alive), sum(x.nbytes for x in alive)))
    assert len(set(counts)) == 1
    assert not any(x.requires_grad for x in leaves(state).values())


# rounding by chance over layouts


def words_of(text: str, sharded: bool) -> list[tuple[dict[str, int], dict[str, Tensor], Plan]]:
    """Every rank's words for its leaves."""
    layout = plan(config_of(f"precision.policy=bf16 precision.stochastic_rounding=true {text}"))

    def main(groups: Any) -> tuple[dict[str, int], dict[str, Tensor], Plan]:
        world = ProcessWorld(groups)
        trainer = Trainer(layout, world)
        words = (words_by_shard if sharded else words_by_path)(layout, world)
        found = trainer.params.leaves(trainer.init().params)
        return world.coords, {p: words(rng.key(5), p, x) for p, x in found.items()}, layout

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


def test_words_are_the_wholes() -> None:
    """Cut over tp and pp, padded vocabulary: a leaf's words are those of its elements."""
    for coords, words, layout in words_of("parallel.tp=2 parallel.pp=2 parallel.dp=1", False):
        specs = tree.flatten(layout.stages[coords["pp"]].specs)
        assert words.keys() == specs.keys()
        for path, word in words.items():
            whole = whole_words(rng.key(5), path, torch.empty(specs[path].shape))
            mine = shard_leaf(whole, specs[path], layout.mesh, coords, path)
            rows = slice(0, len(mine) - (coords["tp"] if path == "embed.tokens" else 0))
            assert torch.equal(word[rows], mine[rows]), path


def test_words_of_shards() -> None:
    """Ranks of a shard group draw the pieces of one bucket; a tied bucket's are both stages'."""
    text = "parallel.tp=1 parallel.pp=2 parallel.dp=2 parallel.sharding=optim"
    by_stage: dict[int, dict[str, Tensor]] = {}
    for coords, words, layout in sorted(words_of(text, True), key=lambda one: str(one[0])):
        buckets = layout.buckets(coords["pp"])
        for bucket, word in zip(buckets, words.values(), strict=True):
            mine = by_stage.setdefault(coords["pp"], {})
            path = bucket.spans[0].path
            mine[path] = torch.cat([mine[path], word]) if path in mine else word
            whole = whole_words(rng.key(5).fold("bucket"), path, torch.empty(bucket.size))
            assert torch.equal(mine[path], whole[: len(mine[path])])
    shared = by_stage[0].keys() & by_stage[1].keys()
    assert shared == {"embed.tokens"}
    assert torch.equal(by_stage[0]["embed.tokens"], by_stage[1]["embed.tokens"])


@pytest.mark.parametrize("sharding", ["no_shard", "optim", "optim_grads_params"])
def test_rounded_replicas_stay_equal(sharding: str) -> None:
    """After three updates all holders of a piece have its bits, the tied table's stages too."""
    text = (
        "precision.policy=bf16 precision.stochastic_rounding=true parallel.tp=2 parallel.dp=2 "
        f"parallel.pp=2 parallel.sharding={sharding} train.global_batch=8"
    )
    layout = plan(config_of(text))

    def main(groups: Any) -> tuple[dict[str, int], dict[str, Tensor]]:
        trainer = trainer_of(layout, groups)
        assert isinstance(trainer.world, ProcessWorld)
        coords, state = trainer.world.coords, trainer.init()
        for step in range(3):
            state, _ = finish(trainer.step(state, rank_batches(layout.config, coords, step)))
        state = finish(by_path(layout, trainer.world, state))
        return coords, tree.flatten(state.params)

    holders: dict[Any, Tensor] = {}
    for coords, params in on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh)):
        for path, x in params.items():
            cut = layout.specs[path].p.axes
            first = holders.setdefault((path, coords["tp"] if cut else 0), x)
            assert x.dtype == torch.bfloat16 and torch.equal(x, first), (path, coords)
