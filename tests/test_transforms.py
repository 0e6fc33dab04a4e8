"""Derivatives of every order through a simulated mesh are those of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transform_cases import (
    ONE,
    Case,
    compare,
    model_settings,
    near,
    on_one,
    on_simulated_ranks,
    vector,
)

from mfun import func, rng, tree
from mfun.comm import simulate
from mfun.grads import reductions
from mfun.mesh import Mesh
from mfun.spec import P, ParamSpec, shard
from mfun.verify import reference
from mfun.verify.batches import global_batch

CASES = {
    "tp2 sp": Case("llama", Mesh(tp=2), sp=True),
    "tp2 sp dp2": Case("gpt2", Mesh(tp=2, dp=2), sp=True, kv=4),
    "tp2": Case("gpt2", Mesh(tp=2)),
    "tp2 dp2": Case("llama", Mesh(tp=2, dp=2), kv=4),
    "tp4, heads repeated": Case("llama", Mesh(tp=4), kv=2),
    "dp4": Case("gpt2", Mesh(dp=4)),
}
LONG = {"tp2 sp", "tp2 dp2", "dp4"}
"""Cases whose parts others have; tp2 sp is also run on processes."""


@cache
def alone(case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """Parameters, a direction, and everything of one device."""
    config = case.config
    params, v = vector(config, 1), vector(config, 2)
    return params, v, on_one(config, params, v)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in LONG else []) for n in CASES]
)
def test_inside_of_a_mesh(name: str) -> None:
    """Gradients, per-sample, Jacobian-, Hessian-, Gauss-Newton- and Fisher-vector products."""
    case = CASES[name]
    params, v, want = alone(case)
    assert compare(case, on_simulated_ranks(case, params, v), want) < 1e-12


@pytest.mark.parametrize("name", ["tp2 sp dp2", "tp2 dp2"])
def test_outside_of_a_mesh(name: str) -> None:
    """The whole mesh is a function: gradient, both orders of second derivative, Fisher."""
    case = CASES[name]
    config, (params, v, want) = case.config, alone(case)
    batch, mesh = global_batch(config, 0), func.mesh_loss(config)

    def loss(p: Any) -> Tensor:
        return mesh(p, batch)

    def slope(p: Any) -> Tensor:
        return func.tree_dot(func.gradient(loss, p), v)

    found = {
        "gradient": func.gradient(loss, params),
        "hessian": func.hessian_vector(loss, params, v),
    }
    found["hessian, reverse over reverse"] = torch.func.grad(slope)(params)
    for what, have in found.items():
        right = want["gradient" if what == "gradient" else "hessian"]
        for path, x in tree.flatten(have).items():
            near(f"{what} of {path}", x, right[path], right[path])


@pytest.mark.parametrize(
    ("tied", "sp"),
    [(True, True), (False, False)]
    + [pytest.param(*case, marks=pytest.mark.full) for case in ((True, False), (False, True))],
)
def test_through_a_pipeline(tied: bool, sp: bool) -> None:
    """Stages composed, and stage by stage with doubled messages; tied tables are summed."""
    name = "gpt2" if tied else "llama"
    case = Case(name, Mesh(tp=2, dp=2, pp=2), sp=sp, layers=2)
    config, (params, v, want) = case.config, alone(case)
    batch, stages = global_batch(config, 0), func.mesh_stages(config)
    of = [tree.select(params, specs) for specs in case.stage_specs]
    along = [tree.select(v, specs) for specs in case.stage_specs]
    run: list[Any] = [lambda p, x, s=stage: s(p, x, batch) for stage in stages]
    grads, curved = func.pipeline_products(run, of, along)
    composed = func.hessian_vector(lambda p: func.mesh_loss(config)(p, batch), params, v)
    assert len(stages) == 2
    for have, right in ((grads, "gradient"), (curved, "hessian"), (composed, "hessian")):
        assert tree.flatten(have).keys() == want[right].keys()
        for path, x in tree.flatten(have).items():
            near(f"{right} of {path}", x, want[right][path], want[right][path])


# ---------------------------------------------------------------------------- in full

SMALL = Case("gpt2", Mesh(tp=2, dp=2), sp=True)


def one_block(case: Case) -> tuple[Any, Any, Tensor]:
    """Final norm and head of a model as all there is of it, and their Hessian by torch."""
    config = case.config
    specs = tree.select(func.specs_of(config), {"final_norm": {"weight": 0, "bias": 0}})
    rest, batch = vector(config, 1), global_batch(config, 0)
    at = tree.select(rest, specs)
    flat = torch.cat([x.flatten() for x in tree.flatten(at).values()])

    def loss(x: Tensor) -> Tensor:
        parts = x.split([leaf.numel() for leaf in tree.flatten(at).values()])
        given = dict(zip(tree.flatten(at), parts, strict=True))
        return reference.loss(model_settings(config), {**tree.flatten(rest), **given}, [batch])[1]

    want: Any = torch.autograd.functional.hessian(loss, flat)
    return specs, rest, want


def test_hessian_in_full_inside_of_a_mesh() -> None:
    """A Hessian from global directions, each masked by its owners, equals torch's."""
    config, mesh = SMALL.config, SMALL.mesh
    specs, rest, want = one_block(SMALL)
    table = reductions([specs], mesh)
    others = func.specs_of(config)
    n = len(want)

    def inside(groups: Any, params: Any, rest: Any, directions: Any, batch: Any) -> Any:
        loss = func.rank_loss(config, groups, batch)

        def of_some(some: Any) -> Tensor:
            return loss(tree.unflatten({**tree.flatten(rest), **tree.flatten(some)}))

        space = func.rank_space(groups, table)
        return func.hessian(of_some, params, directions, space)

    plain = tree.map(lambda spec: P(*spec.p.entries), specs)
    rows = tree.map(lambda spec: P(None, *spec.p.entries), specs)
    run = simulate(inside, mesh, (plain, others, rows, P("dp")), rows)
    found = run(tree.select(rest, specs), rest, func.basis(specs), global_batch(config, 0))
    have = torch.cat([x.flatten(1) for x in tree.flatten(found).values()], 1)
    near("the Hessian", have, want, want)
    assert have.shape == (n, n) and n == 16


def test_basis_is_global_and_cut_by_owner() -> None:
    """Of 5 rows over 2 ranks: each is one on one rank, padding on none; a copy is one on both."""
    mesh = Mesh(tp=2)
    specs = {
        "cut": ParamSpec(shape=(5,), p=P("tp"), pads=(0,)),
        "copy": ParamSpec(shape=(2,), grad={"tp": "equal"}),
    }
    whole = func.basis(specs)
    assert [tuple(x.shape) for x in whole.values()] == [(7, 5), (7, 2)]
    ranks = [shard(whole, func.stacked(specs, 7), mesh, {**ONE, "tp": tp}) for tp in range(mesh.tp)]
    assert [r["cut"].sum().item() for r in ranks] == [3, 2]
    assert (ranks[0]["cut"].sum(1) + ranks[1]["cut"].sum(1)).tolist() == [1] * 5 + [0] * 2
    assert all(r["copy"][5:].tolist() == [[1, 0], [0, 1]] for r in ranks)
    assert ranks[1]["cut"][:, 2].tolist() == [0] * 7


def test_jacobian_is_torchs() -> None:
    """Against `torch.func.jacrev` of a function of a tree."""
    at = {"a": torch.tensor([0.3, 0.7]), "b": torch.tensor(2.0)}
    specs = {"a": ParamSpec(shape=(2,)), "b": ParamSpec(shape=())}
    f = lambda p: torch.stack([(p["a"] ** 2).sum() * p["b"], p["b"].sin()])  # noqa: E731
    have = func.jacobian(f, at, func.basis(specs, torch.float32))
    want = torch.func.jacrev(f)(at)
    assert torch.allclose(have, torch.cat([want["a"], want["b"].unsqueeze(1)], 1).T)
    assert torch.allclose(func.jacobian(f, at, func.basis(specs, torch.float32), chunk=2), have)


# ---------------------------------------------------------------------------- estimates


def symmetric(n: int, seed: int = 0) -> Tensor:
    """A symmetric matrix, neither definite nor special."""
    a = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a + a.T


def test_lanczos_on_a_matrix() -> None:
    """All steps give all eigenvalues; a few bound the largest; the vector is its own."""
    m = symmetric(12)
    want, vectors = torch.linalg.eigh(m)
    start = torch.ones(12, dtype=torch.float64)
    full = func.lanczos(lambda v: m @ v, start, 12)
    near("all eigenvalues", full.values, want, want, 1e-12)
    assert float(full.bounds.max()) < 1e-10
    some = func.lanczos(lambda v: m @ v, start, 7)
    distance = (some.values.unsqueeze(1) - want).abs().amin(1)
    assert bool((distance <= some.bounds + 1e-12).all()) and float(some.bounds[0]) > 1e-6
    near("the top vector", (full.vector @ vectors[:, -1]).abs(), torch.ones(()).double(), want)


def test_lanczos_where_the_space_ends() -> None:
    """An invariant subspace of 2: further steps add zeros, never a division by zero."""
    m = torch.diag(torch.tensor([1.0, 5.0, 7.0, 9.0], dtype=torch.float64))
    found = func.lanczos(lambda v: m @ v, torch.tensor([1.0, 1.0, 0, 0]).double(), 4)
    assert found.values.isfinite().all() and float((found.values - 5).abs().min()) < 1e-12
    with pytest.raises(ValueError, match="0 steps"):
        func.lanczos(lambda v: v, torch.ones(2), 0)


def test_estimates_on_a_matrix() -> None:
    """Over all signs the means are exact; the error is that of a sample of probes."""
    m = symmetric(3)
    signs = list(torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 3))
    near("the trace", func.trace_estimate(lambda v: m @ v, signs).mean, m.trace(), m)
    near("the diagonal", func.diagonal_estimate(lambda v: m @ v, signs).mean, m.diag(), m)
    each = torch.stack([v @ m @ v for v in signs])
    near("the error", func.trace_estimate(lambda v: m @ v, signs).error, each.std() / 8**0.5, each)


def test_conjugate_gradients_solve() -> None:
    """(M + damping) x = b, in as many steps as dims; more change nothing."""
    m = symmetric(6) @ symmetric(6).T
    b = torch.arange(6.0, dtype=torch.float64)
    want = torch.linalg.solve(m + 0.5 * torch.eye(6), b)
    for steps in (6, 30):
        have = func.conjugate_gradients(lambda v: m @ v, b, steps, damping=0.5)
        near("the solution", have, want, want, 1e-8)
    assert (
        func.conjugate_gradients(lambda v: m @ v, torch.zeros(6).double(), 3).tolist() == [0.0] * 6
    )


def test_probe_is_one_vector_in_every_layout() -> None:
    """Signs by global index: a rank's are the slice of the whole's, and padding is 0."""
    config = CASES["tp2 sp"].config
    specs, mesh = func.specs_of(config), Mesh(tp=2)
    whole = func.probe(rng.key(3), specs, Mesh(), ONE)
    for tp in range(2):
        coords = {**ONE, "tp": tp}
        mine = func.probe(rng.key(3), specs, mesh, coords)
        cut = shard(whole, specs, mesh, coords)
        tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), mine, cut)
    signs = torch.cat([x.flatten() for x in tree.flatten(whole).values()])
    assert signs.abs().eq(1).all() and abs(float(signs.mean())) < 0.1
    other = func.probe(rng.key(4), specs, Mesh(), ONE)
    assert not torch.equal(other["embed"]["tokens"], whole["embed"]["tokens"])


def test_spectrum_inside_of_a_mesh() -> None:
    """Eigenvalues, trace and diagonal of a model's Hessian on the ranks: as of one device."""
    case = CASES["tp2 sp dp2"]
    config, mesh = case.config, case.mesh
    params, batch, specs = vector(config, 1), global_batch(config, 0), func.specs_of(config)
    table = reductions([specs], mesh)
    probes = [func.probe(rng.key(i), specs, Mesh(), ONE) for i in range(2)]

    def told(loss: Any, p: Any, probes: Any, space: func.Space) -> dict[str, Tensor]:
        matrix = lambda v: func.hessian_vector(loss, p, v, space)  # noqa: E731
        found = func.lanczos(matrix, probes[0], 4, space)
        back = func.conjugate_gradients(matrix, probes[0], 2, space, damping=50.0)
        trace = func.trace_estimate(matrix, probes, space)
        return {
            "values": found.values,
            "bounds": found.bounds,
            "vector": space.dot(found.vector, found.vector),
            "solved": space.dot(back, back),
            "trace": trace.mean,
            "error": trace.error,
        }

    def inside(groups: Any, p: Any, probes: Any, batch: Any) -> Any:
        loss, space = func.rank_loss(config, groups, batch), func.rank_space(groups, table)
        return told(loss, p, probes, space)

    run = simulate(inside, mesh, (specs, (specs, specs), P("dp")), P())
    have = run(params, tuple(probes), batch)
    one = attrs.evolve(case, mesh=Mesh(), sp=False).config
    loss = func.mesh_loss(one)
    want = told(lambda p: loss(p, batch), params, probes, func.WHOLE)
    for name in want:
        near(name, have[name], want[name], want[name], 1e-9)
    near("length of the vector", have["vector"], torch.ones(()).double(), have["vector"])
