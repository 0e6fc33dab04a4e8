"""One rank of a training run with a planted fault or a watcher; run as a program by the tests.

FAULT=kind:rank,...  raises, dies or hangs on a rank at step 3; the file STRUCK gets the time
WATCH=folder         each rank writes its records and its count of live tensors there
SKEW=rank            a rank that draws its initial weights from another seed
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import attrs
import torch

from mfun.checkpoint import writer
from mfun.cli import main
from mfun.pipeline.flight import Flight
from mfun.train import loop
from mfun.train.feed import Feed
from mfun.train.params import StageParams
from mfun.train.step import Trainer

STEP = 3


def strike(kind: str) -> None:
    """What the fault does; when it did is written down."""
    Path(os.environ["STRUCK"]).write_text(str(time.time()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(1000)
    raise ValueError(f"planted in {kind}")


def plant(kind: str) -> None:
    """Make one place of step 3 fail on this rank."""
    owner, name = {
        "loader": (Feed, "step"),
        "forward": (Flight, "forward"),
        "backward": (Flight, "backward"),
        "optimizer": (torch, "_fused_adamw_"),
        "save": (writer, "_write_file"),
        "kill": (Flight, "forward"),
        "hang": (Feed, "step"),
    }[kind]
    original = getattr(owner, name)
    step = {"now": 0}

    def counted(self: Trainer, state: Any, batches: Any, **rest: Any) -> Any:
        step["now"] = state.step + 1
        return advance(self, state, batches, **rest)

    def faulty(*args: Any, **rest: Any) -> Any:
        now = args[1] + 1 if owner is Feed else step["now"]
        if now == STEP:
            strike(kind)
        return original(*args, **rest)

    advance = Trainer.step
    setattr(Trainer, "step", counted)  # noqa: B010
    setattr(owner, name, faulty)


def live_tensors() -> dict[str, Any]:
    """How many tensors this process holds, their bytes, and whether a leaf wants a gradient."""
    gc.collect()
    alive = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    wants = any(x.requires_grad for x in alive if x.is_leaf)
    return {"tensors": len(alive), "bytes": sum(x.nbytes for x in alive), "wants": wants}


def watch(folder: Path) -> None:
    """Write down what this rank's loop yields, and how many tensors live after each step."""
    original = loop.train

    def watched(*args: Any) -> Any:
        rows = []
        for record in original(*args):
            live = live_tensors() if record.step in (3, 4, 12, 20) else {}
            rows.append(record.row() | live | {"val_loss": record.val_loss})
            (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(rows))
            yield record

    from mfun.cli import progress

    setattr(progress, "train", watched)  # noqa: B010


def skew() -> None:
    """Other initial weights, as of a rank that seeds itself."""
    original = StageParams.drawn

    def skewed(self: StageParams) -> Any:
        config = self.plan.config
        other = attrs.evolve(config, train=attrs.evolve(config.train, seed=1))
        return original(StageParams(attrs.evolve(self.plan, config=other), self.world))

    setattr(StageParams, "drawn", skewed)  # noqa: B010


if __name__ == "__main__":
    for fault in filter(None, os.environ.get("FAULT", "").split(",")):
        kind, _, rank = fault.partition(":")
        if os.environ["RANK"] == rank:
            plant(kind)
    if "WATCH" in os.environ:
        watch(Path(os.environ["WATCH"]))
    if os.environ.get("SKEW") == os.environ["RANK"]:
        skew()
    main(prog_name="mfun")
