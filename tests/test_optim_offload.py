"""An optimizer whose state lives in the host's memory: the same bits, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from pool import Pool
from test_optim import leaves
from test_sharding import config_of, equal, one_stage, whole
from torch import Tensor

from mfun import config as cfg
from mfun import optim
from mfun.cli import main
from mfun.comm import ProcessWorld, distribute, finish
from mfun.config import Config, OptimConfig, PrecisionConfig, load, resolve
from mfun.grads import needed_groups
from mfun.optim import Leaves, Transform, offload, state_scalars, state_tensors, with_offload
from mfun.plan.measure import held_bytes, measure
from mfun.plan.memory import account
from mfun.train.plan import plan
from mfun.train.step import Trainer

CHAINS = {
    "adamw": OptimConfig(clip=0.5),
    "sgd": OptimConfig(name="sgd", clip=0.5, clip_value=0.1),
    "sgd without a state": OptimConfig(name="sgd", momentum=0.0),
    "lion": OptimConfig(name="lion"),
}


def numbers(state: Any) -> dict[str, Any]:
    """All of a state by path."""
    return {**state_tensors(state), **state_scalars(state)}


def same(a: Any, b: Any) -> bool:
    """Same names in the same order, same bits."""
    one, two = numbers(a), numbers(b)
    return list(one) == list(two) and all(
        torch.equal(x, two[path]) if isinstance(x, Tensor) else x == two[path]
        for path, x in one.items()
    )


def wrapped(config: OptimConfig, precision: PrecisionConfig, **more: Any) -> Transform:
    """The optimizer of a configuration."""
    return optim.with_precision(optim.build(config, steps=9), precision, **more)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("policy", ["fp64", "bf16", "fp16"])
@pytest.mark.parametrize("name", CHAINS)
def test_bitwise_as_without(name: str, policy: str, donate: bool) -> None:
    """Parameters and state of four updates, an overflow among them."""
    precision = PrecisionConfig(policy=policy)  # type: ignore[arg-type]
    dtypes = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}
    plain = wrapped(CHAINS[name], precision)
    away = wrapped(CHAINS[name], precision, offload=True)
    params = [leaves(0, dtypes[policy]), leaves(0, dtypes[policy])]
    states = [plain.init(params[0]), away.init(params[1])]
    assert same(*states)
    for n in range(4):
        for i, opt in enumerate((plain, away)):
            wide = torch.float64 if policy == "fp64" else torch.float32
            extra = {"norm": torch.tensor(2.0 + n), "donate": donate, "overflow": n == 2}
            params[i], states[i] = opt.update(leaves(n + 1, wide), states[i], params[i], **extra)
        assert equal(*params) and list(params[0]) == list(params[1])
        assert same(*states)


def test_nothing_given_is_written_to_without_donation() -> None:
    """The old state gives the same again."""
    opt = with_offload(optim.adamw(0.1))
    params, grads = leaves(0), leaves(1)
    params, state = opt.update(grads, opt.init(params), params)
    before = {path: x.clone() for path, x in {**state_tensors(state), **params}.items()}
    first = opt.update(grads, state, params, donate=False)
    again = opt.update(grads, state, params, donate=False)
    assert equal(before, {**state_tensors(state), **params})
    assert equal(first[0], again[0]) and same(first[1], again[1])


def test_donated_state_keeps_its_memory() -> None:
    """Pinned memory is not asked for anew at each step."""
    opt = with_offload(optim.adamw(0.1))
    params = leaves(0)
    params, state = opt.update(leaves(1), opt.init(params), params, donate=True)
    places = {path: x.data_ptr() for path, x in state_tensors(state).items()}
    _, state = opt.update(leaves(2), state, params, donate=True)
    assert places == {path: x.data_ptr() for path, x in state_tensors(state).items()}


def test_the_next_leafs_state_travels_while_one_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two leaves' states are on the device at most: one at work and one on its way."""
    events: list[str] = []
    fetched, ready = offload._fetched, offload._ready

    def noted(path: str, *args: Any) -> Any:
        events.append(f"fetch {path}")
        return fetched(path, *args)

    def arrived(near: Any, *args: Any) -> Any:
        events.append("ready")
        return ready(near, *args)

    monkeypatch.setattr(offload, "_fetched", noted)
    monkeypatch.setattr(offload, "_ready", arrived)
    inner = optim.adamw(0.1)

    def update(updates: Leaves, state: Any, params: Leaves, **extra: Any) -> Any:
        events.append(f"update {' '.join(params)}")
        assert list(state["mu"]) == list(state["nu"]) == list(params)
        return inner.update(updates, state, params, **extra)

    opt = with_offload(Transform(inner.init, update))
    params = {name: torch.ones(3) for name in "abc"}
    opt.update(params, opt.init(params), params)
    assert events == [
        *("fetch a", "ready", "fetch b", "update a"),
        *("ready", "fetch c", "update b", "ready", "update c"),
    ]


def test_no_parameters() -> None:
    """A stage may have none."""
    opt = with_offload(wrapped(OptimConfig(), PrecisionConfig()))
    new, state = opt.update({}, opt.init({}), {}, norm=torch.tensor(1.0))
    assert new == {} and state["adamw"]["count"] == 1


# ---------------------------------------------------------------------------- training


def offloaded(config: Config) -> Config:
    """The same with the optimizer's state away."""
    return attrs.evolve(config, parallel=attrs.evolve(config.parallel, offload_optimizer=True))


def both(sharding: str, **more: str) -> tuple[Trainer, Trainer, Callable[[int], Any]]:
    """Trainers with the state away and here, in the mailbox; batches by step."""
    here, batches = one_stage(sharding, **more)
    config = here.plan.config
    away = plan(
        attrs.evolve(config, parallel=attrs.evolve(config.parallel, offload_optimizer=True))
    )
    return Trainer(away, here.world), here, batches


@pytest.mark.parametrize(
    ("sharding", "optimizer"),
    [
        *((name, "adamw") for name in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
        ("optim", "muon"),
    ],
)
def test_training_is_bitwise_the_same(sharding: str, optimizer: str) -> None:
    """Steps, and a state that was saved here and goes on there."""
    away, here, batches = both(sharding, optimizer=optimizer, clip="0.05", bucket_size="50")
    one, two = away.init(), here.init()
    for step in range(3):
        one, mine = finish(away.step(one, batches(step)))
        two, its = finish(here.step(two, batches(step)))
        assert mine == its and equal(whole(away, one), whole(here, two))
    one, _ = finish(away.step(one._replace(opt=two.opt), batches(3), donate=False))
    two, _ = finish(here.step(two, batches(3), donate=False))
    assert equal(whole(away, one), whole(here, two))


# ---------------------------------------------------------------------------- memory


LARGE = (
    "model.layers=2 model.hidden=64 model.heads=2 model.vocab=64 model.seq_len=4 parallel.tp=1 "
    "parallel.pp=1 parallel.dp=2 train.microbatches=1 train.global_batch=2 precision.policy=bf16 "
    "parallel.sharding=optim"
)


def test_account_moves_the_optimizer_to_the_host() -> None:
    """By hand: the same bytes there; of the device's, scratch for the largest two neighbours."""
    layout = plan(resolve(load("tiny", LARGE.split()), None))
    config = attrs.evolve(
        layout.config, parallel=attrs.evolve(layout.config.parallel, offload_optimizer=True)
    )
    here = account(layout, 0, device="cuda")
    away = account(plan(config), 0, device="cuda")
    assert away.host == here.masters + here.moments > 0 == away.masters == away.moments
    assert (away.params, away.grads, away.padding) == (here.params, here.grads, here.padding)
    assert away.held == here.held - away.host and here.host == 0
    owns = [bucket.size // 2 for bucket in layout.buckets(0)]
    assert len(owns) == 2  # what decays and what does not
    # 12 bytes of state an element of both, 2 of the rounded parameter; gradients are fp32 already
    assert away.scratch >= 12 * sum(owns) + 2 * owns[0]
    on_cpu = account(plan(config), 0, device="cpu")
    assert on_cpu.host == 0 and on_cpu.held == here.held


def on_two(rank: int, settings: str) -> tuple[int, int, int]:
    """Bytes of a real rank: of the optimizer, held, and the most."""
    layout = plan(resolve(load("tiny", settings.split()), 2))
    groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    found = measure(layout, ProcessWorld(groups))
    return found.opt, found.held, found.peak


def test_measured_bytes_are_the_accounts(pool: Pool) -> None:
    """On CPU, where the host's memory is the device's, within 2 %."""
    settings = f"{LARGE} parallel.offload_optimizer=true model.hidden=128"
    want = account(plan(resolve(load("tiny", settings.split()), 2)), 0)
    for opt, held, peak in pool.run(on_two, settings, world=2):
        assert abs(opt - want.opt) <= 64
        assert held == pytest.approx(want.held, rel=0.02)
        assert peak == pytest.approx(want.total, rel=0.02)


def test_plan_shows_it() -> None:
    """A column where it is asked for."""
    words = ["tiny", "parallel.tp=1", "parallel.dp=2", "parallel.offload_optimizer=true"]
    done = CliRunner().invoke(main, ["plan", *words])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[1].split()[-1] == "host"
    assert Config() == cfg.from_toml(cfg.to_toml(Config())) and held_bytes() == 0
    assert config_of({"dp": "2"}).parallel.offload_optimizer is False
