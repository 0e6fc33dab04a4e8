"""Schedules in the CSV of torch.distributed.pipelining: read, and written for its reader.

A row is a rank, a column a step, an empty cell a bubble. `2F0` is the forward of microbatch 0 on
virtual stage 2; `I` and `W` are the two parts of a backward, `B` the whole: what torch calls
"compute_only". What its "compute_comms" has besides (messages, sharding, reductions) is read over:
here others put that in, as `with_p2p` does the messages.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from mfun.schedule.clock import layer_counts, simulate_time
from mfun.schedule.layers import bare
from mfun.schedule.ops import AnyOp, B, Compute, F, I, ScheduleError, W
from mfun.schedule.streams import Placement
from mfun.schedule.timeline import ORDER

KINDS: dict[str, type[Compute]] = {"F": F, "B": B, "I": I, "W": W}
CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
PAIR = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B")
LOWERED = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])[0-9]*")

Action = tuple[int, type[Compute], int]  # virtual stage, kind, microbatch
Cell = tuple[str, tuple[Action, ...]]  # where, what


def to_csv(streams: Sequence[Sequence[AnyOp]], place: Placement | None = None) -> str:
    """A schedule's steps, each op one step long, without what was inserted (`Extras`).

    Args:
      streams: one stream a stage, messages included, as `plan` gives them.
      place: where virtual stages are; None is one chunk a stage.
    Returns: one line a rank.
    Raises:
      ScheduleError: a model that is held twice, which torch's format cannot say.
    Example:
      >>> from mfun.schedule.check import plan
      >>> print(to_csv(plan("1f1b", stages=2, microbatches=2)), end="")
      0F0,0F1,,0B0,,0B1
      ,1F0,1B0,1F1,1B1,

    Source: torch.distributed.pipelining.schedules, _Action and _dump_csv.
    """
    place = Placement(len(streams)) if place is None else place
    if place.replicas > 1:
        raise ScheduleError(
            f"torch's CSV numbers the stages of one model, but this schedule holds it "
            f"{place.replicas} times"
        )
    counts = layer_counts(streams)
    layers = [
        [counts.get((stage, chunk), 0) for chunk in range(place.chunks)]
        for stage in range(len(streams))
    ]
    plain = [list(bare(ops, own)) for ops, own in zip(streams, layers, strict=True)]
    timing = simulate_time(plain, ORDER, place)
    rows = [[""] * int(timing.makespan) for _ in streams]
    for event in timing.events:
        virtual = place.virtual(event.stage, event.op.chunk)
        text = f"{virtual}{type(event.op).__name__}{event.op.mb}"
        rows[event.stage][int(event.start)] = text
    return "".join(",".join(row) + "\n" for row in rows)


def from_csv(text: str) -> tuple[tuple[tuple[Compute, ...], ...], Placement]:
    """The compute ops of a schedule, and where its virtual stages are.

    `(0F1;3B0)OVERLAP_F_B`, two ops that torch runs as one, is read as the first, then the second.
    What is read has the right form, and no more: pass it through `with_p2p` to `check`.

    Args:
      text: the CSV.
    Returns: one tuple of ops a stage, and the placement: looped, or a wave.
    Raises:
      ScheduleError: a cell that is no op, naming it; virtual stages that are laid in no known way.
    Example:
      >>> from_csv("0F0,0F1,,0B0,,0B1\\n,1F0,1B0,1F1,1B1,\\n")[0]
      ((F0, F1, B0, B1), (F0, B0, F1, B1))
      >>> from_csv("0F0,2F0junk")
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: row 0, column 1: '2F0junk' is not an op such as 2F0: virtual
      stage, then F, I, W or B, then microbatch

    Source: torch.distributed.pipelining.schedules, _Action.from_str and _load_csv (whose pattern
    also takes `2F0junk`, for 2F0).
    """
    rows = [
        [(f"row {y}, column {x}", _actions(cell.strip(), y, x)) for x, cell in enumerate(row)]
        for y, row in enumerate(csv.reader(io.StringIO(text)))
    ]
    place = _placement(rows)
    for y, row in enumerate(rows):
        _countable(y, list(_all(row)))
    return tuple(
        tuple(kind(mb, place.chunk(virtual)) for virtual, kind, mb in _all(row)) for row in rows
    ), place


def _actions(cell: str, y: int, x: int) -> tuple[Action, ...]:
    """What a cell says."""
    pair = PAIR.fullmatch(cell)
    if not cell or LOWERED.fullmatch(cell):
        return ()
    pieces = [piece.strip() for piece in pair.groups()] if pair else [cell]
    matches = [CELL.fullmatch(piece) for piece in pieces]
    if all(matches):
        return tuple((int(m[1]), KINDS[m[2]], int(m[3])) for m in matches if m)
    raise ScheduleError(
        f"row {y}, column {x}: {cell!r} is not an op such as 2F0: virtual stage, then F, I, W or "
        "B, then microbatch"
    )


def _countable(y: int, row: Sequence[Action]) -> None:
    """Refuse numbers that would have everything that counts to them count for ever."""
    for _, _, mb in row:
        if mb >= len(row):
            raise ScheduleError(f"row {y} has {len(row)} ops, but one of microbatch {mb}")


def _all(row: Iterable[Cell]) -> Iterator[Action]:
    for _, actions in row:
        yield from actions


def _placement(rows: Sequence[Sequence[Cell]]) -> Placement:
    """The layout in which every virtual stage is on the row that names it."""
    named = sorted({virtual for row in rows for virtual, _, _ in _all(row)})
    count = len(named)
    if not named or named[-1] != count - 1:
        gap = next((i for i, virtual in enumerate(named) if i != virtual), 0)
        raise ScheduleError(f"the CSV has no op of virtual stage {gap}")
    chunks = -(-count // len(rows))
    choices = [Placement(len(rows), chunks, wave) for wave in (False, True)]
    wrong = [_misplaced(rows, place) for place in choices]
    for place, where in zip(choices, wrong, strict=True):
        if where is None:
            return place
    raise ScheduleError(
        f"{len(rows)} rows hold virtual stages up to {count - 1} neither looped (misfit: "
        f"{wrong[0]}) nor as a wave (misfit: {wrong[1]})"
    )


def _misplaced(rows: Sequence[Sequence[Cell]], place: Placement) -> str | None:
    """The first op on another stage than a placement says."""
    for stage, row in enumerate(rows):
        for where, actions in row:
            for virtual, _, _ in actions:
                if place.stage(virtual) != stage:
                    return f"{where}, virtual stage {virtual}"
    return None
