"""The doors of a simulated mesh: what goes in, what comes out, and derivatives through both."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from mfun.comm import Groups, copy, gather, map_ranks, reduce, simulate
from mfun.comm.door import Enter, Leave, make_door
from mfun.mesh import Factor, Mesh
from mfun.spec import P, ParamSpec

FOUR = Mesh(tp=2, dp=2)
X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


def through(x: Tensor, mesh: Mesh, before: Any, after: Any, check: bool = True) -> Tensor:
    """In by one spec, out by another, untouched in between."""
    return simulate(lambda g, x: x * 1, mesh, (before,), after, check=check)(x)


def held(x: Tensor, mesh: Mesh, spec: Any) -> list[Any]:
    """What each rank holds."""
    seen: list[Any] = []

    def look(groups: Groups, x: Tensor) -> Tensor:
        seen.append(x)
        return gather(x.unsqueeze(0), groups["tp_dp_cp"], 0)

    return simulate(look, mesh, (spec,), P())(x).tolist()


def test_pieces_of_each_rank() -> None:
    """Rank r = tp + 2 dp holds the piece of its coordinates; a tuple's first axis is slowest."""
    x = torch.arange(8.0)
    quarters = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert held(x, FOUR, P("tp")) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2
    assert held(x, FOUR, P("dp")) == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert held(x, FOUR, P(("dp", "tp"))) == quarters
    assert held(x, FOUR, P(("tp", "dp"))) == [quarters[i] for i in (0, 2, 1, 3)]
    grid = torch.arange(8.0).reshape(2, 4)
    assert held(grid, FOUR, P("dp", "tp")) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
    assert held(grid, FOUR, P(None, ("tp",))) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]] * 2
    halves = Mesh(tp=4)
    assert held(torch.arange(2.0), halves, P(Factor("tp", 2))) == [[0], [0], [1], [1]]
    assert held(torch.arange(2.0), halves, P(Factor("tp", 2).inner)) == [[0], [1], [0], [1]]
    swapped = P((Factor("tp", 2).inner, Factor("tp", 2)))
    assert held(torch.arange(4.0), halves, swapped) == [[0], [2], [1], [3]]
    other = Mesh(tp=2, dp=2, order="dp-tp-cp-ep-pp")  # rank = dp + 2 tp
    assert held(x, other, P("tp")) == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    experts = Mesh(tp=2, dp=2, ep=2, etp=1)  # rank = ep + 2 edp
    assert held(torch.arange(2.0), experts, P("ep")) == [[0], [1], [0], [1]]


SPECS = [
    P(), P("tp"), P("dp"), P(None, "tp"), P("dp", "tp"), P(("dp", "tp")), P(None, ("tp", "dp")),
    P("cp"), P(Factor("tp", 2)), P(None, Factor("tp", 2, "inner")),
    P(Factor("tp", 2), Factor("tp", 2, "inner")), P((Factor("tp", 2, "inner"), "dp")),
]  # fmt: skip
MESHES = [Mesh(tp=2, dp=2), Mesh(tp=4), Mesh(tp=2, cp=2, dp=2, order="cp-dp-tp-ep-pp"), Mesh(tp=2)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"tp{m.tp}cp{m.cp}dp{m.dp}")
def test_round_trip(spec: P, mesh: Mesh) -> None:
    """In and out by one spec is the identity, forwards, backwards, and in second order."""
    x = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)
    y, pull = vjp(lambda x: through(x, mesh, spec, spec), x)[:2]
    assert torch.equal(y, x)
    assert torch.equal(pull(x)[0], x)
    assert torch.equal(vjp(lambda ct: pull(ct)[0], x)[1](x)[0], x)
    assert torch.equal(jvp(lambda x: through(x, mesh, spec, spec), (x,), (x,))[1], x)
    assert torch.equal(through(x.long(), mesh, spec, spec), x.long())
    assert torch.equal(through(x > 5, mesh, spec, spec), x > 5)


@given(st.sampled_from(SPECS), st.sampled_from(MESHES), st.sampled_from(["dp", "tp", "cp"]))
def test_sums_leaving(spec: P, mesh: Mesh, axis: str) -> None:
    """A value that leaves with sums counts once for each rank that is not cut, and no others.

    Entering with the same sums it is R, so its gradient counts likewise.
    """
    x = torch.arange(32.0, dtype=torch.float64).reshape(4, 8)
    copies = getattr(mesh, axis)
    for a in spec.axes:
        if (a if isinstance(a, str) else a.axis) == axis:
            copies //= mesh.size(a)
    after = P(*spec.entries, sums=(axis,))
    assert torch.equal(through(x, mesh, spec, after), x * copies)
    assert torch.equal(through(x, mesh, after, spec), x)
    y, pull = vjp(lambda x: through(x, mesh, after, after), x)[:2]
    assert torch.equal(y, x * copies)
    assert torch.equal(pull(x)[0], x * copies)
    assert torch.equal(vjp(lambda ct: pull(ct)[0], x)[1](x)[0], x * copies)


def test_halves_of_an_axis_among_sums() -> None:
    """With one half cut or summed, the other half is what stays: equal if not mentioned."""
    mesh, outer = Mesh(tp=4), Factor("tp", 2)
    index = map_ranks(lambda g, _: g.tp.index.double(), mesh)(torch.zeros(4))
    assert index.tolist() == [0, 1, 2, 3]

    def run(after: P, value: str) -> Tensor:
        def local(groups: Groups, x: Tensor) -> Tensor:
            at = groups.tp.index.double()
            return {"all": at, "outer": at // 2, "inner": at % 2}[value].reshape(1) + x

        return simulate(local, mesh, (P(),), after)(torch.zeros((), dtype=torch.float64))

    assert run(P(outer, sums=(outer.inner,)), "all").tolist() == [1, 5]
    assert run(P(outer, sums=("tp",)), "all").tolist() == [1, 5]
    assert run(P(outer.inner, sums=(outer,)), "all").tolist() == [2, 4]
    assert run(P(sums=(outer,)), "outer").tolist() == [1]
    assert run(P(sums=(outer.inner,)), "inner").tolist() == [1]
    for after, value in ((P(sums=(outer,)), "inner"), (P(outer), "all"), (P(outer.inner), "outer")):
        with pytest.raises(ValueError, match=r"rank \d differs from rank \d"):
            run(after, value)


def test_gradient_of_an_equal_value_is_taken_once() -> None:
    """P(): all ranks get x and use it alike; the gradient is not world times too large."""
    run = simulate(lambda g, x: (x * x).sum(), Mesh(tp=2, cp=2, dp=2), (P(),), P())
    assert torch.equal(grad(run)(X), 2 * X)
    assert torch.equal(vjp(run, X)[1](torch.tensor(3.0, dtype=torch.float64))[0], 6 * X)


def test_gradient_of_a_shared_value_is_summed() -> None:
    """sums=(dp,): each rank uses x for its own data, and its gradients are summands."""
    data = torch.tensor([1.0, 10.0], dtype=torch.float64)

    def local(groups: Groups, x: Tensor, d: Tensor) -> Tensor:
        return (d * x).sum()

    entry = P(sums=("dp",))
    run = simulate(local, FOUR, (entry, P("dp")), P(sums=("dp",)))
    assert torch.equal(grad(run)(X, data), torch.full_like(X, 11))
    wrong = simulate(local, FOUR, (P(), P("dp")), P(sums=("dp",)))
    with pytest.raises(ValueError, match=r"the gradient of argument 0 is .* equal .* up to 9;"):
        grad(wrong)(X, data)
    unchecked = simulate(local, FOUR, (P(), P("dp")), P(sums=("dp",)), check=False)
    assert torch.equal(grad(unchecked)(X, data), torch.ones_like(X))


def test_derivatives_of_a_parallel_layer() -> None:
    """Row-parallel product over tp of a dp batch: Jacobian, Hessian and per-sample gradients."""
    x, w = X[:, :2].contiguous(), torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2).T

    def dense(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x @ w)

    def local(groups: Groups, x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(reduce(x @ w, groups.tp))

    def loss(groups: Groups, x: Tensor, w: Tensor) -> Tensor:
        return local(groups, x, w).pow(2).sum()

    weight = P("tp", sums=("dp",))
    run = simulate(local, FOUR, (P("dp", "tp"), weight), P("dp"))
    total = simulate(loss, FOUR, (P("dp", "tp"), weight), P(sums=("dp",)))

    def whole(x: Tensor, w: Tensor) -> Tensor:
        return dense(x, w).pow(2).sum()

    near = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)
    near(run(x, w), dense(x, w))
    for transform in (jacrev, jacfwd):
        for i in (0, 1):
            near(transform(run, i)(x, w), transform(dense, i)(x, w))
    near(hessian(total, (0, 1))(x, w), hessian(whole, (0, 1))(x, w))
    many = torch.stack([x, 2 * x, -x])
    near(vmap(grad(total, 1), (0, None))(many, w), vmap(grad(whole, 1), (0, None))(many, w))


@pytest.mark.parametrize("spec", [P(), P("dp", "tp"), P(None, "tp", sums=("dp",))], ids=str)
def test_batches_around_the_doors(spec: P) -> None:
    """A vmap outside of the mesh, over any dim, of the function and of its pullback."""
    x = torch.arange(24.0, dtype=torch.float64).reshape(2, 4, 3, 1).expand(2, 4, 3, 2)
    copies = 2.0 if spec.sums else 1.0

    def run(x: Tensor) -> Tensor:
        return through(x, FOUR, spec, spec)

    pull = vjp(run, x[:, :, 0])[1]
    for dim in range(3):
        many = x.movedim(2, dim)
        assert torch.equal(vmap(run, dim, 2)(many), x * copies)
        assert torch.equal(vmap(lambda ct: pull(ct)[0], dim, 2)(many), x * copies)
        assert torch.equal(vmap(lambda x: jvp(run, (x,), (x,))[1], dim, 2)(many), x * copies)


def test_batch_dim_at_the_door_itself() -> None:
    """The Functions of the door take a batch dim wherever it is."""
    door = make_door(P("tp", sums=("dp",)), 1, FOUR, True, "x")
    x = torch.arange(6.0).reshape(2, 3)
    inside = vmap(lambda x: Enter.apply(x, door, -1), 1)(x)
    assert inside.tolist() == [[0, 3, 0, 3], [1, 4, 1, 4], [2, 5, 2, 5]]
    assert vmap(lambda x: Leave.apply(x, door, -1), 1)(inside.T).tolist() == (2 * x.T).tolist()


@pytest.mark.parametrize("spec", [P(), P("tp"), P("dp", sums=("tp",))], ids=str)
def test_all_second_orders_through_the_doors(spec: P) -> None:
    """Something nonlinear before, inside and after: four ways to a Hessian agree with the dense."""
    x = torch.tensor([0.3, -0.4], dtype=torch.float64)
    copies = 2.0 if spec.sums else 1.0

    def loss(x: Tensor) -> Tensor:
        y = simulate(lambda g, x: torch.exp(x), FOUR, (spec,), spec)(torch.sin(x))
        return (y * y * torch.tensor([1.0, 3.0])).sum()

    def dense(x: Tensor) -> Tensor:
        return ((copies * torch.exp(torch.sin(x))) ** 2 * torch.tensor([1.0, 3.0])).sum()

    want = hessian(dense)(x)
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            torch.testing.assert_close(outer(inner(loss))(x), want, rtol=1e-13, atol=1e-13)


class Pair(NamedTuple):
    """A NamedTuple as argument and result."""

    first: Any
    second: Any


def test_trees() -> None:
    """A P stands for all leaves below it; dicts, tuples, lists and NamedTuples keep their kind."""
    w = {"a": torch.ones(2, 2), "b": {"c": torch.arange(4.0), "d": torch.ones(2)}}
    specs = {"a": P(None, "tp"), "b": P("tp")}

    def local(groups: Groups, w: Any, pair: Pair, rest: list[Tensor]) -> Any:
        assert [tuple(x.shape) for x in (w["a"], w["b"]["c"], w["b"]["d"])] == [(2, 1), (2,), (1,)]
        assert [tuple(x.shape) for x in (*pair, *rest)] == [(2,), (1,), (2,)]
        return {"w": w, "pair": Pair(pair.second, pair.first), "rest": rest, "one": (rest[0],)}

    run = simulate(
        local,
        Mesh(tp=2),
        (specs, Pair(P(), P("tp")), [P()]),
        {"w": specs, "pair": (P("tp"), P()), "rest": P(), "one": (P(),)},
    )
    out = run(w, Pair(torch.ones(2), torch.zeros(2)), [torch.ones(2)])
    assert isinstance(out["pair"], Pair)
    assert isinstance(out["rest"], list)
    assert isinstance(out["one"], tuple)
    assert torch.equal(out["w"]["b"]["c"], w["b"]["c"])
    assert torch.equal(out["pair"].first, torch.zeros(2))
    loss = simulate(
        lambda g, w: reduce((w["a"] ** 2).sum() + (w["b"]["c"] ** 3).sum(), g.tp),
        Mesh(tp=2), (specs,), P(),
    )  # fmt: skip
    slope = grad(loss)(w)
    assert torch.equal(slope["b"]["c"], 3 * w["b"]["c"] ** 2)
    assert torch.equal(slope["b"]["d"], torch.zeros(2))


VOCAB = ParamSpec(shape=(5, 2), p=P("tp"), grad={}, pads=(0,))


def test_padded_parameter() -> None:
    """5 rows over 4 ranks: 2 each, the last 3 of 8 are zeros inside, and invisible outside."""
    x = torch.arange(1.0, 11).reshape(5, 2)
    rows = held(x, Mesh(tp=4), VOCAB)
    assert rows == [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [0, 0]], [[0, 0], [0, 0]]]
    assert torch.equal(through(x, Mesh(tp=4), VOCAB, VOCAB), x)
    run = simulate(lambda g, w: reduce(((w + 1) ** 2).sum(), g.tp), Mesh(tp=4), (VOCAB,), P())
    assert run(x) == float(((x + 1) ** 2).sum()) + 6
    assert torch.equal(grad(run)(x), 2 * (x + 1))


def test_spec_says_what_its_gradients_are() -> None:
    """Over dp and cp, and where declared partial, gradients add up; where equal, one is taken."""
    mesh = Mesh(tp=2, cp=2, dp=2)
    x = torch.ones(2)

    def used(groups: Groups, w: Tensor) -> Tensor:
        return w.sum()

    sums = P(sums=("tp", "cp", "dp"))
    partial = ParamSpec(shape=(2,), grad={"tp": "partial"})
    equal = ParamSpec(shape=(2,), grad={"tp": "equal"})
    assert grad(simulate(used, mesh, (partial,), sums))(x).tolist() == [8, 8]
    assert grad(simulate(used, mesh, (equal,), P(sums=("cp", "dp"))))(x).tolist() == [4, 4]
    repeated = ParamSpec(shape=(2,), p=P(Factor("tp", 2)), grad={"tp": "partial"})
    assert grad(simulate(used, Mesh(tp=4), (repeated,), P(sums=("tp",))))(x).tolist() == [2, 2]
    # A gradient computed inside leaves by the same spec: per rank 1, the sum as above.
    inside = simulate(lambda g, w: grad(lambda w: w.sum())(w), mesh, (partial,), partial)
    assert inside(x).tolist() == [8, 8]
    mean = ParamSpec(shape=(2,), grad={"tp": "mean"})
    with pytest.raises(ValueError, match="declare `partial`"):
        simulate(used, mesh, (mean,), P())(x)


def refused(
    message: str, specs: Any, out: Any, *args: Any, mesh: Mesh = FOUR, fn: Any = None
) -> None:
    run = simulate(fn or (lambda g, *x: x[0] * 1), mesh, specs, out)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(*args)


def test_refusals() -> None:
    """Each message names the argument or result, the dim or key, the axis and the numbers."""
    refused("2 arguments for 1 in_specs", (P(),), P(), X, X)
    refused(
        "argument 0: dim 1 of shape [4, 3] does not divide into 2 pieces over ('tp',)",
        (P(None, "tp"),), P(), X,
    )  # fmt: skip
    refused("argument 1: P(None, None, 'tp') has 3 entries for a tensor of 2 dims",
            (P(), P(None, None, "tp")), P(), X, X)  # fmt: skip
    refused("argument 0 at a.w has shape [4, 3], but its spec [5, 3]",
            ({"a": {"w": ParamSpec(shape=(5, 3))}},), P(), {"a": {"w": X}})  # fmt: skip
    refused("dim 0 of a parameter of shape [5, 2] does not divide into 2 pieces over ('tp',)",
            (ParamSpec(shape=(5, 2), p=P("tp")),), P(), torch.ones(5, 2))  # fmt: skip
    refused("argument 0 has keys ['b', 'w'] and its specs ['w']",
            ({"w": P()},), P(), {"w": X, "b": X})  # fmt: skip
    refused("argument 0 at w has keys ['0'] and its specs ['0', '1']",
            ({"w": (P(), P())},), P(), {"w": (X,)})  # fmt: skip
    refused("argument 0 is a Tensor; its specs are a tree", ({"w": P()},), P(), X)
    refused("the spec of argument 0 at w is None, not a P", ({"w": None},), P(), {"w": X})
    refused("argument 0 at w is 3, not a tensor; close over", (P(),), P(), {"w": 3})
    refused("argument 0: P(sums=('data',)): ", (P(sums=("data",)),), P(), X)
    refused("argument 0: P('ep', 'dp'): axes ['ep', 'dp'] belong to two views",
            (P("ep", "dp"),), P(), X)  # fmt: skip
    refused("the result: P('tp', None, None) has 3 entries", (P(),), P("tp", None, None), X)
    refused("the result has keys ['a', 'b'] and its specs ['a']",
            (P(),), {"a": P()}, X, fn=lambda g, x: {"a": x, "b": x})  # fmt: skip
    refused("the result on each rank has shape [4, 3], but its spec [4, 3] P('tp') means [2, 3]",
            (P(),), ParamSpec(shape=(4, 3), p=P("tp")), X)  # fmt: skip
    with pytest.raises(ValueError, match="in_specs is P\\('tp'\\); give a tuple"):
        simulate(lambda g, x: x, FOUR, P("tp"), P())
    with pytest.raises(ValueError, match="pp = 2; stages of a pipeline run in the mailbox"):
        simulate(lambda g, x: x, Mesh(pp=2), (P(),), P())


@pytest.mark.parametrize("spec", [P(), P("dp"), P("dp", sums=("cp",))])
def test_unequal_result_is_refused(spec: P) -> None:
    """A result that differs over an axis its spec does not mention; without check, the first's."""

    def local(groups: Groups, x: Tensor) -> Tensor:
        return x + groups.tp.index

    entry = P(*spec.entries)
    with pytest.raises(
        ValueError, match=r"the result is declared equal .* rank 1 differs from rank 0 by up to 1;"
    ):
        simulate(local, FOUR, (entry,), spec)(X)
    assert torch.equal(simulate(local, FOUR, (entry,), spec, check=False)(X), X)
    with pytest.raises(ValueError, match=r"the result at y\.0 is declared equal"):
        simulate(lambda g, x: {"y": (local(g, x),)}, FOUR, (entry,), {"y": spec})(X)


def test_rounding_at_the_door() -> None:
    """A redundant gelu differs in its last bits between equal ranks; that is no error."""
    odd = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 5)))
    for fn in (torch.nn.functional.gelu, torch.sigmoid, torch.nn.functional.softplus):
        run = simulate(lambda g, x, fn=fn: fn(copy(x, g.tp)), Mesh(tp=3), (P(sums=("tp",)),), P())
        torch.testing.assert_close(run(odd), fn(odd), rtol=1e-14, atol=1e-14)


def test_results_that_no_rank_has_touched() -> None:
    """Constants and untouched arguments leave like any other value."""
    run = simulate(lambda g, x: (torch.ones(2), x), FOUR, (P(),), (P("dp"), P()))
    one, x = run(X)
    assert torch.equal(one, torch.ones(4))
    assert torch.equal(x, X)
    nothing = simulate(lambda g: reduce(torch.ones(2), g.tp), FOUR, (), P(sums=("dp",)))
    assert nothing().tolist() == [4, 4]


def test_scalars_and_empty_tensors() -> None:
    """0-dim tensors and dims of length 0 pass both doors."""
    assert through(torch.tensor(3.0), FOUR, P(), P(sums=("dp", "tp"))) == 12
    assert through(torch.ones(0, 4), FOUR, P("dp", "tp"), P("dp", "tp")).shape == (0, 4)
