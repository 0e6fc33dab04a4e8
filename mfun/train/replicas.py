"""Whether replicas hold the same bits: a hash of every tensor, compared over its replica group.

Run after initial weights are drawn or a checkpoint is loaded: replicas that start apart stay apart,
and no later number shows it.

Megatron-LM broadcasts the parameters of the first data rank at this point instead. Here they are
drawn by global index, or read by name from one checkpoint, so ranks that differ have other code,
another file or bad memory: a broadcast would hide what the next step brings back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from torch import Tensor

from mfun import optim, tree
from mfun.comm.process import ProcessWorld
from mfun.comm.world import Waits
from mfun.grads import Reduction
from mfun.mesh import AxisLike
from mfun.train.step import State


class ReplicaError(RuntimeError):
    """Ranks that should hold the same bits do not; the message names tensors and ranks."""


def fingerprint(x: Tensor) -> int:
    """63 bits of the hash of a tensor's shape, type and bits; +0.0 and -0.0 differ, as do NaNs.

    Example:
        >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2))
        True
        >>> fingerprint(torch.zeros(2)) == fingerprint(-torch.zeros(2))
        False
    """
    flat = x.detach().cpu().contiguous().reshape(-1)
    digest = sha256(f"{x.dtype}{[*x.shape]}".encode())
    digest.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return int.from_bytes(digest.digest()[:8], "little") >> 1


def owner(path: str, paths: Mapping[str, Reduction]) -> str | None:
    """The parameter that an optimizer tensor belongs to: the longest path that it ends in.

    Example:
        >>> owner("adamw.mu.a.w", {"w": None, "a.w": None}), owner("clip.norm", {"w": None})
        ('a.w', None)
    """
    keys = path.split(".")
    tails = (".".join(keys[i:]) for i in range(len(keys)))
    return next((tail for tail in tails if tail in paths), None)


def state_leaves(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by name: `params.<path>` and `opt.<path>`."""
    params = {f"params.{p}": x for p, x in tree.flatten(state.params).items()}
    return params | {f"opt.{p}": x for p, x in optim.state_tensors(state.opt).items()}


def check_replicas(
    world: ProcessWorld, table: Mapping[str, Reduction], state: State
) -> Waits[None]:
    """Compare every parameter and optimizer tensor over the ranks that hold the same piece of it.

    Args:
        world: of this process.
        table: the reductions, whose groups are the replica groups.
        state: this rank's.

    Raises:
        ReplicaError: on every rank of the groups that disagree, naming tensors and ranks.
    """
    groups: dict[tuple[int, ...], list[tuple[str, int]]] = {}
    for name, x in sorted(state_leaves(state).items()):
        path = owner(name, table)
        ranks = _group(world, table[path]) if path else (world.rank,)
        if len(ranks) > 1:
            groups.setdefault(ranks, []).append((name, fingerprint(x)))
    wrong: dict[str, str] = {}
    order = sorted({row.group for row in table.values()}, key=str)
    for axes, stages in order:
        ranks = world.mesh.group_of(world.rank, *axes, stages=stages) if _in(world, stages) else ()
        leaves = groups.pop(ranks, []) if ranks else []
        if leaves:
            rows = yield from _gather(world, axes, stages, ranks, [h for _, h in leaves])
            wrong |= _differing(rows, ranks, [name for name, _ in leaves])
    if wrong:
        listed = [wrong[name] for name in state_leaves(state) if name in wrong]
        raise ReplicaError(
            "ranks that hold the same tensors hold different bits: "
            + "; ".join(listed[:5])
            + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            + ". They started apart: give all ranks the same code, seed, data and checkpoint."
        )


def _in(world: ProcessWorld, stages: tuple[int, ...] | None) -> bool:
    return stages is None or world.stage in stages


def _group(world: ProcessWorld, row: Reduction) -> tuple[int, ...]:
    return world.mesh.group_of(world.rank, *row.axes, stages=row.joined)


def _gather(
    world: ProcessWorld,
    axes: Sequence[AxisLike],
    stages: tuple[int, ...] | None,
    ranks: tuple[int, ...],
    hashes: Sequence[int],
) -> Waits[Tensor]:
    """Every rank's hashes: (ranks, leaves), by a sum of rows of which each rank fills its own."""
    rows = torch.zeros(len(ranks), len(hashes), dtype=torch.int64, device=world.device)
    rows[ranks.index(world.rank)] = torch.tensor(hashes, device=world.device)
    return (yield from world.all_reduce(rows, axes, stages))


def _differing(rows: Tensor, ranks: tuple[int, ...], names: Sequence[str]) -> dict[str, str]:
    """Name -> a sentence, for every tensor whose hashes are not all equal."""
    out = {}
    for name, column in zip(names, rows.T.tolist(), strict=True):
        most = max(set(column), key=column.count)
        odd = [rank for rank, value in zip(ranks, column, strict=True) if value != most]
        if odd:
            out[name] = f"{name} (rank{'s' * (len(odd) > 1)} {odd} against the others of {ranks})"
    return out
