"""Initial weights from a checkpoint, in any layout and number format, for a new run."""

from __future__ import annotations

from pathlib import Path

import torch

from mfun import checkpoint, convert, data
from mfun.checkpoint import CheckpointError, Index, Rules
from mfun.config import Config, from_toml
from mfun.convert.read_config import differences
from mfun.train import saving
from mfun.train.plan import Plan
from mfun.train.ranks import Peers
from mfun.train.step import State, Trainer


def start(trainer: Trainer, peers: Peers) -> State:
    """The weights of `train.init_from`, converted to this run's number formats; step 0.

    Args:
        trainer: whose layout the state is to have.
        peers: the ranks; each reads its part.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it is of another model; each
            field and tensor that differs is named.
    """
    plan = trainer.plan
    folder = newest(Path(plan.config.train.init_from))
    index = checkpoint.read_index(folder)
    _check_model(plan, folder, index)
    _check_tokens(plan.config)
    opened = checkpoint.open_checkpoint(
        folder, _expected(plan, index), Rules(unexpected=("opt.*",))
    )
    state = State(0, trainer.params.blank(), {})
    held = saving.held(trainer, state)
    targets = {h.name: (h.piece, h.tensor) for h in held if h.name.startswith("params.")}
    if peers.any(checkpoint.fill(opened, targets)):
        files = sorted(index.files)[peers.place.rank :: peers.place.world]
        checkpoint.check_files(folder, index, files)
    return trainer.fresh(state.params)


def newest(path: Path) -> Path:
    """The checkpoint that a path means: itself, or a run's newest.

    Raises: CheckpointError if there is none.
    """
    if (path / "index.json").is_file():
        return path
    found = checkpoint.latest(path)
    if found is None:
        raise CheckpointError(
            f"train.init_from is {path}, which holds no checkpoint; name a run's folder, or one "
            "that `mfun convert from-hf` made"
        )
    return found


def _check_model(plan: Plan, folder: Path, index: Index) -> None:
    """The same weights in another model would run, and mean nothing."""
    apart = differences(plan.config.model, from_toml(index.config, str(folder)).model)
    if apart:
        listed = "; ".join(f"{key} is {a!r}, and there {b!r}" for key, (a, b) in apart.items())
        raise CheckpointError(
            f"{folder} is of another model: model.{listed}. Give this run the model of its "
            "config.toml"
        )


def _check_tokens(config: Config) -> None:
    """A model that has a tokenizer would learn nothing from bytes."""
    file = convert.tokenizer_file(Path(config.train.init_from), config)
    if file is not None and not data.are_built(config.data):
        raise data.DataError(
            f"data.path is text, read as bytes, but the model's tokens are those of {file}: "
            f"make a dataset by `mfun data build TEXT X --tokenizer {file}` and set data.path=X"
        )


def _expected(plan: Plan, index: Index) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every parameter, of the type that it is stored in."""
    out = {}
    for path, spec in plan.specs.items():
        stored = index.tensors.get(f"params.{path}")
        out[f"params.{path}"] = (
            spec.shape,
            getattr(torch, stored[0].dtype) if stored else plan.dtype,
        )
    return out
