"""Ranks, coordinates and groups of every small mesh, by enumeration over the real `Mesh`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from math import prod

from mfun.mesh import DENSE, EXPERT, FAMILIES, Mesh, partial_optimizer_groups
from proofs.claims import Claim, claim

ORDERS = ["-".join((*rest, "pp")) for rest in permutations(("tp", "cp", "ep", "dp"))] + [
    "pp-tp-cp-ep-dp",
    "tp-pp-ep-dp-cp",
]


def divisors(n: int) -> list[int]:
    """Of n, ascending."""
    return [d for d in range(1, n + 1) if n % d == 0]


def small(world: int) -> Iterator[Mesh]:
    """Every mesh of exactly so many ranks in the default order, with every expert view."""
    for tp in divisors(world):
        for cp in divisors(world // tp):
            for dp in divisors(world // tp // cp):
                pp, stage = world // tp // cp // dp, tp * cp * dp
                for etp in divisors(stage):
                    for ep in divisors(stage // etp):
                        yield Mesh(tp=tp, cp=cp, dp=dp, pp=pp, etp=etp, ep=ep)


def reordered(world: int) -> Iterator[Mesh]:
    """Every such mesh in many orders; where pp is not last, dense and expert stages agree."""
    for mesh in small(world):
        for order in ORDERS if mesh.etp == mesh.tp and mesh.ep == 1 else ():
            if not order.endswith("pp") and mesh.cp > 1:
                continue  # refused: edp would not be dp
            yield Mesh(tp=mesh.tp, cp=mesh.cp, dp=mesh.dp, pp=mesh.pp, order=order)


def bijection(mesh: Mesh) -> Iterator[str]:
    """Coordinates back to ranks, in both views; each set of coordinates once."""
    for coords, view in ((mesh.coords, DENSE), (mesh.expert_coords, EXPERT)):
        seen = set()
        for rank in range(mesh.world):
            where = coords(rank)
            if any(not 0 <= where[axis] < mesh.size(axis) for axis in view):
                yield f"{mesh}: rank {rank} has coordinates {where}"
            if mesh.rank(**where) != rank:
                yield f"{mesh}: rank {rank} has the coordinates of {mesh.rank(**where)}"
            seen.add(tuple(where[axis] for axis in view))
        if len(seen) != mesh.world or prod(map(mesh.size, view)) != mesh.world:
            yield f"{mesh}: {len(seen)} coordinates for {mesh.world} ranks"


def partition(mesh: Mesh) -> Iterator[str]:
    """Each family: every rank in one group, of the right size, which differs on its axes only."""
    for name, axes in FAMILIES.items():
        groups = mesh.groups(*axes)
        expert = not set(axes) <= set(DENSE)
        coords, view = (mesh.expert_coords, EXPERT) if expert else (mesh.coords, DENSE)
        if sorted(rank for group in groups for rank in group) != list(range(mesh.world)):
            yield f"{mesh}: the groups of {name} are no partition: {groups}"
        for group in groups:
            fixed = {tuple(coords(r)[a] for a in view if a not in axes) for r in group}
            if len(fixed) != 1 or len(group) != prod(map(mesh.size, axes)):
                yield f"{mesh}: {group} is no group of {name}"
            if any(mesh.group_of(rank, *axes) != group for rank in group):
                yield f"{mesh}: `group_of` and `groups` differ on {group}"


def instances(mesh: Mesh) -> Iterator[str]:
    """Groups of an optimizer in several instances: both are partitions that meet in one rank."""
    for count in divisors(mesh.dp * mesh.cp):
        intra, inter = partial_optimizer_groups(mesh, count)
        for groups in (intra, inter):
            if sorted(rank for group in groups for rank in group) != list(range(mesh.world)):
                yield f"{mesh}, {count} instances: no partition"
        if any(len({*a} & {*b}) > 1 for a in intra for b in inter):
            yield f"{mesh}, {count} instances: two ranks hold one shard of one instance"


def claims(world: int = 8) -> Iterator[Claim]:
    """All meshes of at most `world` ranks."""
    plain = [mesh for n in range(1, world + 1) for mesh in small(n)]
    turned = [mesh for n in range(1, world + 1) for mesh in reordered(n)]
    for says, check, meshes in (
        ("ranks and coordinates correspond one to one", bijection, plain + turned),
        ("each family of groups partitions the world", partition, plain + turned),
        ("optimizer instances: shards and their copies partition the world", instances, plain),
    ):
        yield claim(f"{says}, {len(meshes)} meshes", (p for mesh in meshes for p in check(mesh)))
