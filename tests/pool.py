"""Real ranks for tests: a few processes, started once, that run functions together over gloo.

    def total(rank, x):                      # at the top level of an importable module
        groups = distribute(Mesh(dp=2))
        return reduce(x + rank, groups.dp)

    def test_total(pool):
        assert pool.run(total, 1.0, world=2) == [3.0, 3.0]

Each call has a process group of its own, made over a fresh file and destroyed after a barrier. A
rank that raises, dies or takes too long ends the call at once with its traceback: all ranks are
killed, and the next call starts new ones. No rank outlives the process that started it.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any


class RankError(RuntimeError):
    """A rank failed; the message has its number and its traceback."""


class Pool:
    """`size` processes; started by the first `run`.

    Args:
        size: most ranks a call may have.
        limit: seconds a call may take unless it says otherwise.
    """

    def __init__(self, size: int = 4, limit: float = 60.0) -> None:
        self.size, self.limit = size, limit
        self._ranks: list[tuple[Any, connection.Connection]] = []
        self._lifeline: connection.Connection | None = None
        self._folder: Path | None = None
        self._calls = itertools.count()

    def run(
        self, fn: Callable[..., Any], *args: Any, world: int = 2, limit: float | None = None
    ) -> list[Any]:
        """`fn(rank, *args)` on ranks 0 .. world - 1 of an initialised process group.

        Args:
            fn: importable by name.
            args: the same for every rank; what pickle can carry.
            world: number of ranks.
            limit: seconds.

        Returns:
            The results by rank.

        Raises:
            RankError: a rank raised, died or was too slow. The first failure is told.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world is {world}; this pool has 1 to {self.size} ranks")
        limit = self.limit if limit is None else limit
        if not self._ranks:
            self._start()
        assert self._folder is not None
        store = self._folder / f"store{next(self._calls)}"
        call = pickle.dumps((sys.path, str(store), world, limit, pickle.dumps((fn, args))))
        try:
            for _, pipe in self._ranks[:world]:
                pipe.send_bytes(call)
            return self._collect(world, time.monotonic() + limit)
        except BaseException:  # an interrupt, too, leaves ranks in the middle of something
            self.kill()
            raise
        finally:
            store.unlink(missing_ok=True)

    def _collect(self, world: int, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        waiting: dict[Any, int] = {self._ranks[rank][1]: rank for rank in range(world)}
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                raise RankError(
                    f"no answer in time from ranks {late} of {world}{self._stacks(late)}"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._answer(rank, pipe)
        return [results[rank] for rank in range(world)]

    def _answer(self, rank: int, pipe: Any) -> Any:
        try:
            fine, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death(rank) from None
        if not fine and "Connection" in value:  # to a rank that is no more: its end came first
            ended = connection.wait([process.sentinel for process, _ in self._ranks], timeout=1.0)
            for other, (process, _) in enumerate(self._ranks):
                if process.sentinel in ended:
                    raise self._death(other)
        if not fine:
            raise RankError(f"rank {rank} raised\n{value}")
        return value

    def _death(self, rank: int) -> RankError:
        process = self._ranks[rank][0]
        process.join(5)
        return RankError(f"rank {rank} died with exit code {process.exitcode}")

    def _stacks(self, ranks: list[int]) -> str:
        """Where the late ranks are, written by their own signal handlers."""
        assert self._folder is not None
        for rank in ranks:
            os.kill(self._ranks[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.3)
        texts = ((self._folder / f"stack{rank}").read_text() for rank in ranks)
        return "".join(f"\nrank {r} is at\n{text}" for r, text in zip(ranks, texts, strict=True))

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed"])
        self._folder = Path(tempfile.mkdtemp(prefix="mfun_pool_"))
        lifeline, self._lifeline = context.Pipe(duplex=False)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, lifeline, str(self._folder)), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        lifeline.close()

    def kill(self) -> None:
        """End all ranks at once; the next `run` starts new ones."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self._clear()

    def close(self) -> None:
        """Let all ranks end by themselves.

        Raises:
            RankError: one did not end cleanly.
        """
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(10)
        codes = [process.exitcode for process, _ in self._ranks]
        for process, _ in self._ranks:
            process.kill()
        self._clear()
        if any(codes):
            raise RankError(f"the ranks' exit codes are {codes}; all should be 0")

    def _clear(self) -> None:
        self._ranks.clear()
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _serve(rank: int, pipe: Any, lifeline: Any, folder: str) -> None:
    """A rank: run what comes through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    import torch

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(os.path.join(folder, f"stack{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        while True:
            try:
                call = pipe.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                answer = pickle.dumps((True, _call(rank, *pickle.loads(call))))
            except BaseException as error:
                answer = pickle.dumps((False, _told(error)))
            pipe.send_bytes(answer)


def _call(rank: int, path: list[str], store: str, world: int, limit: float, pickled: bytes) -> Any:
    import torch.distributed as dist

    sys.path[:] = path
    fn, args = pickle.loads(pickled)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=limit + 60),  # the parent's limit comes first, and tells more
    )
    result = fn(rank, *args)
    dist.barrier()  # gloo aborts when a peer is gone while another still tears down
    dist.destroy_process_group()
    return result


def _told(error: BaseException) -> str:
    """The traceback from the called function on; all of it where it did not get there."""
    frames = error.__traceback__
    for _ in range(2):
        frames = frames.tb_next if frames is not None else None
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _die_with_parent(lifeline: Any) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        pass
    os._exit(1)
