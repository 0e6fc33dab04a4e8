"""A training state as a checkpoint and back, to the bit, from any layout into any other.

By the name of a parameter stand it, its moments and its master copy, each once in the whole
checkpoint, cut as the ranks hold them:

    not sharded     boxes of the whole; ranks that hold the same box share the writing by turns
    sharded         this rank's run of each leaf in its shard of a bucket; parameters, too
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor

from mfun import checkpoint, flat, optim, rng, tree
from mfun import config as cfg
from mfun.checkpoint import CheckpointError, Order, Piece, Rules, check_files
from mfun.checkpoint.pieces import whole
from mfun.comm.process import ProcessWorld
from mfun.grads.table import Group
from mfun.mesh import AxisLike, Mesh
from mfun.spec import ParamSpec, local_shape, window
from mfun.train.plan import Plan
from mfun.train.ranks import Peers
from mfun.train.replicas import owner, state_leaves
from mfun.train.rounding import place
from mfun.train.step import State, Trainer, build_optimizer

STRICT = Rules()
_SHARD = re.compile(r"(.+)\.bucket\.(\d+)")


class Held(NamedTuple):
    """A part of a state: its name, where it lies in the whole, its memory, and who writes it."""

    name: str
    piece: Piece
    tensor: Tensor
    writer: int


class _Known(NamedTuple):
    """What decides who holds what, found once for all parameters: each of these walks over all."""

    plan: Plan
    world: ProcessWorld
    specs: Mapping[str, ParamSpec]
    buckets: Sequence[flat.Bucket]
    spans: Mapping[str, tuple[int, flat.Span]]
    boxes: Mapping[str, Piece]


def layout(plan: Plan) -> dict[str, Any]:
    """What decides which rank holds what, as JSON values."""
    mesh, parallel = plan.mesh, plan.config.parallel
    sizes = {axis: mesh.size(axis) for axis in ("tp", "cp", "ep", "etp", "dp", "pp")}
    blocks = [[*blocks] for blocks in cfg.stage_layers(plan.config)]
    more = {"order": mesh.order, "blocks": blocks, "shard_copies": parallel.shard_copies}
    return {**sizes, **more, "sharding": parallel.sharding}


def order(trainer: Trainer, state: State, folder: Path, peers: Peers) -> Order:
    """What this rank is to save of a state.

    Args:
        trainer: whose plan and world the state is of.
        state: this rank's; its tensors are not copied.
        folder: of the run.
        peers: the ranks.
    """
    plan, rank = trainer.plan, peers.place.rank
    parts = _some(_held(trainer, state, shard_params=True))
    own = [held for held in parts if held.writer == rank]
    return Order(
        run_dir=folder,
        step=state.step,
        consumed=cfg.rampup.consumed(plan.config.train, state.step),
        key=_key(plan, state.step),
        tensors={held.name: held.tensor for held in own},
        pieces={held.name: held.piece for held in own},
        scalars={f"opt.{k}": v for k, v in optim.state_scalars(state.opt).items()},
        layout=layout(plan),
        config=cfg.to_toml(plan.config),
        rank=rank,
        world=peers.place.world,
        keep=plan.config.train.keep,
    )


def save(trainer: Trainer, state: State, folder: Path, peers: Peers) -> Path:
    """Write the checkpoint of a state; every rank calls this.

    Args: as `order`.

    Returns: the checkpoint's folder.
    """
    return checkpoint.save(order(trainer, state, folder, peers), peers.any)


def load(
    trainer: Trainer,
    folder: Path,
    peers: Peers,
    rules: Rules = STRICT,
    into: State | None = None,
) -> State:
    """The state of a checkpoint folder, whatever layout saved it; every rank calls this.

    Args:
        trainer: whose layout the state is to have.
        folder: of the checkpoint.
        peers: the ranks.
        rules: what may differ; tensors that may be missing and are have their initial values.
        into: a state of this trainer's whose memory is filled, as to go back to a checkpoint during
            a run: tensors that may be missing and are stay as they are. New memory if not given.

    Raises:
        CheckpointError: naming each tensor that this run's model does not have as the checkpoint
            does, a file that is damaged, or another position in the data.
    """
    plan = trainer.plan
    opened = checkpoint.open_checkpoint(folder, _expected(plan), rules)
    if rules == STRICT:
        _check_position(plan, opened)
    state = into or (trainer.init() if rules.missing else trainer.blank())
    mine = held(trainer, state)
    read(opened, mine, peers)
    opt = _restored(plan, state.opt, mine, opened.index.scalars, rules)
    return State(opened.index.step, state.params, opt)


def read(opened: checkpoint.Opened, parts: Sequence[Held], peers: Peers) -> None:
    """Fill this rank's parts; every rank calls this.

    Pieces that some rank reads in part are not compared with their hashes thereby, so ranks then
    share the reading of all files.

    Raises:
        CheckpointError: on every rank, if a file is damaged or cannot be read.
    """
    names = {part.name: (part.piece, part.tensor) for part in parts}
    some = _agreed(peers, opened, lambda: checkpoint.fill(opened, names))
    if peers.any(some):
        files = sorted(opened.index.files)[peers.place.rank :: peers.place.world]
        _agreed(peers, opened, lambda: bool(check_files(opened.folder, opened.index, files)))


def _agreed(peers: Peers, opened: checkpoint.Opened, work: Callable[[], bool]) -> bool:
    """What this rank's work gives, once it has succeeded on all ranks."""
    failure: Exception | None = None
    done = False
    try:
        done = work()
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(
            f"{error.filename or opened.folder} cannot be read ({error.strerror or error}): let it "
            f"be read, or delete {opened.folder} to resume from another checkpoint"
        )
    if peers.any(failure is not None):
        raise failure or CheckpointError(
            f"{opened.folder} was not loaded: another rank failed, see its error"
        )
    return done


def held(trainer: Trainer, state: State) -> list[Held]:
    """The parts of this rank's state, as they are filled from a checkpoint."""
    return _some(_held(trainer, state, shard_params=False))


def _restored(
    plan: Plan, opt: Any, filled: list[Held], stored: Mapping[str, Any], rules: Rules
) -> Any:
    """The optimizer's state whose tensors were filled, with its numbers and reported values."""
    tensors = {f"opt.{n}": x for n, x in optim.state_tensors(opt).items()}
    tensors |= {h.name: h.tensor for h in filled if owner(h.name, plan.table) is None}
    scalars = {rules.renamed(n): x for n, x in stored.items()}
    have = {f"opt.{n}": x for n, x in optim.state_scalars(opt).items()}
    scalars |= {n: x for n, x in have.items() if n not in scalars and rules.may_miss(n)}
    scalars = {n: x for n, x in scalars.items() if n in have or not rules.may_have(n)}
    return optim.restore_state(opt, _below(tensors), _below(scalars))


def _below(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("opt."): x for name, x in values.items()}


def _key(plan: Plan, step: int) -> tuple[int, ...]:
    return rng.key(plan.config.train.seed, "dropout", step).words


@functools.lru_cache(maxsize=1)
def _expected(plan: Plan) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor of the whole run, by the names of its parameters."""
    specs = plan.specs
    parallel = attrs.evolve(plan.config.parallel, offload_optimizer=False)  # of no memory at all
    near = attrs.evolve(plan, config=attrs.evolve(plan.config, parallel=parallel))
    leaves = {
        path: torch.empty(spec.shape, dtype=spec.dtype_among(plan.dtype), device="meta")
        for path, spec in specs.items()
    }
    state = State(0, tree.unflatten(leaves), build_optimizer(near).init(leaves))
    return {
        name: (specs[path].shape if (path := owner(name, plan.table)) else (), _kept(name, x, plan))
        for name, x in state_leaves(state).items()
    }


def _kept(name: str, x: Tensor, plan: Plan) -> torch.dtype:
    """Reported values (a norm) are of one type in every checkpoint."""
    return x.dtype if owner(name, plan.table) else torch.float64


def _check_position(plan: Plan, opened: checkpoint.Opened) -> None:
    """The run goes on with the samples and random numbers that would have come next."""
    index, train = opened.index, plan.config.train
    consumed, key = cfg.rampup.consumed(train, index.step), _key(plan, index.step)
    if (index.consumed, index.key) != (consumed, key):
        raise CheckpointError(
            f"{opened.folder} was saved after {index.consumed} samples, and step {index.step} of "
            f"this run comes after {consumed}, or its random keys are others; resume with the same "
            "train.global_batch, train.rampup and train.seed"
        )


def _held(trainer: Trainer, state: State, *, shard_params: bool) -> Iterator[Held]:
    """The parts of this rank's state, as they are written and read.

    Args:
        shard_params: where the optimizer is sharded, of whole parameters only this rank's shards.
    """
    plan, world = trainer.plan, _processes(trainer)
    buckets = plan.buckets(world.stage)
    specs, spans = plan.specs, flat.locate(buckets)
    boxes = {path: box_of(specs[path], world.mesh, world.coords) for path in spans}
    known = _Known(plan, world, specs, buckets, spans, boxes)
    leaves, turns = state_leaves(state), dict[Group, int]()
    shards = {name: match for name in leaves if (match := _SHARD.fullmatch(name))}
    boxes = [name for name in leaves if name not in shards]
    for name in sorted(boxes, key=lambda n: (-leaves[n].numel(), n)):
        path, x = owner(name, plan.table), leaves[name]
        if path is None:
            yield Held(name, whole(()), x.double(), 0)
        elif plan.sharded and shard_params:
            yield from _params_by_shard(known, path, x)
        else:
            group = plan.table[path].group
            turns[group] = turns.get(group, -1) + 1
            yield _box(known, name, path, x, turns[group])
    for name, match in shards.items():
        yield from _shard(known, buckets[int(match[2])], match[1], leaves[name])


def _some(parts: Iterator[Held]) -> list[Held]:
    """Without those that are nothing but padding."""
    return [held for held in parts if held.piece.count]


def _box(known: _Known, name: str, path: str, x: Tensor, turn: int) -> Held:
    """All that this rank holds of a tensor, without padding; its holders write in turn."""
    world, piece, (axes, stages) = known.world, known.boxes[path], known.plan.table[path].group
    holders = _holders(world.mesh, world.rank, tuple(axes), stages)
    kept = x[tuple(slice(0, n) for n in piece.box)]
    return Held(name, piece, kept, holders[turn % len(holders)])


@functools.lru_cache(maxsize=64)
def _holders(
    mesh: Mesh, rank: int, axes: tuple[AxisLike, ...], stages: tuple[int, ...] | None
) -> list[int]:
    """The ranks that hold the same part, of which there are a few kinds for many parameters."""
    return sorted(mesh.group_of(rank, *axes, stages=stages))


def box_of(spec: ParamSpec, mesh: Mesh, coords: Mapping[str, int]) -> Piece:
    """Where a rank's part of a parameter lies in the whole, without padding.

    Example:
        >>> from mfun.spec import P
        >>> spec = ParamSpec(shape=(37, 8), p=P("tp"), pads=(0,))
        >>> piece = box_of(spec, Mesh(tp=2), {"tp": 1})
        >>> piece.start, piece.box
        ((19, 0), (18, 8))
    """
    ranges = window(spec, mesh, coords)
    start, box = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
    return Piece(global_shape=spec.shape, start=start, box=box, spec=str(spec.p))


def _params_by_shard(known: _Known, path: str, x: Tensor) -> Iterator[Held]:
    """This rank's run of a parameter that every rank of a shard group holds whole."""
    index, span = known.spans[path]
    bucket, (shards, at, writer) = known.buckets[index], _place(known.plan, known.world, path)
    for part in flat.shard_pieces(bucket, shards, at):
        if part.path == path:
            piece = _run(known, part)
            low = part.start - span.start
            kept = x.view(-1)[low : low + piece.count].view(piece.shape)
            yield Held(f"params.{path}", piece, kept, writer)


def _shard(known: _Known, bucket: flat.Bucket, prefix: str, x: Tensor) -> Iterator[Held]:
    """The runs of leaves that this rank's shard of a bucket consists of."""
    shards, at, writer = _place(known.plan, known.world, bucket.spans[0].path)
    first, _ = flat.shard_range(bucket, shards, at)
    for part in flat.shard_pieces(bucket, shards, at):
        piece = _run(known, part)
        low = part.start - first
        kept = x[low : low + piece.count].view(piece.shape)
        yield Held(f"{prefix}.{part.path}", piece, kept, writer)


def _place(plan: Plan, world: ProcessWorld, path: str) -> tuple[int, int, int]:
    """Of the bucket of a leaf: how many shards it has, which is this rank's, and who writes it."""
    row, mesh = plan.table[path], world.mesh
    at = place(row.shard_axes, mesh, world.coords)
    holders = mesh.group_of(world.rank, *row.axes, stages=row.joined)
    same = [rank for rank in holders if place(row.shard_axes, mesh, mesh.coords(rank)) == at]
    return prod(map(mesh.size, row.shard_axes)), at, min(same)


def _run(known: _Known, part: flat.Piece) -> Piece:
    """A run of a rank's part of a parameter; rows that pad it at its end are left out."""
    spec, box = known.specs[part.path], known.boxes[part.path]
    if local_shape(spec, known.world.mesh)[1:] != box.box[1:]:
        raise CheckpointError(f"{part.path} is padded inside, and such shards cannot be saved")
    size = prod(box.box)
    low, high = min(part.offset, size), min(part.end, size)
    return Piece(
        global_shape=box.global_shape,
        start=box.start,
        box=box.box,
        first=low,
        count=high - low,
        spec=box.spec,
    )


def _processes(trainer: Trainer) -> ProcessWorld:
    assert isinstance(trainer.world, ProcessWorld), "checkpoints are written by processes"
    return trainer.world
