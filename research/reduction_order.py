"""Does it matter in which order gradients are added up, and in how many bits? The bits matter most.

Real gradients, one a sample, of a GPT through tp 2 with sequence parallelism; N of them are added
by rank order, by a ring (each piece begins at another rank), by a tree, and in rank order with the
sum kept in float32, each number being bfloat16. Against the exact sum of the same numbers.

Run:    python -m research.reduction_order
Expect: with a float32 sum the error is that of one rounding whatever N, at most 2^-8 of the norm;
        added in bfloat16 one after another it grows with N, at the largest at least 3 times that;
        a tree is between the two; a ring is no better than half of one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import torch
from torch import Tensor

from mfun import func
from research import common

SIZES = (2, 4, 8, 16, 32, 64)
DRAWS = 8
NARROW = torch.bfloat16


def in_order(x: Tensor) -> Tensor:
    """((x0 + x1) + x2) + .., every partial sum rounded."""
    total = x[0]
    for row in x[1:]:
        total = total + row
    return total


def ring(x: Tensor) -> Tensor:
    """A ring's reduce-scatter: piece i of the vector is summed from rank i on, around."""
    pieces = torch.tensor_split(x, len(x), dim=1)
    return torch.cat([in_order(piece.roll(-i, 0)) for i, piece in enumerate(pieces)])


def by_tree(x: Tensor) -> Tensor:
    """Pairs, then pairs of pairs."""
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def wide_sum(x: Tensor) -> Tensor:
    """In order with a float32 sum, rounded once at the end."""
    return in_order(x.float()).to(x.dtype)


ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one after another": in_order,
    "ring": ring,
    "tree": by_tree,
    "one after another, float32 sum": wide_sum,
}
Errors = dict[str, list[tuple[float, float]]]


def gradients(samples: int) -> Tensor:
    """One gradient a sample (samples, elements), through the mesh."""
    config = common.tiny({"train.global_batch": samples, "parallel.dp": 1})
    params, mean = common.start(config), common.mean_loss(config)
    batch = common.text(config)
    return torch.stack(
        [
            common.flat(func.gradient(lambda p, i=i: mean(p, row(batch, i)), params))
            for i in range(samples)
        ]
    )


def row(batch: common.Batch, i: int) -> common.Batch:
    """Sample i alone."""
    return {name: x[i : i + 1] for name, x in batch.items()}


def run(samples: int) -> Errors:
    """Mean and standard deviation over draws of the relative error, for each order and N."""
    each, draw = gradients(samples).to(NARROW), torch.Generator().manual_seed(0)
    errors: Errors = {name: [] for name in ORDERS}
    for size in SIZES:
        picks = [torch.randint(len(each), (size,), generator=draw) for _ in range(DRAWS)]
        for name, add in ORDERS.items():
            found = []
            for pick in picks:
                exact = each[pick].double().sum(0)
                found.append((add(each[pick]).double() - exact).norm() / exact.norm())
            both = torch.stack(found)
            errors[name].append((float(both.mean()), float(both.std())))
    return errors


def plot(errors: Errors) -> common.Figure:
    """Error against the number of summands, with the spread over draws."""
    figure, (axis,) = common.panels(1, 5.6, 3.4)
    for (name, points), marker in zip(errors.items(), "osD^", strict=True):
        means, spreads = zip(*points, strict=True)
        axis.errorbar(SIZES, means, spreads, fmt=f"{marker}-", markersize=4, linewidth=1.1,
                      capsize=2, label=name)  # fmt: skip
    axis.axhline(2**-8, color="0.6", linestyle="--", linewidth=1)
    axis.text(SIZES[0], 2**-8 * 1.06, "half a unit in the last place", fontsize=7, color="0.4")
    axis.set(xscale="log", yscale="log", xlabel="gradients added up", ylabel="relative error")
    axis.set_xticks(SIZES, [str(n) for n in SIZES])
    axis.set_yticks([2.0**-k for k in range(9, 5, -1)], [f"$2^{{-{k}}}$" for k in range(9, 5, -1)])
    axis.minorticks_off()
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def as_expected(errors: Errors) -> bool:
    """The four statements above."""
    last = {name: points[-1][0] for name, points in errors.items()}
    wide = errors["one after another, float32 sum"]
    narrow, tree = last["one after another"], last["tree"]
    return (
        all(mean <= 2**-8 for mean, _ in wide)
        and narrow >= 3 * wide[-1][0]
        and wide[-1][0] < tree < narrow
        and last["ring"] >= 0.5 * narrow
    )


@click.command(help=__doc__)
@click.option("--samples", default=64, show_default=True)
@click.option("--out", default=common.FIGURES / "reduction_order.png", type=Path)
def main(samples: int, out: Path) -> None:
    """Command line."""
    errors = run(samples)
    print(f"{'relative error of the sum of':<32}" + "".join(f"{n:>9}" for n in SIZES))
    for name, points in errors.items():
        print(f"{name:<32}" + "".join(f"{mean:9.1e}" for mean, _ in points))
    common.end(as_expected(errors), plot(errors), out)


if __name__ == "__main__":
    main()
