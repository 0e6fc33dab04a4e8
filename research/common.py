"""What the scripts share: a tiny GPT in float64, text that can be learned, trees, an ending."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from mfun import config as cfg
from mfun import func, tree
from mfun.comm import Groups, simulate
from mfun.config import Config, load, resolve
from mfun.grads import reductions
from mfun.mesh import Mesh
from mfun.spec import P, init_params

Tree = Any
Batch = dict[str, Tensor]
Loss = Callable[[Tree, Batch], Tensor]
ONE = {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
FIGURES = Path(__file__).parent / "figures"
TINY = {
    "model.layers": 1, "model.hidden": 16, "model.heads": 4, "model.vocab": 16, "model.seq_len": 8,
    "model.position": "rotary", "model.norm": "rmsnorm", "model.bias": "none", "model.tied": False,
    "parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 1, "parallel.sequence_parallel": True,
    "precision.policy": "fp64", "train.global_batch": 16, "train.microbatches": 1,
}  # fmt: skip


def tiny(changes: dict[str, Any] | None = None) -> Config:
    """One block, 16 wide, on tp 2 with sequence parallelism and dp 2; changed by dotted keys."""
    values = {**TINY, **(changes or {})}
    return resolve(load("tiny", [f"{k}={str(v).lower()}" for k, v in values.items()]), None)


def start(config: Config, seed: int = 1) -> Tree:
    """Initial weights, whole."""
    dtype = torch.float64 if config.precision.policy == "fp64" else torch.float32
    return init_params(func.specs_of(config), seed, Mesh(), ONE, dtype)


def text(config: Config, step: int = 0, *, kinds: int = 3) -> Batch:
    """Sequences of a random language in which a word has a few likely successors."""
    rows, seq, vocab = config.train.global_batch, config.model.seq_len, config.model.vocab
    table = np.random.Generator(np.random.Philox(key=[7, 7])).integers(0, vocab, (vocab, kinds))
    draw = np.random.Generator(np.random.Philox(key=[config.train.seed % 2**63, step]))
    words = [draw.integers(0, vocab, rows)]
    for _ in range(seq):
        words.append(table[words[-1], draw.integers(0, kinds, rows)])
    whole = torch.from_numpy(np.stack(words, 1))
    mask = torch.ones(rows, seq, dtype=torch.float64)
    sample = torch.arange(step * rows, (step + 1) * rows)
    return {
        "tokens": whole[:, :-1].clone(), "labels": whole[:, 1:].clone(), "mask": mask,
        "sample": sample,
    }  # fmt: skip


def mean_loss(config: Config) -> Loss:
    """Nats a token, of whole parameters and a whole batch, on the simulated mesh."""
    total = func.mesh_loss(config, check=False)
    return lambda params, batch: total(params, batch) / batch["mask"].sum()


def sample_gradients(config: Config, params: Tree, batch: Batch) -> Tree:
    """Every sample's gradient of its mean token loss, each computed by the data rank that has it.

    Samples are a dim that is cut over dp; over tp a gradient is made whole within the mesh.
    """
    mesh, specs = cfg.mesh(config), func.specs_of(config)
    table = reductions([specs], mesh)

    def inside(groups: Groups, params: Tree, batch: Batch) -> Tree:
        def loss(p: Tree, row: Batch) -> Tensor:
            return func.rank_loss(config, groups, row)(p) / config.model.seq_len

        own = func.rank_space(groups, table, over_data=False)
        return func.per_sample_gradients(loss, params, batch, own)

    out = tree.map(lambda spec: P("dp", *spec.p.entries), specs)
    return simulate(inside, mesh, (specs, P("dp")), out, check=False)(params, batch)


def flat(params: Tree) -> Tensor:
    """All leaves in one vector."""
    return torch.cat([x.flatten() for x in tree.flatten(params).values()])


def unflat(vector: Tensor, like: Tree) -> Tree:
    """The inverse of `flat`."""
    leaves = tree.flatten(like)
    pieces = vector.split([x.numel() for x in leaves.values()])
    return tree.unflatten({k: v.view(leaves[k].shape) for k, v in zip(leaves, pieces, strict=True)})


def rows(stacked: Tree) -> Tensor:
    """A stack of trees as a matrix, a row each."""
    return torch.cat([x.flatten(1) for x in tree.flatten(stacked).values()], 1)


def panels(count: int = 1, width: float = 4.4, height: float = 3.2) -> tuple[Figure, list[Any]]:
    """A figure with axes side by side."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def end(held: bool, figure: Figure, out: Path) -> None:
    """Write the figure, say whether the expectation held, and exit by it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=90)
    print(f"expectation {'held' if held else 'FAILED'}; figure: {out}")
    raise SystemExit(0 if held else 1)
