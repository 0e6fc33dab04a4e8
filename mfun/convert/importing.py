"""A Hugging Face folder as an mfun checkpoint of step 0, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun import checkpoint
from mfun import config as cfg
from mfun.config import Config, ModelConfig, ParallelConfig, PrecisionConfig, TrainConfig
from mfun.convert.folder import BESIDE, draft, keep_beside, refuse_used
from mfun.convert.matching import Leaf, match, specs_of
from mfun.convert.read_config import read_config
from mfun.inspect.weights import in_folder, read_json

POLICIES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The precision policy whose parameters are of a type."""
Told = Callable[[str, int], object]


def _nothing(name: str, size: int) -> None:
    """Nobody watches."""


@attrs.frozen
class Converted:
    """What was converted.

    Args:
        family: by its `model_type`.
        model: as mfun has it.
        tensors: how many were written.
        nbytes: of them.
    """

    family: str
    model: ModelConfig
    tensors: int
    nbytes: int


def from_hf(folder: Path, out: Path, *, told: Told = _nothing) -> Converted:
    """Write a folder that `mfun sample`, `inspect` and `train` (by `train.init_from`) read.

    No more than one parameter is in memory at a time. The folder gets its name when all of it is
    on the disk.

    Args:
        folder: of a Hugging Face model.
        out: to be made.
        told: called with each parameter and its bytes when it is written.

    Raises:
        HFError: an architecture, an option or a tensor that does not fit, each named; or `out` is
            in use.
        CheckpointError: files that are damaged.
    """
    refuse_used(out)
    family, model = read_config(read_json(folder / "config.json"))
    leaves = match(family, model, in_folder(folder))
    config = _config(model, leaves, out)
    late = _late(model, leaves, told)
    with draft(out) as made:
        layout = {"tp": 1, "dp": 1, "pp": 1}
        order = {"tensors": late, "config": cfg.to_toml(config), "layout": layout}
        checkpoint.save(checkpoint.Order(run_dir=made, step=0, **order))
        (made / "config.toml").write_text(cfg.to_toml(config), encoding="utf-8")
        keep_beside(folder, made / BESIDE)
    return Converted(family.name, model, len(late), sum(one.nbytes for one in late.values()))


def _config(model: ModelConfig, leaves: Mapping[str, Leaf], out: Path) -> Config:
    """One rank, in the precision of the embedding; a training run of it starts from its weights."""
    policy: Any = POLICIES[leaves["embed.tokens"].weights[0].dtype]
    return Config(
        model=model,
        parallel=ParallelConfig(dp=1),
        precision=PrecisionConfig(policy=policy),
        train=TrainConfig(init_from=str(out.resolve())),
    )


@attrs.frozen
class Late:
    """A tensor that is read when its values are asked for: what the writer of a checkpoint needs.

    Args:
        shape: of the tensor.
        leaf: what it is made of.
        told: called when it is read.
    """

    shape: tuple[int, ...]
    leaf: Leaf
    told: Told
    layout = torch.strided
    is_quantized = False

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.leaf.dtype

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return sum(weight.nbytes for weight in self.leaf.weights)

    def detach(self) -> Tensor:
        """Its values."""
        self.told(self.leaf.path, self.nbytes)
        return self.leaf.read()


def _late(model: ModelConfig, leaves: Mapping[str, Leaf], told: Told) -> dict[str, Any]:
    specs = specs_of(model)
    return {f"params.{p}": Late(specs[p].shape, leaf, told) for p, leaf in leaves.items()}
