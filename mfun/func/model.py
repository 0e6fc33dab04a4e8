"""A model as plain functions of its parameters, for `torch.func`: of one rank, of a whole mesh.

No step, no buffers, no schedule: the layers, one after the other. The loss is the sum over tokens
of mask times loss; whoever wants a mean divides by a count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from mfun import config as cfg
from mfun import nn, tree
from mfun.comm import Groups, simulate
from mfun.config import Config
from mfun.models.gpt import Head, gpt
from mfun.nn.layer import Ctx, Layer
from mfun.pipeline.stage import cut
from mfun.rng import Key
from mfun.spec import P

Tree = Any
Batch = Mapping[str, Tensor]
RankStage = Callable[[Groups, Tree, Tree, Batch], Tree]
"""(groups, params, x, batch) -> y, on one rank's pieces."""
MeshStage = Callable[[Tree, Tree, Batch], Tree]
"""(params, x, batch) -> y, on whole tensors."""


def specs_of(config: Config) -> Tree:
    """Specs of all parameters of a model, nested as the parameters are.

    Example:
        >>> from mfun.config import load
        >>> specs_of(load("tiny"))["embed"]["tokens"].shape
        (256, 128)
    """
    return tree.merge(*(layer.specs for layer in gpt(config)))


def run_layers(layers: Sequence[Layer], key: Key | None = None) -> RankStage:
    """Layers one after the other, as a function whose derivatives of every order exist.

    Args:
        layers: a model, or the slice of it that is a pipeline stage.
        key: of the dropout; None for none.

    Returns:
        (groups, params, x, batch) -> y. Of the parameters it takes those its layers name.
    """

    def run(groups: Groups, params: Tree, x: Tree, batch: Batch) -> Tree:
        for layer in layers:
            x = layer.apply(tree.select(params, layer.specs), x, Ctx(groups, batch, key))
        return x

    return run


def rank_loss(config: Config, groups: Groups, batch: Batch) -> Callable[[Tree], Tensor]:
    """The loss of one rank's parameters on its batch: I over tp, P over dp.

    Args:
        config: resolved.
        groups: of the rank.
        batch: its rows.

    Returns:
        params -> the sum over tokens of mask times loss.
    """
    run = run_layers(gpt(config))
    return lambda params: run(groups, params, {}, batch)["loss"]


def rank_logits(config: Config, groups: Groups, batch: Batch) -> Callable[[Tree], Tensor]:
    """The logits of one rank's parameters on its batch: V over tp (its columns) and over dp.

    Args:
        config: resolved.
        groups: of the rank.
        batch: its rows.

    Returns:
        params -> (b, s, ceil(v/n)); columns that pad the vocabulary count nowhere.
    """
    head: Head = "columns"
    run = run_layers(gpt(config, head=head))
    return lambda params: run(groups, params, {}, batch)["logits"]


def logits_loss(config: Config, groups: Groups, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The loss as a function of `rank_logits`: what of it is curved in the Gauss-Newton matrix."""

    def loss(logits_bsv: Tensor) -> Tensor:
        losses_bs = nn.vocab_cross_entropy(
            logits_bsv,
            batch["labels"],
            groups.tp,
            vocab=config.model.vocab,
            label_smoothing=config.train.label_smoothing,
            z_loss=config.train.z_loss,
        )
        return (losses_bs * batch["mask"]).sum()

    return loss


def rank_sample_losses(config: Config, groups: Groups, batch: Batch) -> Callable[[Tree], Tensor]:
    """The loss of every sample: params -> (b,), I over tp, V over dp."""
    logits = rank_logits(config, groups, batch)

    def losses(params: Tree) -> Tensor:
        losses_bs = nn.vocab_cross_entropy(
            logits(params), batch["labels"], groups.tp, vocab=config.model.vocab,
            label_smoothing=config.train.label_smoothing, z_loss=config.train.z_loss,
        )  # fmt: skip
        return (losses_bs * batch["mask"]).sum(-1)

    return losses


def rank_stages(config: Config) -> list[RankStage]:
    """The pipeline stages of a model, to be composed: each takes what the one before returns."""
    return [run_layers(stage.layers) for stage in cut(gpt(config), cfg.stage_layers(config))]


def mesh_stages(config: Config, *, check: bool = True) -> list[MeshStage]:
    """The pipeline stages of a model, each on its simulated ranks: whole tensors in and out.

    Args:
        config: resolved; of its mesh pp is the number of stages, each stage on the rest.
        check: assert declared types at every collective.

    Returns:
        (params, x, batch) -> y by stage; the first takes {}, the last returns {"loss"}.
    """
    mesh = attrs.evolve(cfg.mesh(config), pp=1)
    cuts = P("dp", "tp" if config.parallel.sequence_parallel else None)
    stages = cut(gpt(config), cfg.stage_layers(config))
    last = len(stages) - 1

    def on_mesh(i: int) -> MeshStage:
        specs, run = stages[i].specs, run_layers(stages[i].layers)
        out = {"loss": P(sums=("dp",))} if i == last else {"h": cuts}
        into = {"h": cuts} if i else {}
        whole = simulate(run, mesh, (specs, into, P("dp")), out, check=check)
        return lambda params, x, batch: whole(tree.select(params, specs), x, batch)

    return [on_mesh(i) for i in range(len(stages))]


def mesh_loss(config: Config, *, check: bool = True) -> Callable[[Tree, Batch], Tensor]:
    """The loss of a whole model on a whole batch, computed on a simulated mesh.

    A function like any other: every transform of `torch.func` and of this package applies to it,
    and what it returns is that of one device. Pipeline stages are composed.

    Args:
        config: resolved.
        check: assert declared types at every collective.

    Returns:
        (params, batch) -> the sum over tokens of mask times loss.

    Example:
        >>> import torch
        >>> from mfun.config import load, resolve
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import init_params
        >>> from mfun.verify.batches import global_batch
        >>> small = ["model.layers=2", "model.hidden=8", "model.seq_len=4", "train.global_batch=4"]
        >>> config = resolve(load("tiny", [*small, "precision.policy=fp64"]), None)
        >>> one = {"tp": 0, "dp": 0, "cp": 0, "pp": 0}
        >>> params = init_params(specs_of(config), 0, Mesh(), one, torch.float64)
        >>> grads = torch.func.grad(mesh_loss(config))(params, global_batch(config, 0))
        >>> grads["embed"]["tokens"].shape
        torch.Size([256, 8])
    """
    stages = mesh_stages(config, check=check)

    def loss(params: Tree, batch: Batch) -> Tensor:
        x: Tree = {}
        for stage in stages:
            x = stage(params, x, batch)
        return x["loss"]

    return loss
