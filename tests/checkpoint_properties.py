"""Properties of checkpoints, for planted faults."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from mfun import checkpoint
from mfun.checkpoint import Background, CheckpointError, Disk, Order, Piece, source
from tests import test_checkpoint_layouts as layouts
from tests.properties import Broken, Property, named
from tests.test_checkpoint import is_state_of, large_parts, load, save, state, written
from tests.test_checkpoint_stops import killing, on_ranks, rank_order


def in_folder(check: Callable[[Path], None]) -> Property:
    """A property of what is done in an empty folder, with its docstring as name."""

    def checked() -> None:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder))

    checked.__doc__ = check.__doc__
    return named(checked)


def moved(a: str, b: str, model: str = layouts.MODELS[0]) -> Property:
    """A state saved in one layout is, bit by bit, that which another loads, and goes on alike."""

    def check() -> None:
        with tempfile.TemporaryDirectory() as folder:
            layouts.check(a, b, model, Path(folder), 1)

    return Property(f"checkpoint of {a} in {b}", check)


@in_folder
def damage_is_found(folder: Path) -> None:
    """a flipped bit is refused"""
    at = save(folder, 1)
    file = at / "rank-00000.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-3] ^= 16
    file.write_bytes(contents)
    _refused("a flipped bit", lambda: load(at, state(1)))


@in_folder
def extra_tensors_are_told(folder: Path) -> None:
    """a tensor that nobody asks for is refused"""
    at = save(folder, 1)
    some = {n: x for n, x in state(1).items() if n.startswith("params.")}
    _refused("an unexpected tensor", lambda: load(at, some))


def _refused(what: str, call: Callable[[], object]) -> None:
    try:
        call()
    except CheckpointError:
        return
    raise Broken(f"{what} was not refused")


@in_folder
def stopped_saves(folder: Path) -> None:
    """a save of the same step, stopped before any operation, leaves a whole checkpoint"""
    disk, done = killing(-1)
    save(folder / "probe", 1)
    save(folder / "probe", 1, disk=disk, keep=1)
    for at in range(len(done)):
        run = folder / str(at)
        save(run, 1)
        disk, _ = killing(at)
        try:
            save(run, 1, disk=disk, keep=1)
        except BaseException as error:
            if type(error).__name__ != "Killed":
                raise
        newest = checkpoint.latest(run)
        if newest is None or not is_state_of(newest, 1):
            raise Broken(f"stopped before operation {at}, {done[at]}: no whole checkpoint is left")
        save(run, 2)
        if left := sorted(run.glob("checkpoints/.*")):
            raise Broken(f"a stopped save is never cleared away: {left}")


@in_folder
def one_failure_fails_all(folder: Path) -> None:
    """a rank whose disk is full fails the save on every rank, and keeps the one before"""

    def before(operation: str, path: Path) -> None:
        if path.suffix == ".safetensors":
            raise OSError(28, "No space left on device", str(path))

    on_ranks(4, lambda r, agree: checkpoint.save(rank_order(folder, 1, r), agree))
    disks = [Disk(before) if rank == 1 else Disk() for rank in range(4)]
    done = on_ranks(4, lambda r, a: checkpoint.save(rank_order(folder, 2, r, disks[r]), a))
    if not all(isinstance(x, OSError | CheckpointError) for x in done):
        raise Broken(f"not every rank failed: {done}")
    if [*checkpoint.saved(folder)] != [1]:
        raise Broken("the checkpoint before is not what is left")


@in_folder
def large_files(folder: Path) -> None:
    """a large file, written slowly, is its parts"""
    write = os.write

    def slow(handle: int, view: memoryview) -> int:
        time.sleep(0.02)
        return write(handle, view)

    with patch.object(os, "write", slow):
        if not written(folder / "large", large_parts()):
            raise Broken("the file holds something else than was written to it")


@in_folder
def full_disks(folder: Path) -> None:
    """a disk that is full at any block is told"""
    for block in range(5):
        calls: list[int] = []

        def full(handle: int, view: memoryview, block: int = block, calls: Any = calls) -> int:
            calls.append(len(view))
            if len(calls) == block + 1:
                raise OSError(28, "No space left on device")
            return len(view)

        with patch.object(os, "write", full):
            try:
                Disk().write(folder / "large", large_parts())
            except OSError:
                continue
        raise Broken(f"nobody was told that block {block} has no room")


@in_folder
def columns(folder: Path) -> None:
    """columns are read from rows, joined over small gaps or one by one"""
    x = torch.arange(6 * 8 * 10, dtype=torch.int32).view(6, 8, 10)
    at = save(folder, 1, {"w": x})
    for gap in (1, 12, 512):
        for low, high in ((0, 3), (4, 8), (8, 10)):
            piece = Piece(global_shape=(6, 8, 10), start=(2, 1, low), box=(3, 4, high - low))
            with patch.object(source, "GAP", gap):
                found = load(at, {"w": x}, pieces={"w": piece})["w"]
            if not torch.equal(found, x[2:5, 1:5, low:high]):
                raise Broken(f"columns {low} to {high} are others, gaps below {gap} being joined")


@in_folder
def snapshots(folder: Path) -> None:
    """a save beside training has the values it was asked for"""
    gate = threading.Event()
    disk = Disk(lambda operation, path: (operation == "write" and gate.wait(5), None)[1])
    tensors, saves = state(1), Background()
    saves.start(Order(run_dir=folder, step=1, tensors=tensors, disk=disk))
    for x in tensors.values():
        x.fill_(7)
    gate.set()
    while (at := saves.poll()) is None:
        time.sleep(0.001)
    if not is_state_of(at, 1):
        raise Broken("the file has the values of a later step")


@in_folder
def retention(folder: Path) -> None:
    """the newest two are kept"""
    for step in (1, 2, 3, 4):
        save(folder, step, keep=2)
    if [*checkpoint.saved(folder)] != [3, 4]:
        raise Broken(f"kept are {[*checkpoint.saved(folder)]}, not 3 and 4")


@in_folder
def whole_tensors(folder: Path) -> None:
    """pieces that are no whole tensor are refused"""
    half = Piece(global_shape=(4,), start=(0,), box=(4,), count=2)
    at = checkpoint.save(
        Order(run_dir=folder, step=1, tensors={"w": torch.zeros(2)}, pieces={"w": half})
    )
    _refused("half a tensor", lambda: load(at, {"w": torch.zeros(4)}))
