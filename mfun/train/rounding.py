"""Random words for rounding parameters by chance: functions of the parameter and the index there.

A leaf by path has the words of its elements in the whole parameter, so every layout rounds alike. A
shard has those of its elements in its bucket: layouts of other buckets round otherwise, but all
ranks that hold an element, and the stages that share a tied one, draw the same word for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mfun import rng
from mfun.comm.world import World
from mfun.grads import shard_name
from mfun.mesh import AxisLike, Mesh
from mfun.optim.masters import Words
from mfun.rng import Grid, Key
from mfun.spec import ParamSpec, local_shape, piece_index
from mfun.train.plan import Plan


def grid(spec: ParamSpec, mesh: Mesh, coords: Mapping[str, int]) -> Grid:
    """The global coordinates of a rank's piece; rows that pad it are numbered on.

    Example:
        >>> from mfun.spec import P
        >>> grid(ParamSpec(shape=(37, 8), p=P("tp"), pads=(0,)), Mesh(tp=2), {"tp": 1}).coords
        (range(19, 38), range(0, 8))
    """
    ranges = []
    for dim, length in enumerate(local_shape(spec, mesh)):
        start = length * piece_index(spec.p, dim, mesh, coords)
        ranges.append(range(start, start + length))
    return Grid(tuple(ranges), spec.shape)


def words_by_path(plan: Plan, world: World) -> Words:
    """For leaves by path."""
    specs = plan.specs

    def words(key: Key, path: str, leaf: Tensor) -> Tensor:
        drawn = world.build(
            lambda coords: {"x": rng.bits(key.fold(path), grid(specs[path], plan.mesh, coords))}
        )
        return drawn["x"].to(leaf.device)

    return words


def words_by_shard(plan: Plan, world: World) -> Words:
    """For the shards of a stage's buckets."""
    buckets = {shard_name(b.index): b for b in plan.buckets(world.stage)}

    def words(key: Key, name: str, leaf: Tensor) -> Tensor:
        bucket = buckets[name]
        path = bucket.spans[0].path  # names it on every stage, which a bucket's number does not
        axes, size = plan.table[path].shard_axes, leaf.shape[-1]

        def one(coords: Mapping[str, int]) -> dict[str, Tensor]:
            start = size * place(axes, plan.mesh, coords)
            piece = Grid((range(start, start + size),), (bucket.size,))
            return {"x": rng.bits(key.fold("bucket", path), piece)}

        return world.build(one)["x"].to(leaf.device)

    return words


def place(axes: tuple[AxisLike, ...], mesh: Mesh, coords: Mapping[str, int]) -> int:
    """Which shard of a bucket a rank holds: its place among the ranks that differ in these axes."""
    rank = mesh.rank(**coords)
    return mesh.group_of(rank, *axes).index(rank) if axes else 0
