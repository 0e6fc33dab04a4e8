"""Ranks, their coordinates on named axes, and the groups they form. Integers only, no torch.

A mesh is read in two ways. The *dense* view has the axes ``tp cp dp pp``. The *expert* view refolds
the ranks of each pipeline stage into ``etp ep edp``; ``pp`` is common to both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import attrs
import numpy as np

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
TOKENS = ("tp", "cp", "ep", "dp", "pp")

Groups = tuple[tuple[int, ...], ...]


@attrs.frozen
class Factor:
    """Part of an axis: its coordinate is split as ``outer * (size / parts) + inner``.

    Key and value heads fewer than ``tp`` use it: with ``tp`` 4 and two heads, ``Factor("tp", 2)``
    says which head a rank holds and its ``inner`` half which copy of it.

    Args:
      axis: the mesh axis that is split.
      parts: size of the outer part; divides the axis.
      part: which of the two parts is meant.

    Example:
      >>> mesh = Mesh(tp=4)
      >>> [mesh.index(rank, Factor("tp", 2)) for rank in range(4)]
      [0, 0, 1, 1]
      >>> [mesh.index(rank, Factor("tp", 2).inner) for rank in range(4)]
      [0, 1, 0, 1]
    """

    axis: str
    parts: int
    part: Literal["outer", "inner"] = attrs.field(
        default="outer", validator=attrs.validators.in_(("outer", "inner"))
    )

    @property
    def outer(self) -> Factor:
        """The slow part, of size ``parts``."""
        return attrs.evolve(self, part="outer")

    @property
    def inner(self) -> Factor:
        """The fast part, of size ``size / parts``."""
        return attrs.evolve(self, part="inner")

    def __str__(self) -> str:
        """`tp/inner2`: the inner half of tp cut in two."""
        return f"{self.axis}/{self.part}{self.parts}"


AxisLike = str | Factor


def mesh_axis(axis: AxisLike) -> str:
    """The mesh axis that is meant, or of which this is a factor.

    Example:
      >>> mesh_axis("tp"), mesh_axis(Factor("tp", 2))
      ('tp', 'tp')
    """
    return axis.axis if isinstance(axis, Factor) else axis


class Digit(NamedTuple):
    """One digit of a rank in mixed radix: ``rank // stride % size``."""

    axis: AxisLike
    size: int
    stride: int


def _positive(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(
            f"mesh.{attribute.name} is {value!r}; give a whole number of at least 1 "
            "(1 means the axis is not used)."
        )


def _positive_or_none(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None:
        _positive(instance, attribute, value)


@attrs.frozen(kw_only=True)
class Mesh:
    """Sizes of the named axes and the order in which they number the ranks.

    ``rank = sum_i coord_i * prod_{j < i} size_j`` over the axes of ``order``, leftmost fastest.
    The dense view skips ``ep``; the expert view replaces ``tp`` by ``etp`` and ``dp`` by ``edp``,
    skips ``cp``, and has ``edp = tp * cp * dp / (etp * ep)``.

    Args:
      tp: tensor parallel size.
      cp: context parallel size.
      ep: expert parallel size; refolds ranks and does not add any.
      dp: data parallel size.
      pp: pipeline stages.
      etp: tensor parallel size inside an expert; None means ``tp``.
      order: the five names joined by dashes; one that is left out must have size 1.

    Raises:
      ValueError: a size below 1, an unknown or repeated name in ``order``, an expert view that
        does not fold, or one whose pipeline groups would differ from the dense view's.

    Example:
      >>> mesh = Mesh(tp=2, dp=4)
      >>> mesh.groups("dp")
      ((0, 2, 4, 6), (1, 3, 5, 7))
      >>> mesh.coords(5)
      {'tp': 1, 'cp': 0, 'dp': 2, 'pp': 0}

    Source: Megatron-LM core/parallel_state.py, RankGenerator.
    Proof: proofs/Mesh.v, rank_coords, coords_rank, coords_stride.
    """

    tp: int = attrs.field(default=1, validator=_positive)
    cp: int = attrs.field(default=1, validator=_positive)
    ep: int = attrs.field(default=1, validator=_positive)
    dp: int = attrs.field(default=1, validator=_positive)
    pp: int = attrs.field(default=1, validator=_positive)
    etp: int | None = attrs.field(default=None, validator=_positive_or_none)
    order: str = "tp-cp-ep-dp-pp"

    def __attrs_post_init__(self) -> None:
        _check_order(self)
        _check_expert_view(self)

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, ``tp * cp * dp``."""
        return self.tp * self.cp * self.dp

    @property
    def world(self) -> int:
        """All ranks, ``tp * cp * dp * pp``."""
        return self.stage_size * self.pp

    @property
    def edp(self) -> int:
        """Ranks of a stage that hold the same expert shard, ``stage_size / (etp * ep)``."""
        return self.stage_size // (self.size("etp") * self.ep)

    def size(self, axis: AxisLike) -> int:
        """Size of an axis of either view, or of a factor of one.

        Example:
          >>> Mesh(tp=4, dp=2, ep=2, etp=1).size("edp")
          4
        """
        if isinstance(axis, Factor):
            outer, inner = self._split(axis)
            return outer if axis.part == "outer" else inner
        if axis == "etp":
            return self.tp if self.etp is None else self.etp
        if axis not in DENSE + EXPERT:
            raise ValueError(_unknown(axis))
        return getattr(self, axis)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank in the dense view."""
        return self._coords(rank, DENSE)

    def expert_coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank in the expert view."""
        return self._coords(rank, EXPERT)

    def table(self, *, expert: bool = False) -> dict[str, np.ndarray]:
        """Coordinates of all ranks at once: for each axis of the view, one entry a rank."""
        view = EXPERT if expert else DENSE
        ranks = np.arange(self.world)
        found = {d.axis: ranks // d.stride % d.size for d in self.digits(*view)}
        return {axis: found[axis] for axis in view}

    def index(self, rank: int, axis: AxisLike) -> int:
        """Coordinate of a rank on one axis, or on a factor of one."""
        self._check_rank(rank)
        digit = next(d for d in self.digits(axis) if d.axis == axis)
        return rank // digit.stride % digit.size

    def rank(self, **coords: int) -> int:
        """Rank at these coordinates, all of one view; an axis left out is at 0.

        Example:
          >>> Mesh(tp=2, dp=2, pp=2).rank(tp=1, pp=1)
          5
        """
        digits = self.digits(*coords)
        for d in digits:
            where = coords.get(str(d.axis), 0)
            if not 0 <= where < d.size:
                raise ValueError(
                    f"coordinate {d.axis}={where} is outside the axis, which has size {d.size}; "
                    f"give 0 to {d.size - 1}."
                )
        return sum(coords.get(str(d.axis), 0) * d.stride for d in digits)

    def groups(self, *axes: AxisLike, stages: Iterable[int] | None = None) -> Groups:
        """Partition of the ranks into groups that differ only in these axes.

        Ranks ascend in a group and groups ascend by their first rank's other coordinates, as in
        Megatron.

        Args:
          axes: all of the dense or all of the expert view (``pp`` is in both); none gives
            singletons.
          stages: take the ranks of these pipeline stages only, and let a group span them.

        Raises:
          ValueError: an unknown axis, axes of both views, a stage outside the mesh.

        Example:
          >>> Mesh(tp=2, pp=3).groups(stages=(0, 2))
          ((0, 4), (1, 5))

        Proof: proofs/Mesh.v, groups_partition, group_size.
        """
        digits = self.digits(*axes)[::-1]
        ranks = np.arange(self.world).reshape([d.size for d in digits])
        names = [d.axis for d in digits]
        inside = _inside(axes, names)
        if stages is not None:
            pp = names.index("pp")
            ranks = ranks.take(self._stages(stages), axis=pp)
            inside.add(pp)
        outside = [i for i in range(ranks.ndim) if i not in inside]
        size = prod(ranks.shape[i] for i in inside)
        table = ranks.transpose(outside + sorted(inside)).reshape(-1, size)
        return tuple(map(tuple, table.tolist()))

    def group_of(
        self, rank: int, *axes: AxisLike, stages: Iterable[int] | None = None
    ) -> tuple[int, ...]:
        """The group of ``groups(*axes, stages=stages)`` that holds this rank.

        Worked out from the rank alone, so it costs the size of the group, not of the world.
        """
        self._check_rank(rank)
        digits = self.digits(*axes)
        names = [d.axis for d in digits]
        moving: dict[int, Sequence[int]] = {i: range(digits[i].size) for i in _inside(axes, names)}
        if stages is not None:
            kept = self._stages(stages)
            if self.index(rank, "pp") not in kept:
                raise ValueError(
                    f"rank {rank} is on pipeline stage {self.index(rank, 'pp')}, which is not one "
                    f"of stages {tuple(kept)}; it has no such group."
                )
            moving[names.index("pp")] = kept
        base = rank - sum(
            rank // digits[i].stride % digits[i].size * digits[i].stride for i in moving
        )
        steps = [[k * digits[i].stride for k in moving[i]] for i in moving]
        return tuple(sorted(base + sum(step) for step in itertools.product(*steps)))

    def stage_ranks(self, stage: int) -> tuple[int, ...]:
        """Ranks of a pipeline stage, ascending; the place in it is the *stage position*."""
        return self.groups(*DENSE, stages=(stage,))[0]

    def stage_groups(self, *axes: AxisLike) -> Groups:
        """The partition of one stage by these axes, in stage positions; equal for every stage.

        Example:
          >>> Mesh(pp=2, tp=2, dp=2, order="pp-tp-dp").stage_groups("dp")
          ((0, 2), (1, 3))
        """
        if "pp" in map(mesh_axis, axes):
            raise ValueError("stage_groups is about one stage; name no 'pp', or use groups().")
        place = {rank: position for position, rank in enumerate(self.stage_ranks(0))}
        groups = self.groups(*axes, stages=(0,))
        return tuple(tuple(place[rank] for rank in group) for group in groups)

    def neighbours(self, rank: int) -> tuple[int | None, int | None]:
        """Ranks at the same place of the previous and the next stage; None past an end."""
        pp = next(d for d in self.digits() if d.axis == "pp")
        stage = self.index(rank, "pp")
        return (
            rank - pp.stride if stage > 0 else None,
            rank + pp.stride if stage < pp.size - 1 else None,
        )

    def digits(self, *axes: AxisLike) -> list[Digit]:
        """Digits of a rank, fastest first, in the view these axes belong to.

        An axis of which a factor is named comes as two digits, its inner part first.
        """
        view = _view(axes)
        factors = {axis.axis: axis for axis in axes if isinstance(axis, Factor)}
        for axis in axes:
            if isinstance(axis, Factor) and axis.parts != factors[axis.axis].parts:
                raise ValueError(
                    f"axis {axis.axis!r} is cut in {axis.parts} and in {factors[axis.axis].parts} "
                    "parts at once; use one number."
                )
        digits, stride = [], 1
        for name in _ordered(self, view):
            for axis in (
                [name] if name not in factors else [factors[name].inner, factors[name].outer]
            ):
                digits.append(Digit(axis, self.size(axis), stride))
                stride *= digits[-1].size
        return digits

    def _coords(self, rank: int, view: tuple[str, ...]) -> dict[str, int]:
        self._check_rank(rank)
        found = {d.axis: rank // d.stride % d.size for d in self.digits(*view)}
        return {axis: found[axis] for axis in view}

    def _split(self, factor: Factor) -> tuple[int, int]:
        size = self.size(factor.axis)
        if type(factor.parts) is not int or factor.parts < 1 or size % factor.parts:
            raise ValueError(
                f"axis {factor.axis!r} of size {size} cannot be split in {factor.parts!r} parts; "
                f"use a divisor of {size}."
            )
        return factor.parts, size // factor.parts

    def _stages(self, stages: Iterable[int]) -> list[int]:
        kept = sorted(set(stages))
        if not kept or kept[0] < 0 or kept[-1] >= self.pp:
            raise ValueError(
                f"stages {tuple(kept)} are not all pipeline stages of this mesh; pp is {self.pp}, "
                f"so give some of 0 to {self.pp - 1}."
            )
        return kept

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise ValueError(
                f"rank {rank} is outside the mesh, whose world is {self.world} ranks; "
                f"give 0 to {self.world - 1}."
            )


FAMILIES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "cp": ("cp",),
    "dp_cp": ("dp", "cp"),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
    "ep": ("ep",),
    "etp": ("etp",),
    "edp": ("edp",),
    "tp_ep": ("etp", "ep"),
}
"""The named groups and the axes each spans."""


def embedding_groups(mesh: Mesh, stages: Iterable[int] | None = None) -> Groups:
    """Ranks that hold copies of one shard of a tied word embedding.

    Args:
      mesh: the mesh.
      stages: stages with a copy; by default the first and the last.

    Example:
      >>> embedding_groups(Mesh(tp=2, pp=4))
      ((0, 6), (1, 7))
    """
    return mesh.groups(stages=(0, mesh.pp - 1) if stages is None else stages)


def position_embedding_groups(mesh: Mesh, stages: Iterable[int] = (0,)) -> Groups:
    """Ranks that hold copies of one position table; by default on the first stage only."""
    return mesh.groups(stages=stages)


def partial_optimizer_groups(
    mesh: Mesh, instances: int, *, expert: bool = False
) -> tuple[Groups, Groups]:
    """Groups of a distributed optimizer that exists in several equal instances.

    A data-parallel group of n ranks is cut in ``instances`` runs of n / instances: each run
    (*intra*) shards one optimizer, and the ranks at equal places of the runs (*inter*) hold the
    same shard.

    Args:
      mesh: the mesh.
      instances: how many optimizers; divides the size of the data-parallel group.
      expert: cut the groups of ``edp`` instead of those of ``dp`` and ``cp``.

    Returns:
      The intra and the inter groups, both partitions of the world.

    Raises:
      ValueError: ``instances`` does not divide the group.

    Example:
      >>> partial_optimizer_groups(Mesh(dp=4), 2)
      (((0, 1), (2, 3)), ((0, 2), (1, 3)))

    Source: Megatron-LM, num_distributed_optimizer_instances.
    """
    wholes = mesh.groups(*(("edp",) if expert else ("dp", "cp")))
    size, name = len(wholes[0]), "edp" if expert else "dp * cp"
    if instances < 1 or size % instances:
        raise ValueError(
            f"{instances} optimizer instances cannot share {name} = {size} ranks; "
            f"use a divisor of {size}."
        )
    run = size // instances
    intra = tuple(whole[i : i + run] for whole in wholes for i in range(0, size, run))
    inter = tuple(whole[i::run] for whole in wholes for i in range(run))
    return intra, inter


def _tokens(order: str) -> tuple[str, ...]:
    """All five names: those of ``order``, and those left out just before a final pp."""
    given = tuple(order.split("-"))
    missing = tuple(token for token in TOKENS if token not in given)
    return (*given[:-1], *missing, "pp") if given[-1] == "pp" else given + missing


def _ordered(mesh: Mesh, view: tuple[str, ...]) -> list[str]:
    """Axis names of a view from fastest to slowest."""
    expert = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    tokens = _tokens(mesh.order)
    if view == EXPERT:
        return [expert[token] for token in tokens if token in expert]
    return [token for token in tokens if token in DENSE]


def _view(axes: Iterable[AxisLike]) -> tuple[str, ...]:
    """The view that all these axes belong to; dense where both would do."""
    names = [mesh_axis(axis) for axis in axes]
    for name in names:
        if name not in DENSE + EXPERT:
            raise ValueError(_unknown(name))
    for view in (DENSE, EXPERT):
        if all(name in view for name in names):
            return view
    raise ValueError(
        f"axes {names} belong to two views of the mesh; use those of {DENSE} or those of {EXPERT}."
    )


def _inside(axes: Sequence[AxisLike], names: list[AxisLike]) -> set[int]:
    """Positions in ``names`` of the digits that vary inside a group."""
    return {i for i, name in enumerate(names) if name in axes or mesh_axis(name) in axes}


def _unknown(axis: object) -> str:
    return f"unknown axis {axis!r}; the axes are {', '.join(dict.fromkeys(DENSE + EXPERT))}."


def _check_order(mesh: Mesh) -> None:
    given = mesh.order.split("-")
    for token in given:
        if token not in TOKENS or given.count(token) > 1:
            raise ValueError(
                f"mesh.order is {mesh.order!r}: {token!r} is unknown or repeated; join "
                f"{', '.join(TOKENS)} by dashes, each once, fastest first."
            )
    for token in TOKENS:
        if token not in given and getattr(mesh, token) != 1:
            raise ValueError(
                f"mesh.order is {mesh.order!r} without {token!r}, but {token} is "
                f"{getattr(mesh, token)}; add it to the order."
            )


def _check_expert_view(mesh: Mesh) -> None:
    expert = mesh.size("etp") * mesh.ep
    if mesh.stage_size % expert:
        raise ValueError(
            f"etp * ep = {mesh.size('etp')} * {mesh.ep} = {expert} does not divide the "
            f"{mesh.stage_size} ranks of a stage (tp * cp * dp = {mesh.tp} * {mesh.cp} * "
            f"{mesh.dp}); change ep or etp."
        )
    if mesh.pp == 1 or _tokens(mesh.order)[-1] == "pp":
        return
    dense, folded = ({d.axis: d.stride for d in mesh.digits(*view)} for view in (DENSE, EXPERT))
    if mesh.edp != mesh.dp or dense["pp"] != folded["pp"]:
        raise ValueError(
            f"mesh.order {mesh.order!r} does not end in 'pp', so dense and expert ranks must have "
            f"the same stages: that needs edp = dp, but edp is {mesh.edp} and dp is {mesh.dp} "
            f"(a stage's neighbour is {folded['pp']} and {dense['pp']} ranks away); put pp last."
        )
