"""Attention, masks, rotary positions and dropout, by their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nn_cases import cubes, near, randn
from torch import Tensor
from torch.func import grad, vjp, vmap

from mfun import nn
from mfun.comm import Groups, simulate, single_groups
from mfun.config import ModelConfig
from mfun.mesh import Factor, Mesh
from mfun.nn.rotary import frequencies
from mfun.rng import Grid, key
from mfun.spec import P
from mfun.verify import reference

TP = single_groups().tp


def by_loops(q: Tensor, k: Tensor, v: Tensor, seen: np.ndarray) -> np.ndarray:
    """Attention one query at a time; `seen` is (b, s, t)."""
    out = np.zeros(q.shape)
    b, s, h, d = q.shape
    for i, j, n in np.ndindex(b, s, h):
        group = n * k.shape[2] // h
        keys = np.flatnonzero(seen[i, j])
        scores = np.array([float(q[i, j, n] @ k[i, t, group]) for t in keys]) / math.sqrt(d)
        weights = np.exp(scores - scores.max())
        values = v[i, keys, group].numpy()
        out[i, j, n] = (weights / weights.sum()) @ values
    return out


@pytest.mark.parametrize("fused", [False, True])
@settings(max_examples=15)
@given(
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    window=st.integers(0, 6),
    packed=st.booleans(),
)
def test_attention_by_loops(fused: bool, heads: tuple[int, int], window: int, packed: bool) -> None:
    """Grouped heads, sliding windows and packed documents, both kernels."""
    (h, g), s = heads, 5
    q, k, v = randn(2, s, h, 4), randn(2, s, g, 4, seed=1), randn(2, s, g, 4, seed=2)
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]) if packed else None
    back = np.arange(s)[:, None] - np.arange(s)[None, :]
    seen = np.broadcast_to((back >= 0) & (back < (window or s)), (2, s, s))
    if documents is not None:
        seen = seen & (documents.numpy()[:, :, None] == documents.numpy()[:, None, :])
    mask = nn.attention_mask(s, window=window, documents_bs=documents)
    y = nn.attention(q, k, v, mask=mask, fused=fused)
    np.testing.assert_allclose(y, by_loops(q, k, v, seen), rtol=1e-10, atol=1e-12)


def test_plain_causal_needs_no_mask() -> None:
    """A window as long as the sequence is no window."""
    assert nn.attention_mask(4) is None
    assert nn.attention_mask(4, window=4) is None
    assert nn.attention_mask(4, window=3) is not None


def test_kernels_have_the_same_gradients() -> None:
    """The fused kernel's first derivatives are the definition's."""
    args = randn(2, 5, 4, 4), randn(2, 5, 2, 4, seed=1), randn(2, 5, 2, 4, seed=2)

    def scalar(fused: bool) -> Any:
        return lambda *a: nn.attention(*a, fused=fused).pow(3).sum()

    near(grad(scalar(True), (0, 1, 2))(*args), grad(scalar(False), (0, 1, 2))(*args))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_repeated_key_value_heads(tp: int) -> None:
    """One kv head over tp ranks: the gradient of its weight is a summand on each (bugs row 18)."""
    q, kv, x = randn(4, 2, 3), randn(2, 1, 2, 3), randn(2, 3, 3)

    def local(groups: Groups, x: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        queries, keys, values = nn.project_qkv({"q": q, "kv": kv}, x, groups.tp)
        return nn.attention(queries, keys, values)

    held = Factor("tp", 1)
    specs = P(), P("tp"), P(None, held, sums=(held.inner,))
    run = simulate(local, Mesh(tp=tp), specs, P(None, None, "tp"))

    def dense(x: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        queries = torch.einsum("bsd,hkd->bhsk", x, q)
        keys, values = (torch.einsum("bsd,kd->bsk", x, w[0])[:, None] for w in kv)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(2.0)
        scores = scores.masked_fill(~torch.ones(3, 3).tril().bool(), -math.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2)

    near(run(x, q, kv), dense(x, q, kv))
    found = grad(cubes(run), (0, 1, 2))(x, q, kv)
    near(found, grad(cubes(dense), (0, 1, 2))(x, q, kv))


# ---------------------------------------------------------------------------- rotary


@given(
    scaling=st.sampled_from(["none", "linear", "llama3", "yarn"]),
    factor=st.sampled_from([1.0, 4.0, 16.0]),
    original=st.sampled_from([0, 32, 8192]),
    theta=st.sampled_from([100.0, 10000.0, 500000.0]),
    k=st.sampled_from([2, 8, 64]),
)
def test_frequencies_are_the_references(
    scaling: Any, factor: float, original: int, theta: float, k: int
) -> None:
    """All scalings, pair by pair, as the independent reference defines them."""
    how = {
        "hidden": 4 * k, "heads": 4, "seq_len": 64, "rope_scaling": scaling, "rope_factor": factor,
        "rope_original": original, "rope_theta": theta,
    }  # fmt: skip
    found, scale = frequencies(ModelConfig(**how))
    settings = reference.complete({"model": how})
    right, right_scale = reference.rotary_frequencies(settings["model"])
    np.testing.assert_allclose(found, right, rtol=1e-12)
    assert scale == pytest.approx(right_scale, rel=1e-15)


def test_rotation_by_hand() -> None:
    """Two pairs of a head of 4 at position 3: dims (0, 2) turn by 3, dims (1, 3) by 0.3."""
    table = nn.rotary_table(ModelConfig(hidden=4, heads=1, rope_theta=100.0), 5)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    y = nn.rotate(x, table, torch.tensor([[3]])).flatten()
    c, s, e, r = math.cos(3.0), math.sin(3.0), math.cos(0.3), math.sin(0.3)
    np.testing.assert_allclose(y, [c - 3 * s, 2 * e - 4 * r, 3 * c + s, 4 * e + 2 * r], rtol=1e-12)
    near(nn.rotate(x.expand(1, 4, 1, 4), table)[:, 3].flatten(), y)
    with pytest.raises(ValueError, match="6 tokens for a table of 5"):
        nn.rotate(x.expand(1, 6, 1, 4), table)


# ---------------------------------------------------------------------------- dropout


def masks(tp: int, dp: int, sp: bool) -> tuple[Tensor, Tensor]:
    """Dropout of ones, rate 0.5: activations of every rank and attention scores, as held."""
    mesh, root = Mesh(tp=tp, dp=dp), key(0, "dropout", 0)

    def local(groups: Groups, x: Tensor, p: Tensor, sample: Tensor) -> tuple[Tensor, Tensor]:
        tokens = nn.token_grid(x, sample, groups.tp, sp)
        scores = nn.score_grid(p, sample, groups.tp)
        return (
            nn.dropout(x, 0.5, root.fold("x"), tokens),
            nn.dropout(p, 0.5, root.fold("p"), scores),
        )

    activations = P("dp", "tp") if sp else P("dp")
    specs = activations, P("dp", "tp"), P("dp")
    run = simulate(local, mesh, specs, (activations, P("dp", "tp")))
    return run(torch.ones(4, 4, 6), torch.ones(4, 4, 4, 4), torch.arange(4) + 10)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_masks_are_the_same_in_every_layout(tp: int, dp: int, sp: bool) -> None:
    """Bitwise those of one device; so shards differ and replicas agree (bugs row 80)."""
    x, p = masks(tp, dp, sp)
    one_x, one_p = masks(1, 1, False)
    assert torch.equal(x, one_x)
    assert torch.equal(p, one_p)


def test_masks_differ_where_they_should() -> None:
    """Between sequence halves, heads, samples and keys: no two pieces of a mask are equal."""
    x, p = masks(1, 1, False)
    pieces = [x[:, :2], x[:, 2:], x[[1, 0, 3, 2], :2]]
    assert not any(torch.equal(a, b) for i, a in enumerate(pieces) for b in pieces[:i])
    assert not torch.equal(p[:, 0], p[:, 1])
    assert not torch.equal(p[0], p[1])
    assert set(x.unique().tolist()) == {0.0, 2.0}


def test_dropout_is_pure() -> None:
    """Same key same mask, also under vjp and vmap; torch's generator is not touched (row 138)."""
    grid, x = Grid.whole((3, 8)), torch.ones(3, 8)
    before = torch.get_rng_state()
    y = nn.dropout(x, 0.5, key(1), grid)
    assert torch.equal(y, nn.dropout(x, 0.5, key(1), grid))
    assert torch.equal(y, vjp(lambda x: nn.dropout(x, 0.5, key(1), grid), x)[0])
    (dx,) = vjp(lambda x: nn.dropout(x, 0.5, key(1), grid), x)[1](x)
    assert torch.equal(dx, y)
    rows = [nn.dropout(x[0], 0.5, key(n), Grid.whole((8,))) for n in (1, 2)]
    assert not torch.equal(*rows)
    per_row = vmap(lambda x, i: nn.dropout(x, 0.5, key(1), Grid((i[None], range(8)), (3, 8))))(
        x[:, None], torch.arange(3)
    )
    assert torch.equal(per_row[:, 0], y)
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_refusals() -> None:
    """A rate of 1 and a grid of another shape are named."""
    with pytest.raises(ValueError, match=r"rate is 1.0; it lies in \[0, 1\)"):
        nn.dropout(torch.ones(4), 1.0, key(0), Grid.whole((4,)))
    with pytest.raises(ValueError, match=r"a grid of shape \[5\] for x of shape \[4\]"):
        nn.dropout(torch.ones(4), 0.5, key(0), Grid.whole((5,)))
