"""What `mfun schedule` inserts into a schedule's streams, by options of its own."""

from __future__ import annotations

from typing import Literal

import attrs
import click

from mfun.cli.schedule_plan import Planned
from mfun.schedule import Extras, dress, simulate_time


@attrs.frozen
class Inserted:
    """The options. Every layer is a bucket, and they are alike.

    Args:
        layers: of each chunk.
        recompute: which run again: all, the first so many of a chunk, or None.
        offload: most chunks whose activations stay on the device; None is all.
        reduce, gather, copy: times of a layer's gradients, of its parameters, and of what a chunk
            keeps to the host or back; None where there is no such op.
    """

    layers: int
    recompute: Literal["full"] | int | None
    offload: int | None
    reduce: float | None
    gather: float | None
    copy: float | None

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        given = (self.recompute, self.offload, self.reduce, self.gather)
        return self.layers > 1 or any(option is not None for option in given)


class RecomputeParam(click.ParamType):
    """`full`, or a number of layers."""

    name = "recompute"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | int:
        """From the word of the command line."""
        if value == "full" or isinstance(value, int):
            return value
        if not value.isdecimal() or not int(value):
            self.fail(f"{value!r} is neither full nor a number of layers above 0", param, ctx)
        return int(value)


def dressed(result: Planned, asked: Inserted) -> Planned:
    """A schedule with what was asked for in its streams, checked and timed again.

    Raises:
        ScheduleError: fewer activations on the device than it works with.
    """
    if not asked:
        return result
    sizes = result.sizes
    places = [(c, i) for c in reversed(range(sizes.chunks)) for i in reversed(range(asked.layers))]
    buckets = tuple(frozenset({at}) for at in places)
    extras = Extras(
        layers=(asked.layers,) * sizes.chunks,
        reduce=() if asked.reduce is None else buckets,
        gather=() if asked.gather is None else buckets,
        recompute=asked.recompute,
        offload=asked.offload,
    )
    costs = attrs.evolve(
        sizes.costs,
        reduce=asked.reduce or 0,
        gather=asked.gather or 0,
        offload=asked.copy or 0,
    )
    every = [extras] * sizes.stages
    streams = dress(result.streams, every)  # type: ignore[arg-type]  # not dressed yet
    return attrs.evolve(
        result,
        sizes=attrs.evolve(sizes, costs=costs),
        streams=streams,
        timing=simulate_time(streams, costs, result.place, every),
        layers=asked.layers,
        extras=tuple(every),
    )
