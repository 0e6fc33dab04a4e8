"""The vocabulary-parallel loss: hand-computed values, padding, chunks, memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import dense_loss, near, randint, randn
from torch import Tensor
from torch.func import grad, grad_and_value, jvp
from torch.utils._python_dispatch import TorchDispatchMode

from mfun import nn
from mfun.comm import Groups, simulate, single_groups
from mfun.mesh import Mesh
from mfun.nn import head
from mfun.nn.head import HeadLoss
from mfun.spec import P, ParamSpec

TP = single_groups().tp
LOGITS = torch.tensor([[0.3, -1.0, 2.0, 0.5]], dtype=torch.float64)
LABEL = torch.tensor([2])


def every_rank(mesh: Mesh, logits: Tensor, **settings: Any) -> Tensor:
    """The loss on each rank of tp, one after the other."""
    run = simulate(
        lambda groups, z: nn.vocab_cross_entropy(
            z, LABEL, groups.tp, vocab=logits.shape[-1], **settings
        ),
        mesh,
        (P(None, "tp"),),
        P("tp"),
    )
    return run(logits)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_smoothing_is_over_the_global_vocabulary(tp: int) -> None:
    """0.530419 on every rank (bugs row 22): torch's definition, at any tp."""
    found = every_rank(Mesh(tp=tp), LOGITS, label_smoothing=0.1)
    np.testing.assert_allclose(found, np.full(tp, 0.530419), atol=5e-7)
    z = LOGITS[0].numpy()
    log_p = z - np.log(np.exp(z).sum())
    by_hand = -(0.9 * log_p[2] + 0.1 * log_p.mean())
    np.testing.assert_allclose(found, np.full(tp, by_hand), rtol=1e-12)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_large_gaps_stay_finite(tp: int) -> None:
    """Logits (0, -200, 0, 200), label 2: lse 200, the label's logit 0 and the mean logit 0."""
    logits = torch.tensor([[0.0, -200.0, 0.0, 200.0]], dtype=torch.float64)
    np.testing.assert_allclose(every_rank(Mesh(tp=tp), logits), np.full(tp, 200.0), rtol=1e-12)
    found = every_rank(Mesh(tp=tp), logits, label_smoothing=0.1)
    np.testing.assert_allclose(found, np.full(tp, 200.0), rtol=1e-12)


def test_gathered_logits() -> None:
    """0.375419 whether logits are gathered or not; mixing the two up is refused (bugs row 23)."""
    np.testing.assert_allclose(every_rank(Mesh(tp=2), LOGITS), [0.375419] * 2, atol=5e-7)
    w = LOGITS.T.contiguous()

    def gathered(groups: Groups, w: Tensor) -> Tensor:
        one = torch.ones(1, 1, 1, dtype=w.dtype)
        z = nn.column_linear(one, w, None, groups.tp, gather_output=True)
        return nn.vocab_cross_entropy(z, LABEL[None], None, vocab=4)

    np.testing.assert_allclose(
        simulate(gathered, Mesh(tp=2), (P("tp"),), P())(w), [[0.375419]], atol=5e-7
    )

    def wrong(groups: Groups, z: Tensor) -> Tensor:
        return nn.vocab_cross_entropy(z, LABEL, groups.tp, vocab=4)

    with pytest.raises(ValueError, match=r"4 columns on each of 2 ranks .* pass axis=None"):
        simulate(wrong, Mesh(tp=2), (P(),), P())(LOGITS)


def test_sixteen_bit_logits_are_widened() -> None:
    """bf16 logits give the float32 loss of the rounded logits."""
    z = (randn(3, 4, 50) * 9).bfloat16()
    labels = randint(50, 3, 4)
    found = nn.vocab_cross_entropy(z, labels, TP, vocab=50)
    assert found.dtype == torch.float32
    right = F.cross_entropy(z.double().flatten(0, 1), labels.flatten(), reduction="none")
    np.testing.assert_allclose(found.flatten(), right, rtol=1e-5)


@settings(max_examples=40)
@given(
    tp=st.sampled_from([1, 2, 4]),
    vocab=st.integers(1, 13),
    smoothing=st.sampled_from([0.0, 0.3]),
    zeta=st.sampled_from([0.0, 0.05]),
    sp=st.booleans(),
    chunk=st.integers(0, 9),
)
def test_any_vocabulary(
    tp: int, vocab: int, smoothing: float, zeta: float, sp: bool, chunk: int
) -> None:
    """Head and loss with a padded vocabulary, whole or in chunks: value and gradients are dense."""
    h, w = randn(2, 4, 3), randn(vocab, 3)
    labels, weights = randint(vocab, 2, 4), randn(2, 4).abs()

    def local(groups: Groups, h: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        def loss(h: Tensor, w: Tensor) -> Tensor:
            return nn.linear_cross_entropy(
                h, w, labels, weights, groups.tp, vocab=vocab, label_smoothing=smoothing,
                z_loss=zeta, sequence_parallel=sp, chunk=chunk,
            )  # fmt: skip

        grads, value = grad_and_value(loss, (0, 1))(h, w)
        return value, *grads

    cut = P(None, "tp") if sp else P()
    table = ParamSpec(shape=(vocab, 3), p=P("tp"), pads=(0,))
    found = simulate(local, Mesh(tp=tp), (cut, table), (P(), cut, table))(h, w)

    def dense(h: Tensor, w: Tensor) -> Tensor:
        return dense_loss(h @ w.T, labels, weights, smoothing, zeta)

    grads, value = grad_and_value(dense, (0, 1))(h, w)
    near(found, (value, *grads))


# ---------------------------------------------------------------------------- in chunks


def one_device(chunk: int, **how: Any) -> Any:
    """The head and loss of 2 x 4 tokens on one device."""
    labels, weights = randint(11, 2, 4), randn(2, 4).abs()
    return lambda h, w: nn.linear_cross_entropy(
        h, w, labels, weights, TP, vocab=11, chunk=chunk, **how
    )


@pytest.mark.parametrize("chunk", [1, 3, 8, 100])
def test_chunks_equal_the_definition(chunk: int) -> None:
    """Value, gradients, and their derivatives in both modes, on the path that a step takes."""
    args, t = (randn(2, 4, 3), randn(11, 3)), (randn(2, 4, 3, seed=1), randn(11, 3, seed=1))
    how = {"label_smoothing": 0.1, "z_loss": 0.2}
    fast, plain = one_device(chunk, **how), one_device(0, **how)
    near(fast(*args), plain(*args))
    near(grad(fast, (0, 1))(*args), grad(plain, (0, 1))(*args))
    near(jvp(fast, args, t)[1], jvp(plain, args, t)[1])

    def twice(f: Any) -> Any:
        return grad(lambda *a: sum(g.sin().sum() for g in grad(f, (0, 1))(*a)), (0, 1))(*args)

    near(twice(fast), twice(plain))
    near(jvp(grad(fast, (0, 1)), args, t)[1], jvp(grad(plain, (0, 1)), args, t)[1])


def test_rows_a_page_apart_are_kept_apart() -> None:
    """1024 columns of float32 fill a page: the same values and gradients, in memory with gaps."""
    h, w = randn(1, 5, 3), randn(1024, 3)
    labels, weights = randint(1024, 1, 5), randn(1, 5).abs()

    def loss(chunk: int) -> Any:
        return lambda h, w: nn.linear_cross_entropy(
            h, w, labels, weights, TP, vocab=1024, chunk=chunk
        )

    assert not head._product(h[0], w).is_contiguous()
    dense = grad(lambda h, w: dense_loss(h @ w.T, labels, weights, 0.0, 0.0), (0, 1))
    near(grad(loss(2), (0, 1))(h, w), dense(h, w))


def test_eager_autograd_twice() -> None:
    """The same by torch.autograd.grad, with create_graph and without."""
    h, w = randn(2, 4, 3).requires_grad_(), randn(11, 3).requires_grad_()
    found, right = [], []
    for chunk, out in ((3, found), (0, right)):
        loss = one_device(chunk)(h, w)
        first = torch.autograd.grad(loss, (h, w), create_graph=True)
        out += [*first, *torch.autograd.grad(first[0].sin().sum(), (h, w))]
        out += torch.autograd.grad(one_device(chunk)(h, w), (h, w))
    near(found, right)


def test_weights_may_be_differentiated() -> None:
    """The gradient for a token's weight is its loss, in chunks too."""
    h, w, labels, weights = randn(2, 4, 3), randn(11, 3), randint(11, 2, 4), randn(2, 4)

    def loss(m: Tensor, w: Tensor) -> Tensor:
        return nn.linear_cross_entropy(h, w, labels, m, TP, vocab=11, chunk=3)

    near(grad(loss, 0)(weights, w), nn.vocab_cross_entropy(h @ w.T, labels, TP, vocab=11))
    assert grad(loss, (0, 1))(weights, w)[0].abs().max() > 0


class Largest(TorchDispatchMode):
    """Records the largest number of elements any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it and look."""
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("train", [True, False])
def test_logits_never_exist_whole(train: bool) -> None:
    """Of 32 x 512 logits at most a chunk of 4 x 512 is made, in rows with gaps of 64."""
    h = randn(2, 16, 4).requires_grad_(train)
    w = randn(512, 4).requires_grad_(train)
    labels, weights = randint(512, 2, 16), torch.ones(2, 16)
    with Largest() as seen:
        loss = nn.linear_cross_entropy(h, w, labels, weights, TP, vocab=512, chunk=4)
        if train:
            torch.autograd.grad(loss, (h, w))
    assert seen.numel == (4 * (512 + 64) if train else w.numel())


def test_every_pair_of_transforms() -> None:
    """The Function itself, composed two deep with vmap, on one device."""
    labels, weights = randint(11, 2, 4), randn(2, 4).abs()
    rule = nn.TokenLoss(vocab=11, label_smoothing=0.1, z_loss=0.1)

    def fast(h: Tensor, w: Tensor) -> Tensor:
        return HeadLoss.apply(h, w, labels, weights, TP.index, TP, rule, False, 3, None, False)[0]

    def plain(h: Tensor, w: Tensor) -> Tensor:
        return dense_loss(h @ w.T, labels, weights, 0.1, 0.1)

    h, w = randn(2, 4, 3), randn(11, 3)
    steps: dict[str, Any] = {
        "grad": lambda f: lambda h: grad(f)(h),
        "jvp": lambda f: lambda h: jvp(f, (h,), (h.sin(),))[1],
        "vmap": lambda f: lambda h: torch.func.vmap(f)(torch.stack([h, h.cos()])),
    }

    def twice(one: str, other: str, f: Any) -> Tensor:
        once = steps[one](lambda h: f(h, w))
        return steps[other](lambda h: once(h).square().sum())(h)

    for one, other in itertools.product(steps, steps):
        near(twice(one, other, fast), twice(one, other, plain))
