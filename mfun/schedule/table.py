"""The table of schedules: a generator, where its chunks live, and its memory bound, a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import attrs

from mfun.schedule.dual import dualpipe, dualpipe_in_flight, dualpipev, dualpipev_in_flight
from mfun.schedule.generators import gpipe, none, one_f_one_b
from mfun.schedule.looped import interleaved, looped_bfs, refuse_group, warmup
from mfun.schedule.ops import Compute, ScheduleError
from mfun.schedule.sizes import Sizes
from mfun.schedule.streams import Placement
from mfun.schedule.zero_bubble import (
    limit,
    refuse_memory,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_interleaved,
    zbv,
)

Generate = Callable[[int, Sizes], Iterator[Compute]]


@attrs.frozen
class Schedule:
    """A generator, where its chunks live, and its memory bound: what checker and executor need.

    Args:
      name: as in `parallel.schedule`.
      ops: the generator, `(stage, sizes) -> ops`.
      in_flight: of the same numbers, the most chunks whose activations the stage keeps.
      chunks: how many chunks a stage has; 0 is any number.
      wave: every second chunk runs the stages backwards (`Placement`).
      replicas: how often the model is held (`Placement`).
      refuse: what is wrong with sizes that this schedule cannot run, or None.
    Example:
      >>> SCHEDULES["1f1b"].in_flight(0, Sizes(4, 6))
      4
    """

    name: str
    ops: Generate
    in_flight: Callable[[int, Sizes], int]
    chunks: int = 1
    wave: bool = False
    replicas: int = 1
    refuse: Callable[[Sizes], str | None] = lambda sizes: None

    def place(self, sizes: Sizes) -> Placement:
        """Where the virtual stages live.

        Raises:
          ScheduleError: the schedule cannot run these sizes; naming the numbers.
        """
        if self.chunks and sizes.chunks != self.chunks:
            raise ScheduleError(
                f'schedule "{self.name}" has {self.chunks} chunks a stage, but chunks is '
                f"{sizes.chunks}"
            )
        if wrong := self.refuse(sizes):
            raise ScheduleError(f'schedule "{self.name}": {wrong}')
        return Placement(sizes.stages, sizes.chunks, self.wave, self.replicas)


def _refuse_none(sizes: Sizes) -> str | None:
    if sizes.stages == 1:
        return None
    return f'it runs 1 stage, but stages is {sizes.stages}: use "1f1b" or "gpipe"'


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {
        row.name: row
        for row in (
            Schedule("none", none, lambda stage, sizes: 1, refuse=_refuse_none),
            Schedule("gpipe", gpipe, lambda stage, sizes: sizes.microbatches),
            Schedule("1f1b", one_f_one_b, lambda s, n: min(n.stages - s, n.microbatches)),
            Schedule(
                "interleaved",
                interleaved,
                lambda s, n: min(warmup(s, n) + 1, n.microbatches * n.chunks),
                chunks=0,
                refuse=refuse_group,
            ),
            Schedule("looped-bfs", looped_bfs, lambda s, n: n.microbatches * n.chunks, chunks=0),
            Schedule("dualpipev", dualpipev, dualpipev_in_flight, chunks=2, wave=True),
            Schedule("dualpipe", dualpipe, dualpipe_in_flight, chunks=2, wave=True, replicas=2),
            Schedule("zb-h1", zb_h1, limit("zb-h1"), refuse=refuse_memory),
            Schedule("zb-h2", zb_h2, limit("zb-h2"), refuse=refuse_memory),
            Schedule(
                "zb-interleaved",
                zb_interleaved,
                limit("zb-interleaved"),
                chunks=0,
                refuse=refuse_memory,
            ),
            Schedule("zbv", zbv, limit("zbv"), chunks=2, wave=True, refuse=refuse_memory),
            Schedule("v-half", v_half, limit("v-half"), chunks=2, wave=True, refuse=refuse_memory),
            Schedule("v-min", v_min, limit("v-min"), chunks=2, wave=True, refuse=refuse_memory),
        )
    }
)
