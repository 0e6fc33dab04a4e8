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
from mfun.comm.groups import simulated_groups
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
    """Run a rank-local function on a whole mesh in one process: whole tensors in, whole out.

    Args:
        fn: `fn(groups, *local_args)`; sees rank-local shapes and its rank's `Groups`.
        mesh: the mesh; `pp` must be 1.
        in_specs: one entry per argument: a `P`, a `ParamSpec`, or a tree of them (a `P` may stand
            for a whole sub-tree).
        out_specs: likewise for the result. Axes that a spec does not mention hold equal values.
            A `ParamSpec` here is for gradients: summed over dp, cp and where it says `partial`.
        check: assert at every collective and at the exit that what is declared equal is equal.

    Returns:
        A function of whole tensors, differentiable to any order. What enters as `P()` is I: on
        its way to a result that is summed it must pass `copy` (or enter with the same `sums`), or
        the value is right and the gradient lacks the other ranks' shares.

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
    if not isinstance(in_specs, tuple | list):
        raise ValueError(
            f"simulate: in_specs is {in_specs!r}; give a tuple with one entry per argument"
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
    """Apply a door to every leaf; a spec stands for all leaves below it, keys must match."""
    spec_of: dict[str, P | ParamSpec] = {}

    def prefix(spec: Any, value: Any, path: str) -> None:
        where = f"{name}{f' at {path}' if path else ''}"
        if isinstance(spec, P | ParamSpec):
            spec_of.update(dict.fromkeys(tree.flatten(value, path), spec))
            return
        below, given = tree.children(spec), tree.children(value)
        if below is None:
            raise ValueError(f"simulate: the spec of {where} is {spec!r}, not a P or ParamSpec")
        if given is None:
            raise ValueError(f"simulate: {where} is a {type(value).__name__}; its specs are a tree")
        if isinstance(spec, tuple | list) and len(below) == len(given):
            below = dict(zip(given, below.values(), strict=True))  # a NamedTuple, by position
        if set(below) != set(given):
            raise ValueError(
                f"simulate: {where} has keys {sorted(given)} and its specs {sorted(below)}; "
                "name the same"
            )
        for key in below:
            prefix(below[key], given[key], f"{path}.{key}" if path else key)

    def one(path: str, value: Any) -> Any:
        where = f"{name}{f' at {path}' if path else ''}"
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"simulate: {where} is {value!r}, not a tensor; close over what is no tensor"
            )
        return door(value, spec_of[path], mesh, check, where)

    prefix(specs, values, "")
    return tree.map_with_path(one, values)
