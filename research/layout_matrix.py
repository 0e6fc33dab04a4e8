"""How far is each layout from one device? Rounding only: as many roundings, in each precision.

For every layout of 8 simulated ranks (tp x dp x pp, with and without sequence parallelism): the
largest relative error of loss, gradients and weights after two updates, against an independent
single-device reference in float64, in three precisions and over several seeds. One process, no GPU.

A number goes through about ten operations of each of 8 layers, forward and again backward. If 160
roundings all went one way, its error would be 160 u, with u the half of a unit in the last place:
2^-53, 2^-24 and 2^-8. Cut sums over tp add fewer than that again, which can double an error; chance
may do so once more, for each is a maximum over many elements.

Run:    python -m research.layout_matrix [--ranks 8] [--seeds 3]
Expect: every error of loss and gradients at most 160 u; and in no precision has any layout's
        gradient more than 4 times the error of the best one's, of means over seeds.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import click

from mfun.config import Config, load, resolve
from mfun.train.plan import plan
from mfun.verify.compare import judge
from mfun.verify.reference import History
from mfun.verify.run import in_mailbox, reference_history
from research import common

MODEL = [
    "model.layers=8",
    "model.heads=8",
    "model.hidden=32",
    "model.ffn=40",
    "model.vocab=37",
    "model.seq_len=16",
    "model.dropout=0.1",
    "train.microbatches=2",
    "train.global_batch=16",
    "train.steps=2",
    "optim.warmup=1",
    "optim.eps=1e-4",  # Adam must not blow up the rounding of gradients that are 0
]
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8}
EXPECTED = {policy: 160 * u for policy, u in ROUNDOFF.items()}
SPREAD = 4
COLOURS = {"fp64": "tab:blue", "fp32": "tab:orange", "bf16": "tab:green"}


def layouts(ranks: int) -> list[tuple[int, int, int, bool]]:
    """(tp, dp, pp, sequence parallel) with tp * dp * pp = ranks."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = [x for x in itertools.product(sizes, repeat=3) if x[0] * x[1] * x[2] == ranks]
    return [
        (tp, dp, pp, sp) for tp, dp, pp in found for sp in ([False, True] if tp > 1 else [False])
    ]


def configured(layout: tuple[int, int, int, bool], policy: str, seed: int) -> Config:
    """The one model and batch, in a layout and a precision."""
    tp, dp, pp, sp = layout
    keys = [f"parallel.tp={tp}", f"parallel.dp={dp}", f"parallel.pp={pp}", f"train.seed={seed}"]
    keys += [f"parallel.sequence_parallel={str(sp).lower()}", f"precision.policy={policy}"]
    return resolve(load("tiny", [*MODEL, *keys]), None)


@functools.cache
def reference(seed: int) -> History:
    """What one device does in float64, by the independent reference."""
    return reference_history(configured((1, 1, 1, False), "fp64", seed))


def measure(layout: tuple[int, int, int, bool], policy: str, seed: int = 0) -> dict[str, Any]:
    """Errors of one layout in one precision, from one seed."""
    built = plan(configured(layout, policy, seed))
    report = judge(built, in_mailbox(built), reference(seed))
    return {"layout": name(layout), "policy": policy, **report.errors}


def name(layout: tuple[int, int, int, bool]) -> str:
    """As `tp2+sp dp2 pp2`."""
    tp, dp, pp, sp = layout
    return f"tp{tp}{'+sp' if sp else ''} dp{dp} pp{pp}"


def plot(rows: list[dict[str, Any]]) -> common.Figure:
    """Errors by layout, one colour a precision; a point is the mean over seeds, a bar the range."""
    names = list(dict.fromkeys(row["layout"] for row in rows))
    figure, (axis,) = common.panels(1, 8, 0.28 * len(names) + 1.4)
    for policy, colour in COLOURS.items():
        for kind, marker in (("grads", "o"), ("loss", "x")):
            each = [values(rows, layout, policy, kind) for layout in names]
            means = [sum(x) / len(x) for x in each]
            bars = [
                [m - min(x) for m, x in zip(means, each, strict=True)],
                [max(x) - m for m, x in zip(means, each, strict=True)],
            ]
            label = f"{policy}, {'gradients' if kind == 'grads' else 'loss'}"
            axis.errorbar(means, range(len(names)), xerr=bars, fmt=marker, color=colour,
                          markersize=5, elinewidth=1, capsize=2, label=label)  # fmt: skip
        axis.axvline(EXPECTED[policy], color=colour, linestyle="--", linewidth=1)
        axis.text(EXPECTED[policy], -0.75, "160 u ", color=colour, fontsize=8, ha="right")
    axis.set(xscale="log", xlim=(5e-18, 2), ylim=(len(names) - 0.5, -1.2))
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xticks([10.0**k for k in range(-16, 1, 4)])
    axis.set_xlabel("largest relative error against one device (float64 reference)")
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    return figure


def values(rows: list[dict[str, Any]], layout: str, policy: str, kind: str) -> list[float]:
    """Errors over seeds; exactly none is drawn at the left edge."""
    mine = [row for row in rows if (row["layout"], row["policy"]) == (layout, policy)]
    return [max(row[kind], 1e-17) for row in mine]


def as_expected(rows: list[dict[str, Any]]) -> bool:
    """Each error within its bound, and no layout apart from the others."""
    if not all(max(row["loss"], row["grads"]) <= EXPECTED[row["policy"]] for row in rows):
        return False
    names = {row["layout"] for row in rows}
    for policy in EXPECTED:
        each = [values(rows, layout, policy, "grads") for layout in names]
        means = [sum(x) / len(x) for x in each]
        if max(means) > SPREAD * min(means):
            return False
    return True


def run(ranks: int, seeds: int = 1) -> list[dict[str, Any]]:
    """All layouts in every precision and from every seed."""
    kinds = itertools.product(layouts(ranks), EXPECTED, range(seeds))
    return [measure(*kind) for kind in kinds]


@click.command(help=__doc__)
@click.option("--ranks", default=8, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option("--out", default=common.FIGURES / "layout_matrix.png", show_default=True, type=Path)
def main(ranks: int, seeds: int, out: Path) -> None:
    """Command line."""
    rows = []
    print(f"{'layout':<18} {'policy':<6} {'loss':>9} {'grads':>9} {'params':>9}   worst of seeds")
    for layout in layouts(ranks):
        for policy in EXPECTED:
            mine = [measure(layout, policy, seed) for seed in range(seeds)]
            rows += mine
            worst = [max(row[k] for row in mine) for k in ("loss", "grads", "params")]
            numbers = " ".join(f"{x:9.1e}" for x in worst)
            print(f"{name(layout):<18} {policy:<6} {numbers}", flush=True)
    common.end(as_expected(rows), plot(rows), out)


if __name__ == "__main__":
    main()
