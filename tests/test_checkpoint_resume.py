"""A run that was killed goes on to the same bits; in another layout, to rounding."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import Tensor

import mfun
from mfun import checkpoint
from mfun.checkpoint import CheckpointError, Order
from mfun.config import Config, from_toml, load, resolve, to_toml
from mfun.train import loop, metrics, saving
from mfun.train.lifecycle import Request, RunError, configure, open_run
from mfun.train.ranks import Peers, Place

WORKER = str(Path(__file__).with_name("killed_worker.py"))
ROOT = Path(mfun.__file__).parent.parent
SMALL = (
    "model.layers=2 model.hidden=16 model.heads=2 model.seq_len=8 model.dropout=0.1 "
    "parallel.tp=1 parallel.pp=1 train.global_batch=4 train.microbatches=2 train.steps=8 "
    "train.eval_every=0 train.checkpoint_every=2 optim.warmup=2 precision.policy=fp64 "
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A small text to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(120)))
    return path


def settings(text: Path, more: str = "") -> list[str]:
    """Of a small run."""
    return [*SMALL.split(), f"data.path={text}", *more.split()]


def config_of(text: Path, more: str = "") -> Config:
    """The same, resolved."""
    return resolve(load("tiny", settings(text, more)), None)


def alone(folder: Path, config: Config) -> list[loop.Record]:
    """A run on one rank."""
    opened, where = open_run(Request(run_dir=folder, resume=True), config)
    return list(loop.train(loop.job(opened, folder=where)))


def whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a run's newest checkpoint."""
    found = checkpoint.latest(folder)
    assert found is not None
    tensors = checkpoint.read_index(found).tensors
    rows = {name: rows[0] for name, rows in tensors.items()}
    return checkpoint.load(
        found, {n: (row.global_shape, getattr(torch, row.dtype)) for n, row in rows.items()}
    )


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Equal names and bits."""
    assert a.keys() == b.keys() and a
    for name, x in a.items():
        assert torch.equal(x, b[name]), name


def losses(folder: Path) -> list[float]:
    """Of all steps."""
    return [row["loss"] for row in metrics.read(folder)]


def start(command: list[str], folder: Path, **environ: str) -> subprocess.Popen[str]:
    """A program in the background, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environ},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def lines(folder: Path) -> int:
    """Steps that a run has written."""
    file = folder / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def kill_at(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """SIGKILL for all of a run's processes once it has done a step."""
    while process.poll() is None and lines(folder) < step:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()[0]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# one layout: bits


def train_on(rank: int, configuration: str, folder: str, world: int) -> list[float]:
    """On a process of the pool: a run in a folder, from its newest checkpoint."""
    config, peers = from_toml(configuration), Peers(Place(rank=rank, world=world))
    return [r.loss for r in loop.train(loop.job(config, peers, Path(folder)))]


def test_torchrun_restarts_a_killed_job_to_the_same_bits(
    text: Path, tmp_path: Path, pool: Pool
) -> None:
    """A rank dies in step 6, of which a checkpoint is two steps old; nobody does anything."""
    more = "parallel.dp=2 parallel.sharding=optim_grads_params train.async_save=true"
    arguments = ["train", *settings(text, more), "--run-dir", "run", "--resume", "--device", "cpu"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    mark = tmp_path / "killed"
    job = start(
        [*torchrun, "--max-restarts", "1", WORKER, *arguments],
        tmp_path,
        KILL="1:6",
        KILLED=str(mark),
    )
    calm = tmp_path / "calm"
    calm.mkdir()
    pool.run(train_on, to_toml(config_of(text, more)), str(calm), 2, world=2)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 0 and mark.exists(), said
    assert "resumed after step 4" in said or "resumed after step 2" in said, said
    assert losses(tmp_path / "run") == losses(calm)
    same(whole(tmp_path / "run"), whole(calm))


def test_killed_and_started_again(text: Path, tmp_path: Path) -> None:
    """SIGKILL for everything, then --resume: the weights of an undisturbed run."""
    alone(tmp_path / "calm", config_of(text, "train.steps=30 train.checkpoint_every=3"))
    run = tmp_path / "run"
    command = ["-m", "mfun", "train", "--device", "cpu", "--run-dir", str(run)]
    more = "train.steps=30 train.checkpoint_every=3"
    kill_at(start([*command, *settings(text, more)], tmp_path), run, 10)
    again = start([*command, "--resume"], tmp_path)
    said, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "resumed after step" in said, said
    assert losses(run) == losses(tmp_path / "calm")
    same(whole(run), whole(tmp_path / "calm"))


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_make_train_killed_halfway(tmp_path: Path) -> None:
    """The default model on four ranks, by `make train`."""
    make = ["make", "-o", ".venv/.run", f"BIN={Path(sys.executable).parent}", "train"]

    def training(folder: Path, more: str = "") -> subprocess.Popen[str]:
        arguments = [*make, f"ARGS=--run-dir {folder} {more}"]
        return subprocess.Popen(
            arguments, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True
        )

    calm = training(tmp_path / "calm")
    calm.communicate(timeout=900)
    assert calm.returncode == 0
    steps = len(losses(tmp_path / "calm"))
    kill_at(training(tmp_path / "run"), tmp_path / "run", steps // 2 + 10)
    stopped = lines(tmp_path / "run")
    again = training(tmp_path / "run", "--resume")
    said, _ = again.communicate(timeout=900)
    assert again.returncode == 0, said
    print(f"make train killed after step {stopped} of {steps} and resumed")
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    same(whole(tmp_path / "run"), whole(tmp_path / "calm"))


# other layouts: rounding


def go_on(rank: int, texts: list[str], folder: str, steps: list[int]) -> list[list[float]]:
    """On a process of the pool: from each step's checkpoint to the end, in each layout."""
    out = []
    for text in texts:
        config, peers = from_toml(text), Peers(Place(rank=rank, world=2))
        job = loop.job(config, peers)
        for step in steps:
            at = checkpoint.step_folder(Path(folder), step)
            state = saving.load(job.trainer, at, peers)
            out.append([record.loss for record in loop.train(job, state)])
    return out


def test_any_step_in_any_layout_goes_on(text: Path, tmp_path: Path, pool: Pool) -> None:
    """One rank's run of 8 steps, resumed at each on two: the rest of its losses."""
    more = "train.checkpoint_every=1 model.vocab=257"
    want = [record.loss for record in alone(tmp_path / "run", config_of(text, more))]
    others = (
        "parallel.tp=2 parallel.sequence_parallel=true",
        "parallel.pp=2 train.microbatches=4",
        "parallel.dp=2 parallel.sharding=optim_grads_params train.microbatches=1",
    )
    request = Request(run_dir=tmp_path / "run", resume=True)
    texts = []
    for other in others:
        asked = Request(run_dir=request.run_dir, resume=True, overrides=tuple(other.split()))
        texts.append(to_toml(configure(asked, None)))
    steps = [1, 4, 7]
    for found in pool.run(go_on, texts, str(tmp_path / "run"), steps, world=2):
        for rest, step in zip(found, steps * len(others), strict=True):
            assert rest == pytest.approx(want[step:], rel=1e-10)


def test_a_run_may_change_its_layout_but_not_its_loss(text: Path, tmp_path: Path) -> None:
    """Where the loss is a mean over microbatches, their size is part of it."""
    changed = ("train.microbatches=1", "parallel.tp=2")
    for norm in ("tokens", "microbatch"):
        folder = tmp_path / norm
        open_run(Request(run_dir=folder), config_of(text, f"train.loss_norm={norm}"))
        request = Request(run_dir=folder, resume=True, overrides=changed)
        if norm == "tokens":
            assert configure(request, None).parallel.tp == 2
            continue
        with pytest.raises(RunError, match=r"train.microbatches is 2 there and 1 now"):
            configure(request, None)


# beside training


def test_saves_beside_training_are_those_of_their_steps(text: Path, tmp_path: Path) -> None:
    """The same files as saves that training waits for; each record tells what was completed."""
    alone(tmp_path / "a", config_of(text, "train.keep=0"))
    records = alone(tmp_path / "b", config_of(text, "train.keep=0 train.async_save=true"))
    told = [record.saved.name for record in records if record.saved]
    assert told[-1] == "step-00000008" and set(told) >= {"step-00000002", "step-00000004"}
    assert list(checkpoint.saved(tmp_path / "b")) == [2, 4, 6, 8]
    for step in (2, 4, 6, 8):
        for name in ("rank-00000.safetensors",):
            a, b = (checkpoint.step_folder(tmp_path / run, step) / name for run in "ab")
            assert a.read_bytes() == b.read_bytes()


def test_a_failed_save_beside_training_ends_it_at_the_next_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before stays."""
    write = Order.write

    def full(self: Order) -> None:
        if self.step == 4:
            raise OSError(28, "No space left on device", str(self.draft))
        write(self)

    monkeypatch.setattr(Order, "write", full)
    config = config_of(text, "train.async_save=true")
    seen: list[int] = []
    with pytest.raises(CheckpointError, match="No space left") as caught:
        opened, where = open_run(Request(run_dir=tmp_path / "run", resume=True), config)
        for record in loop.train(loop.job(opened, folder=where)):
            seen.append(record.step)
            time.sleep(0.05)
    assert seen == [1, 2, 3, 4] and caught.value.__notes__ == ["at step 5"]
    assert list(checkpoint.saved(tmp_path / "run")) == [2]


def test_a_loop_that_is_left_leaves_no_thread(text: Path, tmp_path: Path) -> None:
    """A save that was under way is not completed, and is cleared away by the next."""
    config = config_of(text, "train.async_save=true")
    training = loop.train(loop.job(config, folder=tmp_path))
    while next(training).step < 2:
        pass
    training.close()
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == [".tmp-step-00000002"]
    assert len(list(loop.train(loop.job(config, folder=tmp_path)))) == 8
    assert list(checkpoint.saved(tmp_path)) == [2, 4, 6, 8]
    shutil.rmtree(tmp_path / "checkpoints")
