"""A schedule as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

The pipeline is a process and each stage a thread of it. Messages are flow arrows from the op that
made them to the op that waits for them; how many chunks are in flight is a counter of each stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mfun.schedule.clock import Event, Flight, Timing
from mfun.schedule.ops import B, Compute, F, I, tag_text
from mfun.schedule.streams import Placement

UNIT = 1000
"""Microseconds of the trace in a unit of time, so that a unit is shown as 1 ms."""

Record = dict[str, Any]


def to_trace(timing: Timing, title: str, place: Placement | None = None) -> str:
    """A schedule in Chrome's trace event format.

    Args:
      timing: of `simulate_time`.
      title: the name of the process.
      place: where virtual stages are; None is looped, with as many chunks as the ops name.
    Returns: one JSON object; a unit of time is 1 ms of the trace.
    Example:
      >>> from mfun.schedule.check import plan
      >>> from mfun.schedule.clock import simulate_time
      >>> trace = json.loads(to_trace(simulate_time(plan("1f1b", 2, 1)), "1f1b"))
      >>> [record["name"] for record in trace["traceEvents"] if record["ph"] == "X"]
      ['F0', 'F0', 'B0', 'B0']

    Source: the Trace Event Format (Google), phases M, X, C, s and f.
    """
    if place is None:
        chunks = 1 + max((event.op.chunk for event in timing.events), default=0)
        place = Placement(len(timing.busy), chunks)
    records = [
        *_names(timing, title),
        *(_slice(event, place) for event in timing.events),
        *_arrows(timing, place),
        *_counters(timing),
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": records})


def _names(timing: Timing, title: str) -> Iterator[Record]:
    """Process and threads."""
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    for stage in range(len(timing.busy)):
        place = {"ph": "M", "pid": 0, "tid": stage}
        yield {**place, "name": "thread_name", "args": {"name": f"stage {stage}"}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": stage}}


def _slice(event: Event, place: Placement) -> Record:
    """One op."""
    op = event.op
    virtual = place.virtual(event.stage, op.chunk)
    return {
        "ph": "X",
        "pid": 0,
        "tid": event.stage,
        "name": str(op),
        "cat": type(op).__name__,
        "ts": event.start * UNIT,
        "dur": (event.end - event.start) * UNIT,
        "args": {"microbatch": op.mb, "chunk": op.chunk, "slice": place.slice(virtual)},
    }


def _arrows(timing: Timing, place: Placement) -> Iterator[Record]:
    """Two ends a message. An end belongs to the op around it: so just before the maker's end."""
    when = {(event.stage, event.op): event for event in timing.events}
    for number, flight in enumerate(timing.flights):
        maker, user = (when[end] for end in _ends(flight, when, place))
        common = {"pid": 0, "cat": "message", "name": tag_text(flight.tag), "id": number}
        before_end = maker.end - min((maker.end - maker.start) / 2, 1 / UNIT)
        yield {**common, "ph": "s", "tid": flight.source, "ts": before_end * UNIT}
        yield {**common, "ph": "f", "bp": "e", "tid": flight.target, "ts": user.start * UNIT}


def _ends(
    flight: Flight, when: dict[tuple[int, Compute], Event], place: Placement
) -> tuple[tuple[int, Compute], tuple[int, Compute]]:
    """The stage and op that made a message, and those that need it."""
    kind, mb, to = flight.tag
    if kind == "act":
        return (
            (flight.source, F(mb, place.chunk(to - 1))),
            (flight.target, F(mb, place.chunk(to))),
        )
    ends = ((flight.source, place.chunk(to + 1)), (flight.target, place.chunk(to)))
    source, target = (
        (stage, B(mb, chunk) if (stage, B(mb, chunk)) in when else I(mb, chunk))
        for stage, chunk in ends
    )
    return source, target


def _counters(timing: Timing) -> Iterator[Record]:
    """Chunks in flight on each stage, whenever that changes."""
    live = [0] * len(timing.busy)
    changes = [
        (event.start if isinstance(event.op, F) else event.end, event.stage, event.op)
        for event in timing.events
        if not isinstance(event.op, I)
    ]
    for time, stage, op in sorted(changes, key=lambda change: change[0]):
        live[stage] += 1 if isinstance(op, F) else -1
        name = f"in flight, stage {stage}"
        yield {
            "ph": "C",
            "pid": 0,
            "name": name,
            "ts": time * UNIT,
            "args": {"chunks": live[stage]},
        }
