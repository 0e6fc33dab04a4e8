"""Training in 16 bits against plain torch, to the bit; layouts against one device; loss scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor

from mfun import config as cfg
from mfun import optim, tree
from mfun.comm import ProcessWorld, distribute, finish
from mfun.config import Config
from mfun.grads import needed_groups
from mfun.train import saving
from mfun.train.plan import Plan, plan
from mfun.train.ranks import Peers, Place
from mfun.train.shards import by_path
from mfun.train.step import Metrics, State, Trainer
from mfun.verify import reference
from mfun.verify.batches import rank_batches
from mfun.verify.reference.optim import decayed
from mfun.verify.run import settings_of
from tests import plain16
from tests.threads import on_threads

SMALL = (
    "model.layers=2 model.hidden=16 model.heads=2 model.ffn=24 model.seq_len=8 model.vocab=19 "
    "model.init_std=0.3 parallel.tp=1 parallel.pp=1 optim.lr=0.01 optim.clip=0 optim.warmup=2 "
    "train.microbatches=2"
)
BF16, FP16 = "precision.policy=bf16", "precision.policy=fp16"
SCALING = f"{FP16} precision.initial_scale=524288 precision.growth_every=4"
PLANTED = {3: 1, 9: 1}  # step, from 1: the data rank whose loss overflows
SHARDINGS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
HUGE = 2.0**20  # a weight of one token's loss that takes its gradient out of fp16's range


def config_of(text: str) -> Config:
    """A small configuration with these settings."""
    return cfg.resolve(cfg.override(Config(), f"{SMALL} {text}".split()), None)


def batches(config: Config, dp: int, step: int) -> list[dict[str, Tensor]]:
    """A rank's microbatches of the step from `step`, with the planted weights."""
    found = rank_batches(config, {"dp": dp}, step)
    if config.precision.policy == "fp16" and PLANTED.get(step + 1) == dp:
        found[1]["mask"][0, 2] = HUGE
    return found


def plain(config: Config, steps: int) -> plain16.Run:
    """The same run in plain torch."""
    precision, settings = config.precision, settings_of(config)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision.policy]
    scaled, sharding = precision.scaling == "dynamic", config.parallel.sharding
    params = reference.init(settings, config.train.seed, dtype)
    if precision.norms == "fp32":
        params = {p: x.float() if "norm" in p else x for p, x in params.items()}
    return plain16.train(
        params,
        [[batches(config, dp, s) for dp in range(config.parallel.dp)] for s in range(steps)],
        settings["model"],
        lambda n: reference.learning_rate(settings, n),
        decayed,
        scale=plain16.Scale(precision.initial_scale) if scaled else None,
        rule={
            "every": precision.growth_every,
            "hysteresis": precision.hysteresis,
            "minimum": precision.min_scale,
        },
        each=sharding in ("optim_grads", "optim_grads_params"),
    )


def advance(
    trainer: Trainer, state: State, steps: range, seen: list[Metrics], donate: bool = True
) -> State:
    """Some steps of one rank."""
    config, world = trainer.plan.config, trainer.world
    assert isinstance(world, ProcessWorld)
    for step in steps:
        assert state.step == step
        data = batches(config, world.coords["dp"], step)
        state, metrics = finish(trainer.step(state, data, donate=donate))
        seen.append(metrics)
    return state


def trainer_of(layout: Plan, groups: Any = None) -> Trainer:
    """A rank's."""
    groups = groups or distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    return Trainer(layout, ProcessWorld(groups))


def leaves(state: State) -> dict[str, Tensor]:
    """Parameters and the optimizer's tensors by name."""
    found = {f"params.{p}": x for p, x in tree.flatten(state.params).items()}
    return found | {f"opt.{p}": x for p, x in optim.state_tensors(state.opt).items()}


def in_threads(layout: Plan, steps: int) -> list[tuple[dict[str, Tensor], list[Metrics]]]:
    """Every rank's tensors after some steps, and its metrics."""

    def main(groups: Any) -> tuple[dict[str, Tensor], list[Metrics]]:
        trainer, seen = trainer_of(layout, groups), []
        state = advance(trainer, trainer.init(), range(steps), seen)
        return leaves(finish(by_path(layout, trainer.world, state))), seen

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


def assert_plain(found: dict[str, Tensor], seen: Sequence[Metrics], right: plain16.Run) -> None:
    """Weights and masters to the bit; losses, scales, skips and rates of every step."""
    masters = {n.partition("master.")[2]: x for n, x in found.items() if "master." in n}
    assert masters.keys() == right.masters.keys()
    for path, x in right.params.items():
        assert found[f"params.{path}"].dtype == x.dtype
        assert torch.equal(found[f"params.{path}"], x), path
        assert torch.equal(masters[path], right.masters[path]), path
    assert [m.skipped for m in seen] == right.skipped
    assert [m.lr for m in seen] == right.rates
    assert [m.loss for m in seen] == pytest.approx(right.losses, rel=1e-6)


# one device and data parallel ranks, to the bit


@pytest.mark.parametrize(
    "policy", [BF16, f"{FP16} precision.loss_scale=none"], ids=["bf16", "fp16"]
)
@pytest.mark.parametrize("batch", [4, 6], ids=["late-head", "early-head"])
def test_one_device_equals_plain_torch(policy: str, batch: int) -> None:
    """Five steps of 16-bit weights with float32 masters are those of plain torch, to the bit."""
    config = config_of(f"{policy} parallel.dp=1 train.global_batch={batch}")
    trainer, seen = trainer_of(plan(config)), []
    state = advance(trainer, trainer.init(), range(5), seen)
    right = plain(config, 5)
    assert_plain(leaves(state), seen, right)
    moved = sum(
        float((a - b).abs().sum())
        for a, b in zip(right.masters.values(), plain(config, 1).masters.values(), strict=True)
    )
    assert moved > 1.0


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_wide_norms_among_bf16(sharding: str) -> None:
    """Bug row 77: fp32 norms and float32 gradients beside bf16, two ranks: torch's, to the bit."""
    text = f"{BF16} precision.norms=fp32 parallel.dp=2 parallel.sharding={sharding}"
    config = config_of(f"{text} train.global_batch=8")
    layout, right = plan(config), plain(config, 4)
    assert {x.dtype for x in right.params.values()} == {torch.bfloat16, torch.float32}
    for found, seen in in_threads(layout, 4):
        assert_plain(found, seen, right)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_overflow_on_one_rank(sharding: str) -> None:
    """Planted on rank 1 at steps 3 and 9: scales, skips and weights of both are plain torch's."""
    config = config_of(f"{SCALING} parallel.dp=2 train.global_batch=8 parallel.sharding={sharding}")
    right = plain(config, 12)
    assert [n for n, skipped in enumerate(right.skipped, 1) if skipped] == [1, 2, 3, 9, 12]
    assert [round(math.log2(x)) for x in right.scales] == [19, 19, 18, *[17] * 4, *[18] * 5]
    for found, seen in in_threads(plan(config), 12):
        assert [m.loss_scale for m in seen] == right.scales
        assert_plain(found, seen, right)


def resumed(rank: int, text: str, folder: str) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """On a process: six steps, saved, loaded into a new trainer, six more; and twelve without."""
    config, peers = config_of(text), Peers(Place(rank=rank, world=2))
    layout = plan(config)
    first = trainer_of(layout)
    seen: list[Metrics] = []
    whole: list[Metrics] = []
    state = advance(first, first.init(), range(6), seen)
    at = saving.save(first, state, Path(folder), peers)
    second = Trainer(layout, first.world)
    state = advance(second, saving.load(second, at, peers), range(6, 12), seen)
    third = Trainer(layout, first.world)
    right = advance(third, third.init(), range(12), whole)
    found, want = (leaves(finish(by_path(layout, first.world, x))) for x in (state, right))
    assert found.keys() == want.keys()
    for name, x in want.items():
        assert x.dtype == found[name].dtype and torch.equal(x, found[name]), name
    assert optim.state_scalars(state.opt) == optim.state_scalars(right.opt)
    values = {
        n: x.view(torch.int16 if x.element_size() == 2 else torch.int32).numpy()
        for n, x in found.items()
        if x.dtype != torch.float64
    }
    return values, [tuple(m) for m in seen], [tuple(m) for m in whole]


@pytest.mark.parametrize("sharding", ["no_shard", "optim_grads_params"])
def test_resumed_on_processes(pool: Pool, tmp_path: Path, sharding: str) -> None:
    """Bug rows 75 and 78: saved at 6 of 12 steps, all is plain torch's, which did not stop."""
    text = f"{SCALING} parallel.dp=2 train.global_batch=8 parallel.sharding={sharding}"
    right = plain(config_of(text), 12)
    for values, seen, whole in pool.run(resumed, text, str(tmp_path), world=2):
        metrics = [Metrics(*row) for row in seen]
        assert [m.loss_scale for m in metrics] == right.scales
        found = {
            n: torch.from_numpy(x).view(torch.float16 if x.dtype == "int16" else torch.float32)
            for n, x in values.items()
        }
        assert_plain(found, metrics, right)
        assert str(seen) == str(whole)  # NaN is not itself
