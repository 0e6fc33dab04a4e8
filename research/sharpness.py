"""How sharp does the loss become in training? As sharp as the learning rate allows: 2 / lr.

Gradient descent on one fixed batch, through tp 2 with sequence parallelism and dp 2, at three
learning rates under one vmap. Now and then the largest eigenvalue of the Hessian, by Lanczos from
Hessian-vector products that go through the mesh. Along a direction of curvature h a step multiplies
the distance from the minimum by 1 - lr h, which grows from h = 2 / lr on: a flatter loss sharpens
until it is there, a sharper one throws the weights to where it is flatter. So descent ends at the
edge of stability, and the loss goes on falling (Cohen et al. 2021, arXiv 2103.00065).

Run:    python -m research.sharpness
Expect: at each rate the mean of the last quarter is within 25 % of 2 / lr, so that the sharpness
        differs fourfold between the first rate and the last, from equal weights; the lowest rate
        begins below 2 / lr, the highest above; and the loss falls further in the second half.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from mfun import func, rng, tree
from mfun.config import Config
from mfun.mesh import Mesh
from research import common

RATES = (1.0, 0.5, 0.25)
EXPECTED = 0.25
SIZE = {"model.init_std": 0.25, "train.global_batch": 8}


class Run(NamedTuple):
    """Losses (steps, rates), and at some of the steps the sharpness (.., rates)."""

    losses: Tensor
    at: list[int]
    sharpness: Tensor


def descend(config: Config, steps: int, every: int, products: int = 5) -> Run:
    """Train with plain gradient descent, and look at the Hessian now and then."""
    batch, mean = common.text(config), common.mean_loss(config)
    vector = func.probe(rng.key(0, "sharpness"), func.specs_of(config), Mesh(), common.ONE)

    def loss(p: Any) -> Tensor:
        return mean(p, batch)

    def step(p: Any, rate: Tensor) -> tuple[Any, Tensor]:
        value, grads = func.value_and_gradient(loss, p)
        return func.add(p, grads, -rate), value

    def look(p: Any, v: Any) -> tuple[Tensor, Any]:
        found = func.lanczos(lambda u: func.hessian_vector(loss, p, u), v, products)
        return found.values[-1], found.vector  # where the next look starts

    rates = torch.tensor(RATES, dtype=torch.float64)
    params, vectors = (
        tree.map(lambda x: x.expand(len(rates), *x.shape), one)
        for one in (common.start(config), vector)
    )
    losses, at, sharpness = [], list(range(0, steps, every)), []
    for i in range(steps):
        if i in at:
            top, vectors = torch.func.vmap(look)(params, vectors)
            sharpness.append(top)
        params, value = torch.func.vmap(step)(params, rates)
        losses.append(value)
    return Run(torch.stack(losses), at, torch.stack(sharpness))


def as_expected(run: Run) -> bool:
    """Whether every rate came to its edge and stayed, learning on."""
    edge = 2 / torch.tensor(RATES, dtype=torch.float64)
    last = run.sharpness[-(len(run.at) // 4) :].mean(0)
    first, half = run.sharpness[0], len(run.losses) // 2
    there = ((last / edge - 1).abs() <= EXPECTED).all()
    fell = (run.losses[half:].min(0).values < run.losses[:half].min(0).values).all()
    return bool(there and fell and first[0] > edge[0] and first[-1] < edge[-1])


def plot(run: Run) -> common.Figure:
    """Loss, and sharpness with the edge it comes to."""
    figure, (left, right) = common.panels(2)
    for i, rate in enumerate(RATES):
        left.plot(run.losses[:, i], color=f"C{i}", linewidth=1.2, label=f"learning rate {rate:g}")
        right.plot(run.at, run.sharpness[:, i], "o-", color=f"C{i}", markersize=3, linewidth=1)
        right.axhline(2 / rate, color=f"C{i}", linestyle="--", linewidth=1)
        right.annotate(
            f"2 / {rate:g}", (1, 2 / rate), (4, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", color=f"C{i}", fontsize=8, va="center",
        )  # fmt: skip
    left.set(xlabel="step", ylabel="loss, nats a token", yscale="log")
    right.set(xlabel="step", ylabel="largest eigenvalue of the Hessian", yscale="log")
    for axis, ticks in ((left, (0.1, 0.2, 0.5, 1, 2)), (right, (1, 2, 4, 8, 16))):
        axis.minorticks_off()
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    left.legend(fontsize=8, frameon=False)
    return figure


@click.command(help=__doc__)
@click.option("--steps", default=192, show_default=True)
@click.option("--every", default=6, show_default=True, help="Steps from look to look.")
@click.option("--out", default=common.FIGURES / "sharpness.png", show_default=True, type=Path)
def main(steps: int, every: int, out: Path) -> None:
    """Command line."""
    run = descend(common.tiny(SIZE), steps, every)
    last = run.sharpness[-(len(run.at) // 4) :].mean(0)
    for i, rate in enumerate(RATES):
        print(
            f"rate {rate:<5g} 2 / lr {2 / rate:<3g} sharpness {run.sharpness[0, i]:.2f} -> "
            f"{last[i]:.2f}  loss {run.losses[0, i]:.3f} -> {run.losses[-1, i]:.3f}"
        )
    common.end(as_expected(run), plot(run), out)


if __name__ == "__main__":
    main()
