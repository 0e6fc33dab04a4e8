"""How much of a loss curve is luck? Train all seeds at once: vmap over a tensor-parallel mesh.

A training step through tp 2 with sequence parallelism and dp 2 is a function of parameters and
batch, so `torch.func.vmap` over it trains one model a seed in one program: the mesh inside, the
seeds outside.

Run:    python -m research.ensemble
Expect: every member equals the model trained alone to 1e-10, and together they take at most half
        of the time of one after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from mfun import func, tree
from mfun.config import Config
from research import common

RATE = 0.5
EXPECTED = (1e-10, 0.5)


def stepper(config: Config) -> Callable[[Any, Any, common.Batch], tuple[Any, Any, Tensor]]:
    """(params, momentum, batch) -> the same after one step, and the loss."""
    mean = common.mean_loss(config)

    def step(params: Any, trace: Any, batch: common.Batch) -> tuple[Any, Any, Tensor]:
        value, grads = func.value_and_gradient(lambda p: mean(p, batch), params)
        trace = func.add(grads, trace, 0.9)
        return func.add(params, trace, -RATE), trace, value

    return step


def train(config: Config, step: Any, params: Any, steps: int) -> tuple[Any, Tensor]:
    """Parameters after the steps and the losses (steps, ...)."""
    trace, losses = tree.map(torch.zeros_like, params), []
    for i in range(steps):
        params, trace, loss = step(params, trace, common.text(config, i))
        losses.append(loss)
    return params, torch.stack(losses)


def run(config: Config, seeds: int, steps: int) -> tuple[Tensor, float, float]:
    """Losses (steps, seeds), the largest difference from members alone, and the ratio of times."""
    step, members = stepper(config), [common.start(config, seed) for seed in range(seeds)]
    stacked = tree.map(lambda *each: torch.stack(each), *members)
    together = torch.func.vmap(step, (0, 0, None))
    train(config, together, stacked, 1)
    begin = time.perf_counter()
    params, losses = train(config, together, stacked, steps)
    middle = time.perf_counter()
    alone = [train(config, step, member, steps) for member in members]
    ended = time.perf_counter()
    weights = common.rows(params) - torch.stack([common.flat(p) for p, _ in alone])
    curves = losses - torch.stack([x for _, x in alone], 1)
    apart = max(float(weights.abs().max()), float(curves.abs().max()))
    return losses, apart, (middle - begin) / (ended - middle)


def plot(losses: Tensor) -> common.Figure:
    """Every seed, their mean, and two standard deviations."""
    figure, (axis,) = common.panels(1, 5, 3.2)
    mean, spread, at = losses.mean(1), 2 * losses.std(1), range(len(losses))
    axis.plot(losses, color="tab:blue", linewidth=0.6, alpha=0.5)
    band = {"color": "tab:blue", "alpha": 0.15, "linewidth": 0, "label": "two standard deviations"}
    axis.fill_between(at, mean - spread, mean + spread, **band)
    axis.plot(at, mean, color="tab:blue", linewidth=1.6, label=f"mean of {losses.shape[1]} seeds")
    axis.set(xlabel="step", ylabel="loss, nats a token")
    axis.legend(fontsize=8, frameon=False)
    return figure


@click.command(help=__doc__)
@click.option("--seeds", default=6, show_default=True)
@click.option("--steps", default=16, show_default=True)
@click.option("--out", default=common.FIGURES / "ensemble.png", show_default=True, type=Path)
def main(seeds: int, steps: int, out: Path) -> None:
    """Command line."""
    losses, apart, ratio = run(common.tiny(), seeds, steps)
    last = losses[-1]
    print(f"loss {losses[0].mean():.3f} -> {last.mean():.3f} +- {last.std():.3f}, {seeds} seeds")
    print(f"largest difference from members alone {apart:.1e}; time {ratio:.2f} of one by one")
    common.end(apart <= EXPECTED[0] and ratio <= EXPECTED[1], plot(losses), out)


if __name__ == "__main__":
    main()
