"""Sharded gradients, optimizer and parameters: every strategy equals one device, and each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from test_verify import assert_equal, on_a_rank
from threads import in_threads
from torch import Tensor

from mfun import config as cfg
from mfun import tree
from mfun.comm import finish
from mfun.config import Config
from mfun.pipeline import mailbox
from mfun.train.plan import Plan, plan
from mfun.train.shards import by_path
from mfun.train.step import State, Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.compare import RankResult, judge
from mfun.verify.run import in_mailbox, reference_history
from tests.pairwise import Row, covering

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
FIELDS: dict[str, tuple[str, ...]] = {
    "sharding": STRATEGIES,
    "tp": ("1", "2"),
    "pp": ("1", "2"),
    "dp": ("1", "2", "3", "4"),
    "shard_copies": ("1", "2"),
    "sequence_parallel": ("false", "true"),
    "overlap": ("false", "true"),
    "mean_gradients": ("false", "true"),
    "schedule": ("1f1b", "gpipe", "zb-h1", "interleaved"),
    "microbatches": ("1", "2", "4"),
    "loss_norm": ("tokens", "microbatch"),
    "tied": ("true", "false"),
    "kv_heads": ("4", "1"),
    "bucket_size": ("0", "50"),
    "prefetch": ("0", "1", "9"),
    "optimizer": ("adamw", "sgd"),
    "clip": ("0.0", "0.05"),
    "recompute": ("none", "full"),
    "dropout": ("0.0", "0.1"),
}
SMALL = (
    "model.hidden=8 model.heads=4 model.ffn=12 model.seq_len=4 model.vocab=19 model.init_std=0.3 "
    "model.norm=layernorm model.position=learned model.bias=all precision.policy=fp64 "
    "optim.eps=1e-4 optim.lr=0.01 optim.warmup=1 train.steps=2"
)


def allowed(row: Row) -> bool:
    """Chunks need stages, and copies shards of half the data ranks."""
    chunks = row.get("pp") == "1" and row.get("schedule") == "interleaved"
    copies = row.get("shard_copies") == "2"
    odd = copies and row.get("dp") in ("1", "3")
    return not (chunks or odd or (copies and row.get("sharding") == "no_shard"))


def config_of(row: Row) -> Config:
    """The smallest configuration of a row."""
    row = {"schedule": "auto", "microbatches": "1", "clip": "0.0", **row}
    pp, dp, count = (int(row.get(name, "1")) for name in ("pp", "dp", "microbatches"))
    layers = 3 if row["schedule"] != "interleaved" else 5
    sections = {
        "parallel": "sharding shard_copies tp pp dp sequence_parallel overlap bucket_size "
        "prefetch recompute mean_gradients",
        "model": "tied kv_heads dropout",
        "train": "microbatches loss_norm",
        "optim": "clip",
    }
    settings = [
        f"{s}.{name}={row[name]}" for s, names in sections.items() for name in names.split()
        if name in row
    ]  # fmt: skip
    settings += [
        f"parallel.schedule={row['schedule'] if pp > 1 else 'auto'}",
        f"model.layers={layers}",
        f"train.global_batch={dp * (count + 1)}",
        f"optim.name={row.get('optimizer', 'adamw')}",
    ]
    defaults = "parallel.tp=1 parallel.pp=1 parallel.dp=1"
    return cfg.resolve(cfg.override(Config(), [*SMALL.split(), *defaults.split(), *settings]), None)


def name_of(row: Row) -> str:
    """A row's values."""
    return "-".join(row.values())


ROWS = covering(FIELDS, allowed, seed=0)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_equals_one_device(row: Row) -> None:
    """Value, norm, every gradient and the parameters, all ranks in one process."""
    layout = plan(config_of(row))
    assert_equal(judge(layout, in_mailbox(layout), reference_history(layout.config)))


@pytest.mark.parametrize(
    "row",
    [row for row in covering(FIELDS, allowed, seed=1) if row["dp"] != "1"],
    ids=name_of,
)
def test_as_processes_run_it_equals_one_device(row: Row) -> None:
    """Each rank a thread that runs what it would run as a process."""
    layout = plan(config_of(row))
    assert_equal(judge(layout, in_threads(layout), reference_history(layout.config)))


@pytest.mark.full
@pytest.mark.parametrize("place", [in_mailbox, in_threads])
@pytest.mark.parametrize("seed", range(10, 16))
def test_grid_equals_one_device(seed: int, place: Callable[[Plan], list[RankResult]]) -> None:
    """More rows that cover every pair."""
    for row in covering(FIELDS, allowed, seed=seed):
        layout = plan(config_of(row))
        report = judge(layout, place(layout), reference_history(layout.config))
        assert report.ok, (row, report.notes)


@pytest.mark.parametrize("sharding", STRATEGIES[1:])
@pytest.mark.parametrize(
    "row",
    [
        {"dp": "2", "microbatches": "2", "recompute": "full", "dropout": "0.1"},
        {"dp": "3", "microbatches": "1"},
        {"dp": "4", "shard_copies": "2", "mean_gradients": "true"},
        {"dp": "2", "tp": "2", "sequence_parallel": "true", "overlap": "true"},
        {"dp": "2", "pp": "2", "microbatches": "4", "schedule": "zb-h1", "overlap": "true"},
    ],
    ids=name_of,
)
def test_on_gloo_ranks_equals_one_device(pool: Pool, row: Row, sharding: str) -> None:
    """Real processes."""
    layout = plan(config_of({**row, "sharding": sharding}))
    settings = cfg.to_toml(layout.config)
    found = pool.run(on_gloo, settings, world=layout.mesh.world)
    for result in found:
        for kind in ("grads", "params"):
            result[kind] = {p: torch.from_numpy(x) for p, x in result[kind].items()}
    results = [RankResult(**result) for result in found]
    assert_equal(judge(layout, results, reference_history(layout.config)))


def on_gloo(rank: int, toml: str) -> dict[str, Any]:
    """One rank's result."""
    return on_a_rank(rank, (), cfg.from_toml(toml))


def same(a: list[RankResult], b: list[RankResult]) -> bool:
    """Whether all ranks have the same gradients to the bit.

    Not so the norm, a sum in another order, nor the parameters: the optimizers' kernels round the
    last elements of a tensor, which fill no vector of the processor, otherwise than the rest, and
    what is last in a leaf is not so in a bucket.
    """
    return all(
        x.losses == y.losses
        and x.norms == pytest.approx(y.norms, rel=1e-12)
        and all(torch.equal(v, y.grads[path]) for path, v in x.grads.items())
        and all(torch.allclose(v, y.params[path], 1e-15, 1e-15) for path, v in x.params.items())
        for x, y in zip(a, b, strict=True)
    )


SAME_ORDER = {
    "one-microbatch": ({"dp": "2", "tp": "2"}, STRATEGIES),
    "three-ranks": ({"dp": "3"}, STRATEGIES),
    "several-microbatches": (
        {"dp": "2", "microbatches": "3", "pp": "2", "tied": "false"},
        STRATEGIES[:2],
    ),
    "gradients-by-microbatch": ({"dp": "2", "microbatches": "3", "pp": "2"}, STRATEGIES[2:]),
}


@pytest.mark.parametrize("case", SAME_ORDER)
@pytest.mark.parametrize("place", [in_mailbox, in_threads])
def test_strategies_agree_bitwise(case: str, place: Callable[[Plan], list[RankResult]]) -> None:
    """Where sums are of the same summands in the same order, all strategies have the same bits."""
    row, strategies = SAME_ORDER[case]
    first, *others = (place(plan(config_of({**row, "sharding": s}))) for s in strategies)
    assert all(same(first, other) for other in others)


@pytest.mark.parametrize("sharding", STRATEGIES[1:])
def test_shards_smaller_than_ranks(sharding: str) -> None:
    """64 ranks, of which most hold only padding of the smallest buckets."""
    row = {"dp": "64", "sharding": sharding, "bucket_size": "1"}
    layout = plan(config_of(row))
    sizes = [bucket.used for bucket in layout.buckets(0)]
    assert min(sizes) < 64
    report = judge(layout, in_mailbox(layout, check=False), reference_history(layout.config))
    assert_equal(report)


# ---------------------------------------------------------------------------- states


def one_stage(sharding: str, **more: str) -> tuple[Trainer, Callable[[int], Any]]:
    """A trainer of two data ranks in the mailbox, and its batches by step."""
    layout = plan(config_of({"dp": "2", "microbatches": "2", "sharding": sharding, **more}))
    (world,) = mailbox.worlds(layout.mesh)

    def batches(step: int) -> Any:
        count = layout.config.train.microbatches
        return [
            world.build(lambda c, i=i: rank_batches(layout.config, c, step)[i])
            for i in range(count)
        ]

    return Trainer(layout, world), batches


def whole(trainer: Trainer, state: State) -> dict[str, Tensor]:
    """Every tensor of a state, by path."""
    found = finish(by_path(trainer.plan, trainer.world, state._asdict()))
    return {path: x.clone() for path, x in tree.flatten(found).items() if isinstance(x, Tensor)}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Same names, same bits."""
    return a.keys() == b.keys() and all(torch.equal(x, b[path]) for path, x in a.items())


@pytest.mark.parametrize("sharding", STRATEGIES)
def test_old_state_stays_valid_without_donation(sharding: str) -> None:
    """A step from it gives the same again, and its tensors are what they were."""
    trainer, batches = one_stage(sharding)
    state, _ = finish(trainer.step(trainer.init(), batches(0)))
    before = whole(trainer, state)
    first, _ = finish(trainer.step(state, batches(1), donate=False))
    result = whole(trainer, first)
    assert equal(before, whole(trainer, state))
    again, _ = finish(trainer.step(state, batches(1), donate=False))
    assert equal(result, whole(trainer, again))
    assert equal(result, whole(trainer, first))
    assert not equal(result, before)


@pytest.mark.parametrize("to", STRATEGIES)
@pytest.mark.parametrize("sharding", STRATEGIES)
def test_state_of_one_strategy_continues_under_another(sharding: str, to: str) -> None:
    """By path, a state is the same for all: one microbatch, so that all have the same bits."""
    trainer, batches = one_stage(sharding, microbatches="1")
    other, _ = one_stage(to, microbatches="1")
    state, _ = finish(trainer.step(trainer.init(), batches(0)))
    portable = finish(by_path(trainer.plan, trainer.world, state))
    params = tree.unflatten(tree.flatten(portable.params))
    adopted = other.adopt(State(state.step, params, portable.opt))
    there, _ = finish(other.step(adopted, batches(1)))
    here, _ = finish(trainer.step(state, batches(1)))
    assert equal(whole(trainer, here), whole(other, there))


@pytest.mark.parametrize("sharding", STRATEGIES[1:])
def test_padding_stays_zero(sharding: str) -> None:
    """No optimizer, norm or reduction ever puts a number where no parameter is."""
    trainer, batches = one_stage(sharding, bucket_size="50")
    state = trainer.init()
    for step in range(3):
        state, _ = finish(trainer.step(state, batches(step)))
    moments = state.opt["adamw"]["mu"]
    for i, bucket in enumerate(trainer.plan.buckets(0)):
        used = torch.zeros(bucket.size, dtype=torch.bool)
        for span in bucket.spans:
            used[span.start : span.stop] = True
        lead = [moments[f"bucket.{i}"][rank] for rank in range(2)]
        assert torch.cat(lead)[~used].abs().sum() == 0
        assert torch.cat(lead)[used].abs().sum() > 0


# ---------------------------------------------------------------------------- communication


class Counted:
    """The elements that one rank hands to each kind of collective of a world, call by call."""

    def __init__(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, list[int]] = {"all_reduce": [], "reduce_scatter": [], "gather": []}
        for kind in self.sizes:
            self._count(trainer.world, kind, monkeypatch)

    def _count(self, world: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original = getattr(world, kind)

        def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if x[0].numel() > 1:  # not the counts, the loss and the norm
                self.sizes[kind].append(x[0].numel())
            return original(x, *args, **kwargs)

        monkeypatch.setattr(world, kind, counted)


def padded(n: int) -> int:
    """A bucket's size over two data ranks: in multiples of 128."""
    return -(-n // 128) * 128


def aligned(*sizes: int) -> int:
    """Leaves one after the other, each from a multiple of 64."""
    end = 0
    for size in sizes:
        end = -(-end // 64) * 64 + size
    return padded(end)


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("sharding", STRATEGIES)
def test_communication_is_the_formula(
    sharding: str, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number and size of a step's collectives, for three blocks on two data ranks.

    A rank hands over all P gradients once a step (all-reduce or reduce-scatter), or once a
    microbatch where gradients are sharded; and is handed P parameters once a step, or where they
    are sharded, layer by layer: in every forward, and in every backward except for the layer that
    has just run.
    """
    trainer, batches = one_stage(
        sharding, microbatches=str(microbatches), tied="false", prefetch="0"
    )
    state = trainer.init()
    state, _ = finish(trainer.step(state, batches(0)))
    counted = Counted(trainer, monkeypatch)
    finish(trainer.step(state, batches(1)))
    norms, biases = [8] * 4, [24, 8, 12, 8]
    matrices = [192, 64, 96, 96]
    layers = {
        "embed": [aligned(152, 32)],
        "block": [aligned(*matrices), aligned(*biases, *norms)],
        "head": [aligned(152), aligned(8, 8)],
    }
    model = layers["embed"] + 3 * layers["block"] + layers["head"]
    sizes = counted.sizes
    if sharding == "no_shard":
        plain = 152 + 32 + 3 * sum(matrices + biases + norms) + 152 + 16
        assert sizes == {"all_reduce": [plain], "reduce_scatter": [], "gather": []}
        return
    assert sizes["all_reduce"] == []
    if sharding == "optim":  # one bucket for what decays and one for what does not
        assert len(sizes["reduce_scatter"]) == len(sizes["gather"]) == 2
        assert sizes["reduce_scatter"] == sizes["gather"]
        most = 152 + 32 + 152 + 3 * (sum(matrices + biases + norms)) + 16
        assert most <= sum(sizes["gather"]) <= most + 64 * 33 + 2 * 128
        return
    assert sorted(sizes["reduce_scatter"]) == sorted(model * microbatches)
    if sharding == "optim_grads":
        assert sorted(sizes["gather"]) == sorted(model)
        return
    forward = model * microbatches
    backward = (layers["embed"] + 3 * layers["block"]) * microbatches
    kept = layers["embed"] * (microbatches - 1)  # the next forward begins where a backward ended
    assert sorted(sizes["gather"]) == sorted(_without(forward + backward, kept))


def _without(values: list[int], taken: list[int]) -> list[int]:
    left = list(values)
    for value in taken:
        left.remove(value)
    return left
