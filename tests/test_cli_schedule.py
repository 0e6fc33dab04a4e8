"""`mfun schedule`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner

import mfun
from mfun.cli import main, schedule
from mfun.cli import schedule_text as text
from mfun.schedule import SCHEDULES, Sizes, check, from_csv, with_p2p


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)


def run(words):
    """Run `mfun schedule`."""
    return CliRunner().invoke(main, ["schedule", *words.split()], catch_exceptions=False)


def ok(words):
    """What a command that succeeds prints."""
    done = run(words)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_text_is_the_grid_and_numbers_by_hand():
    """Two stages, two microbatches; B twice as long as F."""
    assert ok("1f1b --stages 2 --microbatches 2").splitlines() == [
        "1f1b: 2 stages, 2 microbatches",
        "stage 0 | F0 F1  .  . B0 --  . B1 --",
        "stage 1 |  . F0 B0 -- F1 B1 --  .  .",
        "",
        "stage  busy  bubble  span  exposed  peak",
        "    0     6       3     3        0     2",
        "    1     6       3     0        0     1",
        "makespan 9, 33.3% idle, 4 messages, no deadlock",
    ]


def test_json_has_what_is_promised():
    """By hand: (p - 1)(F + B) idle on each stage, p - s chunks in flight."""
    told = json.loads(ok("1f1b --stages 4 --microbatches 8 --json"))
    assert told["name"] == "1f1b"
    assert (told["stages"], told["microbatches"], told["chunks"]) == (4, 8, 1)
    assert told["makespan"] == 33
    assert told["bubble"] == [9, 9, 9, 9]
    assert told["bubble_span"] == [9, 6, 3, 0]
    assert told["peak_in_flight"] == [4, 3, 2, 1]
    assert told["messages"] == 48
    assert told["deadlock_free"] is True


def test_costs_reach_schedule_and_clock():
    """Two stages, one microbatch: 2 (F + I + W) and two messages of 0.25; then uneven slices."""
    told = json.loads(ok("1f1b --stages 2 --microbatches 1 --costs 1,2,0.5,0.25 --json"))
    assert told["makespan"] == 7.5
    assert told["exposed"] == [0.25, 0.25]
    told = json.loads(ok("gpipe --stages 2 --microbatches 1 --costs 2:1,1,1 --json"))
    assert told["busy"] == [4, 3]
    slow = json.loads(ok("1f1b --stages 2 --costs 1,1,1,1 --no-overlap --json"))
    fast = json.loads(ok("1f1b --stages 2 --costs 1,1,1,1 --json"))
    assert slow["makespan"] > fast["makespan"]


def test_fractions_are_drawn_in_their_unit():
    """F 1, I 0.5, W 1: a column is half a unit."""
    lines = ok("1f1b --stages 1 --microbatches 1 --costs 1,0.5,1").splitlines()
    assert lines[1:3] == ["a column is 0.5 units of time", "stage 0 | F0 -- B0 -- --"]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_by_name_alone(name):
    """Defaults fit each; the numbers are lists of one a stage."""
    stages = 1 if name == "none" else 4
    told = json.loads(ok(f"{name} --stages {stages} --json"))
    assert told["deadlock_free"]
    for key in ("bubble", "bubble_span", "busy", "exposed", "peak_in_flight"):
        assert len(told[key]) == stages


def test_compare_shows_every_schedule_and_why_one_is_refused():
    """A row each at the same cost of a stage: two chunks halve an op."""
    lines = ok("--compare --stages 4 --microbatches 8").splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1:] if line}
    assert rows["1f1b"][1:] == ["1", "33", "9", "9", "27.3%", "4", "1x", "48"]
    assert rows["interleaved"][1:] == ["2", "28.5", "4.5", "4.5", "15.8%", "5.5", "1x", "112"]
    assert rows["dualpipe"][7] == "2x"
    assert "none is refused: it runs 1 stage, but stages is 4" in "\n".join(lines)
    assert max(map(len, lines)) <= 82
    told = json.loads(ok("--compare --json"))
    assert told.keys() == SCHEDULES.keys()
    assert "1 stage" in told["none"]["refused"]
    assert told["gpipe"]["bubble"] == [9, 9, 9, 9]


def test_list_names_every_schedule():
    """With a sentence, within 80 columns."""
    lines = ok("--list").splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(SCHEDULES)
    assert max(map(len, lines)) <= 80


def test_files_are_written_and_valid(tmp_path):
    """SVG parses, the trace is JSON, the CSV is a schedule; nothing but that is printed."""
    done = run("interleaved --svg a.svg --trace a.json --csv a.csv")
    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr.splitlines() == ["wrote a.svg", "wrote a.json", "wrote a.csv"]
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    orders, place = from_csv((tmp_path / "a.csv").read_text())
    check(with_p2p(orders, place), place=place)
    assert ok("interleaved --csv -") == (tmp_path / "a.csv").read_text()


def test_a_csv_is_read_checked_and_timed(tmp_path):
    """What was written gives the same numbers; one swapped pair is refused, junk is named."""
    ok("zbv --csv a.csv")
    here, there = (json.loads(ok(f"{name} --costs 1,2,1 --json")) for name in ("zbv", "a.csv"))
    assert there["chunks"] == 2
    assert here["peak_in_flight"] == there["peak_in_flight"]
    assert "a.csv: 4 stages, 8 microbatches, 2 chunks a stage" in ok("a.csv")
    text = (tmp_path / "a.csv").read_text()
    (tmp_path / "b.csv").write_text(
        text.replace("0I0", "x").replace("0W0", "0I0").replace("x", "0W0")
    )
    (tmp_path / "c.csv").write_text(text.replace("2F0", "2F0junk"))
    for words, message in (
        ("b.csv", "W0 runs before I0"),
        ("c.csv", "c.csv: row 2, column 2: '2F0junk' is not an op"),
        ("d.csv", "d.csv cannot be read: [Errno 2] No such file or directory"),
        ("a.csv --stages 4", "a.csv decides it: leave --stages out"),
    ):
        done = run(words)
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())


def test_an_option_without_effect_is_told():
    """On standard error, so that JSON stays JSON."""
    done = run("1f1b --memory 3 --json")
    assert json.loads(done.stdout)["peak_in_flight"][0] == 4
    assert done.stderr == "note: --memory 3 changes nothing in this schedule\n"
    assert run("zbv --memory 5 --json").stderr == ""
    assert run("interleaved --group 8 --json").stderr == ""
    assert "--group 4 changes nothing" in run("interleaved --group 4").stderr


def test_an_existing_file_is_kept(tmp_path):
    """Unless --force is given."""
    (tmp_path / "a.svg").write_text("mine")
    done = run("1f1b --svg a.svg")
    assert done.exit_code == 2
    assert "--svg a.svg exists: give another name, or --force" in done.output
    assert (tmp_path / "a.svg").read_text() == "mine"
    ok("1f1b --svg a.svg --force")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_huge_sizes_do_not_flood_the_terminal():
    """No grid of thousands of columns, nor a line for each of a thousand stages."""
    told = ok("1f1b --stages 16 --microbatches 256")
    assert "a grid of 813 columns is too wide for text: --svg FILE draws it" in told
    told = ok("gpipe --stages 1000 --microbatches 1")
    assert "and 936 more stages: --json has all" in told
    assert len(told) < 10_000


def test_a_terminal_cuts_the_grid(monkeypatch):
    """Lines that would wrap are cut, and it says so."""
    monkeypatch.setattr(text.sys, "stdout", type("T", (), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "40")
    lines = list(text.grid_lines(schedule.planned(SCHEDULES["1f1b"], Sizes(2, 16))))
    assert [len(line) for line in lines[:2]] == [40, 40]
    assert lines[0].endswith("...")
    assert "less -S" in lines[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "name a schedule, or give --compare or --list"),
        ("zvb", "no schedule 'zvb': did you mean 'zbv'?"),
        ("1f1b --stages 0", "'--stages': 0 is not in the range x>=1"),
        ("1f1b --microbatches two", "'--microbatches': 'two' is not a valid integer"),
        ("1f1b --chunks 2", "--chunks is 2, but 1f1b has 1 a stage: leave --chunks out"),
        ("none --stages 4", 'it runs 1 stage, but --stages is 4: use "1f1b" or "gpipe"'),
        ("interleaved --group 1", "--group is 1, but with 4 stages and 2 chunks it is at least 4"),
        ("1f1b --costs 1,2", "'--costs': '1,2' is not F,I,W or F,I,W,comm"),
        ("1f1b --costs a,1,1", "'--costs': 'a,1,1': could not convert string to float: 'a'; give"),
        ("1f1b --costs 0,1,1", "cost F is 0, but an op takes more than 0; give F,I,W,comm"),
        ("1f1b --costs 1,nan,1", "cost I is nan"),
        ("1f1b --costs 1,1,1,-1", "cost transfer is -1.0, but a message takes 0 or more"),
        ("1f1b --costs 1e13,1,1", "1e13 is more than 1e+12"),
        ("1f1b --costs 1:2,1,1", "--costs: F has 2 numbers, but the model is cut in 4 slices"),
        ("1f1b --stages 9999 --microbatches 9999", "99980001 forwards, more than 300000: give"),
        ("--compare 1f1b", "--compare shows every schedule: leave NAME 1f1b out"),
        ("--compare --svg a.svg", "--compare shows every schedule: leave --svg out"),
        ("1f1b --svg nowhere/a.svg", "there is no folder nowhere; make it first"),
        ("1f1b --svg .", "'--svg': File '.' is a directory"),
        (f"1f1b --csv {'x' * 300}", "cannot be written (File name too long)"),
        ("dualpipe --csv a.csv", "torch's CSV numbers the stages of one model"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(words, message):
    """Exit code 2, the option, the value and what to do; no traceback, no file."""
    done = run(words)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_help_fits_and_its_examples_run():
    """Within 80 columns, and each example is accepted."""
    told = ok("--help")
    assert max(map(len, told.splitlines())) <= 80
    examples = [re.split("[(;]", line)[0].split() for line in told.splitlines()]
    examples = [words[2:] for words in examples if words[:2] == ["mfun", "schedule"]]
    assert len(examples) >= 5
    for words in examples:
        ok(" ".join(words))


def test_readme_shows_what_is_printed_and_drawn():
    """Comparison and picture; `mfun schedule zbv --svg research/zbv.svg --force` renews it."""
    root = Path(mfun.__file__).parents[1]
    text = (root / "README.md").read_text()
    (shown,) = re.findall(r"^\$ mfun schedule (--compare.*)\n((?:.*\n)*?)```", text, re.MULTILINE)
    assert ok(shown[0]) == shown[1]
    assert (root / "research" / "zbv.svg").read_text() == ok("zbv --svg -")


def test_no_torch_is_imported():
    """A picture comes at once."""
    code = (
        "import sys; from mfun.cli import main\n"
        "try: main(['schedule', '1f1b'])\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_inserted_is_drawn_and_timed_by_hand():
    """Two layers a chunk, one runs again, each reduced for as long as its backward."""
    words = "none --stages 1 --microbatches 1 --layers 2 --costs 2,2,2 --recompute 1 --reduce 2"
    assert ok(words).splitlines() == [
        "none: 1 stage, 1 microbatch",
        "stage 0 | F0[0] F0[1] B0[1] ----- R0[0] B0[0] -----     .     .",
        "",
        "stage  busy  bubble  span  exposed  peak",
        "    0     7       2     0        2     1",
        "makespan 9, 22.2% idle, 0 messages, no deadlock",
    ]


def test_layers_share_a_chunks_costs(tmp_path):
    """In units that make a layer's part whole; and in a picture with what runs beside."""
    assert "a column is 0.25 units" in ok("1f1b --layers 2 --costs 0.5,1,1 --recompute full")
    done = run("gpipe --layers 2 --reduce 0.5 --gather 1 --offload 2 --copy 1 --svg a.svg")
    assert done.exit_code == 0, done.output
    titles = [x.text or "" for x in ET.parse(tmp_path / "a.svg").iter() if x.tag.endswith("title")]
    for word in ("Reduce1", "Gather0", "Offload3", "Reload3", "layer 1"):
        assert any(word in title for title in titles)


def test_peak_counts_the_device_only():
    """Eight microbatches of GPipe, two of which stay."""
    told = json.loads(ok("gpipe --stages 2 --offload 2 --json"))
    assert told["peak_in_flight"] == [2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("1f1b --recompute none", "neither full nor a number"),
        ("1f1b --recompute 0", "neither full nor a number"),
        ("1f1b --copy 1", "--copy is of --offload"),
        ("1f1b --reduce -1", "--reduce"),
        ("zb-h2 --offload 1", "--offload is 1, but at"),
        ("--compare --layers 2", "leave --layers"),
        ("1f1b --layers 100000", "more than 300000"),
    ],
)
def test_what_cannot_be_inserted_is_refused(words, message):
    """By the options' names."""
    done = run(words)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
