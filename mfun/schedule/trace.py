"""A schedule as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

The pipeline is a process and each stage a thread of it, followed by one for each of its links where
anything runs beside. Messages are flow arrows from the op that made them to the op that waits for
them; how many chunks are in flight is a counter of each stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from mfun.schedule.clock import LIVE
from mfun.schedule.ops import F, Recompute, W, tag_text
from mfun.schedule.streams import Placement
from mfun.schedule.timing import Event, Flight, Timing, Trip

UNIT = 1000
"""Microseconds of the trace in a unit of time, so that a unit is shown as 1 ms."""
PROCESS, FIRST = 1, 1000
"""Numbers of the process and of stage 0's thread, which viewers show: `stage 3 1003`. Perfetto took
thread 0 for thread 1 until 2025, and takes one of its process's number for the main thread."""

Record = dict[str, Any]
Part = tuple[int, bool, int, int]  # stage, forward or not, microbatch, chunk


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
    threads = _threads(timing)
    records = [
        *_names(threads, title),
        *(_slice(event, place) for event in timing.events),
        *(_trip(trip, threads) for trip in timing.beside),
        *_arrows(timing, place),
        *_counters(timing),
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": records})


def _threads(timing: Timing) -> dict[tuple[int, str], int]:
    """A thread for each stage, "", and after them for each of its links."""
    stages = len(timing.busy)
    links = sorted({(trip.stage, trip.link) for trip in timing.beside})
    keys = [*((stage, "") for stage in range(stages)), *links]
    return {key: FIRST + i for i, key in enumerate(keys)}


def _names(threads: dict[tuple[int, str], int], title: str) -> Iterator[Record]:
    """Process and threads, each stage's together."""
    yield {"ph": "M", "pid": PROCESS, "name": "process_name", "args": {"name": title}}
    for index, ((stage, link), thread) in enumerate(sorted(threads.items())):
        place = {"ph": "M", "pid": PROCESS, "tid": thread}
        name = f"stage {stage}" + (f" {link}" if link else "")
        yield {**place, "name": "thread_name", "args": {"name": name}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": index}}


def _slice(event: Event, place: Placement) -> Record:
    """One op."""
    op = event.op
    virtual = place.virtual(event.stage, op.chunk)
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": FIRST + event.stage,
        "name": str(op),
        "cat": type(op).__name__,
        "ts": event.start * UNIT,
        "dur": (event.end - event.start) * UNIT,
        "args": {"microbatch": op.mb, "chunk": op.chunk, "slice": place.slice(virtual)},
    }


def _trip(trip: Trip, threads: dict[tuple[int, str], int]) -> Record:
    """One collective or copy."""
    return {
        "ph": "X",
        "pid": PROCESS,
        "tid": threads[trip.stage, trip.link],
        "name": str(trip.op),
        "cat": type(trip.op).__name__,
        "ts": trip.start * UNIT,
        "dur": (trip.end - trip.start) * UNIT,
    }


def _arrows(timing: Timing, place: Placement) -> Iterator[Record]:
    """Two ends a message. An end belongs to the op around it: so just before the maker's end."""
    first: dict[Part, Event] = {}
    last: dict[Part, Event] = {}
    for event in timing.events:
        op = event.op
        if not isinstance(op, (W, Recompute)):
            part = event.stage, isinstance(op, F), op.mb, op.chunk
            first.setdefault(part, event)
            last[part] = event
    for number, flight in enumerate(timing.flights):
        made, used = _ends(flight, place)
        maker, user = last[made], first[used]
        common = {"pid": PROCESS, "cat": "message", "name": tag_text(flight.tag), "id": number}
        before_end = maker.end - min((maker.end - maker.start) / 2, 1 / UNIT)
        yield {**common, "ph": "s", "tid": FIRST + flight.source, "ts": before_end * UNIT}
        yield {
            **common,
            "ph": "f",
            "bp": "e",
            "tid": FIRST + flight.target,
            "ts": user.start * UNIT,
        }


def _ends(flight: Flight, place: Placement) -> tuple[Part, Part]:
    """What made a message, and what needs it."""
    kind, mb, to = flight.tag
    forward = kind == "act"
    maker = to - 1 if forward else to + 1
    return (
        (flight.source, forward, mb, place.chunk(maker)),
        (flight.target, forward, mb, place.chunk(to)),
    )


def _counters(timing: Timing) -> Iterator[Record]:
    """Chunks in flight on each stage, whenever that changes: not where one ends as one starts."""
    live = [0] * len(timing.busy)
    changes: list[tuple[float, int, int]] = [
        (event.start if isinstance(event.op, F) else event.end, event.stage, LIVE[type(event.op)])
        for event in timing.events
        if not event.op.layer
    ]
    changes += [(x.start, x.stage, LIVE.get(type(x.op), 0)) for x in timing.beside]
    moments: dict[tuple[float, int], int] = {}
    for time, stage, change in changes:
        moments[time, stage] = moments.get((time, stage), 0) + change
    for (time, stage), change in sorted(moments.items()):
        if not change:
            continue
        live[stage] += change
        name = f"in flight, stage {stage}"
        yield {
            "ph": "C",
            "pid": PROCESS,
            "name": name,
            "ts": time * UNIT,
            "args": {"chunks": live[stage]},
        }
