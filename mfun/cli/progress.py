"""What a person sees while a run goes: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mfun import checkpoint
from mfun.cli.text import count, duration, ranks_text
from mfun.train import metrics
from mfun.train.loop import Job, Record, train
from mfun.train.step import State


class Screen(Console):
    """A console whose reader may leave, as in `mfun train | head`: the run goes on unseen."""

    def on_broken_pipe(self) -> None:
        """Say nothing more; rich's own would end the process."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def follow(job: Job, state: State, console: Console) -> None:
    """Run a job to its end and show it; on ranks but the first the console is quiet.

    Args:
        job: of this rank.
        state: where it begins.
        console: where to show it.
    """
    console.print(_heading(job, state))
    if state.step >= job.config.train.steps:
        console.print(
            f"the run has done {state.step} of train.steps = {job.config.train.steps} steps "
            "already; set train.steps higher to go on"
        )
        return
    pace, last = Pace(job.config.train.steps - state.step), None
    with Lines(console, state.step, job.config.train.steps) as lines:
        for record in train(job, state):
            pace.add(record)
            lines.show(record, pace, job.config.train.log_every)
            last = record
    if last is not None:
        _ending(job, last, pace, console)


class Pace:
    """Time taken, and time to come by the median of the newest steps.

    Args:
        steps: to do.
    """

    def __init__(self, steps: int) -> None:
        self.done, self.left, self.spent_s = 0, steps, 0.0
        self._recent: deque[float] = deque(maxlen=21)

    def add(self, record: Record) -> None:
        """Count a step."""
        self.done += 1
        self.left -= 1
        self.spent_s += record.step_ms / 1000
        self._recent.append(record.step_ms)

    @property
    def left_s(self) -> float:
        """Seconds to come."""
        return self.left * median(self._recent) / 1000


class Lines:
    """A line a step: rewritten in a terminal, one below the other elsewhere.

    Args:
        console: where.
        start, steps: updates done, and to be done in all.
    """

    def __init__(self, console: Console, start: int, steps: int) -> None:
        self.console, self.steps = console, steps
        self.live = console.is_terminal and not console.quiet
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console, transient=True, disable=not self.live)
        self.task = self.progress.add_task("starting", total=steps, completed=start)

    def __enter__(self) -> Lines:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, record: Record, pace: Pace, every: int) -> None:
        """One step: the live line, and a lasting one for what is worth keeping."""
        text = step_text(record, self.steps, pace.left_s)
        if self.live:
            self.progress.update(self.task, completed=record.step, description=text)
        elif record.step % every == 0 or record.step == self.steps:
            self.console.print(text)
        for note in notes(record):
            self.console.print(note)


def step_text(record: Record, steps: int, left_s: float) -> str:
    """`step 12/300  loss 3.214  grad_norm 1.20  lr 0.003  21.3 k tokens/s  eta 0:41`."""
    scale = "" if record.loss_scale is None else f"loss_scale {record.loss_scale:g}  "
    return (
        f"step {record.step}/{steps}  loss {record.loss:.4f}  grad_norm {record.grad_norm:.3f}  "
        f"lr {record.lr:.2e}  {scale}{count(record.tokens_per_s)} tokens/s  eta {duration(left_s)}"
    )


def notes(record: Record) -> Iterator[str]:
    """What else happened at a step."""
    if record.skipped:
        yield f"step {record.step}  skipped: gradients overflow at loss scale {record.loss_scale:g}"
    if record.val_loss is not None:
        yield f"step {record.step}  validation loss {record.val_loss:.4f}"
    if record.saved is not None:
        yield f"step {record.step}  saved {record.saved.name}"


def _resumed(job: Job, state: State) -> str:
    """Where a run goes on, and which newer checkpoints it could not."""
    said = f"resumed after step {state.step}"
    damaged = checkpoint.damaged(job.folder) if job.folder else {}
    newer = [path.name for step, path in damaged.items() if step > state.step]
    return f"{said}, since {' and '.join(newer)} is damaged" if newer else said


def _heading(job: Job, state: State) -> str:
    """What runs, where."""
    config = job.config
    parameters = sum(spec.numel for spec in job.plan.specs.values())
    begins = _resumed(job, state) if state.step else f"{config.train.steps} steps"
    return (
        f"GPT of {count(parameters)} parameters, {ranks_text(config)} on {job.peers.device.type}, "
        f"{begins}, in {_short(job.folder)}"
    )


def _ending(job: Job, last: Record, pace: Pace, console: Console) -> None:
    """The last words, and the plot."""
    if last.stopped:
        console.print(
            f"stopped by {last.stopped} after step {last.step}; go on with: "
            f"mfun train --run-dir {_short(job.folder)} --resume"
        )
        return
    now = f", {pace.done} of them now" if pace.done < last.step else ""
    spent = f"{duration(pace.spent_s)} of training"
    console.print(f"{last.step} steps{now}, {spent}, loss {last.loss:.4f}")
    if job.folder is None or console.quiet:
        return
    try:
        console.print(f"loss plot: {_short(metrics.plot(job.folder))}")
    except (metrics.PlotUnavailable, metrics.MetricsError) as error:
        console.print(str(error))
    if checkpoint.latest(job.folder):
        console.print(f"try: mfun sample {_short(job.folder)} --prompt 'def '")


def _short(path: Path | None) -> str:
    """A path as it can be typed here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path and path.is_relative_to(here) else path)
