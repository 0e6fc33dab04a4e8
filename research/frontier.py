"""What does a smaller bubble cost in memory? The frontier of every pipeline schedule.

For each schedule at p stages and m microbatches: the idle part of all stages' time, and the most
activations that a stage holds, in microbatches of one stage's share of the model. Simulated, not
measured: a forward and each half of a backward take one unit of time, messages none. Not counted
are the weights, which DualPipe holds twice.

Run:    python -m research.frontier
Expect: GPipe and 1F1B idle for exactly (p - 1) / (m + p - 1) and hold m and p microbatches; whole
        backwards cannot be on the frontier: every schedule there splits them; v-min holds at most
        half of what 1F1B does, v-half at most three quarters, and zbv, with at most 1F1B's memory,
        idles less than a quarter as long.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import click

from mfun.schedule import SCHEDULES, Costs, Sizes, plan, simulate_time
from research import common

WHOLE = ("gpipe", "1f1b", "interleaved", "looped-bfs")
"""Schedules whose backwards are not split into I and W."""


class Row(NamedTuple):
    """A schedule: idle part of the time, activations held, whether nothing is better in both."""

    name: str
    idle: float
    held: float
    best: bool = False


def measure(name: str, stages: int, microbatches: int) -> Row:
    """One schedule, with two chunks a stage where it takes any number."""
    row, costs = SCHEDULES[name], Costs()
    chunks = row.chunks or 2
    sizes = Sizes(stages, microbatches, chunks, costs=costs)
    streams = plan(name, stages, microbatches, chunks=chunks, costs=costs)
    timing = simulate_time(streams, costs, row.place(sizes))
    return Row(name, timing.idle, max(timing.peak_in_flight) * row.replicas / chunks)


def run(stages: int, microbatches: int) -> list[Row]:
    """All of them, with the frontier marked."""
    rows = [measure(name, stages, microbatches) for name in SCHEDULES if name != "none"]

    def beaten(row: Row) -> bool:
        return any(
            (x.idle, x.held) != (row.idle, row.held) and x.idle <= row.idle and x.held <= row.held
            for x in rows
        )

    return [row._replace(best=not beaten(row)) for row in rows]


def as_expected(rows: list[Row], p: int, m: int) -> bool:
    """The statements above."""
    by = {row.name: row for row in rows}
    bubble = (p - 1) / (m + p - 1)
    exact = all(abs(by[name].idle - bubble) < 1e-12 for name in ("gpipe", "1f1b"))
    return (
        exact
        and (by["gpipe"].held, by["1f1b"].held) == (m, min(p, m))
        and not any(row.best for row in rows if row.name in WHOLE)
        and by["v-min"].held <= 0.5 * p
        and by["v-half"].held <= 0.75 * p
        and by["zbv"].held <= p
        and by["zbv"].idle < 0.25 * bubble
    )


def plot(rows: list[Row], p: int, m: int) -> common.Figure:
    """Idle time against memory; the frontier is a line of steps."""
    figure, (axis,) = common.panels(1, 6, 4)
    front = sorted((row.held, 100 * row.idle) for row in rows if row.best)
    axis.step(*zip(*front, strict=True), where="post", color="tab:green", linewidth=1, alpha=0.6)
    beside = {"zbv": (-22, -4), "zb-interleaved": (-78, 7), "dualpipe": (8, -6)}
    for row in rows:
        colour = "tab:green" if row.best else "tab:blue" if row.name not in WHOLE else "0.4"
        at = (row.held, 100 * row.idle)
        axis.plot(*at, "o", color=colour, markersize=6)
        place = beside.get(row.name, (6, 3))
        axis.annotate(row.name, at, place, textcoords="offset points", fontsize=8)
    axis.set(
        xlabel="activations held by the fullest stage, microbatches", ylabel="idle time, %",
        xscale="log", ylim=(0, None), title=f"{p} stages, {m} microbatches",
    )  # fmt: skip
    ticks = [t for t in (2, 3, 4, 6, 8, 12, 16, 24, 32) if t <= m]
    axis.set_xticks(ticks, [str(t) for t in ticks])
    axis.minorticks_off()
    axis.set_xlim(right=max(row.held for row in rows) * 1.25)
    return figure


@click.command(help=__doc__)
@click.option("--stages", default=8, show_default=True)
@click.option("--microbatches", default=24, show_default=True)
@click.option("--out", default=common.FIGURES / "frontier.png", show_default=True, type=Path)
def main(stages: int, microbatches: int, out: Path) -> None:
    """Command line."""
    rows = run(stages, microbatches)
    for row in sorted(rows, key=lambda row: row.idle):
        best = "  on the frontier" if row.best else ""
        print(f"{row.name:<15} idle {row.idle:6.1%}  holds {row.held:5.1f}{best}")
    held = as_expected(rows, stages, microbatches)
    common.end(held, plot(rows, stages, microbatches), out)


if __name__ == "__main__":
    main()
