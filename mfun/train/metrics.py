"""A run's `metrics.jsonl`: one JSON object a line, added to as the run goes; and its plot.

A line has step, loss, grad_norm, lr, tokens, tokens_per_s, step_ms. Validation losses have lines of
their own in `validation.jsonl`: step, val_loss. Losses are in nats a token, which is a byte.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

_NON_FINITE = ("nan", "inf", "-inf")  # written as text, because JSON has no such numbers


class MetricsError(ValueError):
    """A metrics file that cannot be read or plotted; the message names the file and the line."""


class PlotUnavailable(RuntimeError):
    """Matplotlib, an optional extra, is not installed; the message is the one-line hint."""


TRAINING, VALIDATION = "metrics.jsonl", "validation.jsonl"


def metrics_file(run_dir: Path, name: str = TRAINING) -> Path:
    """Where a run keeps its metrics."""
    return Path(run_dir) / name


def append(run_dir: Path, row: Mapping[str, Any], name: str = TRAINING) -> None:
    """Add one line, in a single write, so that a kill can tear only the last line.

    Args:
        row: `step` and any of the others: numbers, text, booleans, None; NaN and infinities too.
        name: of the file.

    Raises: MetricsError naming the key of a value that JSON does not have, or the file that takes
        no more.
    """
    line = json.dumps({key: _to_json(key, value) for key, value in row.items()}) + "\n"
    path, written = metrics_file(run_dir, name), 0
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        raise MetricsError(
            f"{path} cannot be written ({error.strerror}): make room or set its permissions, then "
            "resume"
        ) from error
    if written < len(line.encode()):
        raise MetricsError(f"{path} takes no more text: is the disk full?")


def _to_json(key: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise MetricsError(
        f"metrics: {key} is a {type(value).__name__}; give a Python number, text, boolean or None"
    )


def read(run_dir: Path, name: str = TRAINING) -> list[Row]:
    """All lines of a run in order, without a torn last one.

    Raises: MetricsError if the file is missing, or a line before the last is not a JSON object.
    """
    path = metrics_file(run_dir, name)
    if not path.is_file():
        raise MetricsError(f"{path} does not exist: it is written by `mfun train`")
    *lines, last = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_parse(line, path, number) for number, line in enumerate(lines, 1)]
    try:
        return [*rows, _parse(last, path, len(lines) + 1)]
    except MetricsError:  # empty after a finished line; part of a line after a kill
        return rows


def _parse(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
        return {k: float(v) if v in _NON_FINITE else v for k, v in row.items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise MetricsError(f"{path} line {number} is not a JSON object: delete the line") from error


def truncate(run_dir: Path, step: int) -> None:
    """Drop the lines of steps after `step`, and a torn last one, before a run is resumed there.

    A file is replaced whole: stopped at any moment it is the old or the new one.
    """
    for name in (TRAINING, VALIDATION):
        if metrics_file(run_dir, name).exists():
            _truncate(run_dir, step, name)


def _truncate(run_dir: Path, step: int, name: str) -> None:
    path = metrics_file(run_dir, name)
    kept = [row for row in read(run_dir, name) if row.get("step", 0) <= step]
    draft = path.with_name(f".tmp-{path.name}")
    draft.unlink(missing_ok=True)
    with draft.open("w", encoding="utf-8") as file:
        for row in kept:
            file.write(json.dumps({k: _to_json(k, v) for k, v in row.items()}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def plot(run_dir: Path) -> Path:
    """Draw training and validation loss against step into `loss.png` of the run folder.

    Training loss is drawn thin, and from 100 steps on with its mean over a fiftieth of them (at
    least 10 steps, ending at the point) on top.

    Returns: the picture's path.

    Raises: PlotUnavailable without matplotlib; MetricsError if no finite loss was written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotUnavailable(
            'no loss plot: it needs matplotlib, pip install "mfun[plot]"'
        ) from error
    rows = read(run_dir)
    rows += read(run_dir, VALIDATION) if metrics_file(run_dir, VALIDATION).exists() else []
    training, validation = _curve(rows, "loss"), _curve(rows, "val_loss")
    if not training and not validation:
        raise MetricsError(f"{metrics_file(run_dir)} has no finite loss to plot")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    _draw_training(axes, training)
    if validation:
        label = f"validation, last {validation[-1][1]:.3f}"
        axes.plot(*zip(*validation, strict=True), "o-", color="tab:orange", ms=4, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=Path(run_dir).resolve().name)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(run_dir) / "loss.png"
    draft = path.with_name(f".tmp-{path.name}")
    figure.savefig(draft, format="png")
    return draft.replace(path)


def _curve(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    """(step, value) of every row that has a finite value of that name."""
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [(step, value) for step, value in pairs if math.isfinite(value)]


def _draw_training(axes: Any, curve: list[tuple[int, float]]) -> None:
    if not curve:
        return
    steps, losses = zip(*curve, strict=True)
    if len(curve) < 100:
        axes.plot(steps, losses, color="tab:blue", label=f"training, last {losses[-1]:.3f}")
        return
    width = max(10, len(curve) // 50)
    means = running_mean(losses, width)
    axes.plot(steps, losses, color="tab:blue", alpha=0.35, lw=0.8)
    label = f"training (mean of {width} steps), last {means[-1]:.3f}"
    axes.plot(steps, means, color="tab:blue", lw=1.8, label=label)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to width - 1 before it.

    Example:
        >>> running_mean([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    ranges = (values[max(0, i + 1 - width) : i + 1] for i in range(len(values)))
    return [sum(part) / len(part) for part in ranges]
