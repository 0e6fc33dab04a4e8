"""Pictures of schedules: SVG, trace, and the CSV that torch reads and writes."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from mfun.schedule import (
    SCHEDULES,
    B,
    Costs,
    F,
    I,
    Placement,
    ScheduleError,
    Sizes,
    W,
    check,
    from_csv,
    plan,
    simulate_time,
    timeline,
    to_csv,
    to_svg,
    to_trace,
    with_p2p,
)

SVG = "{http://www.w3.org/2000/svg}"
WAVE = Placement(2, 2, wave=True)
SPLIT = [[F(0), F(0, 1), I(0, 1), W(0, 1), B(0)], [F(0), F(0, 1), B(0, 1), I(0), W(0)]]


def wave_streams():
    """A wave of two stages, both kinds of backward."""
    return with_p2p(SPLIT, WAVE)


def streams_of(name, stages, microbatches, chunks):
    """A schedule of the table and its placement."""
    place = SCHEDULES[name].place(Sizes(stages, microbatches, chunks))
    return plan(name, stages, microbatches, chunks=chunks), place


# text


def test_timeline_shows_kinds_and_chunks_by_hand():
    """I and W apart, chunks after a point, each as wide as it takes."""
    assert timeline(wave_streams(), Costs(F=1, I=1, W=2), WAVE).splitlines() == [
        "stage 0 |   F0    .    . F0.1 I0.1 W0.1 ----    .    .   B0 ---- ----",
        "stage 1 |    .   F0 F0.1    .    . B0.1 ---- ----   I0   W0 ----    .",
    ]


def test_timeline_takes_costs_of_slices():
    """Stage 1 holds slices 1 and 2 of the wave."""
    drawn = timeline(wave_streams(), Costs(F=(1, 2, 1, 1), B=1), WAVE).splitlines()
    assert drawn[1].startswith("stage 1 |    .   F0 ---- F0.1 ")


# svg


def cells(root):
    """Every op of a picture: what hovering tells -> (x, y, width, label)."""
    found = {}
    for group in root.iter(f"{SVG}g"):
        box, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        at = tuple(float(box.get(key)) for key in ("x", "y", "width"))
        found[group.find(f"{SVG}title").text] = (*at, None if text is None else text.text)
    return found


@pytest.mark.parametrize(("name", "p", "m", "v"), [("1f1b", 8, 32, 1), ("gpipe", 4, 8, 1)])
def test_svg_has_every_op_to_scale_with_its_number(name, p, m, v):
    """One cell an op, none over another, and at 8 x 32 every microbatch number fits."""
    streams, place = streams_of(name, p, m, v)
    timing = simulate_time(streams, place=place)
    found = cells(ET.fromstring(to_svg(timing, name)))
    assert len(found) == len(timing.events)
    (unit,) = {box[2] + 1 for told, box in found.items() if told.endswith("stage 0: 0 to 1")}
    rows = defaultdict(list)
    for told, (x, y, width, label) in found.items():
        microbatch = re.search(r"microbatch (\d+)", told)
        assert microbatch
        assert label == microbatch[1]
        start, end = map(float, told.split(": ")[1].split(" to "))
        assert width + 1 == pytest.approx((end - start) * unit, abs=0.03)
        rows[y].append((x, x + width))
    assert len(rows) == p
    for boxes in rows.values():
        boxes.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(boxes))


def test_svg_tells_bubble_peak_kinds_and_escapes():
    """Title, legend of the kinds there are, and text that would be markup."""
    timing = simulate_time(wave_streams(), place=WAVE)
    drawn = to_svg(timing, '<b> & "me"')
    texts = ["".join(t.itertext()) for t in ET.fromstring(drawn).iter(f"{SVG}text")]
    assert texts[0] == '<b> & "me"'
    assert "makespan 10, bubble 40.0%, peak 2 chunks in flight, 4 messages" in texts
    legend = {text for text in texts if "chunks 0-1" in text}
    assert {text.split()[0] for text in legend} == set("FIWB")
    colours = {fill for fill in re.findall(r'fill="(#\w{6})"', drawn)}
    assert len(colours) == 8
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("costs", [Costs(F=1e-6, I=3e-6, W=2e-6), Costs(F=1e7, B=5e9), Costs()])
def test_svg_of_any_unit_has_a_readable_axis(costs):
    """Between 5 and 80 ticks, rising, whatever a unit is."""
    timing = simulate_time(plan("1f1b", 4, 8), costs)
    root = ET.fromstring(to_svg(timing, "x"))
    ticks = [float(t.text or "") for t in root.iter(f"{SVG}text") if t.get("class") == "m g"]
    assert ticks[0] == 0
    assert ticks == sorted(set(ticks))
    assert 5 <= len(ticks) <= 80
    assert ticks[-1] <= timing.makespan


def test_svg_is_as_wide_as_its_legend():
    """A picture of few ops and many chunks shows all of its legend."""
    streams, place = streams_of("interleaved", 1, 1, 30)
    root = ET.fromstring(to_svg(simulate_time(streams, place=place), "x"))
    last = [t for t in root.iter(f"{SVG}text") if "chunks 0-29" in (t.text or "")][-1]
    room = float(root.get("width") or 0) - float(last.get("x") or 0)
    assert room >= 6 * len(last.text or "")
    streams, place = streams_of("zbv", 2, 1, 2)
    root = ET.fromstring(to_svg(simulate_time(streams, place=place), "x"))
    last = [t for t in root.iter(f"{SVG}text") if "chunks 0-1" in (t.text or "")][-1]
    room = float(root.get("width") or 0) - float(last.get("x") or 0)
    assert room >= 6 * len(last.text or "")


def test_svg_of_too_many_ops_is_refused():
    """A picture that no viewer opens is not written."""
    timing = simulate_time([[op for mb in range(50_001) for op in (F(mb), B(mb))]])
    with pytest.raises(ScheduleError, match="100002 ops are too many for a picture"):
        to_svg(timing, "none")


# trace


def test_trace_has_ops_arrows_and_counters():
    """Durations above 0, each arrow from inside its maker to its user's start, counters to 0."""
    timing = simulate_time(wave_streams(), Costs(F=2, latency=1), WAVE)
    trace = json.loads(to_trace(timing, "wave", WAVE))["traceEvents"]
    by = defaultdict(list)
    for record in trace:
        by[record["ph"]].append(record)
    threads = {r["tid"]: r["args"]["name"] for r in by["M"] if r["name"] == "thread_name"}
    assert sorted(threads.values()) == ["stage 0", "stage 1"]
    ops = {(threads[r["tid"]], r["name"]): r for r in by["X"]}
    assert len(ops) == 10
    assert all(r["dur"] > 0 for r in by["X"])
    assert ops["stage 1", "F0.1"]["args"] == {"microbatch": 0, "chunk": 1, "slice": 2}
    starts, ends = ({r["id"]: r for r in by[phase]} for phase in "sf")
    assert starts.keys() == ends.keys()
    arrows = {}
    for number, begin in starts.items():
        end = ends[number]
        maker = at(by["X"], begin, inside=True)
        user = at(by["X"], end, inside=False)
        arrows[begin["name"]] = (threads[begin["tid"]], maker, threads[end["tid"]], user)
        assert begin["ts"] < end["ts"]
        assert end["bp"] == "e"
    assert arrows == {
        "act0>1": ("stage 0", "F0", "stage 1", "F0"),
        "act0>3": ("stage 1", "F0.1", "stage 0", "F0.1"),
        "grad0>2": ("stage 0", "I0.1", "stage 1", "B0.1"),
        "grad0>0": ("stage 1", "I0", "stage 0", "B0"),
    }
    for stage in range(2):
        counts = [r for r in by["C"] if r["name"] == f"in flight, stage {stage}"]
        assert [r["args"]["chunks"] for r in counts] == [1, 2, 1, 0]
        assert [r["ts"] for r in counts] == sorted(r["ts"] for r in counts)


def at(slices, flow, inside):
    """The op around an arrow's end."""
    (found,) = [
        r["name"]
        for r in slices
        if r["tid"] == flow["tid"] and r["ts"] <= flow["ts"] < r["ts"] + r["dur"]
    ]
    assert inside or any(r["ts"] == flow["ts"] for r in slices if r["name"] == found)
    return found


# torch's CSV


def torch_stages(p, v):
    """What torch's schedules ask of a rank's stages; no process group is made."""
    identity = torch.nn.Identity()
    facts = {"is_first": True, "is_last": False, "has_backward": True, "submod": identity}
    return [cast(Any, SimpleNamespace(group_size=p, num_stages=p * v, group_rank=0, **facts))] * v


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("none", "dualpipe")])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (3, 5)])
def test_torch_loads_validates_and_lowers_what_we_write(name, p, m, tmp_path):
    """torch's runtime takes the file, and our reader gives the same ops back."""
    chunks = SCHEDULES[name].chunks or 2
    streams, place = streams_of(name, p, m, chunks)
    text = to_csv(streams, place)
    (tmp_path / "a.csv").write_text(text)
    runtime = torch_schedules._PipelineScheduleRuntime(torch_stages(p, chunks), m)
    runtime._load_csv(str(tmp_path / "a.csv"))
    homes = {virtual: place.stage(virtual) for virtual in range(place.count)}
    assert runtime.stage_index_to_group_rank == homes
    ours = tuple(tuple(op for op in ops if isinstance(op, F | B | I | W)) for ops in streams)
    theirs = runtime.pipeline_order
    assert [[str(cell) for cell in theirs[rank] if cell] for rank in range(p)] == [
        [f"{place.virtual(s, op.chunk)}{type(op).__name__}{op.mb}" for op in ops]
        for s, ops in enumerate(ours)
    ]
    assert from_csv(text) == (ours, place)
    runtime._dump_csv(str(tmp_path / "b.csv"))
    lowered = (tmp_path / "b.csv").read_text()
    assert "UNSHARD" in lowered and "SEND_F" in lowered
    assert from_csv(lowered) == (ours, place)


def test_columns_are_steps():
    """No op stands in the column of what it needs, nor before it."""
    streams, place = streams_of("1f1b", 4, 6, 1)
    rows = [line.split(",") for line in to_csv(streams, place).splitlines()]
    assert {len(row) for row in rows} == {18}
    for virtual in range(3):
        for mb in range(6):
            assert rows[virtual].index(f"{virtual}F{mb}") < rows[virtual + 1].index(
                f"{virtual + 1}F{mb}"
            )


def torch_order(kind, p, v, m):
    """torch's own schedule, as its `_dump_csv` writes it."""
    schedule = getattr(torch_schedules, kind)(torch_stages(p, v), m)
    order = schedule.pipeline_order
    return "".join(
        ",".join("" if cell is None else str(cell) for cell in order[rank]) + "\n"
        for rank in range(p)
    )


@pytest.mark.parametrize(
    ("kind", "m"),
    [
        ("ScheduleLoopedBFS", 8),
        ("ScheduleInterleaved1F1B", 8),
        ("ScheduleInterleavedZeroBubble", 8),
        ("ScheduleZBVZeroBubble", 8),
        ("ScheduleDualPipeV", 8),
        ("ScheduleDualPipeV", 13),
    ],
)
def test_torch_schedules_are_read_checked_and_timed(kind, m):
    """torch's tables pass our check, with the bubble that peers.md §4.1 gives (p 4, v 2)."""
    orders, place = from_csv(torch_order(kind, 4, 2, m))
    assert place == Placement(4, 2, wave=kind in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"))
    streams = with_p2p(orders, place)
    check(streams, microbatches=m, place=place)
    timing = simulate_time(streams, Costs(), place)
    synchronous = kind in ("ScheduleLoopedBFS", "ScheduleInterleaved1F1B")
    assert max(timing.bubble) == (9 if synchronous else 3)


def test_the_table_of_torchs_1f1b_is_refused():
    """Its last rank counts microbatches from 1 (torch 2.13); its executor does not use it."""
    (stage,) = torch_stages(4, 1)
    stage.stage_index = 0
    order = torch_schedules.Schedule1F1B(stage, 6)._get_pipeline_order()
    assert order
    text = "".join(",".join("" if x is None else str(x) for x in order[r]) + "\n" for r in order)
    orders, place = from_csv(text)
    with pytest.raises(ScheduleError, match=r"stage 3, op \d+: B0 runs before F0"):
        check(with_p2p(orders, place), microbatches=6, place=place)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,2F0junk", r"row 0, column 1: '2F0junk' is not an op such as 2F0"),
        ("0F0\n1F0,,x", r"row 1, column 2: 'x' is not"),
        ("0F0,-1F0", r"row 0, column 1: '-1F0' is not"),
        ("0F\u0661", r"row 0, column 0: '0F\u0661' is not"),
        ("0F0,0SEND_F0x", r"row 0, column 1: '0SEND_F0x' is not"),
        ("0F0,UNSHARD", r"is not an op"),
        ("0UNSHARD", r"no op of virtual stage 0"),
        ("(0F0;0B0)", r"is not an op"),
        ("(0F0;0B0x)OVERLAP_F_B", r"is not an op"),
        ("(0F0)OVERLAP_F_B", r"is not an op"),
        ("", r"no op of virtual stage 0"),
        (",\n,\n", r"no op of virtual stage 0"),
        ("0F0\n999999999F0", r"no op of virtual stage 1"),
        ("0F0\n2F0", r"no op of virtual stage 1"),
        ("1F0\n0F0", r"neither looped \(misfit: row 0, column 0, virtual stage 1\) nor as a wave"),
        ("0F0,0B0,0F999999", r"row 0 has 3 ops, but one of microbatch 999999"),
    ],
)
def test_junk_is_refused_with_its_cell(text, message):
    """torch reads `2F0junk` as 2F0; here the cell is named."""
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


def test_a_model_held_twice_has_no_csv():
    """DualPipe's second direction has no number in torch's format."""
    place = Placement(2, 2, wave=True, replicas=2)
    with pytest.raises(ScheduleError, match="this schedule holds it 2 times"):
        to_csv([[F(0)], [F(1, 1)]], place)


@given(st.text(alphabet='0123456789FBIW,;()x \n"', max_size=40))
def test_any_text_is_read_or_refused(text):
    """Never another error."""
    try:
        from_csv(text)
    except ScheduleError:
        pass
