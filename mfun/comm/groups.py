"""`Groups`: every communication axis a function may use, passed to it. Nothing is global."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from mfun.comm.axis import Axis, Scope
from mfun.comm.memory import HostMemory
from mfun.mesh import FAMILIES, AxisLike, Mesh

GroupKey = tuple[frozenset[AxisLike], tuple[int, ...] | None]


def group_key(axes: tuple[AxisLike, ...], stages: tuple[int, ...] | None = None) -> GroupKey:
    """What identifies a group: its axes in any order, and the pipeline stages it joins."""
    return frozenset(axes), stages


def group_name(axes: tuple[AxisLike, ...], stages: tuple[int, ...] | None = None) -> str:
    """A readable name, as `dp_cp` or `dp@stages(0, 3)`."""
    name = "_".join(map(str, axes))
    return f"{name or 'self'}@stages{stages}" if stages is not None else name or "self"


class Groups:
    """The axes of one rank: `groups.tp`, `groups["dp_cp"]`, `groups.over("tp", "dp")`.

    Args:
        mesh: the mesh.
        rank: this rank's number; a batched 0-dim tensor inside `simulate`.
        make: builds the axis of a group key, or raises KeyError.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int | Tensor,
        make: Callable[[tuple[AxisLike, ...], tuple[int, ...] | None], Axis],
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self._make = make

    def over(self, *axes: AxisLike, stages: tuple[int, ...] | None = None) -> Axis:
        """The axis joining the ranks that differ only in `axes` (and are on `stages`).

        Positions on it follow the mesh's order, in whatever order the axes are named: in the usual
        one, `over("dp", "cp")` numbers its ranks as the dim entry `P(("dp", "cp"))` does.

        Raises:
            KeyError: the group was not made; the message names it and says how.
        """
        return self._make(axes, stages)

    def __getitem__(self, family: str) -> Axis:
        if family not in FAMILIES:
            raise KeyError(f"no group {family!r}; there are {sorted(FAMILIES)}")
        return self.over(*FAMILIES[family])

    @property
    def tp(self) -> Axis:
        """Tensor-parallel axis."""
        return self.over("tp")

    @property
    def dp(self) -> Axis:
        """Data-parallel axis."""
        return self.over("dp")

    @property
    def cp(self) -> Axis:
        """Context-parallel axis."""
        return self.over("cp")

    @property
    def pp(self) -> Axis:
        """Pipeline axis; only where ranks are processes."""
        return self.over("pp")


# Only Python numbers are cached here, and an axis is made anew on each call: a tensor made inside a
# torch.func transform belongs to its level, and must not be met again outside of it.


@functools.lru_cache(maxsize=1024)
def _stage_partition(
    mesh: Mesh, axes: tuple[AxisLike, ...]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Groups of one stage as stage positions, and each rank's position within its group."""
    partition = mesh.stage_groups(*axes)
    place = {rank: i for group in partition for i, rank in enumerate(group)}
    return partition, tuple(place[rank] for rank in range(mesh.stage_size))


def simulated_groups(mesh: Mesh, rank: Tensor, scope: Scope, *, check: bool) -> Groups:
    """Groups of one stage's ranks inside a vmap over them.

    Args:
        mesh: the mesh.
        rank: the batched stage position.
        scope: closed when the vmap ends.
        check: assert declared types.
    """

    def make(axes: tuple[AxisLike, ...], stages: tuple[int, ...] | None) -> Axis:
        if "pp" in axes or stages is not None:
            raise KeyError(
                "the pipeline axis is not simulated by vmap; stages run in the mailbox "
                "(mfun.pipeline.mailbox), and cross-stage sums go through its World"
            )
        partition, positions = _stage_partition(mesh, axes)
        return Axis(
            name=group_name(axes),
            size=len(partition[0]),
            index=torch.tensor(positions, device=rank.device)[rank],
            partition=partition,
            check=check,
            scope=scope,
        )

    return Groups(mesh, rank, make)


def single_groups() -> Groups:
    """Groups of one device alone: every axis has size 1."""
    mesh = Mesh()
    return process_groups(mesh, 0, {})


def process_groups(
    mesh: Mesh, rank: int, made: Mapping[GroupKey, object], *, on_host: bool = False
) -> Groups:
    """Groups of a process, from the torch process groups made by `distribute`.

    Args:
        mesh: the mesh.
        rank: this process's.
        made: the groups that it is in.
        on_host: large pieces on CPU may go through memory that the ranks of one host share.
    """

    # Made here: a tensor made under a transform of the user's would belong to it.
    alone = torch.tensor(0)
    index = {k: torch.tensor(mesh.group_of(rank, *k[0], stages=k[1]).index(rank)) for k in made}

    @functools.cache
    def make(axes: tuple[AxisLike, ...], stages: tuple[int, ...] | None) -> Axis:
        name, key = group_name(axes, stages), group_key(axes, stages)
        ranks = mesh.group_of(rank, *axes, stages=stages)
        if len(ranks) > 1 and key not in made:
            raise KeyError(
                f"group {name!r} was not made; add it to the `extra` argument of `distribute` on "
                f"every rank (made: {sorted(map(str, _names(made)))})"
            )
        group = made[key] if len(ranks) > 1 else None
        at = ranks.index(rank)
        memory = HostMemory(group, ranks, at) if group is not None and on_host else None
        return Axis(
            name, len(ranks), index.get(key, alone), group, ranks=ranks, at=at, memory=memory
        )

    return Groups(mesh, rank, make)


def _names(made: Mapping[GroupKey, object]) -> Iterator[str]:
    for axes, stages in made:
        yield group_name(tuple(sorted(axes, key=str)), stages)
