"""How much memory does each sharding strategy save? What the formula says, to a percent.

For N data-parallel ranks, N = 1, 2, 4 and 8, and each `parallel.sharding`: bytes of one rank
between steps and at the worst moment of a step, predicted by `mfun.plan.memory` and measured in a
real step. The rank is real, its tensors too; the others' messages never come (a fake process
group), so its numbers are nonsense and its memory is right. One process, no GPU.

Run:    python -m research.zero_memory [--out zero_memory.png]
Expect: every measured figure within 2 % of the predicted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, get_args

import torch.distributed as dist

from mfun.comm import ProcessWorld, distribute
from mfun.config import load, resolve
from mfun.config.sections import Sharding
from mfun.grads import needed_groups
from mfun.plan.measure import Measured, measure
from mfun.plan.memory import Account, account
from mfun.train.plan import Plan, plan

MODEL = [
    "model.layers=4",
    "model.hidden=128",
    "model.heads=4",
    "model.vocab=64",
    "model.seq_len=4",
    "train.microbatches=2",
    "parallel.tp=1",
    "parallel.pp=1",
]
"""Blocks of parameters, and next to no activations."""
STRATEGIES: tuple[str, ...] = get_args(Sharding)
RANKS = (1, 2, 4, 8)
EXPECTED = 0.02


class Row(NamedTuple):
    """A strategy on so many ranks."""

    strategy: str
    ranks: int
    parameters: int
    predicted: Account
    measured: Measured

    @property
    def errors(self) -> tuple[float, float]:
        """Relative: between steps, and at the worst moment."""
        predicted, measured = self.predicted, self.measured
        return (
            abs(measured.held / predicted.held - 1),
            abs(measured.peak / predicted.total - 1),
        )


@contextmanager
def alone(layout: Plan) -> Iterator[ProcessWorld]:
    """Rank 0 of a layout, whose collectives end at once and move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.mesh.world)
    try:
        yield ProcessWorld(distribute(layout.mesh, needed_groups(layout.table, layout.mesh)))
    finally:
        dist.destroy_process_group()


def layout_of(strategy: str, ranks: int, *settings: str) -> Plan:
    """The model on so many data-parallel ranks, two sequences each."""
    keys = [f"parallel.dp={ranks}", f"train.global_batch={2 * ranks}"]
    keys += [f"parallel.sharding={strategy}"]
    return plan(resolve(load("tiny", [*MODEL, *keys, *settings]), None))


def run(strategy: str, ranks: int, *settings: str) -> Row:
    """Predict and measure."""
    layout = layout_of(strategy, ranks, *settings)
    with alone(layout) as world:
        measured = measure(layout, world)
    parameters = sum(spec.numel for spec in layout.specs.values())
    return Row(strategy, ranks, parameters, account(layout, 0), measured)
