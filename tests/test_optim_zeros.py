"""Zeros of the gradient: each logical element once, in every layout, none of the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mfun.config import override
from mfun.pipeline import mailbox
from mfun.train.plan import plan
from mfun.train.step import Trainer
from mfun.verify import reference
from mfun.verify.batches import all_batches, rank_batches
from mfun.verify.run import settings_of
from tests.properties import small

LAYOUTS = (
    "",
    "tp=4 heads=4",  # a vocabulary of 19 is padded to 20
    "tp=2 dp=2 sequence_parallel=true",
    "pp=2 layers=2",
    "pp=2 layers=2 tied=false dp=2",
    "tp=4 heads=4 kv_heads=2 qk_norm=true",
    "dp=2 sharding=optim",
    "tp=2 dp=2 sharding=optim_grads",
    "tp=2 pp=2 layers=2 dp=2 sharding=optim",
    "dp=2 sharding=optim_grads_params",
)


def counted(settings: str) -> list[Any]:
    """The metric of a step on every stage, and the same batch's count by the reference."""
    config = override(small(f"count_zeros=true {settings}"), ["model.vocab=19"])
    layout, office = plan(config), mailbox.Office()

    def program(world: Any) -> Any:
        trainer = Trainer(layout, world)
        batches = [
            world.build(lambda c, i=i: rank_batches(config, c, 0)[i])
            for i in range(config.train.microbatches)
        ]
        _, metrics = yield from trainer.step(trainer.init(), batches)
        return metrics.num_zeros

    found = mailbox.run([program(w) for w in mailbox.worlds(layout.mesh, office)], office)
    told = settings_of(config)
    params = reference.init(told, config.train.seed)
    grads = reference.loss_and_grads(told, params, all_batches(config, 0), config.train.seed, 0)
    return [*found, sum(int((g == 0).sum()) for g in grads.grads.values())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zeros_in_every_layout(layout: str) -> None:
    """Unused rows of an untied embedding, and the like: as many as the reference has."""
    *found, want = counted(
        f"position=learned tied=false {layout}" if "tied" not in layout else layout
    )
    assert want > 0 and found == [want] * len(found)


def test_tied_tables_count_once() -> None:
    """Tied, every row of the table has a gradient: only other leaves may have zeros."""
    *found, want = counted("pp=2 layers=2 tied=true")
    assert found == [want] * 2


def test_it_is_off_by_default() -> None:
    """Nothing is counted, and nothing said."""
    layout = plan(small(""))
    (world,) = mailbox.worlds(layout.mesh)
    config = layout.config
    batches = [
        world.build(lambda c, i=i: rank_batches(config, c, 0)[i])
        for i in range(config.train.microbatches)
    ]
    trainer = Trainer(layout, world)
    (out,) = mailbox.run([trainer.step(trainer.init(), batches)])
    assert out[1].num_zeros is None and torch.is_tensor(
        next(iter(out[0].params.values()))["tokens"]
    )
