"""Parallel layers on real ranks: the message that overlaps a product changes no value."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from nn_cases import LAYERS, Case, near
from pool import Pool
from torch import Tensor
from torch.func import grad, vjp, vmap

from mfun.comm import Groups, distribute, overlap
from mfun.mesh import Mesh
from mfun.nn import linear as nn_linear
from mfun.spec import P, ParamSpec, shard_leaf

Grads = tuple[Tensor, ...]
MESH = Mesh(tp=2)
# Messages started by hand over the four ways below. A column product sends its input's gradient
# under the weight's in the two that are not recorded, and gathers too under sequence parallelism;
# a row product is summed in place in all four, unless it is scattered.
COLUMN, ROW = {False: 2, True: 4}, {False: 4, True: 0}
STARTED = {
    "column": COLUMN,
    "column, gathered": COLUMN,
    "row": ROW,
    "row, cut here": ROW,
    "mlp": {False: 2 + 4, True: 4},
    "head, in chunks": ROW,
}


def piece(x: Tensor, p: P, rank: int) -> Tensor:
    """This rank's part of a whole tensor."""
    spec = ParamSpec(shape=tuple(x.shape), p=P(*p.entries))
    return shard_leaf(x, spec, MESH, MESH.coords(rank)).contiguous()


def as_a_step(case: Case, groups: Groups, args: Grads) -> Grads:
    """torch.autograd.grad on detached leaves, as the executor takes it."""
    leaves = [x.detach().requires_grad_() for x in args]
    y = case.scalar(lambda *a: case.local(groups, *a))(*leaves)
    return torch.autograd.grad(y, leaves)


def as_a_pullback(case: Case, groups: Groups, args: Grads) -> Grads:
    """torch.func.vjp, pulled without recording."""
    y, pull, *_ = vjp(case.scalar(lambda *a: case.local(groups, *a)), *args)
    with torch.no_grad():
        return pull(torch.ones_like(y), retain_graph=False)


def as_any_order(case: Case, groups: Groups, args: Grads) -> Grads:
    """torch.func.grad, whose backward is recorded, and so is made of the plain collectives."""
    scalar = case.scalar(lambda *a: case.local(groups, *a))
    return grad(scalar, tuple(range(len(args))))(*args)


def second_order(case: Case, groups: Groups, args: Grads) -> Grads:
    """The gradient of the sum of squares of the gradients of the first argument."""
    scalar = case.scalar(lambda *a: case.local(groups, *a))
    outer = tuple(range(len(args)))
    return grad(lambda *a: grad(scalar)(*a).square().sum(), outer)(*args)


def on_a_rank(rank: int, layer: str, sp: bool) -> tuple[dict[str, Any], int]:
    """Every way to take the gradients, and how many messages were started beside a product."""
    groups = distribute(MESH)
    case = LAYERS[layer](MESH, sp)
    args = tuple(piece(x, p, rank) for x, p in zip(case.args, case.specs, strict=True))
    ways = (as_a_step, as_a_pullback, as_any_order, second_order)
    started = 0

    def counting(original: Any) -> Any:
        def start(*a: Any) -> Any:
            nonlocal started
            started += 1
            return original(*a)

        return start

    names = ("start_all_reduce", "start_reduce_scatter", "start_gather")
    with mock.patch.multiple(overlap, **{n: counting(getattr(overlap, n)) for n in names}):
        found = {way.__name__: way(case, groups, args) for way in ways}
    return found, started


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_layer_on_two_processes(pool: Pool, layer: str, sp: bool) -> None:
    """All gradients, first order in three ways and second order, are pieces of the dense ones."""
    case = LAYERS[layer](MESH, sp)
    every = tuple(range(len(case.args)))
    dense = case.scalar(case.dense)
    first = grad(dense, every)(*case.args)
    results = pool.run(on_a_rank, layer, sp)
    for way in ("as_a_step", "as_a_pullback", "as_any_order"):
        whole = [
            sum(found[way][i] for found, _ in results) if "tp" in spec.sums else None
            for i, spec in enumerate(case.specs)
        ]
        for rank, (found, _) in enumerate(results):
            for i, spec in enumerate(case.specs):
                mine = found[way][i] if whole[i] is None else whole[i]
                near(mine, piece(first[i], spec, rank))
    for found, started in results:
        assert started == STARTED.get(layer, {sp: 0})[sp]
        near(found["as_a_step"], found["as_any_order"], 1e-13)
        near(found["as_a_pullback"], found["as_any_order"], 1e-13)


def mapped_on_a_rank(rank: int, layer: str, sp: bool) -> tuple[Grads, Grads]:
    """Pullbacks of three cotangents and three values, by vmap and one by one, not recorded."""
    groups = distribute(MESH)
    case = LAYERS[layer](MESH, sp)
    x, *rest = (piece(x, p, rank) for x, p in zip(case.args, case.specs, strict=True))
    inputs = torch.stack([x, x.sin(), 0.5 * x])

    def f(x: Tensor) -> Tensor:
        return case.local(groups, x, *rest)

    with torch.no_grad():
        y, pull, *_ = vjp(f, x)
        cotangents = torch.stack([torch.cos(y + i) for i in range(3)])
        together = vmap(f)(inputs), vmap(pull)(cotangents)[0]
        alone = torch.stack([f(x) for x in inputs]), torch.stack([pull(c)[0] for c in cotangents])
    return together, alone


@pytest.mark.parametrize("layer", ["column", "row", "mlp", "head, in chunks"])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_vmap_on_two_processes(pool: Pool, layer: str, sp: bool) -> None:
    """A batch of messages is one message: never the in-place kind, which sees no batch dim."""
    for together, alone in pool.run(mapped_on_a_rank, layer, sp):
        near(together, alone, 1e-13)


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_second_order_on_two_processes(pool: Pool, sp: bool) -> None:
    """Gradients of gradients through an mlp, on real ranks, are pieces of the dense ones.

    Under sequence parallelism each rank's scalar is a summand, so the objective is the sum over
    ranks of what each takes the square of: the dense squares as well.
    """
    case = LAYERS["mlp"](MESH, sp)
    every = tuple(range(len(case.args)))
    inner = grad(case.scalar(case.dense))
    right = grad(lambda *a: inner(*a).square().sum(), every)(*case.args)
    results = pool.run(on_a_rank, "mlp", sp)
    for rank, (found, _) in enumerate(results):
        for i, spec in enumerate(case.specs):
            mine = found["second_order"][i]
            if "tp" in spec.sums:
                mine = sum(other["second_order"][i] for other, _ in results)
            near(mine, piece(right[i], spec, rank))


def halves_on_a_rank(rank: int, tokens: int) -> tuple[Tensor, Tensor, int]:
    """A row product summed whole and in halves, and how many sums were started for the latter."""
    groups = distribute(MESH)
    x, w = torch.randn(2, tokens, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    w, b = w[0, :, rank : rank + 1], torch.ones(3, dtype=torch.float64)
    x = x[:, :, rank : rank + 1]
    with torch.no_grad():
        whole = nn_linear.row_linear(x, w, b, groups.tp)
        started = mock.patch.object(overlap, "start_all_reduce", wraps=overlap.start_all_reduce)
        with mock.patch.object(nn_linear, "HALVES", 1), started as count:
            return whole, nn_linear.row_linear(x, w, b, groups.tp), count.call_count


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_sum_in_halves_is_the_sum(pool: Pool, tokens: int) -> None:
    """Also of an odd number of tokens; against the product of the whole."""
    x, w = torch.randn(2, tokens, 3, 2, generator=torch.Generator().manual_seed(0)).double()
    for whole, halves, started in pool.run(halves_on_a_rank, tokens):
        assert torch.allclose(halves, x @ w[0].T + 1, rtol=0, atol=1e-14)
        assert torch.allclose(whole, halves, rtol=0, atol=1e-14) and started == 2
