"""Weights' gradients in flat views instead of autograd: the values of autograd, now or at W."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from nn_cases import dense_loss, randint, randn
from torch import Tensor

from mfun import nn
from mfun.comm import single_groups
from mfun.nn.weight_grads import WeightGrads, paths_by_memory

TP = single_groups().tp


class Window:
    """One leaf's view over several gradients, as `GradBuffers` hands it out; stale before."""

    def __init__(self, w: Tensor) -> None:
        self.view = torch.full_like(w, 7.0).detach()
        self.keep = 0
        self.sink = WeightGrads(paths_by_memory({"w": w}), self.claim)

    def claim(self, path: str) -> tuple[Tensor, int]:
        """The view; the first gradient replaces what is there."""
        assert path == "w"
        keep, self.keep = self.keep, 1
        return self.view, keep


def taken(
    loss: Callable[[Tensor, Tensor, WeightGrads | None], Tensor], h: Tensor, w: Tensor, later: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of h and w of two microbatches, h and 2 h, with loss factor 0.3."""
    window = Window(w)
    window.sink.later = later
    dh = torch.zeros_like(h)
    for times in (1, 2):
        x = (times * h).detach().requires_grad_()
        leaf = w.detach().requires_grad_()
        value = 0.3 * loss(x, leaf, window.sink)
        dx, dw = torch.autograd.grad(value, (x, leaf), allow_unused=True, materialize_grads=False)
        assert dw is None, "taken, and so not returned"
        dh += dx
        if later:
            assert window.keep == times - 1, "kept for W"
            window.sink.run()
    return dh, window.view


def right(loss: Callable[[Tensor, Tensor], Tensor], h: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The same by autograd alone."""
    dh, dw = torch.zeros_like(h), torch.zeros_like(w)
    for times in (1, 2):
        x, leaf = (times * h).requires_grad_(), w.clone().requires_grad_()
        dx, d = torch.autograd.grad(0.3 * loss(x, leaf), (x, leaf))
        dh, dw = dh + dx, dw + d
    return dh, dw


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("tokens", [6, 8, 9])
def test_head(tokens: int, chunk: int, later: bool) -> None:
    """Up to d tokens the product waits for W, above only its scaling; in chunks and whole."""
    h, w = randn(1, tokens, 8), randn(11, 8)
    labels, weights = randint(11, 1, tokens), randn(1, tokens).abs()

    def head(x: Tensor, w: Tensor, sink: WeightGrads | None) -> Tensor:
        return nn.linear_cross_entropy(
            x, w, labels, weights, TP, vocab=11, chunk=chunk, weight_grads=sink,
            label_smoothing=0.1, z_loss=0.1,
        )  # fmt: skip

    expected = right(lambda x, w: dense_loss(x @ w.T, labels, weights, 0.1, 0.1), h, w)
    for a, b in zip(taken(head, h, w, later), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("later", [False, True])
def test_table(later: bool) -> None:
    """Rows looked up several times get every gradient, others zero and not what was there."""
    h, w, index = randn(2, 4, 3), randn(9, 3), torch.tensor([[1, 5, 1, 0], [5, 5, 8, 1]])

    def look(x: Tensor, w: Tensor, sink: WeightGrads | None) -> Tensor:
        return (x * nn.vocab_embedding(index, w, TP, weight_grads=sink)).sin().sum()

    dh, dw = taken(look, h, w, later)
    expected = right(lambda x, w: (x * F.embedding(index, w)).sin().sum(), h, w)
    torch.testing.assert_close(dh, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dw, expected[1], rtol=1e-12, atol=1e-12)
    assert dw[[2, 3, 4, 6, 7]].abs().max() == 0


def test_not_a_parameter() -> None:
    """A table that is nobody's memory has its gradient returned."""
    w, index = randn(9, 3), torch.tensor([[1, 5, 1]])
    window, leaf = Window(w), w.clone().requires_grad_()
    out = nn.vocab_embedding(index, leaf, TP, weight_grads=window.sink).square().sum()
    (dw,) = torch.autograd.grad(out, leaf)
    assert window.keep == 0
    expected = torch.autograd.grad(F.embedding(index, leaf).square().sum(), leaf)[0]
    torch.testing.assert_close(dw, expected, rtol=0, atol=0)


def test_stacked_memory_that_a_parameter_has_by_now() -> None:
    """Parameters that are gathered move: a stacked weight's old place may be one's new place."""
    w, dy, x = randn(4, 3), randn(5, 4), randn(5, 3)
    window = Window(w)
    window.sink.stacked(w, (randn(2, 3), randn(1, 3)))  # long gone, but for its address
    with torch.no_grad():
        assert window.sink.product(w, dy, x)
    torch.testing.assert_close(window.view, dy.T @ x, rtol=1e-12, atol=1e-12)
