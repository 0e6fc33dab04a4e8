"""A training state as a checkpoint and back, in the same layout and to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mfun import checkpoint, optim, tree
from mfun import config as cfg
from mfun.checkpoint import Piece
from mfun.comm.process import ProcessWorld
from mfun.comm.world import finish
from mfun.grads.table import Group
from mfun.mesh import Mesh
from mfun.spec import ParamSpec, local_shape, window
from mfun.train.plan import Plan
from mfun.train.ranks import Peers
from mfun.train.replicas import owner, state_leaves
from mfun.train.shards import by_path
from mfun.train.step import State, Trainer, build_optimizer


def layout(plan: Plan) -> dict[str, Any]:
    """What decides which rank holds what, as JSON values."""
    mesh = plan.mesh
    sizes = {axis: mesh.size(axis) for axis in ("tp", "cp", "ep", "etp", "dp", "pp")}
    blocks = [[*blocks] for blocks in cfg.stage_layers(plan.config)]
    return {**sizes, "order": mesh.order, "blocks": blocks}


def save(trainer: Trainer, state: State, folder: Path, peers: Peers) -> Path:
    """Write the checkpoint of a state; every rank calls this.

    Args:
        trainer: whose plan and world the state is of.
        state: this rank's.
        folder: of the run.
        peers: the ranks.

    Returns: the checkpoint's folder.
    """
    plan, train = trainer.plan, trainer.plan.config.train
    state = finish(by_path(plan, trainer.world, state))
    leaves = _stored(trainer, state)
    return checkpoint.save(
        folder,
        step=state.step,
        consumed=cfg.rampup.consumed(train, state.step),
        tensors=leaves,
        scalars={f"opt.{k}": v for k, v in optim.state_scalars(state.opt).items()},
        layout=layout(plan),
        config=cfg.to_toml(plan.config),
        rank=peers.place.rank,
        world=peers.place.world,
        barrier=peers.barrier,
        pieces=_pieces(trainer, leaves),
        owners=_owners(trainer, leaves),
        keep=train.keep,
    )


def load(trainer: Trainer, folder: Path, peers: Peers) -> State:
    """The state of a checkpoint folder.

    Raises: CheckpointError naming whatever differs from this run's layout and model.
    """
    like = _like(trainer)
    leaves = _stored(trainer, like)
    loaded = checkpoint.load(
        folder,
        rank=peers.place.rank,
        world=peers.place.world,
        expected={name: (tuple(x.shape), x.dtype) for name, x in leaves.items()},
        layout=layout(trainer.plan),
        owners=_owners(trainer, leaves),
        device=peers.device,
    )
    params = {p: loaded.tensors[f"params.{p}"] for p in tree.flatten(like.params)}
    tensors = {n.removeprefix("opt."): x for n, x in loaded.tensors.items() if n.startswith("opt.")}
    scalars = {n.removeprefix("opt."): x for n, x in loaded.scalars.items()}
    opt = optim.restore_state(like.opt, tensors, scalars)
    return trainer.adopt(State(loaded.step, tree.unflatten(params), opt))


def _like(trainer: Trainer) -> State:
    """A state of the right shapes and types without memory."""
    plan = trainer.plan

    def empty(spec: ParamSpec) -> Tensor:
        return torch.empty(
            local_shape(spec, plan.mesh), dtype=spec.dtype_among(plan.dtype), device="meta"
        )

    params = tree.map(empty, trainer.stage.specs)
    return State(0, params, build_optimizer(plan).init(tree.flatten(params)))


def _stored(trainer: Trainer, state: State) -> dict[str, Tensor]:
    """A state's tensors by name. Reported values (a norm) are of one type in every checkpoint."""
    leaves = state_leaves(state)
    return {n: x if owner(n, trainer.plan.table) else x.double() for n, x in leaves.items()}


def _pieces(trainer: Trainer, leaves: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Where each tensor lies in the whole one; an optimizer's lies where its parameter does."""
    world, specs = _processes(trainer), tree.flatten(trainer.stage.specs)
    out = {}
    for name, x in leaves.items():
        path = owner(name, trainer.plan.table)
        if path and tuple(x.shape) == local_shape(specs[path], world.mesh):
            start = tuple(a for a, _ in window(specs[path], world.mesh, world.coords))
            out[name] = Piece(global_shape=specs[path].shape, start=start, spec=str(specs[path].p))
    return out


def _owners(trainer: Trainer, leaves: Mapping[str, Tensor]) -> dict[str, int]:
    """The first rank of each tensor's replica group; rank 0 for what belongs to no parameter."""
    world, table = _processes(trainer), trainer.plan.table
    paths = {name: owner(name, table) for name in leaves}
    return {
        name: first_holder(world.mesh, world.rank, table[path].group) if path else 0
        for name, path in paths.items()
    }


def first_holder(mesh: Mesh, rank: int, group: Group) -> int:
    """The lowest rank that holds the same piece."""
    axes, stages = group
    return min(mesh.group_of(rank, *axes, stages=stages))


def _processes(trainer: Trainer) -> ProcessWorld:
    assert isinstance(trainer.world, ProcessWorld), "checkpoints are written by processes"
    return trainer.world
