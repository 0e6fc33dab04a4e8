"""Judge a layout's results against the reference, and say what is likely wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun.mesh import Mesh
from mfun.spec import ParamSpec, unshard_leaf, window
from mfun.train.plan import Plan
from mfun.verify.reference import History

BOUND = 1e-10


@attrs.frozen(eq=False)
class RankResult:
    """What one rank saw.

    Args:
        coords: of the rank.
        grads: first step's whole gradients, local pieces by path.
        params: after the last step, local pieces by path.
        losses: of every step.
        norms: gradient norms of every step.
    """

    coords: dict[str, int]
    grads: dict[str, Tensor]
    params: dict[str, Tensor]
    losses: list[float]
    norms: list[float]


@attrs.frozen(eq=False)
class Report:
    """The verdict.

    Args:
        errors: largest relative error of "loss", "grads" (norms included) and "params".
        worst: path of the leaf with the largest error, for grads and params.
        bitwise: whether all replicas agree bitwise.
        notes: what is wrong, in words; empty when all holds.
    """

    errors: dict[str, float]
    worst: dict[str, str]
    bitwise: bool
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every error is within 1e-10 and replicas agree."""
        return self.bitwise and all(error <= BOUND for error in self.errors.values())


def judge(plan: Plan, results: Sequence[RankResult], history: History) -> Report:
    """Compare every rank's results with the reference's history.

    Errors: of a loss, relative; of a gradient leaf max|a-b| / max(max|ref|, 1e-4 max|ref of all
    gradients|); of a parameter max|a-b| / max(max|ref|, lr steps).

    Args:
        plan: of the run.
        results: of every rank.
        history: the reference's.
    """
    specs = plan.specs
    loss = max(_series(r.losses, history.losses) for r in results)
    norm = max(_series(r.norms, history.grad_norms) for r in results)
    floor = 1e-4 * max(float(g.abs().max()) for g in history.first_grads.values())
    moved = max(history.learning_rates) * len(history.losses)
    notes: list[str] = []
    grads = _leaves(plan.mesh, specs, results, "grads", history.first_grads, floor)
    params = _leaves(plan.mesh, specs, results, "params", history.params, moved)
    bitwise = True
    for kind in ("grads", "params"):
        for path in specs:
            apart = replicas_apart(plan.mesh, path, specs[path], results, kind)
            bitwise = bitwise and not apart
            notes += [f"{path}: replicas' {kind} differ over {apart}"] if apart else []
    for path, error in grads.items():
        if path not in history.first_grads:
            notes.append(f"{path}: the reference has no such parameter")
        elif not error <= BOUND:
            cause = diagnose(plan, path, specs[path], results, history.first_grads[path])
            notes.append(f"{path}: gradient off by {error:.2e} (relative); {cause}")
    absent = sorted(set(history.first_grads) - set(specs))
    notes += [f"no stage holds {', '.join(absent)}"] if absent else []
    for path, error in params.items():
        if not error <= BOUND and grads[path] <= BOUND:
            notes.append(
                f"{path}: parameter off by {error:.2e} (relative) after {len(history.losses)} "
                "updates, its first gradient is right; check initial values and the optimizer"
            )
    if not loss <= BOUND:
        notes.append(f"loss off by {loss:.2e} (relative)")
    if not norm <= BOUND:
        notes.append(f"gradient norm off by {norm:.2e} (relative)")
    return Report(
        errors={
            "loss": loss,
            "grads": max([norm, *grads.values()], key=_nan_last),
            "params": max(params.values(), key=_nan_last),
        },
        worst={
            k: max(v, key=lambda p: _nan_last(v[p]))
            for k, v in (("grads", grads), ("params", params))
        },
        bitwise=bitwise,
        notes=tuple(notes),
    )


def _nan_last(x: float) -> float:
    return float("inf") if x != x else x


def _series(have: Sequence[float], want: Sequence[float]) -> float:
    if len(have) != len(want):
        return float("inf")
    gaps = [
        abs(a - b) / max(abs(b), 1e-300) if a != b else 0.0 for a, b in zip(have, want, strict=True)
    ]
    return max(gaps, key=_nan_last)


def leaf_error(have: Tensor, want: Tensor, floor: float) -> float:
    """max|have - want| / max(max|want|, floor); infinite for a wrong shape."""
    if have.shape != want.shape:
        return float("inf")
    scale = max(float(want.abs().max()), floor, 1e-300)
    return _nan_last(float((have - want).abs().max())) / scale


def _leaves(
    mesh: Mesh,
    specs: Mapping[str, ParamSpec],
    results: Sequence[RankResult],
    kind: str,
    want: Mapping[str, Tensor],
    floor: float,
) -> dict[str, float]:
    """Largest error of each leaf over all ranks, each against its own window of the reference."""
    out = {}
    for path, spec in specs.items():
        errors = [float("inf")] if path not in want else []
        for result in results:
            piece = getattr(result, kind).get(path)
            if piece is not None and path in want:
                box = tuple(slice(a, b) for a, b in window(spec, mesh, result.coords))
                local = piece[tuple(slice(0, s.stop - s.start) for s in box)]
                if local.numel():
                    peak = max(floor, float(want[path].abs().max()))
                    errors.append(leaf_error(local, want[path][box], peak))
        out[path] = max(errors, default=float("inf"))
    return out


def replicas_apart(
    mesh: Mesh, path: str, spec: ParamSpec, results: Sequence[RankResult], kind: str
) -> tuple[str, ...]:
    """Axes along which ranks that hold the same piece of a leaf differ in any bit."""
    holders: dict[Any, list[RankResult]] = {}
    for result in results:
        if path in getattr(result, kind):
            holders.setdefault(window(spec, mesh, result.coords), []).append(result)
    axes: set[str] = set()
    for group in holders.values():
        first = group[0]
        for other in group[1:]:
            if not torch.equal(getattr(first, kind)[path], getattr(other, kind)[path]):
                axes |= {a for a in first.coords if first.coords[a] != other.coords[a]}
    return tuple(sorted(axes))


def diagnose(
    plan: Plan, path: str, spec: ParamSpec, results: Sequence[RankResult], want: Tensor
) -> str:
    """The likely cause of a wrong gradient: a sum missing, doubled, or divided too often."""
    holders = [r for r in results if path in r.grads]
    have = unshard_leaf([(r.coords, r.grads[path]) for r in holders], spec, plan.mesh)
    row = plan.table[path]

    def near(a: Tensor, b: Tensor) -> bool:
        return leaf_error(a, b, 0.0) <= 1e-6

    sizes = {a: plan.mesh.size(a) for a in ("tp", "dp", "cp", "pp")} | {
        r.axis: r.size for r in row.rows
    }
    for size in sorted(set(sizes.values()) - {1}):
        over = " or ".join(axis for axis, n in sizes.items() if n == size)
        if near(have, want * size):
            cause = f"summed once too often over {over}, or a 1/{size} is missing"
            return f"{size} times too large: {cause}"
        if near(have * size, want):
            cause = f"divided once too often over {over}, or its sum is missing"
            return f"{size} times too small: {cause}"
    for axis in ("tp", "dp", "cp", "pp"):
        if sizes[axis] > 1 and near(_summed_over(plan.mesh, axis, spec, holders, path), want):
            return f"each rank holds a summand: the sum over {axis} is missing"
    declared = ", ".join(f"{r.axis} {r.kind}" for r in row.rows) or "no reduction"
    return f"its declared reduction is: {declared}; check that and the collectives before it"


def _summed_over(
    mesh: Mesh, axis: str, spec: ParamSpec, holders: Sequence[RankResult], path: str
) -> Tensor:
    """The leaf as it would be if the ranks' values were summed over an axis."""
    parts = []
    for result in holders:
        if result.coords[axis]:
            continue
        same = [
            r.grads[path]
            for r in holders
            if all(r.coords[a] == result.coords[a] for a in r.coords if a != axis)
        ]
        parts.append((result.coords, torch.stack(same).sum(0)))
    try:
        return unshard_leaf(parts, spec, mesh)
    except (ValueError, IndexError):
        return torch.full(spec.shape, float("nan"))
