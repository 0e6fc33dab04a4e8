"""Faults that other trainers had with optimizers and clipping, by their rows of the bug list."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mfun import tree
from mfun.config import OptimConfig, PrecisionConfig, load, resolve
from mfun.optim import (
    build,
    learning_rate,
    matrices_of,
    named_chain,
    unscale_,
    with_precision,
)
from mfun.pipeline import mailbox
from mfun.spec import ParamSpec
from mfun.train import loop
from mfun.train.plan import plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from tests.properties import small
from tests.test_optim import MASK, OPTIMIZERS, leaves


def stepped(settings: str, steps: int) -> list[list[Any]]:
    """The metrics of some steps, on every stage."""
    config = small(settings)
    layout, office = plan(config), mailbox.Office()

    def program(world: Any) -> Any:
        trainer, out = Trainer(layout, world), []
        state = trainer.init()
        for step in range(steps):
            batches = [
                world.build(lambda c, i=i, s=step: rank_batches(config, c, s)[i])
                for i in range(config.train.microbatches)
            ]
            state, metrics = yield from trainer.step(state, batches)
            out.append(metrics)
        return out

    return mailbox.run([program(w) for w in mailbox.worlds(layout.mesh, office)], office)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_64_an_unused_parameter_has_a_zero_gradient(name: str, donate: bool) -> None:
    """One meaning: it has one, zero; so decay and momentum still move it, as in torch with zeros.

    Used at steps 1 and 4 of 5, among others in one flat bucket.
    """
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.1, clip=0)  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    w = torch.randn(6, generator=g, dtype=torch.float64)
    theirs = w.clone().requires_grad_()
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    fields = {"betas": (0.9, 0.95)} if name == "adamw" else {"momentum": 0.9}
    oracle: Any = kind([theirs], lr=0.1, weight_decay=0.1, **fields)  # type: ignore[arg-type]
    opt, params = build(config, 5, {"bucket.0": (1.0, 1.0)}), {"bucket.0": w}
    state = opt.init(params)
    for step in range(5):
        gradient = torch.randn(6, generator=g, dtype=torch.float64)
        if step not in (0, 3):
            gradient[2:4] = 0.0
        theirs.grad = gradient.clone()
        oracle.step()
        before = params["bucket.0"].clone()
        params, state = opt.update({"bucket.0": gradient}, state, params, donate=donate)
        assert (params["bucket.0"] != before).all()
    torch.testing.assert_close(params["bucket.0"], theirs.detach(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**32])
def test_73_clipping_comes_after_unscaling(scale: float) -> None:
    """Gradient (3, 4) at any loss scale, clipped to 1, is (0.6, 0.8); by value it is (1, 1)."""
    for config, want in (
        (OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip=1.0), [0.6, 0.8]),
        (
            OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0, clip=0, clip_value=1.0),
            [1.0, 1.0],
        ),
    ):
        gradient = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64) * scale}
        assert not bool(unscale_([*gradient.values()], scale))
        norm = torch.linalg.vector_norm(gradient["w"])
        params = {"w": torch.zeros(2, dtype=torch.float64)}
        opt = build(config, 1)
        new, _ = opt.update(gradient, opt.init(params), params, norm=norm)
        torch.testing.assert_close(-new["w"], torch.tensor(want).double(), rtol=1e-6, atol=0)


def test_74_clipping_spreads_no_nan() -> None:
    """A NaN or infinity in one gradient stays in its element, whichever clipping is on."""
    config = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0, clip=1, clip_value=0.5)
    opt = build(config, 1)
    params = {"a": torch.zeros(3), "b": torch.zeros(2)}
    bad = {"a": torch.tensor([1.0, torch.nan, -torch.inf]), "b": torch.ones(2)}
    new, _ = opt.update(bad, opt.init(params), params, norm=torch.tensor(torch.nan))
    assert new["a"][0] == -0.5 and new["a"][1].isnan() and new["a"][2] == 0.5
    assert new["b"].tolist() == [-0.5, -0.5]


@pytest.mark.parametrize("name", ["lion", "muon", "sgd"])
def test_76_small_updates_of_bf16_weights_add_up(name: Any) -> None:
    """A weight of 1 that moves by -6e-4 a hundred times is .94 with masters, whoever moves it."""
    config = OptimConfig(name=name, lr=6e-4, momentum=0.0, weight_decay=0, clip=0, eps=1e-30)
    matrices = matrices_of({"w": ParamSpec(shape=(1,))})
    precision = PrecisionConfig(policy="bf16")
    opt = with_precision(build(config, 100, None, matrices), precision, words=None)
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    state = opt.init(params)
    for _ in range(100):
        gradient = {"w": torch.ones(1, dtype=torch.float32)}
        params, state = opt.update(gradient, state, params, donate=True, overflow=False)
    assert params["w"].item() == torch.tensor(0.94).bfloat16().item()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_105_the_rate_of_update_n_is_the_schedules(name: str) -> None:
    """With four microbatches, on every stage: one step of the schedule an update."""
    settings = f"name={name} pp=2 layers=2 microbatches=4 lr=0.1 warmup=4 optim.schedule=linear"
    for stage in stepped(f"{settings} decay_steps=8 min_lr=0.02 steps=8", 6):
        want = [0.025, 0.05, 0.075, 0.1, 0.08, 0.06]
        assert [metrics.lr for metrics in stage] == pytest.approx(want, rel=1e-14)


def test_105_a_skipped_update_does_not_count() -> None:
    """The schedule moves by updates: after a skipped one the rate is the same again."""
    rates = OptimConfig(name="lion", lr=1.0, warmup=4, clip=0)
    precision = PrecisionConfig(policy="fp16")
    opt = with_precision(build(rates, 10), precision, words=None)
    params = {"w": torch.ones(2, dtype=torch.float16)}
    state, seen = opt.init(params), []
    for overflow in (False, True, True, False):
        gradient = {"w": torch.ones(2)}
        params, state = opt.update(gradient, state, params, overflow=overflow)
        seen.append(learning_rate(state))
    assert seen == [0.25, 0.25, 0.25, 0.5]


def live() -> tuple[int, int]:
    """Tensors and their bytes."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
    return len(found), sum(x.untyped_storage().nbytes() for x in found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_132_memory_does_not_grow(name: str) -> None:
    """Tensors and bytes after the third update and the eighth are as many; none has a graph."""
    opt = OPTIMIZERS[name](0.1)
    params = leaves(0)
    state, seen = opt.init(params), []
    for step in range(8):
        gradient, norm = leaves(step), torch.tensor(5.0)
        params, state = opt.update(gradient, state, params, norm=norm, donate=True)
        del gradient, norm
        if step in (2, 7):
            seen.append(live())
    assert seen[0] == seen[1]
    assert not any(p.requires_grad or p.grad_fn for p in params.values())


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_132_nor_in_a_run(name: str, tmp_path: Path) -> None:
    """The same in the loop, whose batches grow meanwhile."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(120)))
    settings = (
        "model.layers=1 model.hidden=16 model.heads=2 model.seq_len=8 parallel.tp=1 parallel.pp=1 "
        f"train.global_batch=4 train.microbatches=2 train.rampup=2,2,4 optim.name={name} "
        f"optim.count_zeros=true train.eval_every=0 train.steps=10 data.path={text}"
    )
    seen = []
    for record in loop.train(loop.job(resolve(load("tiny", settings.split()), 1))):
        assert not any(p.requires_grad for p in tree.flatten(record.state.params).values())
        step = record.step
        del record
        if step in (5, 10):
            seen.append(live())
    assert seen[0] == seen[1]


def test_masks_are_by_path_and_not_by_shape() -> None:
    """Two leaves of one shape, one of which decays."""
    opt = named_chain(adamw=build(OptimConfig(clip=0, lr=0.5, weight_decay=0.5), 1, MASK))
    params = {"embed.tokens": torch.ones(2), "scale": torch.ones(2)}
    zeros = {k: torch.zeros(2) for k in params}
    new, _ = opt.update(zeros, opt.init(params), params)
    assert new["embed.tokens"].tolist() == [0.75, 0.75] and new["scale"].tolist() == [1.0, 1.0]
