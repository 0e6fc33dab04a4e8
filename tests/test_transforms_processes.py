"""The same transforms on real ranks over gloo, and through a pipeline of processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from transform_cases import Case, assembled, compare, near, on_one, on_rank, pieces, rows_of, vector

from mfun import func, tree
from mfun.comm import Groups, distribute
from mfun.grads import needed_groups, reductions
from mfun.mesh import Mesh

CASES = {
    "tp2 sp": Case("llama", Mesh(tp=2), sp=True),
    "tp2": Case("gpt2", Mesh(tp=2)),
    "tp2 sp dp2": Case("gpt2", Mesh(tp=2, dp=2), sp=True, kv=4),
    "tp4, heads repeated": Case("llama", Mesh(tp=4), kv=2),
}
FOUR = {"tp2 sp dp2", "tp4, heads repeated"}
"""Cases of four processes, which simulated ranks have already had."""


def joined(case: Case) -> Groups:
    """This process' groups, with those of the reduction table."""
    return distribute(case.mesh, needed_groups(reductions(case.stage_specs, case.mesh), case.mesh))


def on_a_process(rank: int, case: Case) -> dict[str, Any]:
    """Everything of `on_rank`."""
    params, v = (pieces(case, rank, vector(case.config, seed)) for seed in (1, 2))
    return on_rank(joined(case), case, params, v, rows_of(case, rank))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in FOUR else []) for n in CASES]
)
def test_on_processes(pool: Pool, name: str) -> None:
    """Second-order results through tensor and sequence parallelism are those of one device."""
    case = CASES[name]
    found = pool.run(on_a_process, case, world=case.mesh.world)
    want = on_one(case.config, vector(case.config, 1), vector(case.config, 2))
    assert compare(case, found, want) < 1e-12


def on_a_stage(rank: int, case: Case) -> tuple[Any, Any]:
    """One rank's gradient and Hessian-vector product; its neighbours' messages are doubled."""
    groups, config = joined(case), case.config
    stage, ranks = case.mesh.coords(rank)["pp"], groups.pp.ranks
    run, batch = func.rank_stages(config)[stage], rows_of(case, rank)
    params, v = (pieces(case, rank, vector(config, seed)) for seed in (1, 2))
    space = func.rank_space(groups, reductions(case.stage_specs, case.mesh))
    shape = (2, len(batch["sample"]), config.model.seq_len // (case.mesh.tp if case.sp else 1), 8)

    def send(dual: func.Dual, to: int) -> None:
        dist.send(torch.stack([dual.value["h"], dual.tangent["h"]]), ranks[to])

    def receive(source: int) -> func.Dual:
        both = torch.empty(shape, dtype=torch.float64)
        dist.recv(both, ranks[source])
        return func.Dual({"h": both[0]}, {"h": both[1]})

    def exchange(y: func.Dual) -> func.Dual:
        if stage == case.mesh.pp - 1:
            return func.seed(y)
        send(y, stage + 1)
        return receive(stage + 1)

    x = receive(stage - 1) if stage else func.Dual({}, {})
    (grads, curved), back = func.stage_products(
        lambda p, x: run(groups, p, x, batch), func.Dual(params, v), x, exchange
    )
    if stage:
        send(back, stage - 1)
    return space.whole(grads), space.whole(curved)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
def test_through_a_pipeline_of_processes(pool: Pool, name: str) -> None:
    """tp2 sp pp2, tied (gpt2) and not: gradient and Hessian-vector product."""
    case = Case(name, Mesh(tp=2, pp=2), sp=True, layers=2)
    config = case.config
    found = pool.run(on_a_stage, case, world=4)
    want = on_one(config, vector(config, 1), vector(config, 2))
    for i, right in enumerate(("gradient", "hessian")):
        whole = assembled(case, right, [each[i] for each in found])
        assert whole.keys() == want[right].keys()
        for path, x in whole.items():
            near(f"{right} of {path}", x, want[right][path], want[right][path])
    assert tree.flatten(found[0][1]).keys() != tree.flatten(found[2][1]).keys()
