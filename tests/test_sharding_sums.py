"""16-bit gradients added up over ranks in fp32, and the padding that buckets are asked to have."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from test_sharding import assert_equal, config_of
from threads import in_threads, on_threads
from torch import Tensor

from mfun import config as cfg
from mfun.comm import ProcessWorld, distribute, finish
from mfun.config import ConfigError, load
from mfun.grads import GradBuffers, needed_groups
from mfun.mesh import Mesh
from mfun.pipeline import mailbox
from mfun.train.plan import Plan, plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, program, reference_history

SIZE = 4000


def summand(rank: int) -> Tensor:
    """Of a rank: bf16 normals."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=generator).to(torch.bfloat16)


def reduced(groups: Any, ranks: int, op: str) -> tuple[Tensor, Tensor]:
    """This rank's piece of the sum, wide and not."""
    world = ProcessWorld(groups)
    x = summand(world.rank)
    wide = finish(world.reduce_scatter(x.clone(), ("dp",), op, wide=True))  # type: ignore[arg-type]
    plain = finish(world.reduce_scatter(x.clone(), ("dp",), op))  # type: ignore[arg-type]
    assert wide.dtype == plain.dtype == torch.bfloat16
    return wide, plain


def on_gloo(rank: int, op: str) -> tuple[list[float], list[float]]:
    """The same on a real rank, as numbers."""
    wide, plain = reduced(distribute(Mesh(dp=4)), 4, op)
    return wide.tolist(), plain.tolist()


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("place", ["threads", "gloo"])
def test_wide_sums_are_rounded_once(place: str, op: str, pool: Pool) -> None:
    """Within half a unit in bf16's last place of the float64 sum; the plain one is further off."""
    ranks = 4 if place == "gloo" else 5
    exact = torch.stack([summand(rank).double() for rank in range(ranks)]).sum(0)
    exact = exact / ranks if op == "mean" else exact
    if place == "gloo":
        pairs = [map(torch.tensor, pair) for pair in pool.run(on_gloo, op, world=ranks)]
    else:
        pairs = on_threads(Mesh(dp=ranks), lambda groups: reduced(groups, ranks, op))
    wide, plain = (torch.cat(list(parts)).double() for parts in zip(*pairs, strict=True))
    assert bool(((wide - exact).abs() <= exact.abs() * 2.0**-8 * 1.001 + 1e-6).all())
    errors = [float((x - exact).abs().mean()) for x in (wide, plain)]
    assert 0 < errors[0] < 0.8 * errors[1], errors


def wide_layout(**more: str) -> Plan:
    """Three data ranks in bf16 with bf16 gradients, summed in fp32."""
    config = config_of({"dp": "3", "microbatches": "2", "bucket_size": "50", **more})
    settings = ["precision.policy=bf16", "precision.grads=bf16", "parallel.wide_sums=true"]
    return plan(cfg.resolve(cfg.override(config, settings), None))


@pytest.mark.parametrize("mean", ["false", "true"])
@pytest.mark.parametrize("sharding", ["optim", "optim_grads"])
def test_a_step_sums_its_gradients_so(sharding: str, mean: str) -> None:
    """Every shard of a step: the ranks' buffers in float32, added, rounded once."""
    layout = wide_layout(sharding=sharding, mean_gradients=mean, microbatches="1")

    def main(groups: Any) -> tuple[list[Tensor], list[Tensor]]:
        world = ProcessWorld(groups)
        trainer = Trainer(layout, world)
        state = trainer.init()
        given: dict[int, Tensor] = {}

        def keep(grads: GradBuffers, bucket: int) -> None:
            given[bucket] = grads.buffers[bucket].clone()

        trainer.buffers().guard = keep
        finish(trainer.gradients(state, rank_batches(layout.config, world.coords, 0)))
        shards = trainer.buffers().shards
        return [given[i] for i in sorted(given)], [shards[i].clone() for i in sorted(shards)]

    found = on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))
    for i in range(len(layout.buckets(0))):
        have = torch.cat([shards[i] for _, shards in found])
        total = found[0][0][i].float() + found[1][0][i].float() + found[2][0][i].float()
        want = (total / 3 if mean == "true" else total).to(torch.bfloat16)
        assert have.dtype == torch.bfloat16 and torch.equal(have, want)


@pytest.mark.parametrize("place", [in_mailbox, in_threads])
def test_replicas_stay_equal(place: Callable[..., Any]) -> None:
    """Two steps of training: parameters of all ranks are the same bits."""
    first, *others = place(wide_layout(sharding="optim"))
    for other in others:
        assert all(torch.equal(x, other.params[path]) for path, x in first.params.items())
        assert first.losses == other.losses and math.isfinite(first.losses[-1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("precision.policy=bf16 precision.grads=bf16", "sharding is no_shard"),
        ("parallel.sharding=optim", "precision.grads fp32"),
        (
            "parallel.sharding=optim parallel.dp=4 parallel.shard_copies=2 precision.policy=bf16 "
            "precision.grads=bf16",
            "parallel.shard_copies 2",
        ),
    ],
)
def test_what_has_no_sum_of_16_bits_is_refused(settings: str, message: str) -> None:
    """Each with the number that does not fit."""
    with pytest.raises(ConfigError, match=message):
        cfg.resolve(load("tiny", ["parallel.wide_sums=true", *settings.split()]), None)


@pytest.mark.parametrize(("pad", "dp"), [(65536, 2), (65536, 3), (1000, 3), (1, 2)])
def test_buckets_are_padded_as_asked(pad: int, dp: int) -> None:
    """To the least multiple of lcm(ranks, pad), and training is one device's."""
    config = config_of({"dp": str(dp), "sharding": "optim", "bucket_size": "500"})
    layout = plan(cfg.override(config, [f"parallel.bucket_pad={pad}"]))
    multiple = math.lcm(dp, pad)
    assert len(layout.buckets(0)) > 2
    for bucket in layout.buckets(0):
        assert bucket.size == -(-bucket.used // multiple) * multiple
    (world,) = mailbox.worlds(layout.mesh)
    assert layout.buffers(0, world.lead).buffers[0].shape[-1] % multiple == 0
    assert_equal(judge(layout, in_mailbox(layout), reference_history(layout.config)))


# ---------------------------------------------------------------------------- launches


def launched(rank: int) -> list[list[float]]:
    """Three sums of a real rank that go out in one launch, and one after them."""
    world = ProcessWorld(distribute(Mesh(dp=3)))
    world.coalesces = True
    xs = [torch.full((n,), float(rank + n), dtype=torch.float64) for n in (2, 3, 5)]
    with world.together(("dp",)):
        going = [world.all_reduce(x, ("dp",)) for x in xs]
        assert [float(x[0]) for x in xs] == [rank + n for n in (2.0, 3.0, 5.0)]  # not under way yet
    sums = [finish(one) for one in going]
    after = finish(world.all_reduce(torch.ones(1), ("dp",)))
    return [x.tolist() for x in (*sums, after)]


def test_sums_go_out_together(pool: Pool) -> None:
    """One call of the backend for all of them, and the sums are theirs."""
    for found in pool.run(launched, world=3):
        assert found == [[9.0] * 2, [12.0] * 3, [18.0] * 5, [3.0]]


def trained(rank: int, toml: str) -> tuple[list[float], list[float]]:
    """Losses and norms of a real rank whose collectives of a kind go out together."""
    layout = plan(cfg.from_toml(toml))
    world = ProcessWorld(distribute(layout.mesh, needed_groups(layout.table, layout.mesh)))
    world.coalesces = True
    found = finish(program(layout, world))
    return found["losses"], found["norms"]


def test_training_with_common_launches(pool: Pool) -> None:
    """Many buckets, tied and not, in one sum: one device's numbers."""
    config = config_of({"dp": "2", "tp": "2", "bucket_size": "50", "sequence_parallel": "true"})
    assert len(plan(config).buckets(0)) > 3
    want = reference_history(config)
    for losses, norms in pool.run(trained, cfg.to_toml(config), world=4):
        assert losses == pytest.approx(want.losses, rel=1e-11)
        assert norms == pytest.approx(want.grad_norms, rel=1e-11)
