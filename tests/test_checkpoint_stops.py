"""A save stopped at any point leaves a whole checkpoint; one that fails, fails on every rank."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mfun import checkpoint
from mfun.checkpoint import Background, CheckpointError, Disk, Order, Piece
from mfun.checkpoint.writer import together
from tests.test_checkpoint import is_state_of, load, same_bits, save, state


class Killed(BaseException):
    """What a kill is to a process: nothing after it runs, no handler either."""


def killing(at: int) -> tuple[Disk, list[str]]:
    """A disk that dies before its operation number `at`, and the operations it did."""
    done: list[str] = []

    def before(operation, path):
        if len(done) == at:
            raise Killed
        done.append(operation)

    return Disk(before), done


def operations(run_dir: Path, step: int, keep: int) -> int:
    """How many operations a save there takes."""
    disk, done = killing(-1)
    save(run_dir, step, disk=disk, keep=keep)
    return len(done)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("steps", [(1, 2, 3), (1, 2, 2)])
def test_stopped_before_any_operation_a_whole_checkpoint_is_left(tmp_path, steps, torn):
    """Stop a save (a new step, and one that replaces) before each operation it makes.

    Before the stop steps 1 and 2 are whole. After it `latest` is the old or the new state, loads
    bitwise, and the next save works and leaves nothing of the broken one. `torn`: what was
    written and not yet synced is cut in half, as a power cut may do.
    """
    *before, last = steps
    probe = tmp_path / "probe"
    for step in before:
        save(probe, step)
    total = operations(probe, last, keep=2)
    assert total > 10
    for at in range(total):
        run_dir = tmp_path / f"{at}"
        for step in before:
            save(run_dir, step)
        disk, done = killing(at)
        with pytest.raises(Killed):
            save(run_dir, last, disk=disk, keep=2)
        if torn and done and done[-1] == "write":
            for path in run_dir.glob("checkpoints/.tmp-*/*"):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        newest = checkpoint.latest(run_dir)
        assert newest is not None
        step = checkpoint.read_index(newest).step
        assert step in (before[-1], last) and is_state_of(newest, step)
        save(run_dir, 4, keep=2)
        names = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
        assert len(names) == 3 and names[::2] == ["latest", "step-00000004"], names
        assert (run_dir / "checkpoints/latest").read_text() == "step-00000004\n"
        assert is_state_of(run_dir / "checkpoints" / names[1], int(names[1][-8:]))


def test_saving_a_step_again_replaces_it(tmp_path):
    """A run resumed from an earlier step overwrites what the first one left."""
    save(tmp_path, 5, {"params.w": torch.zeros(2)})
    folder = save(tmp_path, 5, {"params.w": torch.ones(2)})
    assert load(folder, {"params.w": torch.ones(2)})["params.w"].tolist() == [1, 1]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["latest", "step-00000005"]


@settings(max_examples=15)
@given(keep=st.integers(0, 4), steps=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_retention_keeps_the_newest_and_the_one_just_saved(tmp_path_factory, keep, steps):
    """Against a list: after each save the greatest `keep` steps stay, and the new one."""
    run_dir = tmp_path_factory.mktemp("run")
    there: list[int] = []
    for step in steps:
        save(run_dir, step, {"params.w": torch.zeros(1)}, keep=keep)
        there = sorted({*there, step})
        if keep:
            there = [s for s in there if s in there[-keep:] or s == step]
        assert list(checkpoint.saved(run_dir)) == there
    newest = checkpoint.latest(run_dir)
    assert newest is not None and newest.name == f"step-{max(there):08d}"


def test_latest_of_no_run_is_none(tmp_path):
    """Neither a missing folder nor foreign files in it are an error."""
    assert checkpoint.latest(tmp_path / "nowhere") is None
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes.txt").write_text("x")
    assert checkpoint.latest(tmp_path) is None
    assert [*checkpoint.damaged(tmp_path)] == [7]
    assert save(tmp_path, 7) == checkpoint.latest(tmp_path) and not checkpoint.damaged(tmp_path)


# ---------------------------------------------------------------------------- many ranks


def on_ranks(world: int, work: Callable[[int, Any], object]) -> list:
    """Run `work(rank, agree)` on threads; results, or the exceptions."""
    barrier = threading.Barrier(world, timeout=20)
    said = [False] * world
    out: list = [None] * world

    def one(rank):
        def agree(flag):
            said[rank] = flag
            barrier.wait()
            answer = any(said)
            barrier.wait()
            return answer

        try:
            out[rank] = work(rank, agree)
        except BaseException as error:
            out[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return out


def whole_w() -> torch.Tensor:
    return torch.arange(4.0).view(2, 2)


def rank_order(run_dir: Path, step: int, rank: int, disk: Disk | None = None) -> Order:
    """Of four ranks, 0 and 1 own a column of `w` each, 2 a tensor of its own, 3 nothing."""
    column = Piece(global_shape=(2, 2), start=(0, rank), box=(2, 1)) if rank < 2 else None
    own = {0: {"w": whole_w()[:, :1]}, 1: {"w": whole_w()[:, 1:]}, 2: {"x": torch.tensor(step)}}
    return Order(
        run_dir=run_dir,
        step=step,
        tensors=own.get(rank, {}),
        pieces={"w": column} if column else {},
        scalars={"count": rank},
        rank=rank,
        world=4,
        disk=disk or Disk(),
    )


def is_whole_of(folder: Path, step: int) -> bool:
    """Whether a checkpoint of the four ranks is that of a step."""
    found = load(folder, {"w": whole_w(), "x": torch.tensor(0)})
    return torch.equal(found["w"], whole_w()) and int(found["x"]) == step


def test_ranks_write_what_they_own(tmp_path):
    """A rank that owns nothing has no file; the pieces are one tensor; rank 0's numbers stay."""
    folders = on_ranks(4, lambda r, agree: checkpoint.save(rank_order(tmp_path, 1, r), agree))
    folder = checkpoint.latest(tmp_path)
    assert folder is not None and folders == [folder] * 4
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert files == [f"rank-0000{i}.safetensors" for i in (0, 1, 2)]
    assert set(load_file(folder / files[2])) == {"x"}
    assert torch.equal(load_file(folder / files[1])["w"], whole_w()[:, 1:])
    assert is_whole_of(folder, 1) and checkpoint.read_index(folder).scalars == {"count": 0}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("failing", range(4))
def test_one_rank_that_fails_fails_all_and_hangs_none(tmp_path, failing, beside):
    """bugs.md 89: a full disk on one rank, before each of its operations; the last save stays."""

    def saving(run_dir: Path, step: int, disks: list[Disk]) -> list:
        def work(rank, agree):
            order = rank_order(run_dir, step, rank, disks[rank])
            if not beside:
                return checkpoint.save(order, agree)
            saves = Background(agree)
            saves.start(order)
            return saves.finish()

        return on_ranks(4, work)

    saving(tmp_path, 1, [Disk()] * 4)
    saving(tmp_path / "probe", 1, [Disk()] * 4)
    counted: list[str] = []
    counting = Disk(lambda operation, path: counted.append(operation))
    saving(tmp_path / "probe", 2, [counting if r == failing else Disk() for r in range(4)])
    for at in range(len(counted)):
        seen: list[str] = []

        def before(operation, path, at=at, seen=seen):
            seen.append(operation)
            if len(seen) == at + 1:
                raise OSError(28, "No space left on device", str(path))

        results = saving(tmp_path, 2, [Disk(before) if r == failing else Disk() for r in range(4)])
        assert all(isinstance(r, CheckpointError) for r in results), (counted[at], results)
        assert "No space left on device; make room" in str(results[failing])
        others = [str(r) for i, r in enumerate(results) if i != failing]
        assert all("another rank failed" in text for text in others)
        newest = checkpoint.latest(tmp_path)
        assert newest is not None
        assert is_whole_of(newest, checkpoint.read_index(newest).step)
        assert not [*tmp_path.glob("checkpoints/.tmp-step*")], "the room is given back"
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002", ignore_errors=True)
    assert len(counted) >= (2 if failing == 3 else 4)


def test_rank_0_names_the_ranks_whose_part_is_not_there(tmp_path):
    """As with a node that does not see the folder."""

    def work(rank, agree):
        order = rank_order(tmp_path, 1, rank)
        phases = [order.prepare, (lambda: None) if rank > 1 else order.write, order.commit]
        together(order, phases, agree)

    results = on_ranks(4, work)
    assert "rank(s) 2, 3 did not write their part" in str(results[0])
    assert "another rank failed" in str(results[1])
    assert checkpoint.latest(tmp_path) is None


# ---------------------------------------------------------------------------- beside training


def order_of(
    run_dir: Path,
    step: int,
    tensors: dict[str, torch.Tensor] | None = None,
    disk: Disk | None = None,
) -> Order:
    """What one rank is to save, and one checkpoint to be kept."""
    tensors = state(step) if tensors is None else tensors
    return Order(run_dir=run_dir, step=step, tensors=tensors, keep=1, disk=disk or Disk())


def test_a_save_beside_training_has_the_values_it_was_asked_for(tmp_path):
    """bugs.md 88 and 90: overwritten at once, and steps go on, but the file is of then."""
    gate = threading.Event()
    slow = Disk(lambda operation, path: (operation == "write" and gate.wait(20), None)[1])
    saves, tensors = Background(), state(10)
    saves.start(order_of(tmp_path, 10, tensors, slow))
    for x in tensors.values():
        x.fill_(7)
    assert saves.busy and saves.poll() is None and checkpoint.latest(tmp_path) is None
    gate.set()
    while (folder := saves.poll()) is None:
        time.sleep(0.001)
    assert not saves.busy and saves.poll() is None and saves.finish() is None
    assert folder == checkpoint.latest(tmp_path) and is_state_of(folder, 10)


def test_one_save_at_a_time(tmp_path):
    """Back-pressure: the next one waits for the one before, so that copies do not pile up."""
    saves = Background()
    for step in range(1, 6):
        done = saves.finish()
        assert done is None if step == 1 else is_state_of(done, step - 1)
        saves.start(order_of(tmp_path, step))
        assert sum(t.name.startswith("mfun-save") for t in threading.enumerate()) <= 1
    with pytest.raises(AssertionError, match="finish the save before first"):
        saves.start(order_of(tmp_path, 9))
    assert is_state_of(saves.finish(), 5)


def test_a_failed_save_is_told_at_the_next_poll(tmp_path):
    """And the one after it works."""

    def before(operation, path):
        if path.suffix == ".safetensors":
            raise OSError(28, "No space left on device", str(path))

    saves = Background()
    saves.start(order_of(tmp_path, 1, disk=Disk(before)))
    with pytest.raises(CheckpointError, match=r"step-00000001 was not saved: .*No space left"):
        while saves.poll() is None:
            time.sleep(0.001)
    assert not saves.busy and checkpoint.latest(tmp_path) is None
    saves.start(order_of(tmp_path, 2))
    assert is_state_of(saves.finish(), 2)


# ---------------------------------------------------------------------------- SIGKILL


def doomed(run_dir: str, at: int, step: int, beside: bool, half: bool, told: Any) -> None:
    """In a process: save, and be killed before operation `at`; tells how many there were.

    Args:
        half: half of what is to be written gets there before.
    """
    count = [0]

    def before(operation: str, path: Path) -> None:
        if count[0] == at:
            if half and operation == "write":
                path.write_bytes(path.read_bytes() + b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1

    order = order_of(Path(run_dir), step, many(step), Disk(before, 1 << 20))
    if beside:
        saves = Background()
        saves.start(order)
        saves.finish()
    else:
        checkpoint.save(order)
    told.send(count[0])


def many(step: int) -> dict[str, torch.Tensor]:
    """A state that takes several writes: 3 MiB and a bit."""
    g = torch.Generator().manual_seed(step)
    large = torch.randint(0, 255, (3, 1 << 20), generator=g, dtype=torch.uint8)
    return state(step) | {"params.large": large}


def survives(run_dir: Path, before: int, after: int) -> bool:
    """Whether the newest checkpoint is whole and that of one of two steps, bit by bit."""
    newest = checkpoint.latest(run_dir)
    if newest is None:
        return False
    step = checkpoint.read_index(newest).step
    found = load(newest, many(step))
    return step in (before, after) and all(same_bits(found[n], x) for n, x in many(step).items())


def kills(folder: Path, every: int, beside: bool, half: bool) -> tuple[int, int]:
    """Kill saves with SIGKILL before each `every`-th operation: how many, and how many survived.

    One checkpoint is kept. What a killed save leaves is what the next one finds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "mfun.checkpoint", "tests.test_checkpoint_stops"])
    ours, theirs = context.Pipe(duplex=False)
    checkpoint.save(order_of(folder, 1, many(1)))

    def run(at: int, step: int) -> int | None:
        arguments = (str(folder), at, step, beside, half, theirs)
        process = context.Process(target=doomed, args=arguments)
        process.start()
        process.join()
        return process.exitcode

    assert run(-1, 2) == 0
    total, survived, tried, step = ours.recv(), 0, 0, 2
    assert total >= 15
    for at in range(0, total, every):
        newest = checkpoint.latest(folder)
        assert newest is not None
        step = checkpoint.read_index(newest).step
        code = run(at, step + 1)
        assert code == -signal.SIGKILL
        tried += 1
        survived += survives(folder, step, step + 1)
    checkpoint.save(order_of(folder, step + 2, many(step + 2)))
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["latest", f"step-{step + 2:08d}"], "nothing of the killed ones is left"
    return tried, survived


@pytest.mark.parametrize("beside", [False, True])
def test_killed_by_the_system_a_whole_checkpoint_is_left(tmp_path, beside):
    """A sample of the moments; `make test-full` takes every one."""
    tried, survived = kills(tmp_path, 4, beside, half=beside)
    print(f"saves killed by SIGKILL: {tried}, whole checkpoints left: {survived}")
    assert tried == survived >= 4


@pytest.mark.full
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_killed_at_every_operation(tmp_path, beside, half):
    """Every write, fsync, rename and removal."""
    tried, survived = kills(tmp_path, 1, beside, half)
    print(f"saves killed by SIGKILL: {tried}, whole checkpoints left: {survived}")
    assert tried == survived >= 15
