"""The training loop: a generator that yields a `Record` a step.

It composes what other files define: batches from the feed, the step, validation, checkpoints, the
metrics file. Its state is the `State` alone, so a run that is resumed computes the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import attrs

from mfun import checkpoint
from mfun.checkpoint import Background, CheckpointError
from mfun.comm import finish
from mfun.comm.process import ProcessWorld, distribute
from mfun.config import Config, PrecisionConfig
from mfun.grads import needed_groups
from mfun.train import metrics, saving, starting
from mfun.train.feed import Feed, feed
from mfun.train.lifecycle import RunError
from mfun.train.plan import Plan, plan
from mfun.train.ranks import Peers, Place
from mfun.train.replicas import check_replicas
from mfun.train.step import Metrics, State, Trainer
from mfun.train.stop import Stop


class Record(NamedTuple):
    """What a step did, the same on every rank but for its time.

    Args:
        step: updates done, from 1.
        loss: of this step's batch before the update, nats a token.
        grad_norm: before clipping.
        lr: learning rate of the update.
        tokens: that counted in the loss.
        tokens_per_s, step_ms: by this rank's clock, without validation and checkpoint.
        val_loss: validation loss after the update, where it was taken.
        saved: the checkpoint that was completed after the update, if any; with `train.async_save`
            it is of the step it was asked for.
        stopped: name of the signal after which this is the last step.
        state: after the update; its tensors are overwritten by the next step.
        loss_scale: of this step, None where the loss is not scaled.
        skipped: whether a gradient overflowed and so nothing was updated.
        num_zeros: elements of the gradient that are exactly 0, None where they are not counted.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    step_ms: float
    val_loss: float | None
    saved: Path | None
    stopped: str | None
    state: State
    loss_scale: float | None = None
    skipped: bool = False
    num_zeros: int | None = None

    def row(self) -> dict[str, Any]:
        """The line of `metrics.jsonl`."""
        keys = ROW if self.loss_scale is None else (*ROW, *SCALED)
        keys += () if self.num_zeros is None else ("num_zeros",)
        return {key: getattr(self, key) for key in keys}


ROW = ("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_ms")
SCALED = ("loss_scale", "skipped")


@attrs.frozen(eq=False)
class Job:
    """A run on one rank.

    Args:
        trainer: the step.
        feed: its batches.
        peers: the other ranks.
        folder: of the run; None writes nothing.
        stop: tells whether the run should end early.
        saves: its checkpoints that are written beside training.
    """

    trainer: Trainer
    feed: Feed
    peers: Peers
    folder: Path | None = None
    stop: Stop = attrs.field(factory=Stop)
    saves: Background = attrs.field(factory=Background)

    @property
    def plan(self) -> Plan:
        """The layout."""
        return self.trainer.plan

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self.trainer.plan.config


def job(
    config: Config,
    peers: Peers | None = None,
    folder: Path | None = None,
    stop: Stop | None = None,
) -> Job:
    """Everything a rank needs to train; the process group must stand (`ranks.joined`).

    Args:
        config: resolved.
        peers: of this rank; None for one rank alone.
        folder: of the run; None writes nothing.
        stop: listens for signals; None for a run that is not to be stopped.

    Raises: DataError if the data is not what the configuration says.
    """
    peers = peers or Peers(Place())
    layout = plan(config)
    extra = needed_groups(layout.table, layout.mesh)
    groups = distribute(layout.mesh, extra, timeout_s=config.train.timeout_s)
    world = ProcessWorld(groups, peers.device)
    return Job(
        Trainer(layout, world),
        feed(config, world.coords, peers.device, groups.tp, ahead=True),
        peers,
        folder,
        stop or Stop(),
        Background(peers.any),
    )


def begin(job: Job) -> State:
    """The newest checkpoint of the run's folder, or initial weights; replicas agree to the bit.

    Raises:
        CheckpointError: the checkpoint, or the one to start from, is of another model or damaged.
        ReplicaError: naming tensors and ranks.
    """
    found = _newest(job.folder) if job.folder and job.peers.first else None
    name = job.peers.share(found.name if found else "")
    if name and job.folder:
        state = saving.load(job.trainer, job.folder / "checkpoints" / name, job.peers)
    elif job.config.train.init_from:
        state = starting.start(job.trainer, job.peers)
    else:
        state = job.trainer.init()
    world = job.trainer.world
    assert isinstance(world, ProcessWorld)
    finish(check_replicas(world, job.plan.table, state))
    if job.folder and job.peers.first:
        metrics.truncate(job.folder, state.step)
    return state


def _newest(folder: Path) -> Path | None:
    """The newest whole checkpoint; None only if none was ever finished."""
    found = checkpoint.latest(folder)
    damaged = [] if found else sorted(folder.glob("checkpoints/step-*"))
    if damaged:
        raise CheckpointError(
            f"{damaged[-1]} is damaged, and no checkpoint of the run is whole; restore it, or "
            f"delete {damaged[-1].parent} to start again from step 0"
        )
    return found


def train(job: Job, state: State | None = None) -> Generator[Record, None, State]:
    """Train to `train.steps`, or until asked to stop.

    Args:
        job: of this rank; every rank runs the loop.
        state: where to go on; None begins as `begin` does.

    Yields: a `Record` after each step, its metrics written and its checkpoint on the disk.

    Returns: the last state.

    Raises: whatever fails, with a note `at step N` on it.

    Example:
        >>> from mfun.config import load, resolve
        >>> small = ["model.layers=1", "model.hidden=16", "model.seq_len=8", "parallel.tp=1",
        ...          "parallel.pp=1", "train.steps=3"]
        >>> [record.step for record in train(job(resolve(load("tiny", small), 1)))]
        [1, 2, 3]
    """
    state = begin(job) if state is None else state
    job.stop.pace(0.0)
    try:
        while state.step < job.config.train.steps:
            with _noted(state.step + 1):
                state, record = _advance(job, state)
            yield record
            if record.stopped:
                break
        finish(job.trainer.params.settle())
    finally:
        job.saves.close()
    return state


@contextmanager
def _noted(step: int) -> Iterator[None]:
    """Tell an error when it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(f"at step {step}")
        raise


def _advance(job: Job, state: State) -> tuple[State, Record]:
    """One step and what is due after it."""
    started = time.perf_counter()
    state, done = finish(job.trainer.step(state, job.feed.step(state.step)))
    seconds = time.perf_counter() - started
    job.stop.pace(seconds)
    record = _record(state, done, seconds, _stopped(job))
    _write(job, record)
    _refuse_non_finite(record, job.config.precision)
    record = record._replace(val_loss=_evaluate(job, record), saved=_save(job, record))
    job.stop.pace(seconds)
    return state, record


def _refuse_non_finite(record: Record, precision: PrecisionConfig) -> None:
    """After such a step every weight is lost; a checkpoint of it would push out a good one.

    A skipped step has lost nothing, and the next one has a lower loss scale, if there is one.
    """
    if record.skipped and precision.scaling == "dynamic" and record.loss_scale is not None:
        if record.loss_scale <= precision.min_scale:
            raise RunError(
                f"gradients overflow at the lowest loss scale, precision.min_scale = "
                f"{precision.min_scale:g}, so training ends; lower it or optim.lr, or use "
                "precision.policy=bf16"
            )
    elif not record.skipped and not (
        math.isfinite(record.loss) and math.isfinite(record.grad_norm)
    ):
        raise RunError(
            f"loss is {record.loss} and grad_norm {record.grad_norm}, so training ends and nothing "
            "of this step is saved; start a new run with a lower optim.lr, a longer optim.warmup "
            "or a smaller optim.clip"
        )


def _stopped(job: Job) -> str | None:
    """The signal to end at this step, agreed on by all ranks: it may not have reached each."""
    heard = job.stop.requested
    if not job.peers.any(heard is not None):
        return None
    job.stop.settle()
    return heard or "a signal to another rank"


def _record(state: State, done: Metrics, seconds: float, stopped: str | None) -> Record:
    return Record(
        step=state.step,
        loss=done.loss,
        grad_norm=done.grad_norm,
        lr=done.lr,
        tokens=done.tokens,
        tokens_per_s=done.tokens / seconds,
        step_ms=1000 * seconds,
        val_loss=None,
        saved=None,
        stopped=stopped,
        state=state,
        loss_scale=done.loss_scale,
        skipped=done.skipped,
        num_zeros=done.num_zeros,
    )


def _write(job: Job, record: Record) -> None:
    if job.folder and job.peers.first:
        metrics.append(job.folder, record.row())


def _due(every: int, record: Record, steps: int) -> bool:
    """Whether something that is done every so many steps is due; the last step is one of them."""
    return record.step == steps or (every > 0 and record.step % every == 0)


def _evaluate(job: Job, record: Record) -> float | None:
    """The validation loss, if it is due and there is data for one."""
    train = job.config.train
    if not train.eval_every or record.stopped or not job.feed.evaluates:
        return None
    if not _due(train.eval_every, record, train.steps):
        return None
    job.stop.pace(train.eval_batches * record.step_ms / 1000)
    loss = finish(job.trainer.evaluate(record.state, job.feed.evaluation()))
    if job.folder and job.peers.first:
        row = {"step": record.step, "val_loss": loss}
        metrics.append(job.folder, row, metrics.VALIDATION)
    return loss


def _save(job: Job, record: Record) -> Path | None:
    """The checkpoint, if one is due: at intervals, at the end, and before an early end.

    One that is written beside training is looked after at every step, and waited for by the next.
    """
    train = job.config.train
    if job.folder is None:
        return None
    last = bool(record.stopped) or record.step == train.steps
    if not last and not _due(train.checkpoint_every, record, train.steps):
        return job.saves.poll()
    job.stop.saving()
    before, what = job.saves.finish(), (job.trainer, record.state, job.folder, job.peers)
    if last or not train.async_save:
        return saving.save(*what)
    job.saves.start(saving.order(*what))
    return before
