"""Properties of the transforms in `mfun.func`, for planted faults."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from mfun import func, rng, tree
from mfun.comm import simulate
from mfun.grads import finalize, reductions
from mfun.mesh import Mesh
from mfun.spec import P, ParamSpec, shard
from mfun.verify.batches import global_batch
from tests import transform_cases as cases
from tests.properties import Broken, Property, named


@cache
def alone(case: cases.Case) -> tuple[Any, Any, dict[str, Any]]:
    """Parameters, a direction, and everything of one device by `torch.autograd`."""
    params, v = (cases.vector(case.config, seed) for seed in (1, 2))
    return params, v, cases.on_one(case.config, params, v)


def inside(case: cases.Case) -> Property:
    """Products of every order on the ranks of a mesh are those of one device."""

    def check() -> None:
        params, v, want = alone(case)
        cases.compare(case, cases.on_simulated_ranks(case, params, v), want)

    return Property(f"derivatives of {case.name} on {case.mesh}", check)


SEQUENCE = inside(cases.Case("gpt2", Mesh(tp=2, dp=2), sp=True))
COPIES = inside(cases.Case("llama", Mesh(tp=2)))


@named
def pipelined() -> None:
    """a Hessian-vector product stage by stage, with doubled messages, is that of one device."""
    case = cases.Case("gpt2", Mesh(tp=2, pp=2), sp=True, layers=2)
    params, v, want = alone(case)
    batch = global_batch(case.config, 0)
    stages: list[Any] = [lambda p, x, s=s: s(p, x, batch) for s in func.mesh_stages(case.config)]
    of = [[tree.select(vector, specs) for specs in case.stage_specs] for vector in (params, v)]
    found = func.pipeline_products(stages, *of)
    for have, name in zip(found, ("gradient", "hessian"), strict=True):
        for path, x in tree.flatten(have).items():
            cases.near(f"{name} of {path}", x, want[name][path], want[name][path])


@named
def spectrum() -> None:
    """Lanczos finds each eigenvalue of a matrix once, and bounds those it has not found."""
    m = torch.diag(torch.cat([torch.linspace(0, 1, 30), torch.tensor([100.0])]).double())
    found = func.lanczos(lambda v: m @ v, torch.ones(31).double(), 12)
    if int((found.values > 50).sum()) != 1:
        raise Broken(f"the eigenvalue 100 is found {int((found.values > 50).sum())} times")
    away = (found.values.unsqueeze(1) - m.diag()).abs().amin(1)
    if bool((away > found.bounds + 1e-10).any()):
        raise Broken("an eigenvalue is further than its bound")


@named
def solution() -> None:
    """conjugate gradients solve a damped system."""
    m, b = torch.diag(torch.tensor([1.0, 2.0, 5.0]).double()), torch.ones(3).double()
    x = func.conjugate_gradients(lambda v: m @ v, b, 3, damping=0.5)
    cases.near("the solution", x, b / (m.diag() + 0.5), b)


@named
def probes() -> None:
    """random signs are one vector in every layout."""
    specs = func.specs_of(cases.Case("gpt2", Mesh(tp=2)).config)
    whole = func.probe(rng.key(1), specs, Mesh(), cases.ONE)
    for tp in range(2):
        coords = {**cases.ONE, "tp": tp}
        mine = tree.flatten(func.probe(rng.key(1), specs, Mesh(tp=2), coords))
        for path, x in tree.flatten(shard(whole, specs, Mesh(tp=2), coords)).items():
            cases.near(f"the signs of {path}", mine[path], x, x)


@named
def directions() -> None:
    """a global basis of a cut, padded leaf moves every element of the model once."""
    specs, mesh = {"w": ParamSpec(shape=(3,), p=P("tp"), pads=(0,))}, Mesh(tp=2)
    stacked, whole = func.stacked(specs, 3), func.basis(specs)
    ranks = [shard(whole, stacked, mesh, {**cases.ONE, "tp": tp})["w"] for tp in range(2)]
    if torch.cat(ranks, 1).tolist() != [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]:
        raise Broken(f"directions are {torch.cat(ranks, 1).tolist()}")


@named
def finalized() -> None:
    """the tree form of finalize sums summands, averages means, and hands equal ones on."""
    leaves = {k: ParamSpec(shape=(1,), grad={"tp": k}) for k in ("equal", "partial", "mean")}
    table = reductions([leaves], Mesh(tp=2))
    run = simulate(
        lambda groups, x: finalize({k: x for k in leaves}, groups, table),
        Mesh(tp=2), (P("tp"),), P(), check=False,
    )  # fmt: skip
    found = run(torch.tensor([2.0, 2.0]))
    for kind, want in (("equal", 2.0), ("partial", 4.0), ("mean", 2.0)):
        if found[kind].item() != want:
            raise Broken(f"the gradient of {kind} is {found[kind].item()}, not {want}")
