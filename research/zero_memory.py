"""How much memory does each sharding strategy save? What the formula says, to a percent.

For N data-parallel ranks and each `parallel.sharding`: bytes of one rank between steps and at the
worst moment of a step, predicted by `mfun.plan.memory` and measured in a real step, in bf16 with
Adam: 16, 4 + 12/N, 2 + 14/N and 16/N bytes a parameter between steps. The rank is real, its tensors
too; the others' messages never come (a fake process group), so its numbers are nonsense and its
memory is right. One process, no GPU, a minute.

Run:    python -m research.zero_memory [--out zero_memory.png]
Expect: every measured figure within 2 % of the predicted one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

import click
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
PAPER = ("precision.policy=bf16", "precision.grads=bf16")
EXPECTED = 0.02
COLOURS = dict(zip(STRATEGIES, ("0.35", "tab:blue", "tab:orange", "tab:green"), strict=True))


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


def plot(rows: list[Row], path: Path) -> None:
    """Bytes a parameter against N: lines are predicted, points measured."""
    from matplotlib.figure import Figure

    through = range(1, max(row.ranks for row in rows) + 1)
    accounts = {s: [account(layout_of(s, n, *PAPER), 0) for n in through] for s in STRATEGIES}
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    kinds = ("between steps", "held", "held"), ("at the worst moment of a step", "total", "peak")
    for panel, (title, predicted, measured) in zip(panels, kinds, strict=True):
        for strategy in STRATEGIES:
            colour = COLOURS[strategy]
            mine = [row for row in rows if row.strategy == strategy]
            each = mine[0].parameters
            line = [getattr(a, predicted) / each for a in accounts[strategy]]
            points = [getattr(row.measured, measured) / each for row in mine]
            panel.plot(through, line, color=colour, linewidth=1.5, label=strategy)
            style = {"color": colour, "markersize": 6, "markerfacecolor": "white"}
            panel.plot([row.ranks for row in mine], points, "o", **style)
        panel.set(title=title, xlabel="data-parallel ranks N", xticks=through)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="bytes of a rank, per parameter", ylim=(0, panels[1].get_ylim()[1]))
    panels[1].plot([], [], "o", color="0.4", markerfacecolor="white", label="measured")
    panels[1].legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.74))
    figure.savefig(path, dpi=110)


@click.command(help=__doc__)
@click.option("--out", default="zero_memory.png", show_default=True, type=Path)
def main(out: Path) -> None:
    """Command line."""
    rows = []
    print(f"{'sharding':<19} {'N':>2} {'held':>9} {'off':>7} {'peak':>9} {'off':>7}   bytes")
    for strategy in STRATEGIES:
        for ranks in RANKS:
            row = run(strategy, ranks, *PAPER)
            rows.append(row)
            held, peak = row.errors
            print(
                f"{strategy:<19} {ranks:>2} {row.measured.held:>9} {held:>7.2%} "
                f"{row.measured.peak:>9} {peak:>7.2%}",
                flush=True,
            )
    plot(rows, out)
    good = all(max(row.errors) <= EXPECTED for row in rows)
    print(f"expectation {'held' if good else 'FAILED'}; figure: {out}")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
