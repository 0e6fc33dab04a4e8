"""Does the best learning rate of a narrow model serve a wide one? With muP it does.

Widths from narrow to wide with heads of a fixed size, on tp 2 with sequence parallelism and dp 2,
trained with Adam at a grid of learning rates, a whole grid at once under one vmap. In the standard
parametrisation the best rate falls as the width grows. In muP (Yang et al. 2022, arXiv 2203.03466,
table 8) hidden matrices start with variance 1/width and move at lr / width, the head starts with
variance 1/width^2 and moves at lr / width, and the best rate stays.

Run:    python -m research.mup
Expect: from the narrowest to the widest, muP's best rate moves by at most one step of the grid, and
        the standard one's falls by at least two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from mfun import func, tree
from mfun.config import Config
from research import common

BASE = 16
RATES = tuple(2.0**k for k in range(-12, -1))
EXPECTED = (1, 2)
Scales = Callable[[str, float], tuple[float, float]]


def standard(path: str, wider: float) -> tuple[float, float]:
    """Factors of initial value and learning rate of a leaf: hidden matrices by 1/sqrt(width)."""
    return (1.0 if "norm" in path or "embed" in path else wider**-0.5), 1.0


def mup(path: str, wider: float) -> tuple[float, float]:
    """The same in muP; `wider` is the width over the base's."""
    if "norm" in path or "embed" in path:
        return 1.0, 1.0
    return (1.0 / wider if "head" in path else wider**-0.5), 1.0 / wider


def sized(width: int, batch: int) -> Config:
    """The tiny GPT at another width, heads of 4."""
    sizes = {"model.hidden": width, "model.heads": width // 4, "model.ffn": 2 * width}
    return common.tiny({**sizes, "model.init_std": 0.25, "train.global_batch": batch})


def trained(config: Config, scales: Scales, rates: Tensor, steps: int) -> Tensor:
    """The mean loss of the last quarter of the steps, for every rate."""
    wider, mean = config.model.hidden / BASE, common.mean_loss(config)

    def move(path: str, p: Tensor, m: Tensor, v: Tensor, lr: Tensor, n: int) -> Tensor:
        m, v = m / (1 - 0.9**n), v / (1 - 0.95**n)
        return p - lr * scales(path, wider)[1] * m / (v.sqrt() + 1e-8)

    def step(params: Any, m: Any, v: Any, lr: Tensor, batch: common.Batch, n: int) -> Any:
        value, g = func.value_and_gradient(lambda p: mean(p, batch), params)
        m = tree.map(lambda a, b: 0.9 * a + 0.1 * b, m, g)
        v = tree.map(lambda a, b: 0.95 * a + 0.05 * b.square(), v, g)
        return (
            tree.map_with_path(lambda path, p, a, b: move(path, p, a, b, lr, n), params, m, v),
            m,
            v,
            value,
        )

    start = tree.map_with_path(lambda path, x: x * scales(path, wider)[0], common.start(config))
    params = tree.map(lambda x: x.expand(len(rates), *x.shape), start)
    m = v = tree.map(torch.zeros_like, params)
    losses = []
    for i in range(steps):
        together = torch.func.vmap(step, (0, 0, 0, 0, None, None))
        params, m, v, loss = together(params, m, v, rates, common.text(config, i), i + 1)
        losses.append(loss)
    return torch.stack(losses[-(steps // 4) :]).mean(0)


Curves = dict[str, dict[int, Tensor]]


def run(widths: tuple[int, ...], steps: int, batch: int) -> Curves:
    """Loss by learning rate, of every width in both parametrisations."""
    rates = torch.tensor(RATES, dtype=torch.float64)
    rows: dict[str, Scales] = {"standard": standard, "muP": mup}
    return {
        name: {width: trained(sized(width, batch), scales, rates, steps) for width in widths}
        for name, scales in rows.items()
    }


def best(curve: Tensor) -> int:
    """Where on the grid a loss is least; a diverged one is worst."""
    return int(curve.nan_to_num(float("inf")).argmin())


def plot(curves: Curves) -> common.Figure:
    """Loss against learning rate, one line a width, its minimum marked."""
    figure, axes = common.panels(len(curves))
    for axis, (name, by_width) in zip(axes, curves.items(), strict=True):
        for i, (width, curve) in enumerate(by_width.items()):
            colour = f"C{i}"
            axis.plot(RATES, curve, color=colour, linewidth=1.3, label=f"width {width}")
            axis.plot(RATES[best(curve)], curve[best(curve)], "o", color=colour, markersize=6)
        axis.set(xscale="log", xlabel="learning rate", title=name)
    worst = max(float(curve[0]) for by_width in curves.values() for curve in by_width.values())
    least = min(float(c.nan_to_num(9.0).min()) for each in curves.values() for c in each.values())
    for axis in axes:
        axis.set_ylim(least - 0.05, worst + 0.1)
    axes[0].set_ylabel("loss, nats a token")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


@click.command(help=__doc__)
@click.option("--widths", default="16,64", show_default=True)
@click.option("--steps", default=24, show_default=True)
@click.option("--batch", default=8, show_default=True)
@click.option("--out", default=common.FIGURES / "mup.png", show_default=True, type=Path)
def main(widths: str, steps: int, batch: int, out: Path) -> None:
    """Command line."""
    curves = run(tuple(map(int, widths.split(","))), steps, batch)
    moved = {}
    for name, by_width in curves.items():
        places = [best(curve) for curve in by_width.values()]
        moved[name] = places[0] - places[-1]
        for width, curve in by_width.items():
            at = best(curve)
            print(f"{name:<9} width {width:>4}  best rate {RATES[at]:.5f}  loss {curve[at]:.3f}")
    held = abs(moved["muP"]) <= EXPECTED[0] and moved["standard"] >= EXPECTED[1]
    common.end(held, plot(curves), out)


if __name__ == "__main__":
    main()
