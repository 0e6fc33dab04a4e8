"""How far is each layout from one device? Rounding only: about 1e-15 in float64, 1e-6 in float32.

For every layout of 8 simulated ranks (tp x dp x pp, with and without sequence parallelism): the
largest relative error of loss, gradients and weights after two updates, against an independent
single-device reference in float64. One process, no GPU.

Run:    python -m research.layout_matrix [--ranks 8] [--out layout_matrix.png]
Expect: every float64 error below 1e-10; every float32 error of the gradients below 1e-3.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import attrs
import click

from mfun.config import load, resolve
from mfun.train.plan import plan
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, reference_history
from mfun.verify.shrink import shrink

MODEL = [
    "model.layers=8",
    "model.heads=8",
    "model.hidden=32",
    "model.vocab=37",
    "model.dropout=0.1",
    "train.microbatches=2",
    "train.global_batch=16",
]
EXPECTED = {"fp64": 1e-10, "fp32": 1e-3}


def layouts(ranks: int) -> list[tuple[int, int, int, bool]]:
    """(tp, dp, pp, sequence parallel) with tp * dp * pp = ranks."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = [x for x in itertools.product(sizes, repeat=3) if x[0] * x[1] * x[2] == ranks]
    return [
        (tp, dp, pp, sp) for tp, dp, pp in found for sp in ([False, True] if tp > 1 else [False])
    ]


def measure(layout: tuple[int, int, int, bool], policy: str) -> dict[str, Any]:
    """Errors of one layout in one precision."""
    tp, dp, pp, sp = layout
    keys = [f"parallel.tp={tp}", f"parallel.dp={dp}", f"parallel.pp={pp}"]
    keys += [f"parallel.sequence_parallel={str(sp).lower()}"]
    small = shrink(resolve(load("tiny", [*MODEL, *keys]), None), steps=2)
    history = reference_history(small)
    config = attrs.evolve(small, precision=attrs.evolve(small.precision, policy=policy))
    built = plan(config)
    report = judge(built, in_mailbox(built), history)
    return {"layout": name(layout), "policy": policy, **report.errors, "worst": report.worst}


def name(layout: tuple[int, int, int, bool]) -> str:
    """As `tp2+sp dp2 pp2`."""
    tp, dp, pp, sp = layout
    return f"tp{tp}{'+sp' if sp else ''} dp{dp} pp{pp}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Gradient error by layout, one colour a precision, with the bound of the proof."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["layout"] for row in rows))
    figure = Figure(figsize=(8, 0.34 * len(names) + 1.4), layout="constrained")
    axis = figure.subplots()
    for policy, colour in (("fp64", "tab:blue"), ("fp32", "tab:orange")):
        mine = {r["layout"]: r for r in rows if r["policy"] == policy}
        for kind, marker in (("grads", "o"), ("loss", "x")):
            points = [max(mine[n][kind], 1e-17) for n in names]
            label = f"{policy} {'gradients' if kind == 'grads' else kind}"
            axis.plot(points, range(len(names)), marker, color=colour, label=label, markersize=6)
    axis.axvline(1e-10, color="0.6", linestyle="--", linewidth=1, label="bound of mfun verify")
    axis.set(xscale="log", xlim=(3e-18, 1e-2), ylim=(len(names) - 0.5, -0.9))
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_xlabel("largest relative error against one device (float64 reference)")
    axis.set_title("Every layout of the same training step", fontsize=11)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(path, dpi=140)


def run(ranks: int) -> list[dict[str, Any]]:
    """All layouts in both precisions."""
    return [measure(layout, policy) for layout in layouts(ranks) for policy in EXPECTED]


@click.command(help=__doc__)
@click.option("--ranks", default=8, show_default=True)
@click.option("--out", default="layout_matrix.png", show_default=True, type=Path)
def main(ranks: int, out: Path) -> None:
    """Command line."""
    rows = []
    print(f"{'layout':<18} {'policy':<6} {'loss':>9} {'grads':>9} {'params':>9}")
    for layout in layouts(ranks):
        for policy in EXPECTED:
            row = measure(layout, policy)
            rows.append(row)
            numbers = " ".join(f"{row[k]:9.1e}" for k in ("loss", "grads", "params"))
            print(f"{row['layout']:<18} {policy:<6} {numbers}", flush=True)
    plot(rows, out)
    held = all(row["grads"] <= EXPECTED[row["policy"]] for row in rows)
    print(f"expectation {'held' if held else 'FAILED'}; figure: {out}")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
