"""`start`: local ranks through torchrun's API, and what becomes of them.

Each rank is `python -m mfun ...` with the same arguments, and finds its place in the environment as
under torchrun. They meet at a port that the system chose, on the loopback interface. If one ends
badly, all do; the first error comes back as an exception.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mfun.config import ConfigError
from mfun.mesh import Mesh
from mfun.train.failure import REPORTS, Failure, first_failure, place_text, read_reports
from mfun.train.ranks import threads
from mfun.train.stop import PATIENCE_S, SAVING_S, SIGNALS

LAUNCHED = "MFUN_LAUNCHED"
"""Environment variable that tells a rank that it ends with the process that started it."""


class RanksFailed(RuntimeError):
    """A rank ended badly; the message is its error."""


class Interrupted(RuntimeError):
    """A signal ended the ranks before they could end in order."""


def start(mesh: Mesh, arguments: Sequence[str], program: Sequence[str] = ("-m", "mfun")) -> None:
    """Run `python -m mfun ARGUMENTS` as every rank of a mesh, on this machine, to the end.

    Ctrl-C and SIGTERM are passed on; the ranks then save and end in order.

    Args:
        mesh: how many ranks, and what to call them in an error.
        arguments: of the command line.
        program: what Python runs.

    Raises:
        RanksFailed: with the first error and its rank.
        Interrupted: a signal ended ranks before they had saved and ended by themselves.
        ConfigError: MASTER_PORT is set and in use.
    """
    with tempfile.TemporaryDirectory(prefix="mfun-") as folder, _quiet(), _signals():
        reports = Path(folder) / "reports"
        reports.mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=mesh.world,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"127.0.0.1:{_port()}",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            signals_to_handle="SIGTERM",
            shutdown_timeout=SAVING_S,
        )
        with _environment(_for_ranks(mesh.world, reports)):
            try:
                elastic_launch(config, sys.executable)(*program, *arguments)
            except ChildFailedError as error:
                raise RanksFailed(_explain(reports, error.failures, mesh)) from None
            except SignalException:
                _check_ended(reports, mesh)


def _port() -> int:
    """0 for any free port, or MASTER_PORT if it is set and free."""
    asked = os.environ.get("MASTER_PORT") or "0"
    port = int(asked) if asked.isascii() and asked.isdigit() else -1
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"MASTER_PORT is {asked!r}; give a number below 65536, or unset it.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"MASTER_PORT is {port} and that port is in use; unset it, and a free one is taken."
            ) from error
    return port


def _for_ranks(world: int, reports: Path) -> dict[str, str]:
    """Environment of the ranks; what the user set stays."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    defaults = {
        "OMP_NUM_THREADS": str(threads(world)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        **({"GLOO_SOCKET_IFNAME": loopback} if loopback else {}),
    }
    ours = {REPORTS: str(reports), LAUNCHED: "1"}
    return {k: v for k, v in defaults.items() if k not in os.environ} | ours


def _explain(reports: Path, ended: Mapping[int, ProcessFailure], mesh: Mesh) -> str:
    """The first error as text, from the ranks' reports and how their processes ended."""
    failures, _ = read_reports(reports)
    told = {failure.rank for failure in failures}
    asked = min((failure.time for failure in failures), default=math.inf)
    silent = [_silent(rank, end, mesh, asked) for rank, end in ended.items() if rank not in told]
    killed = [failure for failure in silent if failure is not None]
    first = first_failure(failures, killed)
    return first.block() if first else f"ranks {sorted(ended)} ended without saying why"


def _silent(rank: int, end: ProcessFailure, mesh: Mesh, asked: float) -> Failure | None:
    """A rank that left no report: killed, hung, or dead in C++. None if it ended when asked to.

    `asked` is when another rank first failed, and torchrun asked all to end.
    """
    if end.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return None
    if end.exitcode < 0:
        name = signal.Signals(-end.exitcode).name
        memory = " (out of memory?)" if name == "SIGKILL" else ""
        error = f"killed by {name}{memory}"
        if end.timestamp - asked > PATIENCE_S:
            error = "hung: the others lost it, and it had to be killed because it did not end"
    else:
        error = f"ended with exit code {end.exitcode} before it could say why"
    return Failure(
        rank=rank,
        where=place_text(mesh.coords(rank)),
        moment="",
        error=error,
        trace="",
        consequence=False,
        time=float(end.timestamp),
    )


def _check_ended(reports: Path, mesh: Mesh) -> None:
    """After a signal: either every rank ended in order, or this is an error."""
    failures, ended = read_reports(reports)
    first = first_failure(failures, [])
    if first:
        raise RanksFailed(first.block())
    if len(ended) < mesh.world:
        raise Interrupted("interrupted before all ranks had saved and ended")


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torchrun's log: what it says about failing ranks is said better here."""
    names = [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _signals() -> Iterator[None]:
    """Turn every signal that ranks heed into SIGTERM, which torchrun's agent passes on to them."""

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for number in SIGNALS:
        before[number] = signal.getsignal(number)
        if number != signal.SIGTERM and before[number] is not signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
