"""Streams with everything in them, in time and in pictures: by hand, and by independent readers."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest

from mfun.schedule import (
    SCHEDULES,
    B,
    Costs,
    Extras,
    F,
    ScheduleError,
    Sizes,
    Timing,
    dress,
    plan,
    simulate_time,
    timeline,
    to_csv,
    to_svg,
    to_trace,
)
from mfun.schedule.ops import Gather, Offload, Recompute, Reduce, Reload
from mfun.schedule.streams import Placement

EACH = (frozenset({(0, 1)}), frozenset({(0, 0)}))
STEP = [F(0), B(0)]


def times(
    ops: list[Any], extras: Extras, **costs: Any
) -> tuple[Timing, dict[str, tuple[Any, Any]]]:
    """One stage's timing, and the start and end of each op by its text."""
    streams = dress([ops], [extras])
    timing = simulate_time(streams, Costs(**costs), extras=[extras])
    events = [*timing.events, *timing.beside]
    return timing, {str(event.op): (event.start, event.end) for event in events}


def test_reductions_run_beside_the_backward() -> None:
    """Two layers, a reduction as long as a layer's backward; the last one is waited for."""
    timing, at = times(STEP, Extras(layers=(2,), reduce=EACH), reduce=1)
    assert at["B0[1]"] == (1, 2) and at["B0[0]"] == (2, 3)
    assert at["Reduce0"] == (2, 3) and at["Reduce1"] == (3, 4)
    assert (timing.makespan, timing.busy, timing.bubble, timing.exposed) == (4, (3,), (1,), (1,))


def test_reductions_queue_on_one_network() -> None:
    """Each takes longer than the backward that it hides behind."""
    timing, at = times(STEP, Extras(layers=(2,), reduce=EACH), reduce=3)
    assert at["Reduce0"] == (2, 5) and at["Reduce1"] == (5, 8)
    assert (timing.makespan, timing.exposed) == (8, (5,))


def test_without_overlap_a_reduction_occupies_the_stage() -> None:
    """As messages do."""
    timing, at = times(STEP, Extras(layers=(2,), reduce=EACH), reduce=1, overlap=False)
    assert at["Reduce0"] == (2, 3) and at["B0[0]"] == (3, 4) and at["Reduce1"] == (4, 5)
    assert timing.makespan == 5


def test_running_again_costs_a_forward() -> None:
    """And it is work."""
    timing, at = times(STEP, Extras(recompute="full"), F=2)
    assert at["Recompute0"] == (2, 4) and at["B0"] == (4, 6)
    assert timing.busy == (6,) and timing.peak_in_flight == (1,)
    timing, at = times(STEP, Extras(layers=(2,), recompute=1), F=2)
    assert at["Recompute0[0]"] == (3, 4) and timing.makespan == 5


@pytest.mark.parametrize(("prefetch", "makespan", "second"), [(0, 9, 4.5), (1, 6.5, 4)])
def test_layers_wait_for_their_gathers(prefetch: int, makespan: float, second: float) -> None:
    """Two buckets of a layer each, each two long: one after the other, or both at once."""
    extras = Extras(layers=(2,), gather=EACH[::-1], prefetch=prefetch)
    timing, at = times(STEP, extras, gather=2)
    assert at["F0[0]"] == (2, 2.5)
    assert timing.makespan == makespan and timing.exposed == (makespan - 3,)
    assert at["F0[1]"][0] == second


def test_without_extras_an_op_waits_for_all_gathers() -> None:
    """The stream alone does not say whose parameters they are."""
    extras = Extras(layers=(2,), gather=EACH[::-1], prefetch=1)
    assert simulate_time(dress([STEP], [extras]), Costs(gather=2)).makespan == 7


def test_activations_travel_beside_and_are_waited_for() -> None:
    """F0 F1 Offload1 F2 B0 Reload1 B1 B2, a copy as long as a forward."""
    ops = [*map(F, range(3)), *map(B, range(3))]
    timing, at = times(ops, Extras(offload=2), offload=1)
    assert at["Offload1"] == (2, 3) and at["F2"] == (2, 3) and at["B0"] == (3, 5)
    assert at["Reload1"] == (5, 6) and at["B1"] == (6, 8) and at["B2"] == (8, 10)
    assert timing.makespan == 10 and timing.peak_in_flight == (2,)
    assert simulate_time([ops]).peak_in_flight == (3,)


def test_a_reload_waits_for_its_offload() -> None:
    """A copy that is still on its way out does not come back."""
    timing, at = times([F(0), F(1), B(1), B(0)], Extras(offload=1), offload=5)
    assert at["Offload0"] == (1, 6) and at["Reload0"] == (6, 11) and timing.makespan == 13


@pytest.mark.parametrize("name", ["reduce", "gather", "offload"])
def test_costs_are_not_negative(name: str) -> None:
    """By name."""
    with pytest.raises(ScheduleError, match=f"cost {name} is -1"):
        attrs.evolve(Costs(), **{name: -1})


# ---------------------------------------------------------------------- every schedule

P, M = 3, 5
NAMES = [name for name in SCHEDULES if name != "none"]


def dressed(name: str, **asked: Any) -> tuple[Any, Any, Placement, list[Extras]]:
    """A schedule's own streams, and those with two layers a chunk and more."""
    row = SCHEDULES[name]
    chunks = row.chunks or 2
    plain, place = plan(name, P, M, chunks=chunks), row.place(Sizes(P, M, chunks))
    buckets = tuple(frozenset({(c, i)}) for c in reversed(range(chunks)) for i in (1, 0))
    extras = [Extras(layers=(2,) * chunks, reduce=buckets, gather=buckets, **asked)] * P
    return plain, dress(plain, extras), place, extras


@pytest.mark.parametrize("name", NAMES)
def test_what_takes_no_time_changes_none(name: str) -> None:
    """Layers, reductions and gathers at no cost: each chunk's times are the schedule's own."""
    plain, streams, place, extras = dressed(name)
    want, have = (
        simulate_time(plain, place=place),
        simulate_time(streams, place=place, extras=extras),
    )
    assert have.makespan == pytest.approx(want.makespan)
    assert have.busy == pytest.approx(want.busy) and have.exposed == pytest.approx(want.exposed)
    assert have.peak_in_flight == want.peak_in_flight and have.messages == want.messages
    spans: dict[Any, list[float]] = defaultdict(list)
    for event in have.events:
        key = event.stage, type(event.op), event.op.mb, event.op.chunk
        spans[key] += [event.start, event.end]
    for event in want.events:
        span = spans[event.stage, type(event.op), event.op.mb, event.op.chunk]
        assert (min(span), max(span)) == pytest.approx((event.start, event.end))


@pytest.mark.parametrize("name", NAMES)
def test_more_costs_never_end_sooner(name: str) -> None:
    """And a dearer collective ends no sooner than a cheap one; the makespan bounds every end."""
    _, streams, place, extras = dressed(name, recompute=1)
    last = 0.0
    for cost in (0, 0.1, 0.5, 2):
        costs = Costs(reduce=cost, gather=cost)
        timing = simulate_time(streams, costs, place, extras)
        assert timing.makespan >= last
        last = timing.makespan
        assert all(x.end <= last for x in (*timing.events, *timing.beside))
        per_link = defaultdict(list)
        for trip in timing.beside:
            per_link[trip.stage, trip.link].append((trip.start, trip.end))
        for trips in per_link.values():
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(trips)))


# ---------------------------------------------------------------------- pictures


def least_depth(name: str) -> int:
    """The fewest microbatches on the device that a schedule works with."""
    for depth in itertools.count(1):
        try:
            dressed(name, offload=depth)
        except ScheduleError:
            continue
        return depth
    raise AssertionError


def everything(name: str) -> tuple[Timing, Placement]:
    """A schedule with all kinds of ops, each of which takes time."""
    _, streams, place, extras = dressed(name, recompute=1, offload=least_depth(name))
    costs = Costs(reduce=0.5, gather=0.25, offload=0.75, latency=0.1)
    return simulate_time(streams, costs, place, extras), place


def read_trace(text: str) -> dict[str, list[dict[str, Any]]]:
    """Chrome's trace event format, by its rules: records by phase, or an error.

    Every record has a phase and a process; X has a time and a duration; each B an E on its thread;
    slices of a thread nest or are apart; each flow has one start and one end, inside a slice of
    their threads, and does not go back in time; threads are named once; counters are numbers.
    Perfetto took 0 for the idle task and merged thread 0 into 1 (its pull request 2278), and a
    process's number for its main thread.
    """
    records = json.loads(text)["traceEvents"]
    by_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        assert set("ph pid name".split()) <= record.keys(), record
        assert record["pid"] > 0 and record.get("tid", 1000) not in (0, record["pid"]), record
        by_phase[record["ph"]].append(record)
    assert by_phase.keys() <= set("MXBECsf")
    named = [r["tid"] for r in by_phase["M"] if r["name"] == "thread_name"]
    assert len(named) == len(set(named))
    slices = defaultdict(list)
    open_: dict[int, list[float]] = defaultdict(list)
    for record in sorted(by_phase["B"] + by_phase["E"], key=lambda r: r["ts"]):
        if record["ph"] == "B":
            open_[record["tid"]].append(record["ts"])
        else:
            slices[record["tid"]].append((open_[record["tid"]].pop(), record["ts"]))
    assert not any(open_.values())
    for record in by_phase["X"]:
        assert record["ts"] >= 0 and record["dur"] >= 0 and record["tid"] in named
        slices[record["tid"]].append((record["ts"], record["ts"] + record["dur"]))
    for spans in slices.values():
        ends: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start + 1e-6:
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-6, (start, end, ends)
            ends.append(end)
    starts, finishes = ({r["id"]: r for r in by_phase[phase]} for phase in "sf")
    assert starts.keys() == finishes.keys() and len(starts) == len(by_phase["s"])
    for number, start in starts.items():
        finish = finishes[number]
        assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
        assert start["ts"] <= finish["ts"] and finish["bp"] == "e"
        for end in (start, finish):
            inside = (a <= end["ts"] + 1e-6 and end["ts"] < b for a, b in slices[end["tid"]])
            assert any(inside), end
    for record in by_phase["C"]:
        assert all(isinstance(value, int) and value >= 0 for value in record["args"].values())
    return by_phase


def test_the_reader_refuses_what_is_wrong() -> None:
    """A flow without an end, slices that cross, a begin without an end, a process numbered 0."""
    good = json.loads(to_trace(*everything("1f1b")[:1], "x"))
    for wrong in ("flow", "cross", "begin", "zero"):
        records = json.loads(json.dumps(good["traceEvents"]))
        if wrong == "flow":
            records.remove(next(r for r in records if r["ph"] == "f"))
        elif wrong == "cross":
            next(r for r in records if r["ph"] == "X")["dur"] += 600
        elif wrong == "zero":
            next(r for r in records if r["ph"] == "C")["pid"] = 0
        else:
            records.append({**records[-1], "ph": "B", "tid": 1000})
        with pytest.raises(AssertionError):
            read_trace(json.dumps({"traceEvents": records}))


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_is_read_by_its_format(name: str) -> None:
    """Every op is a slice of its stage's thread, every copy and collective one of a link's."""
    timing, place = everything(name)
    records = read_trace(to_trace(timing, name, place))
    names = {r["tid"]: r["args"]["name"] for r in records["M"] if r["name"] == "thread_name"}
    have = sorted((names[r["tid"]], r["name"], r["ts"]) for r in records["X"])
    own = [(f"stage {e.stage}", str(e.op), e.start * 1000) for e in timing.events]
    links = [(f"stage {t.stage} {t.link}", str(t.op), t.start * 1000) for t in timing.beside]
    assert have == sorted([*own, *links])
    assert len(records["s"]) == timing.messages > 0
    peaks = defaultdict(int)
    for record in records["C"]:
        peaks[record["name"]] = max(peaks[record["name"]], record["args"]["chunks"])
    for stage, peak in enumerate(timing.peak_in_flight):
        assert peaks[f"in flight, stage {stage}"] <= peak + 1


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_has_a_cell_for_everything(name: str) -> None:
    """Well-formed, one titled box an op, a low bar a collective or copy, a legend for each kind."""
    timing, _ = everything(name)
    text = to_svg(timing, name)
    root = ElementTree.fromstring(text)
    ns = "{http://www.w3.org/2000/svg}"
    titled = [g for g in root.iter(f"{ns}g") if g.find(f"{ns}title") is not None]
    boxes = [g.find(f"{ns}rect") for g in titled]
    low = [box for box in boxes if box is not None and box.get("height") == "4"]
    assert len(low) == len(timing.beside) > 0
    assert len(titled) == len(timing.events) + len(timing.beside)
    for word in ("forward again", "gradients", "parameters", "to host", "from host"):
        kinds = {type(x.op) for x in (*timing.events, *timing.beside)}
        there = {"to host": Offload, "from host": Reload, "parameters": Gather, "gradients": Reduce}
        assert (word in text) == (there.get(word, Recompute) in kinds)


def test_text_shows_layers_and_what_runs_again() -> None:
    """A column an op; `R` for a forward that runs again."""
    streams = dress(plan("1f1b", 2, 1), [Extras(layers=(2,), recompute=1, reduce=EACH)] * 2)
    assert timeline(streams).splitlines() == [
        "stage 0 | F0[0] F0[1]     .     .     .     .     . B0[1] R0[0] B0[0]",
        "stage 1 |     .     . F0[0] F0[1] B0[1] R0[0] B0[0]     .     .     .",
    ]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "dualpipe"])
def test_torchs_format_has_the_schedule_only(name: str) -> None:
    """What was inserted is left out."""
    plain, streams, place, _ = dressed(name, recompute="full")
    assert to_csv(streams, place) == to_csv(plain, place)
