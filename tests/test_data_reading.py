"""Who reads a batch and when changes nothing: each rank or one for all of tp, now or ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import Pool

from mfun import data
from mfun.comm import distribute
from mfun.config import Config, load, mesh, resolve
from mfun.data import DataError, Writer
from mfun.train import loop
from mfun.train.feed import Ahead, feed, with_hash
from mfun.train.lifecycle import Request, configure, open_run
from mfun.train.ranks import Peers, Place

SMALL = (
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=8",
    "model.vocab=50",
    "parallel.tp=1",
    "parallel.pp=1",
    "precision.policy=fp64",
    "train.global_batch=4",
    "train.microbatches=2",
    "train.steps=6",
    "train.eval_every=3",
    "train.eval_batches=1",
    "train.checkpoint_every=2",
    "data.reset=positions,attention,loss",
    "data.eod=0",
)


def write(folder: Path) -> str:
    """Two small datasets of documents that end in 0, as `data.path` and weights."""
    random = np.random.RandomState(2)
    for name in "xy":
        with Writer(folder / name, np.dtype("<u2")) as out:
            for length in random.randint(2, 20, 40):
                out.add([*random.randint(1, 50, length), 0])
    return f"data.path={folder}/x,{folder}/y"


def small(*overrides: str) -> Config:
    """A small configuration, its datasets' hash in it."""
    blend = "data.weights=2,1"
    return with_hash(resolve(load("tiny", [*SMALL, blend, *overrides]), None))


def plain(batches: Any) -> Any:
    """Batches as lists."""
    return [{name: x.tolist() for name, x in sorted(batch.items())} for batch in batches]


# ---------------------------------------------------------------------------- each rank or one


def batches_of(rank: int, config: Config, source: str) -> tuple[Any, int]:
    """Three steps and a validation of one rank, and how many rows it read itself."""
    groups = distribute(mesh(config))
    coords = mesh(config).coords(rank)
    here = feed(config, coords, "cpu", groups.tp)
    draws, original = [0], type(here.training).draw

    def counted(self: Any, *args: Any) -> Any:
        draws[0] += 1
        return original(self, *args)

    setattr(type(here.training), "draw", counted)  # noqa: B010
    try:
        got = [plain(here.step(step)) for step in range(3)] + [plain(here.evaluation())]
    finally:
        setattr(type(here.training), "draw", original)  # noqa: B010
    return got, draws[0]


@pytest.mark.parametrize("packed", ["positions,attention,loss", ""])
def test_one_reads_for_all_of_tp(packed: str, pool: Pool, tmp_path: Path) -> None:
    """tp2 dp2: `data.read = first` gives every rank the batches that it reads by itself.

    With two dp ranks, so that a broadcast over other ranks than the tp group's would mix them up.
    """
    path = write(tmp_path)
    layout = (path, "parallel.tp=2", "parallel.dp=2", f"data.reset={packed}")
    found = {
        read: pool.run(batches_of, small(*layout, f"data.read={read}"), path, world=4)
        for read in ("each", "first")
    }
    alone = [feed(small(*layout), {"dp": dp}) for dp in (0, 1)]
    expected = [
        [plain(one.step(step)) for step in range(3)] + [plain(one.evaluation())] for one in alone
    ]
    assert expected[0] != expected[1]
    for rank in range(4):
        dp = mesh(small(*layout)).coords(rank)["dp"]
        assert found["each"][rank] == (expected[dp], 4)
        tp = mesh(small(*layout)).coords(rank)["tp"]
        assert found["first"][rank] == (expected[dp], 4 if tp == 0 else 0)


# ---------------------------------------------------------------------------- ahead


def test_what_is_read_ahead_is_what_is_asked_for() -> None:
    """In any order of steps, each from the function; in turn, one call a step, one step ahead."""
    calls: list[int] = []
    second = threading.Event()

    def read(step: int) -> dict[str, np.ndarray]:
        calls.append(step)
        if step == 1:
            second.set()
        return {"x": np.array([step])}

    ahead = Ahead(read, 4)
    ahead(0)
    assert second.wait(10)  # the next step's, before anybody asks
    assert [int(ahead(step)["x"][0]) for step in (1, 2, 3)] == [1, 2, 3]
    assert sorted(calls) == [0, 1, 2, 3]  # and none after the last
    ahead = Ahead(read, 4)
    assert [int(ahead(step)["x"][0]) for step in (2, 0, 3, 1, 1)] == [2, 0, 3, 1, 1]


def test_reading_ahead_does_not_wait() -> None:
    """The step goes on while the next one's rows are read."""
    go, other = threading.Event(), threading.get_ident()
    threads = []

    def read(step: int) -> dict[str, np.ndarray]:
        threads.append(threading.get_ident())
        assert step == 0 or go.wait(10)
        return {"x": np.array([step])}

    ahead = Ahead(read, 9)
    ahead(0)  # returns although step 1 is held up
    go.set()
    ahead(1)
    assert threads[0] == other != threads[1]


def test_an_error_while_reading_ahead_is_told_at_its_step() -> None:
    """Not at the step before, and not lost."""

    def read(step: int) -> dict[str, np.ndarray]:
        if step == 1:
            raise DataError("cut")
        return {"x": np.array([step])}

    ahead = Ahead(read, 9)
    ahead(0)
    with pytest.raises(DataError, match="cut"):
        ahead(1)
    assert ahead(2)["x"][0] == 2


def test_a_file_that_is_cut_while_a_run_reads_it_ends_the_run(tmp_path: Path) -> None:
    """With the file's name and the step, whose rows were read ahead."""
    config = small(write(tmp_path), "data.val_fraction=0", "train.eval_every=0")
    training = loop.train(loop.job(config))
    next(training)
    for name in "xy":
        with open(tmp_path / f"{name}.bin", "r+b") as file:
            file.truncate(0)
    with pytest.raises(DataError, match=r"\.bin was cut while it was in use") as caught:
        for _ in training:
            pass
    assert any(note.startswith("at step ") for note in caught.value.__notes__)


# ---------------------------------------------------------------------------- runs


def losses(folder: Path, config: Config, steps: int | None = None) -> list[Any]:
    """Train on one rank in a folder, going on with what is there; losses and hashes of weights."""
    opened, where = open_run(Request(run_dir=folder, resume=True), config)
    rows = []
    for record in (training := loop.train(loop.job(opened, folder=where))):
        rows.append((record.step, record.loss, record.grad_norm, record.val_loss))
        if len(rows) == steps:
            training.close()
    return rows


def test_a_run_on_datasets_resumes_to_the_bit(tmp_path: Path) -> None:
    """Stopped after 2 and 4 of 6 steps: the same losses; with more steps the same first ones."""
    config = small(write(tmp_path), "optim.schedule=constant")
    whole = losses(tmp_path / "whole", config)
    parts = losses(tmp_path / "parts", config, 2) + losses(tmp_path / "parts", config, 2)
    assert parts + losses(tmp_path / "parts", config) == whole
    request = Request(run_dir=tmp_path / "parts", resume=True, overrides=("train.steps=8",))
    longer = configure(request, None)
    assert longer.data.samples == 24
    more = losses(tmp_path / "parts", longer)
    assert [row[0] for row in more] == [7, 8]
    straight = [row[:3] for row in losses(tmp_path / "straight", longer)]
    assert straight == [row[:3] for row in whole + more]


def trained(rank: int, config: Config) -> list[tuple[float, float]]:
    """The losses of a run on some ranks."""
    world = mesh(config).world
    peers = Peers(Place(rank=rank, world=world, local_rank=rank, local_world=world))
    return [(r.loss, r.val_loss or 0.0) for r in loop.train(loop.job(config, peers))]


LAYOUTS = (
    ("parallel.tp=2", "data.read=first"),
    ("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.dp=2", "data.read=first"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.sharding=optim_grads"),
    ("parallel.dp=2", "parallel.sharding=optim_grads_params"),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_run_on_datasets_is_the_same_in_every_layout(
    layout: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    """Losses of 3 steps and of the validation as on one device, to 1e-10 in float64."""
    path = write(tmp_path)
    shape = [path, "train.steps=3"]
    expected = [(r.loss, r.val_loss or 0.0) for r in loop.train(loop.job(small(*shape)))]
    config = small(*shape, *layout)
    for got in pool.run(trained, config, world=mesh(config).world):
        assert torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-10, atol=0)


def test_the_default_text_reads_as_before() -> None:
    """Text is still cut into windows in mfun's own order, and its run keeps no `data.samples`."""
    config = with_hash(resolve(load("tiny", ["parallel.tp=1", "parallel.pp=1"]), 1))
    corpus = data.load()
    train, _ = data.split(corpus, config.data.val_fraction, at_least=config.model.seq_len + 1)
    assert config.data.hash == corpus.hash and config.data.samples == 0
    tokens = torch.cat([b["tokens"] for b in feed(config, {"dp": 0}).step(3)])
    order = data.order(np.arange(48, 64), data.windows(train, 128), 0)
    for row, window in zip(tokens.tolist(), order.tolist(), strict=True):
        assert row == train.tokens[window * 128 : window * 128 + 128].tolist()


def test_the_benchmark_of_data_runs() -> None:
    """Small sizes; what it expects of large ones holds of these too."""
    from click.testing import CliRunner

    from research.bench.data import main

    result = CliRunner().invoke(main, ["--documents", "300000", "--cases", "index,blend"])
    assert result.exit_code == 0, result.output
    assert "300,000 documents" in result.output and "300,000 samples" in result.output
