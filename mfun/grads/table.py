"""The reduction table: for each parameter, which ranks' gradients are added, and their weights.

A leaf's *shard group* is all ranks of its stage that hold the same piece; its *replica group* the
other stages that hold it too. Per axis of these its gradient is a summand (`partial`, weight 1), a
copy (`equal`, weight 1/size) or to be averaged (`mean`, weight 1/size); weights are applied first,
then one all-reduce over the union makes it whole and the same everywhere. Everything is derived
from the specs; a new case is a new row in `KINDS` or a new entry in a spec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from mfun import tree
from mfun.mesh import AxisLike, Factor, Mesh, mesh_axis
from mfun.spec import ParamSpec, replicated

Group = tuple[tuple[AxisLike, ...], tuple[int, ...] | None]
"""Axes within a stage, and the stages joined, None for one."""
MODEL_AXES = ("tp",)
DATA_AXES = ("dp", "cp")


class Kind(NamedTuple):
    """How replicas' gradients combine: the weight before the sum, and the reason in words."""

    weight: Callable[[int], float]
    why: str


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "data": Kind(lambda size: 1.0, "each rank saw other samples"),
        "partial": Kind(lambda size: 1.0, "each rank saw other tokens or heads"),
        "repeated": Kind(lambda size: 1.0, "each rank used its copy of the head for other queries"),
        "equal": Kind(lambda size: 1.0 / size, "each rank computed the same"),
        "mean": Kind(lambda size: 1.0 / size, "averaged by declaration"),
        "tied": Kind(lambda size: 1.0, "each stage used the shared tensor for another layer"),
    }
)


class Row(NamedTuple):
    """One axis of one leaf's reduction."""

    axis: str
    size: int
    kind: str

    @property
    def weight(self) -> float:
        """Factor applied before the sum."""
        return KINDS[self.kind].weight(self.size)


@attrs.frozen
class Reduction:
    """How one leaf's gradient is made whole.

    Args:
        path: of the leaf.
        axes: its shard group's axes within a stage (of size above 1).
        stages: the stages that hold it; more than one where it is tied over the pipeline.
        rows: one for each axis of the two groups.
        copies: of every shard, over dp, where gradients are sharded.
    """

    path: str
    axes: tuple[AxisLike, ...]
    stages: tuple[int, ...]
    rows: tuple[Row, ...]
    copies: int = 1

    @property
    def joined(self) -> tuple[int, ...] | None:
        """The stages to reduce over, None when the leaf lives on one."""
        return self.stages if len(self.stages) > 1 else None

    @property
    def shard_axes(self) -> tuple[AxisLike, ...]:
        """Whose ranks each keep another shard: all, or of dp the inner part."""
        inner = Factor("dp", self.copies).inner
        return tuple(inner if a == "dp" and self.copies > 1 else a for a in self.axes)

    @property
    def copy_axes(self) -> tuple[AxisLike, ...]:
        """Whose ranks keep the same shard: of dp the outer part, if it has one."""
        return (Factor("dp", self.copies),) if self.copies > 1 and "dp" in self.axes else ()

    @property
    def weight(self) -> float:
        """Product of the rows' weights."""
        out = 1.0
        for row in self.rows:
            out *= row.weight
        return out

    @property
    def group(self) -> Group:
        """What to all-reduce over."""
        return self.axes, self.joined


def _declared(path: str, spec: ParamSpec, axis: AxisLike) -> str:
    """The declared kind of a model axis the leaf is replicated over."""
    for name in (axis, mesh_axis(axis)):
        if name in spec.grad:
            kind = spec.grad[name]
            return "repeated" if isinstance(axis, Factor) and kind == "partial" else kind
    raise ValueError(
        f"{path} is replicated over {axis!r}, but its spec does not say whether the ranks' "
        f'gradients are summands or copies; add grad={{{axis!r}: "partial"}} (or "equal") to its '
        "ParamSpec"
    )


def reduction(
    path: str, spec: ParamSpec, mesh: Mesh, stages: Sequence[int], copies: int = 1
) -> Reduction:
    """The reduction of one leaf.

    Args:
        path: of the leaf.
        spec: its spec.
        mesh: the mesh.
        stages: the pipeline stages that hold it.
        copies: of every shard, over dp.

    Raises:
        ValueError: it is replicated over a model axis without a declaration.
    """
    axes = replicated(spec.p, mesh, (*MODEL_AXES, *DATA_AXES))
    rows = [
        Row(
            str(axis),
            mesh.size(axis),
            "data" if axis in DATA_AXES else _declared(path, spec, axis),
        )
        for axis in axes
    ]
    if len(stages) > 1:
        rows.append(Row("pp", len(stages), "tied"))
    return Reduction(path, axes, tuple(stages), tuple(rows), copies)


def reductions(stage_specs: Sequence[Any], mesh: Mesh, copies: int = 1) -> dict[str, Reduction]:
    """The table of a whole model.

    Args:
        stage_specs: for each pipeline stage its tree of `ParamSpec`; a leaf that stands in several
            is tied over them.
        mesh: the mesh.
        copies: of every shard over dp, where gradients are sharded; divides dp.

    Returns:
        Path -> reduction, in the order of the stages.

    Raises:
        ValueError: two stages disagree on a spec, or a declaration is missing.

    Example:
        >>> spec = {"norm": ParamSpec(shape=(8,), grad={"tp": "partial"})}
        >>> reductions([spec], Mesh(tp=2, dp=2))["norm"].axes
        ('tp', 'dp')
    """
    holders: dict[str, list[int]] = {}
    specs: dict[str, ParamSpec] = {}
    for stage, stage_tree in enumerate(stage_specs):
        for path, spec in tree.flatten(stage_tree).items():
            if specs.setdefault(path, spec) != spec:
                raise ValueError(
                    f"{path}: stage {stage} has the spec {spec}, another {specs[path]}"
                )
            holders.setdefault(path, []).append(stage)
    return {path: reduction(path, specs[path], mesh, holders[path], copies) for path in specs}


def needed_groups(table: Mapping[str, Reduction], mesh: Mesh) -> list[Group]:
    """Every group a training step reduces over, once, in the same order on all ranks.

    Includes those of the gradient norm and of the loss, which every stage learns, and for shards:
    within a stage, and over stages for each piece of a tied leaf.
    """
    everywhere = tuple(range(mesh.pp))
    groups: list[Group] = [(("tp",), everywhere), (("dp", "cp"), everywhere)]
    groups.append((("tp", "dp", "cp"), everywhere))
    for row in table.values():
        groups += [row.group, (row.shard_axes, None), (row.copy_axes, row.joined)]
    return [group for group in dict.fromkeys(groups) if group[0] or group[1]]


def explain(table: Mapping[str, Reduction], normalised: str = "") -> str:
    """What happens to each parameter's gradient after backward, and why: one line each.

    Args:
        table: from `reductions`.
        normalised: a sentence on the division, from `normalise.explain`.
    """
    width = max((len(path) for path in table), default=0)
    lines = [_explain_row(row, width) for row in table.values()]
    return "\n".join([*lines, *([normalised] if normalised else [])])


def _explain_row(row: Reduction, width: int) -> str:
    if not row.rows:
        return f"{row.path:<{width}}  nothing to do: one rank holds it"
    parts = [f"{r.axis}:{r.size} {r.kind} (x{r.weight:g}, {KINDS[r.kind].why})" for r in row.rows]
    stages = f" of stages {row.stages}" if row.joined else ""
    return f"{row.path:<{width}}  sum{stages} over " + ", ".join(parts)
