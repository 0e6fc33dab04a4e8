"""Parallel layers equal their dense definitions: values and derivatives of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import (
    INSIDE,
    LAYERS,
    OUTSIDE,
    activations,
    cubes,
    near,
    randint,
    randn,
    squares,
    tangents,
)
from torch import Tensor
from torch.func import grad, vjp

from mfun import comm, nn
from mfun.comm import Groups, simulate, single_groups
from mfun.mesh import Mesh
from mfun.spec import P

MESHES = [Mesh(tp=tp, dp=dp) for tp in (1, 2, 4) for dp in (1, 2)]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("derivative", OUTSIDE)
def test_derivative_of_the_mesh(layer: str, sp: bool, derivative: str) -> None:
    """A derivative of the simulated mesh is that of the dense layer."""
    mesh = Mesh(tp=2, dp=2)
    case = LAYERS[layer](mesh, sp)
    f = case.simulated(mesh)
    found = OUTSIDE[derivative](f, case.scalar(f), case.args)
    near(found, OUTSIDE[derivative](case.dense, case.scalar(case.dense), case.args))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("derivative", INSIDE)
def test_derivative_on_a_rank(layer: str, sp: bool, derivative: str) -> None:
    """A derivative that every rank takes of its own program is its piece of the dense one."""
    mesh = Mesh(tp=2, dp=2)
    case = LAYERS[layer](mesh, sp)
    n = len(case.args)

    def local(groups: Groups, *args: Tensor) -> Any:
        scalar = case.scalar(lambda *a: case.local(groups, *a))
        return INSIDE[derivative](scalar, args[:n], args[n:])

    run = simulate(local, mesh, (*case.specs, *case.specs), case.specs, check=False)
    directions = tangents(case.args)
    found = run(*case.args, *directions)
    near(found, INSIDE[derivative](case.scalar(case.dense), case.args, directions))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_reverse_over_reverse_on_a_rank(layer: str, sp: bool) -> None:
    """Each rank's gradient of the sum of squares of gradients (those that are no summands).

    Gradients cut over tp give a summand of that sum on each rank, and are reduced to it; equal
    ones give it on every rank.
    """
    mesh = Mesh(tp=2)
    case = LAYERS[layer](mesh, sp)
    numbers = tuple(range(len(case.args)))
    whole = [i for i in numbers if "tp" not in case.specs[i].sums]

    def local(groups: Groups, *args: Tensor) -> Any:
        def objective(*args: Tensor) -> Tensor:
            grads = grad(case.scalar(lambda *a: case.local(groups, *a)), numbers)(*args)
            cut = squares([grads[i] for i in whole if "tp" in case.specs[i].axes])
            equal = squares([grads[i] for i in whole if "tp" not in case.specs[i].axes])
            return equal + comm.reduce(cut, groups.tp)

        return grad(objective, numbers)(*args)

    def dense(*args: Tensor) -> Tensor:
        grads = grad(case.scalar(case.dense), numbers)(*args)
        return squares([grads[i] for i in whole])

    found = simulate(local, mesh, case.specs, case.specs, check=False)(*case.args)
    near(found, grad(dense, numbers)(*case.args))


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=12)
@given(mesh=st.sampled_from(MESHES), sp=st.booleans())
def test_gradients_on_every_mesh(layer: str, mesh: Mesh, sp: bool) -> None:
    """Value and every gradient, on every mesh."""
    case = LAYERS[layer](mesh, sp)
    f = case.simulated(mesh)
    for derivative in ("value", "grad"):
        found = OUTSIDE[derivative](f, case.scalar(f), case.args)
        near(found, OUTSIDE[derivative](case.dense, case.scalar(case.dense), case.args))


# ---------------------------------------------------------------------------- linear


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_row_bias_gradient(sp: bool) -> None:
    """In 8 out 6 over tp 2: the bias gradient is the column sum of the cotangent (bugs row 20)."""
    mesh, x, w, b, dy = Mesh(tp=2), randn(3, 4, 8), randn(6, 8), randn(6), randn(3, 4, 6)
    spec = P(None, "tp") if sp else P()
    run = simulate(
        lambda groups, x, w, b: nn.row_linear(x, w, b, groups.tp, sequence_parallel=sp),
        mesh,
        (P(None, None, "tp"), P(None, "tp"), P(sums=("tp",)) if sp else P()),
        spec,
    )
    db = vjp(run, x, w, b)[1](dy)[2]
    np.testing.assert_allclose(db.numpy(), dy.numpy().sum((0, 1)), rtol=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_row_bias_is_added_once(tp: int) -> None:
    """In 8 out 6 over tp 1, 2, 4: x W + b in numpy (bugs row 21)."""
    x, w, b = randn(3, 4, 8), randn(6, 8), randn(6)
    run = simulate(
        lambda groups, x, w, b: nn.row_linear(x, w, b, groups.tp),
        Mesh(tp=tp),
        (P(None, None, "tp"), P(None, "tp"), P()),
        P(),
    )
    np.testing.assert_allclose(run(x, w, b), x.numpy() @ w.numpy().T + b.numpy(), rtol=1e-12)


def test_skipped_bias_is_handed_back() -> None:
    """skip_bias_add leaves the bias out and returns it, gathered where the output is."""
    x, w, b = randn(1, 2, 4), randn(4, 4), randn(4)

    def local(groups: Groups, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y, bias = nn.column_linear(x, w, b, groups.tp, gather_output=True, skip_bias_add=True)
        assert bias is not None
        return y, bias

    y, bias = simulate(local, Mesh(tp=2), (P(), P("tp"), P("tp")), (P(), P()))(x, w, b)
    near((y, bias), (x @ w.T, b))
    y, same = nn.row_linear(x, w, b, single_groups().tp, skip_bias_add=True)
    near(y, x @ w.T)
    assert same is b


def test_misfit_is_named() -> None:
    """Shapes that do not fit are refused with both."""
    with pytest.raises(ValueError, match=r"row_linear: x of shape \[1, 2, 3\] .* \[5, 4\]"):
        nn.row_linear(randn(1, 2, 3), randn(5, 4), None, single_groups().tp)


# ---------------------------------------------------------------------------- embedding and norms


@pytest.mark.parametrize("tp", [2, 4])
def test_padded_rows_never_contribute(tp: int) -> None:
    """37 rows over tp: what is in the padding (here NaN) reaches no value and gets no gradient."""
    rows = -(-37 // tp) * tp
    w, tokens = randn(37, 3), randint(37, 4, 8)
    padded = torch.cat([w, torch.full((rows - 37, 3), torch.nan, dtype=w.dtype)])
    run = simulate(
        lambda groups, w: nn.vocab_embedding(tokens, w, groups.tp), Mesh(tp=tp), (P("tp"),), P()
    )
    y, pull, *_ = vjp(run, padded)
    assert torch.equal(y, w[tokens])
    (dw,) = pull(torch.ones_like(y))
    counts = torch.bincount(tokens.flatten(), minlength=rows).double()
    assert torch.equal(dw, counts.unsqueeze(-1).expand(rows, 3))


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_positions_may_restart(sp: bool) -> None:
    """With positions given, each token reads the row of its own, on whole and cut sequences."""
    table, positions = randn(6, 3), torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])

    def local(groups: Groups, w: Tensor) -> Tensor:
        return nn.position_embedding(w, 6, groups.tp, positions_bs=positions, sequence_parallel=sp)

    run = simulate(local, Mesh(tp=2), (P(),), P(None, "tp") if sp else P())
    assert torch.equal(run(table), table[positions])


def test_sequence_longer_than_the_table_is_refused() -> None:
    """Both lengths are named."""
    with pytest.raises(ValueError, match="7 tokens for a table of 6"):
        nn.position_embedding(randn(6, 3), 7, single_groups().tp)


def test_norms_are_their_equations() -> None:
    """Layer and RMS norm, by numpy."""
    x, w, b = randn(2, 3, 5), randn(5), randn(5)
    n = x.numpy()
    centred = n - n.mean(-1, keepdims=True)
    layer = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-2) * w.numpy() + b.numpy()
    rms = n / np.sqrt((n**2).mean(-1, keepdims=True) + 1e-2) * w.numpy()
    np.testing.assert_allclose(nn.layer_norm(x, w, b, 1e-2), layer, rtol=1e-12)
    np.testing.assert_allclose(nn.rms_norm(x, w, 1e-2), rms, rtol=1e-12)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norm_statistics_are_fp32(norm: str) -> None:
    """bf16 in, bf16 out, one rounding at the end: within half a unit in the last place."""
    x, one = (randn(64, 96) * 8 + 3).bfloat16(), torch.ones(96)

    def run(x: Tensor, w: Tensor) -> Tensor:
        return nn.rms_norm(x, w, 1e-5) if norm == "rms" else nn.layer_norm(x, w, None, 1e-5)

    y, right = run(x, one.bfloat16()), run(x.double(), one.double())
    assert y.dtype == torch.bfloat16
    assert ((y.double() - right).abs() <= right.abs() * 2.0**-8 + 1e-6).all()


def test_gelu_is_by_the_error_function() -> None:
    """gelu and its tanh form, at 1: 0.841345 and 0.841192."""
    one = torch.ones(1, dtype=torch.float64)
    assert nn.activate(one, "gelu").item() == pytest.approx(0.8413447460685429, rel=1e-12)
    assert nn.activate(one, "gelu_tanh").item() == pytest.approx(0.8411919906082768, rel=1e-9)
    with pytest.raises(ValueError, match="use one of gelu, gelu_tanh, swiglu"):
        nn.activate(one, "relu")


def test_sequence_shards_feed_norms() -> None:
    """Under sequence parallelism a norm's gradients are summands over tp (bugs row 16)."""
    x, w, b = randn(2, 4, 6), randn(6), randn(6)
    run = simulate(
        lambda _, x, w, b: nn.layer_norm(x, w, b, 1e-5),
        Mesh(tp=2),
        (P(None, "tp"), P(sums=("tp",)), P(sums=("tp",))),
        activations(True),
    )

    def dense(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return nn.layer_norm(x, w, b, 1e-5)

    found = grad(cubes(run), (0, 1, 2))(x, w, b)
    near(found, grad(cubes(dense), (0, 1, 2))(x, w, b))
