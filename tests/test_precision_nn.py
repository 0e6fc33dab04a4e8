"""Layers in 16 bits: statistics in float32, results rounded once, gradients not rounded at all."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from nn_cases import randint, randn
from torch import Tensor

from mfun import nn
from mfun.comm import single_groups
from mfun.config import ModelConfig
from mfun.nn.weight_grads import WeightGrads, paths_by_memory

TP = single_groups().tp
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2.0**-8, FP16: 2.0**-11}  # half a unit in the last place, relative
LOWS = [BF16, FP16]


def rounded_once(y: Tensor, right: Tensor, units: float = 1.0) -> None:
    """y is right (float64) but for one rounding to its type, and float32's before it."""
    bound = units * UNIT[y.dtype] * right.abs() + 1e-6 * right.abs().max()
    assert ((y.double() - right).abs() <= bound).all()


@pytest.mark.parametrize("low", LOWS)
def test_rotary(low: torch.dtype) -> None:
    """Angles and the rotation in float32: one rounding, at late positions as well."""
    model = ModelConfig(hidden=32, heads=2, position="rotary")
    table, x = nn.rotary_table(model, 4096), randn(2, 4096, 2, 16).to(low)
    y = nn.rotate(x, table)
    assert y.dtype == low
    # A difference of products: relative to the pair's length, which a rotation keeps.
    right = nn.rotate(x.double(), table)
    length = torch.hypot(*right.chunk(2, -1)).repeat(1, 1, 1, 2)
    assert ((y.double() - right).abs() <= UNIT[low] * right.abs() + 1e-6 * length).all()


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32-weight", "16-bit-weight"])
@pytest.mark.parametrize("low", LOWS)
def test_norms(low: torch.dtype, wide: bool, kind: str) -> None:
    """Whatever the parameters' type the result has the input's; fp32 parameters, fp32 gradients."""
    x = (randn(64, 96) * 8 + 3).to(low)
    w, b = ((1 + randn(96)).to(FP32 if wide else low) for _ in range(2))

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return nn.rms_norm(x, w, 1e-5) if kind == "rms" else nn.layer_norm(x, w, b, 1e-5)

    rounded_once(run(x, w, b), run(x.double(), w.double(), b.double()), 1.01)
    leaf, right = w.clone().requires_grad_(), w.double().requires_grad_()
    dy = randn(64, 96).to(low)
    (dw,) = torch.autograd.grad(run(x, leaf, b), leaf, dy)
    (want,) = torch.autograd.grad(run(x.double(), right, b.double()), right, dy.double())
    error = float((dw.double() - want).abs().max() / want.abs().max())
    assert error < (2e-6 if wide else 1.01 * UNIT[low])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("low", LOWS)
def test_attention(low: torch.dtype, fused: bool) -> None:
    """Scores, at most, are rounded before the softmax, the sum to one is not: a few units."""
    q, k, v = (randn(2, 24, 2, 8).to(low) for _ in range(3))
    y = nn.attention(q, k, v, fused=fused)
    right = nn.attention(q.double(), k.double(), v.double())
    assert y.dtype == low
    assert float((y.double() - right).abs().max()) < 6 * UNIT[low] * float(v.abs().max())


@pytest.mark.parametrize("low", LOWS)
def test_softmax_sums_in_float32(low: torch.dtype) -> None:
    """2049 equal keys: a sum in 16 bits stops at 256 or 2048, so the mean would be far off."""
    t = 2049
    q, k = torch.zeros(1, t, 1, 4, dtype=low), torch.zeros(1, t, 1, 4, dtype=low)
    v = torch.ones(1, t, 1, 4, dtype=low)
    for fused in (True, False):
        y = nn.attention(q, k, v, fused=fused)[0, -1]
        assert ((y.double() - 1.0).abs() <= 2 * UNIT[low]).all()


# the loss


def loss_by_hand(h: Tensor, w: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and the gradient of the logits, in float64, from logits of the type of h."""
    z = F.linear(h, w).double().flatten(0, -2)
    p = z.softmax(-1)
    target = F.one_hot(labels.flatten(), len(w)).double()
    each = -(z.log_softmax(-1) * target).sum(-1) * weights.double().flatten()
    return each.sum(), weights.double().flatten().unsqueeze(-1) * (p - target)


@pytest.mark.parametrize("low", LOWS)
@pytest.mark.parametrize("chunk", [0, 5, 100])
def test_loss_is_float32(low: torch.dtype, chunk: int) -> None:
    """The loss of 16-bit logits, in float32; its sum over 4096 tokens too."""
    h, w = randn(1, 4096, 4).to(low), randn(300, 4).to(low)
    labels, weights = randint(300, 1, 4096), torch.ones(1, 4096)
    leaf = h.clone().requires_grad_()
    if chunk == 5:
        leaf, labels, weights = leaf[:, :64], labels[:, :64], weights[:, :64]
    loss = nn.linear_cross_entropy(leaf, w, labels, weights, TP, vocab=300, chunk=chunk)
    right, _ = loss_by_hand(leaf.detach(), w, labels, weights)
    assert loss.dtype == FP32
    assert abs(float(loss.detach()) - float(right)) < 1e-5 * float(right)


def head_grads(
    h: Tensor, w: Tensor, labels: Tensor, weights: Tensor, seed: float, chunk: int, sink: bool
) -> tuple[Tensor, Tensor]:
    """dh and, in float32 where the sink takes it, dw of seed * loss."""
    view = torch.full(w.shape, 7.0)
    takes = WeightGrads(paths_by_memory({"w": w}), lambda path: (view, 0)) if sink else None
    x, leaf = h.clone().requires_grad_(), w.detach().requires_grad_()
    loss = nn.linear_cross_entropy(
        x, leaf, labels, weights, TP, vocab=len(w), chunk=chunk, weight_grads=takes
    )
    grads = torch.autograd.grad(
        loss, (x, leaf), torch.tensor(seed), allow_unused=True, materialize_grads=False
    )
    return grads[0], view if sink else grads[1]


@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize("tokens", [12, 40], ids=["late", "early"])  # up to d = 16 it is late
@pytest.mark.parametrize("low", LOWS)
def test_head_gradient_is_the_float32_product(low: torch.dtype, tokens: int, chunk: int) -> None:
    """dW equals the product of the rounded dz with h: 3e-7 off, not the 16-bit unit."""
    h, w = randn(1, tokens, 16).to(low), randn(50, 16).to(low)
    labels, weights = randint(50, 1, tokens), torch.ones(1, tokens)
    dh, dw = head_grads(h, w, labels, weights, 0.25, chunk, sink=True)
    _, dz = loss_by_hand(h, w, labels, weights)
    assert dw.dtype == FP32
    times = 1024.0 if low == FP16 else 1.0
    rounded = (dz.float() * times).to(low).double() / times
    right = 0.25 * rounded.T @ h.double()[0]
    # float32's softmax may round a dz the other way: one unit of one of them, times h
    slack = UNIT[low] * 1e-3 * float(dz.abs().max())
    error = float((dw.double() - right).abs().max())
    assert error < 1e-6 * float(right.abs().max()) + slack
    rounded_once(dh[0], 0.25 * rounded @ w.double(), 2.5)


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("tokens", [12, 40], ids=["late", "early"])
def test_scaled_loss_beyond_fp16(tokens: int, sink: bool) -> None:
    """A seed of 2^20 on a loss weighted 2^-20: gradients are the unscaled ones, and finite."""
    h, w = randn(1, tokens, 16).to(FP16), randn(50, 16).to(FP16)
    labels, weights = randint(50, 1, tokens), torch.full((1, tokens), 2.0**-6)
    plain = head_grads(h, w, labels, torch.ones(1, tokens), 1.0, 100, sink)
    scaled = head_grads(h, w, labels, weights, 2.0**20, 100, sink)
    for a, b in zip(plain, scaled, strict=True):
        if a.dtype == FP32:
            torch.testing.assert_close(b / 2**14, a, rtol=2e-2, atol=2e-3)
    # dh itself is in fp16: 2^14 times it is in range where |dh| < 4
    assert torch.isfinite(scaled[0]).all() == bool((plain[0].abs() < 3.9).all())


@pytest.mark.parametrize("tokens", [12, 40], ids=["late", "early"])
def test_rare_tokens_have_gradients_in_fp16(tokens: int) -> None:
    """Probabilities of 1e-8 and 1e-6, below fp16's smallest number and just above: rows of dW."""
    h = torch.ones(1, tokens, 16, dtype=FP16)
    w = torch.zeros(50, 16, dtype=FP16)
    w[0], w[7], w[8] = 1.0, 1.0 + math.log(1e-6) / 16, 1.0 + math.log(1e-8) / 16
    w[1:7], w[9:] = -4.0, -4.0
    labels = torch.ones(1, tokens, dtype=torch.int64)
    _, dw = head_grads(h, w, labels, torch.ones(1, tokens), 1.0, 100, sink=True)
    _, dz = loss_by_hand(h, w, labels, torch.ones(1, tokens))
    right = dz.T @ h[0].double()
    assert float(right[8, 0]) < 1e-6
    torch.testing.assert_close(dw[7:9].double(), right[7:9], rtol=5e-3, atol=0)


def test_second_derivatives_in_fp32_are_unchanged() -> None:
    """The headroom is fp16's alone: in float64 a Hessian-vector product is the definition's."""
    h, w = randn(1, 6, 4), randn(9, 4)
    labels, weights = randint(9, 1, 6), torch.ones(1, 6, dtype=torch.float64)

    def loss(chunk: int) -> Callable[[Tensor], Tensor]:
        return lambda w: nn.linear_cross_entropy(h, w, labels, weights, TP, vocab=9, chunk=chunk)

    v = randn(9, 4)
    found = torch.autograd.functional.hvp(loss(4), w, v)[1]
    right = torch.autograd.functional.hvp(loss(0), w, v)[1]
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


# gradients of weights


def weight_gradient(low: torch.dtype, grads: torch.dtype) -> float:
    """Relative error of a linear layer's dW over two microbatches of 512 tokens."""
    w = randn(64, 32).to(low)
    view, keep, right = torch.empty(64, 32, dtype=grads), [0], torch.zeros(64, 32).double()
    sink = WeightGrads(paths_by_memory({"w": w}), lambda path: (view, keep[0]))
    for _ in range(2):
        x, dy = randn(1, 512, 32).to(low), randn(1, 512, 64).to(low)
        leaf = w.detach().requires_grad_()
        y = nn.column_linear(x, leaf, None, TP, weight_grads=sink)
        torch.autograd.grad(y, leaf, dy, allow_unused=True)
        right += dy.double()[0].T @ x.double()[0]
        keep[0] = 1
    return float((view.double() - right).norm() / right.norm())


def test_error_of_gradients() -> None:
    """Computed in float32 1.5e-7, rounded to bf16 1.7e-3 (design section 4)."""
    wide, narrow = weight_gradient(BF16, FP32), weight_gradient(BF16, BF16)
    assert wide < 4e-7
    assert 1e-3 < narrow < 4e-3


def test_rows_add_up_in_float32() -> None:
    """512 gradients of 2^-9 for one row of a bf16 table: 1, where bf16 stops at 2^-1 or before."""
    w, index = torch.zeros(4, 2, dtype=BF16), torch.zeros(1, 512, dtype=torch.int64)
    view = torch.full((4, 2), 7.0)
    sink = WeightGrads(paths_by_memory({"w": w}), lambda path: (view, 0))
    leaf = w.detach().requires_grad_()
    y = nn.vocab_embedding(index, leaf, TP, weight_grads=sink)
    torch.autograd.grad(y, leaf, torch.full_like(y, 2.0**-9), allow_unused=True)
    assert view[0].tolist() == [1.0, 1.0] and view[1:].abs().max() == 0
