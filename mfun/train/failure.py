"""How a failing rank says so: one short block, and a report that whoever started it can read.

Of many failures one is the first: the others lost a peer because of it. Reports are JSON files in
the folder that the launcher names in the environment; without a launcher of ours a rank prints.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import attrs
import cattrs
import torch.distributed as dist

from mfun.checkpoint import CheckpointError
from mfun.config import ConfigError
from mfun.data import DataError
from mfun.train.lifecycle import RunError
from mfun.train.metrics import MetricsError
from mfun.train.replicas import ReplicaError

EXPECTED = (CheckpointError, ConfigError, DataError, MetricsError, ReplicaError, RunError)
"""Errors whose message says all there is to say: no traceback, no name of the class."""
REPORTS = "MFUN_REPORTS"
"""Environment variable with the folder that reports go to."""
WHOLE = "MFUN_TRACEBACK"
"""Environment variable that asks for whole tracebacks."""
CONSEQUENCES = (
    *("gloo", "NCCL", "Connection reset", "Connection closed"),
    *("another rank failed", "did not write their part"),  # of a checkpoint
)
"""What an error says that only tells of another rank's."""
FRAMES = 4


@attrs.frozen(kw_only=True)
class Failure:
    """What went wrong on one rank.

    Args:
        rank: which.
        where: its coordinates, `tp 0, dp 0, pp 1`.
        moment: `at step 3`, or empty before the first.
        error: kind and message.
        trace: the last frames, or the whole traceback.
        consequence: the rank only noticed that others were gone.
        time: seconds since the epoch.
    """

    rank: int
    where: str
    moment: str
    error: str
    trace: str
    consequence: bool
    time: float

    def block(self) -> str:
        """The text a user reads."""
        where = f" ({self.where})" if self.where else ""
        head = f"rank {self.rank}{where} failed{self.moment and ' '}{self.moment}: {self.error}"
        return f"{head}\n{self.trace}" if self.trace else head


def place_text(coords: Mapping[str, int]) -> str:
    """Coordinates as text; axes beyond tp, dp and pp only where they are not 0.

    Example:
        >>> place_text({"tp": 1, "cp": 0, "dp": 0, "pp": 2})
        'tp 1, dp 0, pp 2'
    """
    shown = {axis: at for axis, at in coords.items() if at or axis in ("tp", "dp", "pp")}
    return ", ".join(f"{axis} {at}" for axis, at in shown.items())


def describe(error: BaseException, rank: int, where: str) -> Failure:
    """The failure that an exception is; a note `at step N` on it tells when it happened."""
    notes = getattr(error, "__notes__", [])
    expected = isinstance(error, EXPECTED)
    message = str(error) if expected else f"{type(error).__name__}: {error}"
    return Failure(
        rank=rank,
        where=where,
        moment=next((note for note in notes if note.startswith("at ")), ""),
        error=message,
        trace="" if expected and not os.environ.get(WHOLE) else _trace(error),
        consequence=_is_consequence(error, message),
        time=time.time(),
    )


def _is_consequence(error: BaseException, message: str) -> bool:
    lost = isinstance(error, RuntimeError) and any(word in message for word in CONSEQUENCES)
    return lost or isinstance(error, dist.DistError)


def _trace(error: BaseException) -> str:
    """The last frames, one a line; all of it if asked for."""
    if os.environ.get(WHOLE):
        return "".join(traceback.format_exception(error)).rstrip()
    frames = traceback.extract_tb(error.__traceback__)
    shown = [f"  {_short(f.filename)}:{f.lineno} {f.name}: {f.line}" for f in frames[-FRAMES:]]
    hint = [f"  ({WHOLE}=1 shows all of the traceback)"] if len(frames) > FRAMES else []
    return "\n".join([*shown, *hint])


def _short(filename: str) -> str:
    path = Path(filename)
    return str(Path(*path.parts[-3:])) if path.is_absolute() else filename


def report(failure: Failure) -> None:
    """Leave the failure where the launcher looks; print it if there is no launcher of ours."""
    folder = os.environ.get(REPORTS)
    if folder:
        _write(Path(folder) / f"failed-{failure.rank:05d}.json", json.dumps(attrs.asdict(failure)))
        return
    first = failure.block() if not failure.consequence else _gone(failure)
    print(first, file=sys.stderr, flush=True)
    _tell_torchrun(failure)


def leave(failure: Failure) -> NoReturn:
    """Report, and end the process at once: a rank that closes in order keeps others waiting."""
    sys.stdout.flush()
    report(failure)
    sys.stderr.flush()
    os._exit(1)


def _gone(failure: Failure) -> str:
    """A consequence in one line: the first error stands elsewhere."""
    return f"rank {failure.rank} ended because another rank did ({failure.error})"


def _tell_torchrun(failure: Failure) -> None:
    """The file from which torchrun's summary takes the message."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": failure.trace, "timestamp": str(int(failure.time))}
        _write(
            Path(path), json.dumps({"message": {"message": failure.block(), "extraInfo": extra}})
        )


def report_end(rank: int) -> None:
    """Leave word that a rank ended as it should."""
    folder = os.environ.get(REPORTS)
    if folder:
        _write(Path(folder) / f"ended-{rank:05d}", "")


def _write(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_reports(folder: Path) -> tuple[list[Failure], set[int]]:
    """Failures that ranks reported, and the ranks that ended well."""
    failures = [
        cattrs.structure(json.loads(path.read_text(encoding="utf-8")), Failure)
        for path in sorted(folder.glob("failed-*.json"))
    ]
    return failures, {int(path.name.removeprefix("ended-")) for path in folder.glob("ended-*")}


def first_failure(failures: Sequence[Failure], killed: Sequence[Failure]) -> Failure | None:
    """The one that caused the others.

    An error of a rank's own comes before a rank that was killed from outside, and that before a
    rank that lost its peers; among equals the earliest.
    """
    own = [f for f in failures if not f.consequence]
    lost = [f for f in failures if f.consequence]
    for kind in (own, killed, lost):
        if kind:
            return min(kind, key=lambda f: f.time)
    return None
