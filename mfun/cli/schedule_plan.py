"""What `mfun schedule` works on: costs from words, and a schedule planned, checked and timed."""

from __future__ import annotations

from pathlib import Path

import attrs
import click

from mfun.schedule import (
    AnyOp,
    Costs,
    Extras,
    Placement,
    Schedule,
    ScheduleError,
    Sizes,
    Timing,
    check,
    from_csv,
    plan,
    simulate_time,
    with_p2p,
)

MOST_TIME = 1e12
"""Of one op: sums of it stay exact, or nearly."""


class CostsParam(click.ParamType):
    """`F,I,W` or `F,I,W,comm`; each of the first three may be one number a slice: `1:2:1:1`."""

    name = "costs"

    def convert(
        self, value: str | Costs, param: click.Parameter | None, ctx: click.Context | None
    ) -> Costs:
        """From the words of the command line."""
        if isinstance(value, Costs):
            return value
        parts = value.split(",")
        if not 3 <= len(parts) <= 4:
            self.fail(f"{value!r} is not F,I,W or F,I,W,comm, such as 1,1,1,0.1", param, ctx)
        try:
            f, i, w = (_numbers(part) for part in parts[:3])
            return Costs(F=f, I=i, W=w, transfer=_number(parts[3]) if parts[3:] else 0)
        except ValueError as error:
            self.fail(f"{value!r}: {error}; give F,I,W,comm, such as 1,1,1,0.1", param, ctx)


def _number(word: str) -> float:
    """Whole where it is written so."""
    number = int(word) if word.strip().isdecimal() else float(word)
    if number > MOST_TIME:
        raise ValueError(f"{word} is more than {MOST_TIME:g}")
    return number


def _numbers(word: str) -> float | tuple[float, ...]:
    return tuple(map(_number, word.split(":"))) if ":" in word else _number(word)


@attrs.frozen
class Planned:
    """A schedule that has been planned, checked and timed."""

    name: str
    sizes: Sizes
    place: Placement
    streams: tuple[tuple[AnyOp, ...], ...]
    timing: Timing
    layers: int = 1
    extras: tuple[Extras, ...] | None = None

    @property
    def title(self) -> str:
        """`zbv: 4 stages, 8 microbatches, 2 chunks a stage`."""
        sizes = self.sizes
        stages = f"{sizes.stages} stage{'s' * (sizes.stages != 1)}"
        microbatches = f"{sizes.microbatches} microbatch{'es' * (sizes.microbatches != 1)}"
        chunks = f", {sizes.chunks} chunks a stage" if sizes.chunks > 1 else ""
        return f"{self.name}: {stages}, {microbatches}{chunks}"


def planned(row: Schedule, sizes: Sizes) -> Planned:
    """Plan, check and time.

    Raises:
      ScheduleError: the schedule cannot run these sizes.
    """
    place = row.place(sizes)
    sizes.costs.fit(place.depth)
    streams = plan(
        row,
        sizes.stages,
        sizes.microbatches,
        chunks=sizes.chunks,
        group=sizes.group,
        costs=sizes.costs,
        memory=sizes.memory,
    )
    return Planned(row.name, sizes, place, streams, simulate_time(streams, sizes.costs, place))


def read(path: Path, costs: Costs) -> Planned:
    """The schedule of a file in torch's CSV, its messages put in, checked and timed.

    Raises:
      ScheduleError: the file cannot be read, or the schedule cannot run.
    """
    try:
        orders, place = from_csv(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"{path} cannot be read: {error}") from error
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from error
    microbatches = 1 + max(op.mb for ops in orders for op in ops)
    sizes = Sizes(place.stages, microbatches, place.chunks, costs=costs.fit(place.depth))
    streams = with_p2p(orders, place, costs)
    check(streams, microbatches=microbatches, place=place)
    return Planned(path.name, sizes, place, streams, simulate_time(streams, costs, place))
