"""Every collective and its derivatives under `simulate`, against definitions in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from collective_cases import Layout, Program, call, define, matrix, out_shape, some
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from mfun.comm import DUALS, Groups, map_ranks, simulate
from mfun.mesh import AxisLike, Factor, Mesh
from mfun.spec import P

LINEAR = sorted(DUALS)
ORDERS = ("tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp", "cp-dp-tp-pp-ep")
MESHES = [
    (tp, cp, dp)
    for tp in (1, 2, 3, 4, 8)
    for cp in (1, 2, 4)
    for dp in (1, 2, 3, 4, 8)
    if 1 < tp * cp * dp <= 8
]


def close(a: Tensor, b: Tensor) -> None:
    """Equal to 1e-12 of the largest value."""
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-12 * max(1.0, float(b.abs().max()))


@st.composite
def layouts(draw: st.DrawFn, at_least: int = 1) -> Layout:
    """A mesh of up to 8 ranks, and axes, composite axes or halves of one."""
    tp, cp, dp = draw(st.sampled_from(MESHES))
    mesh = Mesh(tp=tp, cp=cp, dp=dp, order=draw(st.sampled_from(ORDERS)))
    choices: list[tuple[AxisLike, ...]] = [
        ("tp",), ("cp",), ("dp",), ("dp", "cp"), ("tp", "cp"), ("tp", "dp"), ("tp", "dp", "cp"),
    ]  # fmt: skip
    for parts in (2, 4):
        if tp % parts == 0:
            outer = Factor("tp", parts)
            choices += [(outer,), (outer.inner,), (outer, "dp"), (outer.inner, "cp", "dp")]
    found = [Layout(mesh, axes) for axes in choices]
    return draw(st.sampled_from([layout for layout in found if layout.size >= at_least]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, str, tuple[int, ...], tuple[int, ...]]:
    """A layout, a collective, its parameters and a rank-local shape it accepts."""
    layout, name = draw(layouts()), draw(st.sampled_from(LINEAR))
    n = layout.size
    ndim = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 2 if ndim < 3 else 1), min_size=ndim, max_size=ndim))
    dim = st.integers(-ndim, ndim - 1)
    params: tuple[int, ...] = ()
    if name in ("gather", "unsplit", "reduce_scatter", "split", "all_to_all"):
        params = (draw(dim),)
        if name not in ("gather", "unsplit"):
            shape[params[0]] *= n
    if name == "all_to_all":
        params = (*params, draw(dim))
    if name == "shift":
        params = (draw(st.integers(-2 * n, 2 * n)),)
    if name in ("broadcast", "collect"):
        params = (draw(st.integers(0, n - 1)),)
    return layout, name, params, tuple(shape)


def stacked(layout: Layout, name: str, params: tuple[int, ...], check: bool = False) -> Any:
    """The collective on rank-stacked tensors."""
    return map_ranks(
        lambda groups, x: call(name, x, groups.over(*layout.axes), params),
        layout.mesh,
        check=check,
    )


def spread(layout: Layout, shape: tuple[int, ...], equal: bool) -> Tensor:
    """Basis (k, ranks, *shape) of all rank-stacked values, or of those equal within each group."""
    count = len(layout.groups) if equal else layout.ranks
    eye = torch.eye(count * int(np.prod(shape)), dtype=torch.float64).reshape(-1, count, *shape)
    return eye[:, layout.number] if equal else eye


@settings(max_examples=100)
@given(cases())
def test_value_is_its_definition(case: Any) -> None:
    """Each collective, on random integers, gives what numpy gives group by group."""
    layout, name, params, shape = case
    x = np.random.default_rng(0).integers(-9, 9, (layout.ranks, *shape)).astype(float)
    if DUALS[name].equal_input:
        x = x[[layout.groups[i][0] for i in layout.number]]
    got = stacked(layout, name, params, check=True)(torch.from_numpy(x))
    np.testing.assert_array_equal(got.numpy(), define(layout, name, params, x))


@settings(max_examples=100)
@given(cases())
def test_backward_is_the_transpose(case: Any) -> None:
    """The integer matrix of the backward is F^T in the pairing of the declared types.

    <x, dx> is the sum over ranks; an invariant pair is equal on all n ranks and counts once. I and
    R values are equal, I and P cotangents are equal, and results must keep to that.
    """
    layout, name, params, shape = case
    before, after = DUALS[name].types.split(" -> ")
    run = stacked(layout, name, params, check=True)
    result = out_shape(layout, name, params, shape)
    x = spread(layout, shape, equal=before in "IR")
    y = vmap(run)(x)
    dy = spread(layout, result, equal=after in "IP")
    pull = vjp(run, torch.zeros(layout.ranks, *shape, dtype=torch.float64))[1]
    dx = vmap(lambda cotangent: pull(cotangent)[0])(dy)
    weight = {"I": 1, "R": layout.size, "P": layout.size, "V": layout.size}  # n times the pairing
    forward = weight[after] * (dy.flatten(1) @ y.flatten(1).T)
    backward = weight[before] * (dx.flatten(1) @ x.flatten(1).T)
    assert torch.equal(forward, backward)
    for value, equal in ((y, after in "IR"), (dx, before in "IP")):
        first = value[:, [group[0] for group in layout.groups]][:, layout.number]
        assert not equal or torch.equal(value, first)


@settings(max_examples=40)
@given(cases())
def test_tangents_and_double_backward_are_the_collective(case: Any) -> None:
    """A linear map is its own tangent, and the transpose of its transpose."""
    layout, name, params, shape = case
    run = stacked(layout, name, params)
    f = matrix(layout, name, params, shape)
    basis = spread(layout, shape, equal=False)
    zero = torch.zeros(layout.ranks, *shape, dtype=torch.float64)
    tangent = vmap(lambda t: jvp(run, (zero,), (t,))[1])(basis)
    assert torch.equal(tangent.flatten(1).T, f)
    pull = vjp(run, zero)[1]
    again = vjp(lambda cotangent: pull(cotangent)[0], torch.zeros_like(run(zero)))[1]
    twice = vmap(lambda t: again(t)[0])(basis)
    assert torch.equal(twice.flatten(1).T, f)


@pytest.mark.parametrize("name", LINEAR)
def test_dual_row_is_consistent(name: str) -> None:
    """The dual has the transposed types (R and P change places) and is dual to the collective."""
    flip = {"I": "I", "V": "V", "R": "P", "P": "R"}
    before, after = DUALS[name].types.split(" -> ")
    assert DUALS[DUALS[name].dual].types == f"{flip[after]} -> {flip[before]}"
    assert DUALS[DUALS[name].dual].dual == name


# Derivatives of a nonlinear program around each collective, taken outside and inside of the mesh.

LAYOUTS = {
    "tp": Layout(Mesh(tp=2, dp=2), ("tp",)),
    "dp_cp": Layout(Mesh(tp=2, cp=2, dp=2), ("dp", "cp")),
    "inner": Layout(Mesh(tp=4), (Factor("tp", 2, "inner"),)),
    "outer": Layout(Mesh(tp=4, order="dp-tp-cp-ep-pp", dp=2), (Factor("tp", 2),)),
    "dp3": Layout(Mesh(dp=3), ("dp",)),
}


def program(name: str, layout: str) -> Program:
    params, shape = some(name, LAYOUTS[layout].size)
    return Program(LAYOUTS[layout], name, params, shape)


def outside(p: Program) -> Callable[..., Tensor]:
    """The loss of whole tensors."""
    x, u, loss = p.specs()
    return simulate(p.local, p.layout.mesh, in_specs=(x, x, u), out_specs=loss)


def inside(p: Program, fn: Any, *specs: P, out: P) -> Callable[..., Tensor]:
    """`fn(loss of this rank's x, *local)` run on every rank."""
    x, u, _ = p.specs()

    def local(groups: Groups, w: Tensor, u: Tensor, *local: Tensor) -> Tensor:
        return fn(lambda x: p.local(groups, x, w, u), *local)

    return simulate(local, p.layout.mesh, in_specs=(x, u, *specs), out_specs=out)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LINEAR)
def test_gradient(name: str, layout: str) -> None:
    """Value and every gradient of the program equal the dense one's; so does a gradient inside."""
    p = program(name, layout)
    x, w, u = p.inputs()
    run = outside(p)
    close(run(x, w, u), p.dense(x, w, u))
    for got, want in zip(
        grad(run, (0, 1, 2))(x, w, u), grad(p.dense, (0, 1, 2))(x, w, u), strict=True
    ):
        close(got, want)
    spec = p.specs()[0]
    within = inside(p, lambda loss, x: grad(loss)(x), spec, out=spec)
    close(within(w, u, x), grad(p.dense)(x, w, u))


@pytest.mark.parametrize("layout", ["tp", "inner"])
@pytest.mark.parametrize("name", LINEAR)
def test_second_order_outside(name: str, layout: str) -> None:
    """jvp(grad), grad(grad) and Hessians of the whole program equal the dense ones."""
    p = program(name, layout)
    x, w, u = p.inputs()
    v = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape)
    run = outside(p)

    def product(loss: Any, x: Tensor, w: Tensor) -> Tensor:
        return (grad(loss)(x, w, u) * v).sum()

    want = jvp(lambda x: grad(p.dense)(x, w, u), (x,), (v,))[1]
    close(jvp(lambda x: grad(run)(x, w, u), (x,), (v,))[1], want)
    for argument in (0, 1):
        close(grad(product, argument + 1)(run, x, w), grad(product, argument + 1)(p.dense, x, w))
    want = hessian(p.dense)(x, w, u)
    close(jacfwd(jacrev(run))(x, w, u), want)
    close(jacrev(jacrev(run))(x, w, u), want)
    close(jacrev(jacfwd(run))(x, w, u), want)
    close(jacfwd(jacfwd(run))(x, w, u), want)


@pytest.mark.parametrize("layout", ["tp", "outer"])
@pytest.mark.parametrize("name", LINEAR)
def test_second_order_inside(name: str, layout: str) -> None:
    """jvp(grad), grad(grad) and a Hessian by global basis vectors, taken by each rank."""
    p = program(name, layout)
    x, w, u = p.inputs()
    v = torch.linspace(-1, 1, x.numel(), dtype=torch.float64).reshape(x.shape)
    spec = p.specs()[0]
    want = jvp(lambda x: grad(p.dense)(x, w, u), (x,), (v,))[1]

    def forward(loss: Any, x: Tensor, v: Tensor) -> Tensor:
        return jvp(grad(loss), (x,), (v,))[1]

    def reverse(loss: Any, x: Tensor, v: Tensor) -> Tensor:
        return grad(lambda x: (grad(loss)(x) * v).sum())(x)

    def rows(loss: Any, x: Tensor, basis: Tensor) -> Tensor:
        return vmap(lambda v: jvp(grad(loss), (x,), (v,))[1])(basis)

    close(inside(p, forward, spec, spec, out=spec)(w, u, x, v), want)
    close(inside(p, reverse, spec, spec, out=spec)(w, u, x, v), want)
    basis = torch.eye(x.numel(), dtype=torch.float64).reshape(-1, *x.shape)
    many = P(None, *spec.entries)

    def along(loss: Any, x: Tensor, v: Tensor) -> Tensor:
        return jvp(lambda x: jvp(loss, (x,), (v,))[1], (x,), (v,))[1]

    curvature = (v * want).sum()
    close(inside(p, along, spec, spec, out=p.specs()[2])(w, u, x, v), curvature)
    close(along(lambda x: outside(p)(x, w, u), x, v), curvature)

    def third(loss: Any, x: Tensor, v: Tensor) -> Tensor:
        return jvp(lambda x: jvp(grad(loss), (x,), (v,))[1], (x,), (v,))[1]

    got = inside(p, third, spec, spec, out=spec)(w, u, x, v)
    close(got, third(lambda x: p.dense(x, w, u), x, v))
    got = inside(p, rows, spec, many, out=many)(w, u, x, basis)
    close(got, hessian(p.dense)(x, w, u).reshape(got.shape))


@pytest.mark.parametrize("layout", ["tp", "dp_cp"])
@pytest.mark.parametrize("name", LINEAR)
def test_per_sample(name: str, layout: str) -> None:
    """Losses and gradients of each of 3 samples, by a vmap around the mesh and one inside it."""
    p = program(name, layout)
    x, w, u = p.inputs(3)
    run = outside(p)
    value = vmap(lambda x: p.dense(x, w, u))(x)
    slopes = torch.stack([grad(p.dense)(one, w, u) for one in x])
    close(vmap(run, (0, None, None))(x, w, u), value)
    close(vmap(grad(run), (0, None, None))(x, w, u), slopes)
    spec, _, loss = p.specs(None)
    close(inside(p, lambda f, x: vmap(f)(x), spec, out=loss)(w, u, x), value)
    close(inside(p, lambda f, x: vmap(grad(f))(x), spec, out=spec)(w, u, x), slopes)
    # Around and inside at once: twice and three times the samples, the outer batch in the middle.
    more = torch.stack([2 * x, 3 * x], 2)
    spec, _, loss = p.specs(None)
    both = vmap(inside(p, lambda f, x: vmap(f)(x), spec, out=loss), (None, None, 2))(w, u, more)
    close(both, torch.stack([vmap(lambda x: p.dense(x, w, u))(s * x) for s in (2, 3)]))


@pytest.mark.parametrize("name", LINEAR)
def test_cotangent_of_any_layout(name: str) -> None:
    """An expanded or transposed cotangent, and a transposed input, count like contiguous ones."""
    layout = LAYOUTS["tp"]
    n = layout.size
    params = {"all_to_all": (0, 1), "shift": (1,)}.get(name, some(name, n)[0])
    shape = (2 * n, n) if params else (3, 4)
    result = out_shape(layout, name, params, shape)
    run = stacked(layout, name, params)
    x = torch.arange(layout.ranks * int(np.prod(shape)), dtype=torch.float64)
    x = x.reshape(layout.ranks, *reversed(shape)).transpose(1, 2)
    y, pull = vjp(run, x)[:2]
    np.testing.assert_array_equal(y.numpy(), define(layout, name, params, x.numpy()))
    row = torch.arange(1.0, 1 + result[-1], dtype=torch.float64).expand(layout.ranks, *result)
    whole = torch.arange(float(np.prod(result)), dtype=torch.float64)
    whole = whole.reshape(*reversed(result)).T.expand(layout.ranks, *result)
    for cotangent in (row, whole):
        assert not cotangent.is_contiguous()
        assert torch.equal(pull(cotangent)[0], pull(cotangent.contiguous())[0])


class BatchLast(torch.autograd.Function):
    """The identity, which under vmap leaves its batch dim last, as any Function may."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return BatchLast.apply(x.movedim(in_dims[0], -1)), x.ndim - 1


@pytest.mark.parametrize("name", [*LINEAR, "max"])
def test_batch_dims_anywhere(name: str) -> None:
    """Ranks that are not the first physical dim, and outer or inner batches that are not."""
    layout = LAYOUTS["tp"]
    params, shape = some(name, layout.size)
    x = torch.arange(3.0 * layout.ranks * int(np.prod(shape)), dtype=torch.float64)
    x = x.reshape(3, layout.ranks, *shape).sin()
    want = torch.stack([torch.from_numpy(define(layout, name, params, e.numpy())) for e in x])
    run = stacked(layout, name, params)
    pull = vjp(run, x[0])[1]
    for dim in range(1, x.ndim):
        assert torch.equal(vmap(run, dim)(x.movedim(0, dim)), want)
    for dim in range(1, want.ndim):
        got = vmap(lambda ct: pull(ct)[0], dim)(want.movedim(0, dim))
        assert torch.equal(got, torch.stack([pull(ct)[0] for ct in want]))

    def ranks_last(groups: Groups, x: Tensor) -> Tensor:
        return call(name, BatchLast.apply(x), groups.over(*layout.axes), params)

    def both_last(groups: Groups, x: Tensor) -> Tensor:
        return vmap(lambda x: ranks_last(groups, x), -1)(BatchLast.apply(x.movedim(0, -1)))

    assert torch.equal(map_ranks(ranks_last, layout.mesh)(x[0]), want[0])
    inside = map_ranks(both_last, layout.mesh)(x.movedim(1, 0))
    assert torch.equal(inside.movedim(1, 0), want)
