"""`simulate`: the whole mesh (all axes but pp) on one device, by the same rank-local function.

All ranks are one `torch.func.vmap` axis. The rank number is the batched input that tells each
collective at which vmap level the ranks are, so per-sample vmaps, jvp, grad and vjp compose with it
inside and outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mfun import tree
from mfun.comm.axis import Scope
from mfun.comm.door import enter, leave
from mfun.comm.groups import Groups, simulated_groups
from mfun.mesh import Mesh
from mfun.spec import P, ParamSpec

Specs = Any


def map_ranks(fn: Callable[..., Any], mesh: Mesh, *, check: bool = False) -> Callable[..., Any]:
    """`fn(groups, *local)` for all ranks of one stage at once, on rank-stacked trees.

    Args:
        fn: the rank-local function.
        mesh: the mesh; its pipeline axis is not simulated.
        check: assert declared types at every collective.

    Returns:
        A function of trees whose tensors have the ranks as dim 0, to such trees.
    """

    def run(*stacked: Any) -> Any:
        ranks = torch.arange(mesh.stage_size)

        scope = Scope()

        def one(rank: torch.Tensor, *local: Any) -> Any:
            return fn(simulated_groups(mesh, rank, scope, check=check), *local)

        try:
            return torch.func.vmap(one, in_dims=0)(ranks, *stacked)
        finally:
            scope.open = False

    return run


def simulate(
    fn: Callable[..., Any], mesh: Mesh, in_specs: Specs, out_specs: Specs, *, check: bool = True
) -> Callable[..., Any]:
    """Run a rank-local function on a whole mesh in one process, from whole tensors to whole tensors.

    Args:
        fn: `fn(groups, *local_args)`; sees rank-local shapes and its rank's `Groups`.
        mesh: the mesh; `pp` must be 1.
        in_specs: one entry per argument: a `P`, a `ParamSpec`, or a tree of them (a `P` may stand
            for a whole sub-tree).
        out_specs: likewise for the result. Axes that a spec does not mention hold equal values.
        check: assert at every collective and at the exit that what is declared equal is equal.

    Returns:
        A function of whole tensors, differentiable to any order.

    Raises:
        ValueError: the mesh has stages, shapes do not divide, or values declared equal differ.

    Example:
        >>> mesh = Mesh(tp=2)
        >>> from mfun.comm import reduce
        >>> f = lambda groups, x, w: reduce(x @ w, groups.tp)
        >>> run = simulate(f, mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
        >>> run(torch.ones(2, 4), torch.ones(4, 1)).flatten()
        tensor([4., 4.])
    """
    if mesh.pp != 1:
        raise ValueError(
            f"simulate: the mesh has pp = {mesh.pp}; stages of a pipeline run in the mailbox "
            "(mfun.pipeline.mailbox), simulate takes pp = 1"
        )
    inner = map_ranks(fn, mesh, check=check)

    def run(*args: Any) -> Any:
        if len(args) != len(in_specs):
            raise ValueError(f"simulate: {len(args)} arguments for {len(in_specs)} in_specs")
        stacked = [
            _through(enter, spec, arg, mesh, check, f"argument {i}")
            for i, (spec, arg) in enumerate(zip(in_specs, args, strict=True))
        ]
        return _through(leave, out_specs, inner(*stacked), mesh, check, "the result")

    return run


def _through(
    door: Callable[..., Any], specs: Specs, values: Any, mesh: Mesh, check: bool, name: str
) -> Any:
    """Apply a door to every leaf; a spec stands for all leaves below it."""

    def one(path: str, spec: Any, value: Any) -> Any:
        where = f"{name}{f' at {path}' if path else ''}"
        return tree.map_with_path(
            lambda below, x: door(x, spec, mesh, check, f"{where} {below}".strip()), value
        )

    if isinstance(specs, P | ParamSpec):
        return one("", specs, values)
    if isinstance(specs, dict):
        return {k: _through(door, specs[k], values[k], mesh, check, f"{name}.{k}") for k in specs}
    return (
        type(values)(
            *[
                _through(door, s, v, mesh, check, f"{name}[{i}]")
                for i, (s, v) in enumerate(zip(specs, values, strict=True))
            ]
        )
        if hasattr(values, "_fields")
        else tuple(
            _through(door, s, v, mesh, check, f"{name}[{i}]")
            for i, (s, v) in enumerate(zip(specs, values, strict=True))
        )
    )


__all__ = ["Groups", "map_ranks", "simulate"]
