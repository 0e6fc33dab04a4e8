"""One rank of a run of `mfun` that is killed once by SIGKILL; run as a program by the tests.

KILL=rank:step   the rank dies in that step
KILLED=file      made before; if it is there, nobody dies
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from mfun.cli import main
from mfun.train.step import Trainer


def doom(rank: str, step: int, mark: Path) -> None:
    """Let a rank die before it ends a step."""
    original = Trainer.step

    def fatal(self: Trainer, state: Any, batches: Any, **rest: Any) -> Any:
        if os.environ["RANK"] == rank and state.step + 1 == step and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, state, batches, **rest)

    setattr(Trainer, "step", fatal)  # noqa: B010


if __name__ == "__main__":
    rank, _, step = os.environ["KILL"].partition(":")
    doom(rank, int(step), Path(os.environ["KILLED"]))
    main(prog_name="mfun")
