"""The pool of real ranks: results by rank, failures told and cleaned up, nobody left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError


def add_up(rank: int, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = x * (rank + 1)
    dist.all_reduce(total)
    return dist.get_world_size(), total


def process_id(rank: int) -> int:
    return os.getpid()


def fail(rank: int, who: int, how: str) -> None:
    if rank == who:
        if how == "raise":
            raise ValueError(f"rank {rank} says no")
        if how == "leave":  # the others see that it is gone before the parent does
            for name in os.listdir("/proc/self/fd"):
                if os.path.exists(f"/proc/self/fd/{name}") and is_internet(int(name)):
                    os.close(int(name))
            time.sleep(0.3)
        if how in ("die", "leave"):
            os._exit(7)
        time.sleep(60)
    dist.barrier()


def is_internet(handle: int) -> bool:
    """Whether an open file is a connection over the network."""
    if not stat.S_ISSOCK(os.fstat(handle).st_mode):
        return False
    with socket.socket(fileno=os.dup(handle)) as one:
        return one.family == socket.AF_INET


def hold(rank: int, folder: str) -> None:
    (Path(folder) / f"rank{rank}").write_text(str(os.getpid()))
    time.sleep(60)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie that nobody waits for does not)."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_worlds_of_every_size(pool: Pool) -> None:
    """A call has the ranks it asks for, and its results come in order; processes are reused."""
    for world, total in ((2, 3), (4, 10), (1, 1), (3, 6)):
        got = pool.run(add_up, torch.ones(2), world=world)
        assert [n for n, _ in got] == [world] * world
        assert all(torch.equal(x, torch.full((2,), float(total))) for _, x in got)
    assert pool.run(process_id, world=4)[:2] == pool.run(process_id, world=2)
    with pytest.raises(ValueError, match="this pool has 1 to 4 ranks"):
        pool.run(process_id, world=5)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "(?s)^rank 1 raised\nTraceback.*, in fail\n.*ValueError: rank 1 says no"),
        ("die", "^rank 1 died with exit code 7"),
        ("leave", "^rank 1 died with exit code 7"),
        ("hang", r"(?s)no answer in time from ranks \[0, 1, 2\] of 3.*rank 1 is at\n.* in fail"),
    ],
)
def test_failure_of_one_rank(pool: Pool, how: str, message: str) -> None:
    """The first failure comes up with its rank, soon, and the next call works on new processes."""
    before = pool.run(process_id, world=4)
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        pool.run(fail, 1, how, world=3, limit=1.0 if how == "hang" else 30.0)
    assert time.monotonic() - start < 10
    assert gone(before)
    assert pool.run(add_up, torch.ones(1), world=4)[3][1] == 10


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
from pool import Pool
import test_pool
if __name__ == "__main__":
    Pool().run(test_pool.hold, {folder!r}, world=2)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_its_starter(how: signal.Signals, tmp_path: Path) -> None:
    """Ranks in the middle of a call end when the program is interrupted, or killed outright."""
    script = tmp_path / "main.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    program = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    marks = [tmp_path / "rank0", tmp_path / "rank1"]
    end = time.monotonic() + 60
    while not all(m.exists() and m.read_text() for m in marks) and time.monotonic() < end:
        time.sleep(0.05)
    ranks = [int(m.read_text()) for m in marks]
    assert all(map(alive, ranks))
    program.send_signal(how)
    program.wait(20)
    assert gone(ranks)


def test_closing_ends_cleanly() -> None:
    """All ranks leave with exit code 0, so gloo did not abort."""
    ranks = Pool(size=2)
    pids = ranks.run(process_id)
    ranks.close()
    assert gone(pids)
