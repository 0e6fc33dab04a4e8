"""The picture of a schedule as text: a row a stage, a column a unit of time."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from mfun.schedule.clock import layer_counts, looped, simulate_time
from mfun.schedule.ops import AnyOp, Recompute, ScheduleError
from mfun.schedule.sizes import Costs
from mfun.schedule.streams import Placement
from mfun.schedule.timing import Event, Timing

ORDER = Costs(F=1, B=1, I=1, W=1)
"""Every op takes one column: shows the order and nothing else."""


def timeline(
    streams: Sequence[Sequence[AnyOp]], costs: Costs | None = None, place: Placement | None = None
) -> str:
    """The picture of a schedule: a row a stage, a column a unit of time, a dot where it is idle.

    An op that takes several units is drawn in its first and continued by dashes. `R` is a forward
    that runs again; what runs beside computation is not drawn.

    Args:
      streams: one stream a stage, messages included, as `plan` gives them.
      costs: of each op, whole numbers; None draws every op one column wide, to show the order.
      place: where virtual stages are; None is looped.
    Returns: text without a trailing newline.
    Raises:
      ScheduleError: a cost that is not a whole number, or a stage that waits for ever.
    Example:
      >>> from mfun.schedule.check import plan
      >>> print(timeline(plan("1f1b", stages=4, microbatches=6)))
      stage 0 | F0 F1 F2 F3  .  .  . B0 F4 B1 F5 B2  . B3  . B4  . B5
      stage 1 |  . F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5  .
      stage 2 |  .  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .  .
      stage 3 |  .  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .  .
      >>> print(timeline(plan("gpipe", stages=2, microbatches=2), Costs(F=1, B=2)))
      stage 0 | F0 F1  .  .  . B0 -- B1 --
      stage 1 |  . F0 F1 B0 -- B1 --  .  .
    """
    if costs is None:
        costs = _one_column(streams, place)
    for name, cost in attrs.asdict(costs).items():
        for one in cost if isinstance(cost, tuple) else (cost,):
            if one is not None and one != int(one):
                raise ScheduleError(f"cost {name} is {one}, but must be whole: scale the costs")
    return grid(simulate_time(streams, costs, place))


def _one_column(streams: Sequence[Sequence[AnyOp]], place: Placement | None) -> Costs:
    """Costs by which every op takes one column, also where chunks are cut in layers."""
    place = looped(streams) if place is None else place
    counts = layer_counts(streams)
    chunks = {place.slice(place.virtual(*at)): count for at, count in counts.items()}
    each = tuple(max(chunks.get(i, 1), 1) for i in range(place.depth))
    return Costs(F=each, B=each, I=each, W=each) if counts else ORDER


def grid(timing: Timing) -> str:
    """`timeline` of what has been simulated, every time a whole number.

    Example:
      >>> from mfun.schedule.check import plan
      >>> print(grid(simulate_time(plan("none", stages=1, microbatches=1))))
      stage 0 | F0 B0 --
    """
    width = max((len(_cell(event)) for event in timing.events), default=1)
    rows = [["." for _ in range(int(timing.makespan))] for _ in timing.busy]
    for event in timing.events:
        start, end = int(event.start), int(event.end)
        rows[event.stage][start:end] = [_cell(event)] + ["-" * width] * (end - start - 1)
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"stage {stage:{label}} | " + " ".join(cell.rjust(width) for cell in row)
        for stage, row in enumerate(rows)
    )


def _cell(event: Event) -> str:
    """`F3.1`; `R3.1` where a forward runs again."""
    text = str(event.op)
    return text.replace("Recompute", "R") if isinstance(event.op, Recompute) else text
