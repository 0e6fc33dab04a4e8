"""`mfun verify`: layouts equal one device, small twins of configurations, the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool

from mfun import config as cfg
from mfun.cli import main
from mfun.comm import ProcessWorld, distribute, finish
from mfun.config import PRESETS, Config
from mfun.grads import needed_groups
from mfun.train.plan import plan
from mfun.verify.compare import BOUND, RankResult, Report, judge
from mfun.verify.run import (
    in_mailbox,
    program,
    reference_history,
    verify_in_process,
)
from mfun.verify.shrink import LOCAL_RANKS, shrink
from tests.layouts import FIELDS, ROWS, allowed, config_of, grid, related, unpacked
from tests.pairwise import pairs_of, wanted
from tests.threads import in_threads

PLACES = {"mailbox": in_mailbox, "threads": in_threads}


def name_of(digits: str) -> str:
    """A row's mesh, for the test's name."""
    row = unpacked(digits)
    return "-".join([*(f"{axis}{row[axis]}" for axis in ("tp", "pp", "dp")), digits])


def assert_equal(report: Report) -> None:
    """Every error within the bound, replicas equal, nothing to say."""
    assert report.ok and max(report.errors.values()) <= BOUND == 1e-10, report.notes
    assert report.bitwise and report.notes == ()


# ---------------------------------------------------------------------------- layouts


def test_the_rows_cover_every_pair() -> None:
    """Each pair of related values that may meet does, in 24 rows."""
    covered = set().union(*(pairs_of(unpacked(digits)) for digits in ROWS))
    assert wanted(FIELDS, allowed, related) <= covered and len(ROWS) == 24


@pytest.mark.parametrize("digits", ROWS, ids=name_of)
def test_layout_equals_one_device(digits: str) -> None:
    """All ranks in one process, against the reference."""
    assert_equal(verify_in_process(config_of(unpacked(digits))))


@pytest.mark.parametrize(
    "digits", [d for d in ROWS if plan(config_of(unpacked(d))).mesh.world <= 8], ids=name_of
)
def test_layout_as_processes_run_it_equals_one_device(digits: str) -> None:
    """Each rank a thread that runs what it would run as a process."""
    layout = plan(config_of(unpacked(digits)))
    assert_equal(judge(layout, in_threads(layout), reference_history(layout.config)))


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(10, 18))
def test_grid_of_layouts_equals_one_device(seed: int, place: str) -> None:
    """Other rows that cover every pair, some 200 in all, both ways."""
    for row in grid(seed):
        layout = plan(config_of(row))
        report = judge(layout, PLACES[place](layout), reference_history(layout.config))
        assert report.ok, (row, report.notes)


def on_a_rank(
    rank: int,
    settings: tuple[str, ...],
    config: Config = Config(),  # noqa: B008, it is frozen
) -> dict[str, Any]:
    """One rank's result as numpy, on a real process."""
    layout = plan(cfg.resolve(cfg.override(config, settings), None))
    groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    found = finish(program(layout, ProcessWorld(groups)))
    arrays = {k: {p: x.numpy() for p, x in found[k].items()} for k in ("grads", "params")}
    return {"coords": layout.mesh.coords(rank), **found, **arrays}


@pytest.mark.parametrize(
    "settings",
    [
        "parallel.pp=2 parallel.schedule=gpipe train.microbatches=3 train.global_batch=4",
        "parallel.pp=2 train.microbatches=1 train.global_batch=2",
        "parallel.tp=2 parallel.dp=2 parallel.sequence_parallel=true model.dropout=0.1",
        "parallel.pp=4 parallel.order=pp-dp-tp train.microbatches=5 train.global_batch=6",
    ],
    ids=["gpipe", "one-microbatch", "tp-dp", "pp4"],
)
def test_layout_on_gloo_ranks_equals_one_device(pool: Pool, settings: str) -> None:
    """Real processes: a pipeline of few microbatches does not wait for itself, all is equal."""
    small = (
        "model.hidden=8 model.heads=2 model.vocab=19 model.seq_len=4 parallel.tp=1 parallel.pp=1 "
        f"optim.eps=1e-4 train.steps=2 precision.policy=fp64 {settings}"
    ).split()
    layout = plan(cfg.resolve(cfg.override(Config(), small), None))
    found = pool.run(on_a_rank, tuple(small), world=layout.mesh.world)
    for result in found:
        for kind in ("grads", "params"):
            result[kind] = {p: torch.from_numpy(x) for p, x in result[kind].items()}
    results = [RankResult(**result) for result in found]
    assert_equal(judge(layout, results, reference_history(layout.config)))


# ---------------------------------------------------------------------------- shrink

LAYOUTS = (
    {},
    {"tp": 2, "pp": 2, "sequence_parallel": True},
    {"tp": 4, "dp": 2},
    {"tp": 2, "pp": 4, "dp": 2, "schedule": "gpipe", "order": "pp-dp-tp"},
    {"tp": 1, "pp": 3, "recompute": "full"},
    {"tp": 8, "pp": 4, "dp": 2, "sequence_parallel": True},
)
MADE_SMALL = {
    "model": "layers hidden heads kv_heads head_dim ffn vocab seq_len sliding_window rope_original",
    "parallel": "dp layers_per_stage",
    "precision": "policy",
    "optim": "warmup decay_steps eps",
    "train": "steps global_batch microbatches",
}


def relations(config: Config) -> dict[str, Any]:
    """How sizes stand to the layout: what a layout can get wrong."""
    model, parallel = config.model, config.parallel
    tp, heads = parallel.tp, (model.heads, model.kv)
    sizes = cfg.microbatch_sizes(config)
    stages = [len(blocks) for blocks in cfg.stage_layers(config)]
    return {
        "heads to a rank": [min(n // tp, 2) if n % tp == 0 else tp % n for n in heads],
        "grouped heads": model.kv < model.heads,
        "own head width": model.hidden == model.heads * model.head_size,
        "own feed-forward width": model.ffn > 0,
        "vocabulary over tp": model.vocab % tp,
        "sequence over tp": model.seq_len % tp == 0,
        "stages": [(a > b) - (a < b) for a, b in zip(stages[1:], stages[:-1], strict=True)],
        "empty stages": [n == 0 for n in stages],
        "microbatches": (len(sizes) == 1, len(sizes) > parallel.pp, len(set(sizes)) > 1),
        "window": model.sliding_window > 0,
        "long rotary waves": model.rope_original > 0,
        "learning rate": (config.optim.warmup > 0, config.optim.decay_steps > 0),
    }


def kept(config: Config) -> dict[str, Any]:
    """Every field that shrinking may not touch."""
    out = {}
    for name in cfg.SECTIONS:
        small = MADE_SMALL.get(name, "").split()
        fields = attrs.asdict(getattr(config, name)).items()
        out |= {f"{name}.{key}": value for key, value in fields if key not in small}
    return out


def assert_twin(config: Config) -> None:
    """The shrunk configuration is small, valid and alike."""
    small = shrink(config)
    cfg.check(small)
    assert kept(small) == kept(config) and relations(small) == relations(config)
    world, tp, pp, dp = (
        cfg.mesh(config).world,
        *(getattr(config.parallel, axis) for axis in ("tp", "pp", "dp")),
    )
    assert small.parallel.dp == (dp if world <= LOCAL_RANKS else min(dp, 2))
    assert small.precision.policy == "fp64" and small.train.steps == 3
    model, given = small.model, config.parallel.layers_per_stage
    assert model.hidden <= 18 * max(4, tp) and model.seq_len <= 8 + 2 * tp
    assert model.vocab <= 10 * tp + 32 and model.layers <= pp * max(2, len(set(given)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)) or "own")
@pytest.mark.parametrize("preset", PRESETS)
def test_shrunk_preset_keeps_what_a_layout_can_get_wrong(
    preset: str, layout: dict[str, Any]
) -> None:
    """Every preset in several layouts; one that does not fit is refused before shrinking."""
    config = PRESETS[preset]
    config = attrs.evolve(config, parallel=attrs.evolve(config.parallel, **layout))
    try:
        config = cfg.resolve(config, None)
    except cfg.ConfigError:
        assert layout.get("tp", 1) > 2 or layout.get("pp", 1) > 2
        return
    assert_twin(config)


@st.composite
def configurations(draw: st.DrawFn) -> Config:
    """Resolved configurations of every relation of sizes."""
    tp, pp, dp = draw(st.integers(1, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    heads, sp = tp * draw(st.integers(1, 6)), draw(st.booleans())
    kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % tp == 0 or tp % n == 0)]
    stages = draw(st.lists(st.integers(0, 6), min_size=pp, max_size=pp))
    own = draw(st.booleans()) and sum(stages) > 0
    batch = draw(st.integers(1, 20))
    config = Config(
        model=cfg.ModelConfig(
            layers=sum(stages) if own else pp + draw(st.integers(0, 12)),
            hidden=heads * 8,
            heads=heads,
            kv_heads=draw(st.sampled_from(kv)),
            head_dim=draw(st.sampled_from([0, 6])),
            ffn=draw(st.sampled_from([0, 7 * tp])),
            vocab=draw(st.integers(1, 2000)),
            seq_len=draw(st.integers(8, 100)) * (tp if sp else 1),
            sliding_window=draw(st.sampled_from([0, 5])),
        ),
        parallel=cfg.ParallelConfig(
            tp=tp, pp=pp, dp=dp, sequence_parallel=sp, layers_per_stage=tuple(stages) if own else ()
        ),
        train=cfg.TrainConfig(global_batch=batch * dp, microbatches=draw(st.integers(1, batch))),
    )
    return cfg.resolve(config, None)


@given(configurations())
def test_shrunk_configuration_is_a_twin(config: Config) -> None:
    """Any configuration has a small twin with the same relations."""
    assert_twin(config)


def test_preset_of_64_ranks_runs_in_this_process() -> None:
    """llama3-70b in its own layout, tp 8 and pp 8, equals one device."""
    small = shrink(cfg.resolve(PRESETS["llama3-70b"], None), steps=1)
    assert cfg.mesh(small).world == 64
    assert_equal(verify_in_process(small))


# ---------------------------------------------------------------------------- the command


def run(*words: str) -> Any:
    """`mfun verify WORDS` in this process."""
    return CliRunner().invoke(main, ["verify", *words])


def test_json_has_exactly_its_keys() -> None:
    """One object on stdout; every error is there and within the bound."""
    result = run("tiny", "parallel.dp=2", "--json", "--one-process", "--steps", "1")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {
        *("ok", "layout", "max_rel_error", "replicas_bitwise_equal", "seconds", "notes"),
    }
    assert found["ok"] is True and found["replicas_bitwise_equal"] is True and not found["notes"]
    assert set(found["max_rel_error"]) == {"loss", "grads", "params"}
    assert all(0 <= error <= BOUND for error in found["max_rel_error"].values())
    assert found["seconds"] > 0
    assert {k: found["layout"][k] for k in ("tp", "pp", "dp")} == {"tp": 2, "pp": 2, "dp": 2}


def test_text_gives_the_verdict() -> None:
    """The same for people."""
    result = run("parallel.tp=2", "parallel.pp=1", "--one-process", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "tp 2: equal to one device" in result.stdout
    assert "replicas bitwise equal: yes" in result.stdout


def test_wrong_configuration_is_refused_with_its_numbers() -> None:
    """A layout that does not fit is an error of the command, not a traceback."""
    result = run("tiny", "parallel.tp=3", "--one-process")
    assert result.exit_code == 1 and "model.heads is 4, which parallel.tp = 3" in result.stderr


def test_broken_collective_in_process_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its sum over dp a gradient is named, with the axis, and the exit status is 1."""
    monkeypatch.setattr("mfun.grads.table.DATA_AXES", ("cp",))
    result = run("parallel.dp=2", "parallel.tp=1", "parallel.pp=1", "--json", "--one-process")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["ok"] is False
    assert found["replicas_bitwise_equal"] is False and found["max_rel_error"]["grads"] > 0.01
    assert any("embed.tokens" in n and "sum over dp is missing" in n for n in found["notes"])


def test_layout_that_raises_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stops the run is told, without a traceback."""
    monkeypatch.setattr("mfun.nn.linear.leave", lambda x, axis, sequence_parallel: x)
    result = run("parallel.pp=1", "--one-process", "--steps", "1")
    assert result.exit_code == 1 and "must be equal over axis 'tp'" in result.stderr


def command(folder: Path, *words: str, break_with: str = "") -> subprocess.CompletedProcess[str]:
    """`mfun verify` as its own process, with every rank's mfun broken by some code."""
    (folder / "sitecustomize.py").write_text(break_with)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "mfun", "verify", *words, "--json", "--steps", "1"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_four_processes_equal_one_device(tmp_path: Path) -> None:
    """The default model on its own four ranks."""
    result = command(tmp_path, "tiny")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["ok"] and found["layout"]["tp"] * found["layout"]["pp"] == 4
    assert max(found["max_rel_error"].values()) <= BOUND and found["replicas_bitwise_equal"]


def test_broken_collective_on_processes_exits_1(tmp_path: Path) -> None:
    """A sum over tp that does not communicate: the exit status is 1, the report names the axis."""
    broken = (
        "from mfun.comm import overlap\n"
        "overlap.start_all_reduce = lambda x, axis: overlap.Pending([], lambda: x)\n"
    )
    result = command(tmp_path, "parallel.pp=1", break_with=broken)
    assert result.returncode == 1, result.stderr
    found = json.loads(result.stdout)
    assert not found["ok"] and found["max_rel_error"]["grads"] > BOUND
    assert any("norm" in note and "tp" in note for note in found["notes"])
