"""Jobs in forks of this process: what one breaks stays in its fork, and none may take for ever."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 8 << 30  # bytes that a job may take above what it starts with


class Job(NamedTuple):
    """Something to do in a process of its own, and the seconds of computing it may take."""

    do: Callable[[], Any]
    limit: float


class Result(NamedTuple):
    """How a job ended: "done" with a value, "timeout", "died", or by an error of its own."""

    how: str
    value: Any = None


def forked(jobs: Sequence[Job], workers: int = 2) -> Iterator[tuple[int, Result]]:
    """Each job in a fork of this process, so many at a time; what they say, as they end."""
    waiting, running = list(enumerate(jobs))[::-1], {}
    clock, ticked = 0.0, time.monotonic()  # stands still while this process is stopped
    while waiting or running:
        while waiting and len(running) < workers:
            index, job = waiting.pop()
            out = tempfile.TemporaryFile()
            pid = os.fork() or _child(job, out.fileno())
            running[pid] = (index, out, clock + 20 * job.limit + 30)
        now = time.monotonic()
        clock, ticked = clock + min(now - ticked, 1.0), now
        for pid, (index, out, end) in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            late = clock > end
            if not done and late:
                os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
            if done or late:
                del running[pid]
                yield index, _result(out, status, late and not done)
        time.sleep(0.002)


def _child(job: Job, out: int) -> int:
    """Do the job, quietly, and never return."""
    code = 1
    try:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        limit = int(time.process_time() + job.limit) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        os.write(out, json.dumps(job.do()).encode())
        code = 0
    finally:
        os._exit(code)


def _result(out: Any, status: int, late: bool) -> Result:
    """What a child that ended has said."""
    with out:
        out.seek(0)
        if late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, 9)):
            return Result("timeout")
        if os.WIFSIGNALED(status):
            return Result("died")
        return Result("done", json.load(out)) if status == 0 else Result("error")
