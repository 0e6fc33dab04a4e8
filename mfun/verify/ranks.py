"""Run a shrunk configuration on local processes: start them, be one, read what they saw."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mfun import config as cfg
from mfun.comm import ProcessWorld, distribute, finish
from mfun.config import Config
from mfun.grads import needed_groups
from mfun.train import launch
from mfun.train.plan import Plan, plan
from mfun.train.ranks import Place, joined
from mfun.verify.compare import RankResult
from mfun.verify.run import program

KINDS = ("grads", "params")


def on_ranks(layout: Plan) -> list[RankResult]:
    """Start the mesh's ranks as processes of this machine and collect their results.

    Raises:
        RanksFailed: with the first error and its rank.
    """
    if layout.mesh.world == 1:
        return [_run(layout, Place())]
    with tempfile.TemporaryDirectory(prefix="mfun-verify-") as name:
        folder = Path(name)
        (folder / "config.toml").write_text(cfg.to_toml(layout.config))
        launch.start(layout.mesh, ["verify", str(folder / "config.toml"), "--rank-results", name])
        return [read(folder, rank) for rank in range(layout.mesh.world)]


def be_rank(config: Config, place: Place, folder: Path) -> None:
    """Run as one started rank and leave the results in the folder."""
    with joined(place, torch.device("cpu"), config.train.timeout_s):
        result = _run(plan(config), place)
    tensors = {
        f"{kind}.{path}": x.contiguous()
        for kind in KINDS
        for path, x in getattr(result, kind).items()
    }
    save_file(tensors, folder / f"rank-{place.rank}.safetensors")
    numbers = {"coords": result.coords, "losses": result.losses, "norms": result.norms}
    (folder / f"rank-{place.rank}.json").write_text(json.dumps(numbers))


def read(folder: Path, rank: int) -> RankResult:
    """What a rank left."""
    numbers = json.loads((folder / f"rank-{rank}.json").read_text())
    tensors = load_file(folder / f"rank-{rank}.safetensors")
    pick: dict[str, Any] = {
        kind: {p.removeprefix(f"{kind}."): x for p, x in tensors.items() if p.startswith(kind)}
        for kind in KINDS
    }
    return RankResult(**numbers, **pick)


def _run(layout: Plan, place: Place) -> RankResult:
    needed = needed_groups(layout.table, layout.mesh)
    groups = distribute(layout.mesh, needed, layout.config.train.timeout_s)
    result = finish(program(layout, ProcessWorld(groups)))
    return RankResult(coords=layout.mesh.coords(place.rank), **result)
