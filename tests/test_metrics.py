"""metrics.jsonl: what is written is read, resume drops torn and later lines, the plot shows it."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfun.train import metrics
from mfun.train.metrics import MetricsError, PlotUnavailable

ROW = {
    "step": 1,
    "loss": 5.5,
    "grad_norm": 1.25,
    "lr": 1e-3,
    "tokens": 2048,
    "tokens_per_s": 51200.5,
    "step_ms": 40.0,
}


def fill(run_dir, steps):
    """A line for each of some steps."""
    for step in steps:
        metrics.append(run_dir, ROW | {"step": step, "loss": 6 / step})


def test_lines_are_plain_json_with_the_promised_keys(tmp_path):
    """Scripts read the file line by line with any JSON reader."""
    metrics.append(tmp_path, ROW)
    metrics.append(tmp_path, {"step": 1, "val_loss": 5.25})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [ROW, {"step": 1, "val_loss": 5.25}]
    assert metrics.read(tmp_path) == [ROW, {"step": 1, "val_loss": 5.25}]


def test_a_file_that_takes_no_more_is_named(tmp_path):
    """A full disk, and a folder that is gone."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(MetricsError, match=r"metrics\.jsonl cannot be written \(No space left"):
        metrics.append(tmp_path, ROW)
    with pytest.raises(MetricsError, match=r"gone/metrics\.jsonl cannot be written"):
        metrics.append(tmp_path / "gone", ROW)


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(rows=st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), max_size=4))
def test_read_inverts_append_and_the_file_is_strict_json(tmp_path_factory, rows):
    """Every float comes back bit for bit, NaN and infinities too, in a file without bare NaN."""
    run_dir = tmp_path_factory.mktemp("run")
    for row in rows:
        metrics.append(run_dir, row)
    if not rows:
        return

    def refuse(name):
        raise AssertionError(f"bare {name} in the file")

    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    back = metrics.read(run_dir)
    assert [list(row) for row in back] == [list(row) for row in rows]
    for a, b in zip(rows, back, strict=True):
        for key, value in a.items():
            if value in ("nan", "inf", "-inf") or (isinstance(value, float) and math.isnan(value)):
                assert str(b[key]) == str(value)
            else:
                assert b[key] == value and type(b[key]) is type(value)


@pytest.mark.parametrize("value", [np.float32(1), [1], np.arange(3), {"a": 1}])
def test_value_json_does_not_have_is_refused_by_key(tmp_path, value):
    """A stray tensor or array is named, and nothing is written."""
    with pytest.raises(MetricsError, match="metrics: grad_norm is a"):
        metrics.append(tmp_path, {"step": 1, "grad_norm": value})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_every_cut_of_the_last_line_is_tolerated_and_mended(tmp_path):
    """Cut after each byte of the last line: the others are read, and a resumed file is whole."""
    fill(tmp_path, [1, 2, 3])
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for end in range(start, len(whole) + 1):
        path.write_bytes(whole[:end])
        expected = [1, 2, 3] if end >= len(whole) - 1 else [1, 2]
        assert [row["step"] for row in metrics.read(tmp_path)] == expected
        metrics.truncate(tmp_path, 3)
        fill(tmp_path, [4])
        assert [row["step"] for row in metrics.read(tmp_path)] == [*expected, 4]


def test_broken_line_in_the_middle_is_refused_by_number(tmp_path):
    """Only the last line can be torn; anything else is damage, and is named."""
    fill(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 2', '["step": 2'))
    with pytest.raises(MetricsError, match=r"metrics\.jsonl line 2 is not a JSON object"):
        metrics.read(tmp_path)


@given(steps=st.lists(st.integers(1, 9), max_size=9), step=st.integers(0, 10))
def test_truncate_keeps_steps_up_to_the_resumed_one(tmp_path_factory, steps, step):
    """Bytes of the kept lines do not change, validation lines go by their step too."""
    run_dir = tmp_path_factory.mktemp("run")
    for s in steps:
        metrics.append(run_dir, {"step": s, "val_loss": 0.1 * s})
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if steps else []
    metrics.truncate(run_dir, step)
    if steps:
        kept = [line for s, line in zip(steps, lines, strict=True) if s <= step]
        assert path.read_text().splitlines() == kept
    assert [p.name for p in run_dir.iterdir()] == (["metrics.jsonl"] if steps else [])


def test_truncate_stopped_midway_leaves_the_old_file(tmp_path, monkeypatch):
    """A kill before the replacement loses nothing, and the next call works."""
    fill(tmp_path, [1, 2, 3])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(metrics.os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            metrics.truncate(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    metrics.truncate(tmp_path, 1)
    assert [row["step"] for row in metrics.read(tmp_path)] == [1]


def test_missing_file_is_refused_by_name(tmp_path):
    """Reading a folder that is no run says so."""
    with pytest.raises(MetricsError, match=r"metrics\.jsonl does not exist"):
        metrics.read(tmp_path)


def synthetic(run_dir, steps):
    """Losses that fall from 5.5 to 2 with noise, a validation every 50 steps."""
    noise = np.random.default_rng(0).normal(0, 0.08, steps + 1)
    for step in range(1, steps + 1):
        loss = 2 + 3.5 * math.exp(-step / 60)
        metrics.append(run_dir, ROW | {"step": step, "loss": loss + noise[step]})
        if step % 50 == 0:
            metrics.append(run_dir, {"step": step, "val_loss": loss + 0.1})


@pytest.mark.parametrize("steps", [3, 400])
def test_plot_draws_both_curves(tmp_path, monkeypatch, steps):
    """The lines handed to matplotlib are the file's numbers; the picture is a PNG of some size."""
    from matplotlib.figure import Figure

    synthetic(tmp_path, steps)
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda f, *a, **k: (figures.append(f), save(f, *a, **k)))
    path = metrics.plot(tmp_path)
    assert path == tmp_path / "loss.png" and path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = metrics.read(tmp_path)
    axes = figures[0].axes[0]
    drawn = [(line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.get_lines()]
    training = [(r["step"], r["loss"]) for r in rows if "loss" in r]
    assert drawn[0] == tuple(map(list, zip(*training, strict=True)))
    if steps >= 50:
        validation = [(r["step"], r["val_loss"]) for r in rows if "val_loss" in r]
        assert drawn[-1] == tuple(map(list, zip(*validation, strict=True)))
        mean = [np.mean(drawn[0][1][max(0, i - 9) : i + 1]) for i in range(steps)]
        np.testing.assert_allclose(drawn[1][1], mean, rtol=1e-12)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss (nats per byte)")
    assert len(axes.get_legend().get_texts()) == (2 if steps >= 50 else 1)


def test_plot_leaves_out_losses_that_are_not_finite(tmp_path):
    """A run that diverged can still be drawn; one without any loss says so."""
    metrics.append(tmp_path, {"step": 1, "loss": math.nan})
    with pytest.raises(MetricsError, match="no finite loss"):
        metrics.plot(tmp_path)
    metrics.append(tmp_path, {"step": 2, "loss": 3.0, "val_loss": None})
    assert metrics.plot(tmp_path).is_file()


def test_without_matplotlib_the_hint_is_one_line(tmp_path, monkeypatch):
    """The extra to install is named."""
    fill(tmp_path, [1])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotUnavailable, match=r'pip install "mfun\[plot\]"$') as caught:
        metrics.plot(tmp_path)
    assert "\n" not in str(caught.value)
