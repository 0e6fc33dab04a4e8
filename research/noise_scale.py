"""How large a batch is worth it? One of about the noise scale, read off per-sample gradients.

Per-sample gradients g_i of N samples on tp 2 x dp 2, each on the data rank that has the sample,
give their mean G, their covariance S, and with Hessian-vector products what batches of B of them,
drawn without replacement, must do (McCandlish et al. 2018, arXiv 1812.06162, for finite N):

    E |G_B|^2 = |G|^2 + tr S (1/B - 1/N)
    best step's gain = that of all N / (1 + B_full (1/B - 1/N)),    B_full = tr(H S) / (G . H G)

The first is exact, and gives tr S from the norms of two sizes of batches alone, as in a run that
has no per-sample gradients. The second is of a loss that is quadratic along a step, so it is asked
late in training, where steps are short. An epoch is cut into batches, whose mean is G again: what
is measured has no noise of the first order.

Run:    python -m research.noise_scale
Expect: the g_i average to the gradient, to 1e-10; measured norms are within 4 standard errors of
        the first line, and tr S from two of them within 4 of its; gains, found by trying steps of
        many lengths, are within 20 % of the second line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from mfun import func, tree
from mfun.config import Config
from research import common

EXPECTED = (1e-10, 4.0, 0.2)
LENGTHS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)


class Size(NamedTuple):
    """Of batches of a size: squared norms with a standard error, and gains over the largest."""

    batch: int
    norm: tuple[float, float, float]
    """Predicted, measured, standard error."""
    gain: tuple[float, float]
    """Predicted, measured."""


class Scale(NamedTuple):
    """Noise scales, what was seen at each size, and how far the mean g_i is from the gradient."""

    simple: float
    full: float
    noise: tuple[float, float, float]
    """tr S; the same from norms; its standard error."""
    sizes: list[Size]
    apart: float


def measure(config: Config, warm: int, epochs: int) -> Scale:
    """After some steps of descent: predicted and measured."""
    params, batch, mean = common.start(config), common.text(config), common.mean_loss(config)

    def loss(p: Any) -> Tensor:
        return mean(p, batch)

    for _ in range(warm):
        params = func.add(params, func.gradient(loss, params), -0.25)
    each = common.sample_gradients(config, params, batch)
    g, whole = common.rows(each), common.flat(func.gradient(loss, params))
    slope, noise, bend, wobble = moments(loss, params, each)
    draw, n = torch.Generator().manual_seed(0), len(g)
    orders = [torch.randperm(n, generator=draw) for _ in range(epochs)]
    sizes, most = [], 0.0
    for size in (2**k for k in reversed(range(n.bit_length())) if n % 2**k == 0):
        fewer = 1 / size - 1 / n
        cut = [g[order].unflatten(0, (-1, size)).mean(1) for order in orders]
        squares = torch.stack([x.square().sum(1).mean() for x in cut])
        norm = slope + noise * fewer, float(squares.mean()), float(squares.std()) / epochs**0.5
        fell = fall(loss, params, cut[0], slope / (bend + wobble * fewer))
        most = most or fell
        sizes.append(Size(size, norm, (1 / (1 + wobble / bend * fewer), fell / most)))
    (_, large, _), (_, small, error), fewer = *(sizes[i].norm for i in (0, -2)), 0.5 - 1 / n
    guess, apart = (noise, (small - large) / fewer, error / fewer), (g.mean(0) - whole).abs().max()
    return Scale(noise / (slope - noise / n), wobble / bend, guess, sizes[::-1], float(apart))


def moments(loss: Any, params: Any, each: Any) -> tuple[float, float, float, float]:
    """|G|^2, tr S, G . H G and tr(H S), of one gradient a sample."""
    both = tree.map(lambda x: torch.cat([x - x.mean(0), x.mean(0, keepdim=True)]), each)
    g, bent = common.rows(both), common.rows(func.hessian(loss, params, both, chunk=16))
    squares, curved, n = g.square().sum(1), (g * bent).sum(1), len(g) - 1
    noise, wobble = squares[:-1].sum() / (n - 1), curved[:-1].sum() / (n - 1)
    return float(squares[-1]), float(noise), float(curved[-1]), float(wobble)


def fall(loss: Any, params: Any, directions: Tensor, step: float) -> float:
    """Mean fall of the loss over directions, at the best of several lengths around `step`."""

    def after(direction: Tensor, length: float) -> Tensor:
        return loss(func.add(params, common.unflat(direction, params), -length))

    def mean(length: float) -> float:
        along = torch.func.vmap(lambda x: after(x, length), chunk_size=16)
        return float(along(directions).mean())

    return float(loss(params)) - min(mean(step * by) for by in LENGTHS)


def as_expected(scale: Scale) -> bool:
    """The statements above."""
    pairs = [scale.noise, *(size.norm for size in scale.sizes)]
    return (
        scale.apart <= EXPECTED[0]
        and all(abs(have - want) <= EXPECTED[1] * error + 1e-12 for want, have, error in pairs)
        and all(abs(s.gain[1] / s.gain[0] - 1) <= EXPECTED[2] for s in scale.sizes)
    )


def plot(scale: Scale) -> common.Figure:
    """Predicted lines, measured points."""
    figure, (left, right) = common.panels(2)
    batches = [size.batch for size in scale.sizes]
    want, have, error = zip(*(size.norm for size in scale.sizes), strict=True)
    left.plot(batches, want, color="0.4", label="predicted")
    left.errorbar(batches, have, [2 * e for e in error], fmt="o", markersize=4, label="measured")
    left.set(ylabel="squared norm of the gradient", yscale="log")
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50) if min(want) / 1.2 < t < 1.2 * max(want)]
    left.set_yticks(ticks, [f"{t:g}" for t in ticks])
    want, have = zip(*(size.gain for size in scale.sizes), strict=True)
    right.plot(batches, want, color="0.4", label="predicted")
    right.plot(batches, have, "o", color="tab:orange", label="measured: best step tried")
    right.axvline(scale.full, color="0.6", linestyle="--", linewidth=1, label="noise scale")
    right.set(ylabel="gain of one step, of the largest", ylim=(0, 1.05))
    for axis in (left, right):
        axis.set(xscale="log", xlabel="batch size, samples")
        axis.minorticks_off()
        axis.set_xticks(batches, list(map(str, batches)))
        axis.legend(fontsize=8, frameon=False)
    return figure


@click.command(help=__doc__)
@click.option("--samples", default=64, show_default=True)
@click.option("--warm", default=60, show_default=True, help="Steps of descent before.")
@click.option("--out", default=common.FIGURES / "noise_scale.png", show_default=True, type=Path)
def main(samples: int, warm: int, out: Path) -> None:
    """Command line."""
    size = {"train.global_batch": samples, "model.init_std": 0.25}
    scale = measure(common.tiny(size), warm, epochs=100)
    print(f"noise scale: simple {scale.simple:.1f}, full {scale.full:.1f} samples")
    print("tr S {:.3f}; from norms {:.3f} +- {:.3f}".format(*scale.noise))
    row = "batch {:>3}  |g|^2 {:.3f}, seen {:.3f} +- {:.3f}  gain {:.3f}, seen {:.3f}"
    for each in scale.sizes:
        print(row.format(each.batch, *each.norm, *each.gain))
    common.end(as_expected(scale), plot(scale), out)


if __name__ == "__main__":
    main()
