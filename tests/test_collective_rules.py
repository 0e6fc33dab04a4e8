"""What collectives mean and refuse: published faults, maxima, uneven dims, types, lost axes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from collective_cases import call, some
from torch import Tensor
from torch.func import grad, hessian, jvp, vjp, vmap

from mfun.comm import (
    DUALS,
    Axis,
    Groups,
    all_reduce,
    all_to_all,
    broadcast,
    collect,
    copy,
    gather,
    map_ranks,
    max,
    reduce,
    reduce_scatter,
    shift,
    simulate,
    single_groups,
    split,
    unsplit,
)
from mfun.mesh import Factor, Mesh
from mfun.spec import P

TP2 = Mesh(tp=2)
X12 = torch.tensor([1.0, 2.0], dtype=torch.float64)


def test_square_of_a_sum_meant_once() -> None:
    """Row 25: x = (1, 2), loss (x0 + x1)^2 of the mesh; each gradient is 6."""
    run = simulate(lambda g, x: (reduce(x, g.tp) ** 2).sum(), TP2, (P("tp"),), P())
    assert grad(run)(X12).tolist() == [6, 6]
    within = simulate(
        lambda g, x: grad(lambda x: (reduce(x, g.tp) ** 2).sum())(x), TP2, (P("tp"),), P("tp")
    )
    assert within(X12).tolist() == [6, 6]


def test_square_of_a_sum_meant_by_each_rank() -> None:
    """Row 25's other meaning: every rank's (x0 + x1)^2 counts, so each gradient is 12."""
    run = simulate(lambda g, x: (all_reduce(x, g.tp) ** 2).sum(), TP2, (P("tp"),), P(sums=("tp",)))
    assert run(X12) == 18
    assert grad(run)(X12).tolist() == [12, 12]


def test_gather_with_other_weights_on_each_rank() -> None:
    """Row 26: rank r holds r + 1 three times; the gradient sums all ranks' weights of my slice."""
    weights = torch.arange(12.0).reshape(2, 6)

    def local(groups: Groups, x: Tensor, w: Tensor) -> Tensor:
        return (gather(x, groups.tp, 0) * w[0]).sum()

    run = simulate(local, TP2, (P("tp"), P("tp")), P(sums=("tp",)))
    x = torch.tensor([1.0, 1, 1, 2, 2, 2])
    assert run(x, weights) == float((x * weights).sum())
    assert grad(run)(x, weights).tolist() == [0 + 6, 1 + 7, 2 + 8, 3 + 9, 4 + 10, 5 + 11]


def test_gather_then_expert() -> None:
    """Row 27: each rank's expert sees all tokens; a token's gradient sums both experts' shares."""
    tokens = torch.tensor([[1.0, 2], [3, -1], [2, 2], [-4, 1]], dtype=torch.float64)
    experts = torch.tensor([[[1.0, -2], [0, 3]], [[2, 1], [-1, 1]]], dtype=torch.float64)
    gate = torch.tensor([[2.0, 1], [0, 3], [1, 1], [2, 0]], dtype=torch.float64)

    def local(groups: Groups, x: Tensor, w: Tensor, gate: Tensor) -> Tensor:
        every = gather(x, groups.tp, 0)
        mine = gate * (every @ w[0]).relu()
        return reduce_scatter(mine, groups.tp, 0).square().sum()

    def dense(x: Tensor, w: Tensor) -> Tensor:
        both = torch.stack([gate[:, e, None] * (x @ w[e]).relu() for e in range(2)])
        return both.sum(0).square().sum()

    specs = (P("tp"), P("tp"), P(None, "tp"))
    run = simulate(local, TP2, specs, P(sums=("tp",)))
    assert run(tokens, experts, gate) == dense(tokens, experts)
    for have, want in zip(
        grad(run, (0, 1))(tokens, experts, gate),
        grad(dense, (0, 1))(tokens, experts),
        strict=True,
    ):
        assert torch.equal(have, want)
    # By hand, token 0: experts give (1, 4) and (0, 3), y = 2 (1, 4) + (0, 3) = (2, 11), dy = 2 y.
    sent = 2 * experts[0] @ torch.tensor([4.0, 22]).double() + experts[1][:, 1] * 22
    assert grad(run)(tokens, experts, gate)[0].tolist() == sent.tolist() == [-58, 154]


def test_mean_over_uneven_pieces_is_a_sum_over_a_count() -> None:
    """Row 28: 3x4 over 2 ranks has mean 5.5, 1x4 has 1.5, also where a rank holds padding only."""

    def local(groups: Groups, x: Tensor, mask: Tensor) -> Tensor:
        return reduce((x * mask).sum(), groups.tp) / reduce(mask.sum(), groups.tp)

    run = simulate(local, TP2, (P("tp"), P("tp")), P())
    for rows, mean in ((3, 5.5), (1, 1.5)):
        x = torch.arange(4.0 * rows).reshape(rows, 4)
        padded = torch.zeros(rows + 1, 4)
        padded[:rows] = x
        mask = torch.zeros_like(padded)
        mask[:rows] = 1
        assert run(padded, mask) == mean
        assert torch.equal(grad(run)(padded, mask), mask / (4 * rows))


def test_sum_under_vmap() -> None:
    """Row 135: the rows of ones(3, 2), reduced one by one over 2 ranks, make 12 in all."""
    run = simulate(lambda g, x: vmap(lambda r: reduce(r, g.tp))(x), TP2, (P(),), P())
    assert torch.equal(run(torch.ones(3, 2)), torch.full((3, 2), 2.0))
    total = simulate(lambda g, x: reduce(x.sum(), g.tp), TP2, (P(),), P())
    assert total(torch.ones(3, 2)) == 12
    assert vmap(total)(torch.ones(3, 2)).tolist() == [4, 4, 4]


@pytest.mark.parametrize("name", sorted(DUALS))
def test_operand_that_no_rank_has_touched(name: str) -> None:
    """A constant made inside the function is each rank's: it counts n times."""
    params, shape = some(name, 2)
    made = torch.arange(1.0, 1 + float(np.prod(shape))).reshape(shape)
    run = map_ranks(lambda g, _: call(name, made.clone(), g.tp, params), TP2)
    given = map_ranks(lambda g, x: call(name, x, g.tp, params), TP2)
    assert torch.equal(run(torch.zeros(2)), given(torch.stack([made, made])))


def test_maximum_and_its_stopped_gradient() -> None:
    """Elementwise over the group; a constant to every derivative, inside and outside of vmaps."""
    x = torch.tensor([[3.0, -5.0], [1.0, 4.0], [0.0, 9.0], [2.0, -1.0]])
    mesh = Mesh(tp=2, dp=2)
    top = map_ranks(lambda g, x: max(x, g.tp), mesh)
    assert top(x).tolist() == [[3, 4], [3, 4], [2, 9], [2, 9]]
    assert map_ranks(lambda g, x: max(x, g["tp_dp_cp"]), mesh)(x)[1].tolist() == [3, 9]
    assert vmap(top)(torch.stack([x, -x]))[1].tolist() == [[-1, 5], [-1, 5], [0, 1], [0, 1]]
    inside = map_ranks(lambda g, x: vmap(lambda e: max(e, g.tp))(x), mesh)
    assert torch.equal(inside(x), top(x))

    def local(groups: Groups, x: Tensor) -> Tensor:
        return reduce((x * x).sum() * max(x * x, groups.tp).sum(), groups.tp)

    run = simulate(local, TP2, (P("tp"),), P())
    x = torch.tensor([1.0, 2.0, 3.0, -4.0])
    # ranks hold (1, 2) and (3, -4); the maxima of the squares are (9, 16).
    assert run(x) == 30 * 25
    assert torch.equal(grad(run)(x), 2 * x * 25)
    assert torch.equal(hessian(run)(x), torch.eye(4) * 50)
    assert jvp(run, (x,), (torch.ones(4),))[1] == 2 * x.sum() * 25
    assert torch.equal(vmap(grad(run))(torch.stack([x, x]))[1], 2 * x * 25)
    within = simulate(lambda g, x: grad(lambda x: local(g, x))(x), TP2, (P("tp"),), P("tp"))
    assert torch.equal(within(x), 2 * x * 25)


def test_whole_numbers_are_communicated() -> None:
    """Counts and tokens are int64; they stay so, beside a gradient."""
    ints = torch.arange(4).reshape(2, 2)
    for name, want in (("reduce", [[2, 4], [2, 4]]), ("gather", [[0, 1, 2, 3]] * 2)):
        params = (0,) if name == "gather" else ()
        got = map_ranks(lambda g, x, n=name, p=params: call(n, x, g.tp, p), TP2)(ints)
        assert got.dtype == torch.int64
        assert got.tolist() == want
    run = simulate(
        lambda g, x, n: reduce(x.sum(), g.tp) / reduce(n.sum(), g.tp), TP2, (P("tp"), P("tp")), P()
    )
    assert grad(run)(X12, torch.tensor([3, 5])).tolist() == [0.125, 0.125]


UNEVEN: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "reduce_scatter": lambda x, axis: reduce_scatter(x, axis, 1),
    "split": lambda x, axis: split(x, axis, 1),
    "all_to_all": lambda x, axis: all_to_all(x, axis, 1, 0),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_dim_is_refused(name: str) -> None:
    """The message names the collective, the dim, the shape, the axis and its size."""
    run = simulate(lambda g, x: UNEVEN[name](x, g.dp), Mesh(tp=2, dp=3), (P(),), P())
    want = f"{name}: dim 1 of shape [2, 4] does not divide over axis 'dp' of size 3; pad it to a"
    with pytest.raises(ValueError, match=re.escape(want)):
        run(torch.ones(2, 4))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, axis: gather(x, axis, 2),
        lambda x, axis: reduce_scatter(x, axis, -3),
        lambda x, axis: split(x, axis, 2),
        lambda x, axis: unsplit(x, axis, -3),
        lambda x, axis: all_to_all(x, axis, 2, 0),
        lambda x, axis: all_to_all(x, axis, 0, 2),
    ],
)
@pytest.mark.parametrize("mesh", [Mesh(), TP2])
def test_dim_out_of_range_is_refused(fn: Any, mesh: Mesh) -> None:
    """Also on an axis of size 1, or a wrong program would run on one device only."""
    with pytest.raises(
        ValueError, match=r"dim -?\d is out of range for a tensor of shape \[2, 4\]"
    ):
        simulate(lambda g, x: fn(x, g.tp), mesh, (P(),), P())(torch.ones(2, 4))


@pytest.mark.parametrize("fn", [broadcast, collect])
@pytest.mark.parametrize("root", [-1, 2])
def test_root_off_the_axis_is_refused(fn: Any, root: int) -> None:
    """A root must be a position of the axis."""
    with pytest.raises(ValueError, match=f"root {root} is not on axis 'tp' of size 2"):
        simulate(lambda g, x: fn(x, g.tp, root), TP2, (P(),), P())(torch.ones(2))


@pytest.mark.parametrize("name", ["copy", "split"])
def test_unequal_input_is_refused(name: str) -> None:
    """With check, an invariant input that differs raises and names axis, size and difference."""
    params = {"copy": (), "split": (0,)}[name]
    run = map_ranks(lambda g, x: call(name, x, g.tp, params), Mesh(tp=2, dp=2), check=True)
    same = torch.ones(4, 2)
    same[2:] = 5  # other groups may hold other values
    run(same)
    same[3, 1] = 7
    want = rf"the input of `{name}` \(I -> .\) must be equal over axis 'tp' \(size 2\).*by up to 2;"
    with pytest.raises(ValueError, match=want):
        run(same)


def test_unequal_cotangent_is_refused() -> None:
    """What `reduce` returns is meant once: ranks that use it differently are found backwards."""

    def local(groups: Groups, x: Tensor) -> Tensor:
        return reduce(reduce(x, groups.tp).sum() * (1.0 + groups.tp.index), groups.tp)

    with pytest.raises(ValueError, match="the input of `copy`"):
        grad(simulate(local, TP2, (P("tp"),), P()))(X12)
    assert grad(simulate(local, TP2, (P("tp"),), P(), check=False))(X12).tolist() == [1, 2]


def test_rounding_is_not_inequality() -> None:
    """CPU kernels round a buffer's end differently: equal ranks may differ in the last bits."""
    x = torch.tensor([1.0, 2.0, 0.0, -3.0], dtype=torch.float64).expand(2, 4)
    run = map_ranks(lambda g, x: copy(x, g.tp), TP2, check=True)
    run(x * torch.tensor([[1.0], [1 + 2e-14]], dtype=torch.float64))
    with pytest.raises(ValueError, match="must be equal"):
        run(x * torch.tensor([[1.0], [1 + 2e-12]], dtype=torch.float64))
    odd = torch.tensor([[float("nan"), float("inf")]] * 2)
    run(odd)
    for other in ([float("inf"), float("inf")], [float("nan"), 1.0], [0.0, float("inf")]):
        with pytest.raises(ValueError, match="must be equal"):
            run(torch.stack([odd[0], torch.tensor(other)]))


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(tp=2)])
@pytest.mark.parametrize("name", [*sorted(DUALS), "max"])
def test_axis_of_one_rank_is_the_identity(name: str, mesh: Mesh) -> None:
    """Every collective over size 1 returns its input, with gradient 1 (0 for max)."""
    params = some(name, 1)[0]
    x = torch.arange(1.0, 5).reshape(2, 2)
    axes = ("cp",) if mesh.tp == 1 else (Factor("tp", 1),)
    run = map_ranks(lambda g, x: call(name, x, g.over(*axes), params), mesh, check=True)
    stack = x.expand(mesh.world, 2, 2)
    y, pull = vjp(run, stack)[:2]
    assert torch.equal(y, stack)
    assert torch.equal(pull(stack)[0], stack * (name != "max"))


def test_single_groups_need_no_simulation() -> None:
    """One device runs the same calls with axes of size 1, composite ones too."""
    groups, x = single_groups(), torch.ones(2, 2)
    assert reduce(x, groups.tp) is x
    assert shift(gather(x, groups["tp_dp_cp"], 0), groups.pp, 1) is x
    assert groups.over("tp", "dp").size == 1


def test_axis_outside_of_its_function() -> None:
    """An axis kept from a finished run raises: alone, in a vmap as deep, and in another mesh."""
    kept: list[Axis] = []

    def keep(groups: Groups, x: Tensor) -> Tensor:
        kept.append(groups.tp)
        return reduce(x, kept[0])

    run = simulate(keep, TP2, (P("tp"),), P())
    run(X12)
    with pytest.raises(RuntimeError, match=r"`reduce` over axis 'tp' \(size 2\)"):
        reduce(X12, kept[0])
    for rows in (2, 5):
        with pytest.raises(RuntimeError, match="a `simulate` run that has ended"):
            vmap(lambda x: reduce(x, kept[0]))(torch.ones(rows, 3))
        with pytest.raises(RuntimeError, match="a `simulate` run that has ended"):
            vmap(lambda x: max(x, kept[0]))(torch.ones(rows, 3))
    with pytest.raises(RuntimeError, match="a `simulate` run that has ended"):
        run(X12)
    with pytest.raises(RuntimeError, match="take the axis from the `groups` argument"):
        grad(lambda x: reduce(x, kept[0]).sum())(X12)


def test_axis_first_used_in_an_inner_derivative() -> None:
    """The axis made within one transform serves the next: its index is not tied to the first."""

    def local(groups: Groups, x: Tensor) -> tuple[Tensor, ...]:
        once = grad(lambda x: reduce((x * x).sum(), groups.tp))(x)
        twice = hessian(lambda x: reduce((x * x).sum(), groups.tp))(x).sum(0)
        sample = vmap(lambda x: reduce(x, groups.tp))(x)
        return once, twice, sample, reduce(x, groups.tp)

    def nested(groups: Groups, x: Tensor) -> Tensor:
        def slope(x: Tensor) -> Tensor:
            return jvp(lambda x: reduce((x * x).sum(), groups.tp), (x,), (x,))[1]

        inner = jvp(slope, (x,), (x,))[1] + max(jvp(slope, (x,), (x,))[1], groups.tp)
        return inner + reduce(grad(slope)(x).sum(), groups.tp)

    # A mesh that no other test has: whatever is kept for it is made inside the inner transform.
    run = simulate(nested, Mesh(tp=5), (P("tp"),), P())
    ones = torch.ones(5)
    assert jvp(run, (ones,), (ones,))[1] == 2 * 20 + 20
    assert run(ones) == 60
    run = simulate(local, TP2, (P("tp"),), (P("tp"), P("tp"), P(), P()))
    for _ in range(2):
        got = run(torch.arange(4.0))
        assert [x.tolist() for x in got] == [[0, 2, 4, 6], [2, 2, 2, 2], [2, 4], [2, 4]]
        jvp(run, (torch.arange(4.0),), (torch.ones(4),))


def test_names_of_groups() -> None:
    """Families by name; an unknown one, and a stage axis under simulate, are refused by name."""

    def sizes(groups: Groups, x: Tensor) -> Tensor:
        assert [groups[f].size for f in ("tp", "cp", "dp", "dp_cp", "tp_cp", "tp_dp_cp")] == [
            2, 1, 3, 3, 2, 6,
        ]  # fmt: skip
        assert groups.over("dp", "tp").partition == groups.over("tp", "dp").partition
        with pytest.raises(KeyError, match="no group 'data'; there are"):
            groups["data"]
        for ask in (lambda: groups.pp, lambda: groups.over("dp", stages=(0,))):
            with pytest.raises(KeyError, match="mailbox"):
                ask()
        return x

    simulate(sizes, Mesh(tp=2, dp=3), (P(),), P())(torch.ones(1))


def test_composite_axis_counts_in_mesh_order() -> None:
    """over(dp, cp) gathers what P((dp, cp)) cut, in either order of naming; P((cp, dp)) differs."""
    mesh = Mesh(cp=2, dp=2)
    x = torch.arange(4.0)
    for axes in (("dp", "cp"), ("cp", "dp")):
        run = simulate(
            lambda g, x, a=axes: unsplit(x, g.over(*a), 0), mesh, (P(("dp", "cp")),), P()
        )
        assert torch.equal(run(x), x)
    run = simulate(lambda g, x: unsplit(x, g["dp_cp"], 0), mesh, (P(("cp", "dp")),), P())
    assert run(x).tolist() == [0, 2, 1, 3]
