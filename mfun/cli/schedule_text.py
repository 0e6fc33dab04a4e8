"""What `mfun schedule` prints: the grid and its numbers, the comparison, and both as JSON."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

import attrs

from mfun.schedule import SCHEDULES, Costs, grid, simulate_time

if TYPE_CHECKING:
    from mfun.cli.schedule_plan import Planned

GRID = 20_000
"""Characters of a grid at most."""
STAGES = 64
"""Stages whose numbers are printed at most."""


def list_lines() -> Iterator[str]:
    """Each schedule's name, chunks, and the first sentence of its generator."""
    width = max(map(len, SCHEDULES))
    for name, row in SCHEDULES.items():
        told = (row.ops.__doc__ or "").strip().split("\n")[0]
        chunks = f" ({row.chunks or 'any number of'} chunks a stage)" if row.chunks != 1 else ""
        indent = " " * (width + 2)
        yield textwrap.fill(f"{name:<{width}}  {told}{chunks}", 80, subsequent_indent=indent)


def lines(result: Planned) -> Iterator[str]:
    """A heading, the grid if it can be read, and the numbers of each stage."""
    timing = result.timing
    yield result.title
    yield from grid_lines(result)
    yield ""
    columns = ("stage", "busy", "bubble", "span", "exposed", "peak")
    numbers = zip(
        range(len(timing.busy)),
        timing.busy,
        timing.bubble,
        timing.bubble_span,
        timing.exposed,
        timing.peak_in_flight,
        strict=True,
    )
    yield from table([columns, *([short(n) for n in row] for row in list(numbers)[:STAGES])])
    if len(timing.busy) > STAGES:
        yield f"and {len(timing.busy) - STAGES} more stages: --json has all"
    yield (
        f"makespan {short(timing.makespan)}, {timing.idle:.1%} idle, "
        f"{timing.messages} messages, no deadlock"
    )


def grid_lines(result: Planned) -> Iterator[str]:
    """The grid, cut at the edge of a terminal; or why there is none."""
    whole, unit = whole_costs(result.sizes.costs, result.layers)
    columns = float(Fraction(result.timing.makespan) / unit)
    width = 2 + len(str(result.sizes.microbatches)) + 2 * (result.sizes.chunks > 1)
    width += 3 * (result.extras is not None)
    if columns * width * result.sizes.stages > GRID:
        yield f"(a grid of {columns:.9g} columns is too wide for text: --svg FILE draws it)"
        return
    if unit != 1:
        yield f"a column is {short(float(unit))} units of time"
    drawn = grid(simulate_time(result.streams, whole, result.place, result.extras)).splitlines()
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else len(drawn[0])
    yield from (line if len(line) <= edge else line[: edge - 3] + "..." for line in drawn)
    if len(drawn[0]) > edge:
        yield "(cut at the edge of the terminal: pipe it into less -S, or --svg FILE)"


def whole_costs(costs: Costs, layers: int = 1) -> tuple[Costs, Fraction]:
    """The same costs in a unit that makes them, and a layer's share of them, whole; and that unit.

    Example:
        >>> whole, unit = whole_costs(Costs(F=1, I=1.5, W=0.5))
        >>> (whole.F, whole.I, whole.W), unit
        ((2, 3, 1), Fraction(1, 2))
    """
    names = ("F", "B", "I", "W", "latency", "transfer", "reduce", "gather", "offload")
    given = {name: getattr(costs, name) for name in names}
    flat = [
        Fraction(str(one)) / (layers if name in "FBIW" else 1)
        for name, cost in given.items()
        for one in (cost if isinstance(cost, tuple) else (cost,))
        if one
    ]
    below = lcm(*(one.denominator for one in flat))
    unit = Fraction(gcd(*(int(one * below) for one in flat)), below)
    if all(one.denominator == 1 for one in flat):
        unit = Fraction(1)

    def whole(cost: Any) -> Any:
        if cost is None:
            return None
        if isinstance(cost, tuple):
            return tuple(map(whole, cost))
        return int(Fraction(str(cost)) / unit)

    return attrs.evolve(costs, **{name: whole(cost) for name, cost in given.items()}), unit


def short(number: float) -> str:
    """A number as a table shows it.

    Example:
        >>> short(3), short(2.50), short(1 / 3)
        ('3', '2.5', '0.333')
    """
    number = round(number, 3) or 0  # no -0
    return f"{number:.0f}" if number == int(number) else f"{number:.3f}".rstrip("0")


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns set to the right, except the first of words."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = not rows[-1][0].isdecimal()
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        if words:
            cells[0] = row[0].ljust(widths[0])
        yield "  ".join(cells)


def as_object(result: Planned) -> dict[str, Any]:
    """Everything that is known of a schedule but its ops."""
    sizes, timing = result.sizes, result.timing
    return {
        "name": result.name,
        "stages": sizes.stages,
        "microbatches": sizes.microbatches,
        "chunks": sizes.chunks,
        "costs": attrs.asdict(sizes.costs),
        "makespan": timing.makespan,
        "idle": timing.idle,
        "busy": list(timing.busy),
        "bubble": list(timing.bubble),
        "bubble_span": list(timing.bubble_span),
        "exposed": list(timing.exposed),
        "peak_in_flight": list(timing.peak_in_flight),
        "messages": timing.messages,
        "replicas": result.place.replicas,
        "deadlock_free": True,  # `plan` has refused it otherwise
    }


def share(chunks: int, replicas: int) -> float:
    """What part of a stage's layers a chunk holds, where a stage is one of as many equal parts.

    Example:
        >>> share(2, 1), share(2, 2)
        (0.5, 1.0)
    """
    return replicas / chunks


def compared_object(results: Mapping[str, Planned | str]) -> dict[str, Any]:
    """Each schedule's object, or why it is refused."""
    return {
        name: {"name": name, "refused": result} if isinstance(result, str) else as_object(result)
        for name, result in results.items()
    }


def compared_lines(results: Mapping[str, Planned | str]) -> Iterator[str]:
    """A row a schedule, then the refused ones with the reason."""
    heads = (
        "schedule",
        "chunks",
        "makespan",
        "bubble",
        "span",
        "idle",
        "peak",
        "params",
        "messages",
    )
    rows: list[Sequence[str]] = [heads]
    for name, result in results.items():
        if isinstance(result, str):
            continue
        timing, part = result.timing, share(result.sizes.chunks, result.place.replicas)
        rows.append(
            (
                name,
                str(result.sizes.chunks),
                short(timing.makespan),
                short(max(timing.bubble)),
                short(max(timing.bubble_span)),
                f"{timing.idle:.1%}",
                short(max(timing.peak_in_flight) * part),
                f"{result.place.replicas}x",
                str(timing.messages),
            )
        )
    yield from table(rows)
    for name, why in results.items():
        if isinstance(why, str):
            why = why.removeprefix(f'schedule "{name}": ')
            yield textwrap.fill(f"{name} is refused: {why}", 80, subsequent_indent="  ")
    yield ""
    yield "--costs are of a whole stage here, and a chunk takes its share of them."
    yield "bubble, span (between a stage's own first and last op), peak: of the worst stage."
    yield "peak: how many microbatches' activations of all its layers a stage keeps."
