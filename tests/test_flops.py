"""The FLOP formula against counts from matrix shapes and against torch's own counter (row 131)."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mfun.config import PRESETS, ModelConfig, flops_per_token, override

MODELS = {
    "plain": ModelConfig(layers=2, hidden=24, heads=4, vocab=51, seq_len=10),
    "gqa": ModelConfig(layers=3, hidden=24, heads=6, kv_heads=2, vocab=37, seq_len=7),
    "gated": ModelConfig(
        layers=2, hidden=16, heads=4, kv_heads=1, ffn=44, activation="swiglu", vocab=19, seq_len=9
    ),
    "wide heads": ModelConfig(layers=1, hidden=16, heads=2, head_dim=24, vocab=30, seq_len=5),
}


def matmul_flops(*shapes: tuple[int, int, int]) -> int:
    """2 m k n for each product of (m, k) by (k, n)."""
    return sum(2 * m * k * n for m, k, n in shapes)


def by_hand(model: ModelConfig, seq: int) -> int:
    """One sequence's forward pass, one matrix after another; scores over all pairs."""
    d, k, h, g, f = model.hidden, model.head_size, model.heads, model.kv, model.ffn_size
    total = 0
    for _ in range(model.layers):
        total += matmul_flops((seq, d, h * k), (seq, d, g * k), (seq, d, g * k), (seq, h * k, d))
        for _ in range(h):
            total += matmul_flops((seq, k, seq), (seq, seq, k))
        ups = 2 if model.activation == "swiglu" else 1
        total += matmul_flops(*[(seq, d, f)] * ups, (seq, f, d))
    return total + matmul_flops((seq, d, model.vocab))


def plain_forward(model: ModelConfig, tokens: torch.Tensor) -> torch.Tensor:
    """A GPT without norms, written with matmul alone; weights are drawn as needed."""
    d, k, h, g, f = model.hidden, model.head_size, model.heads, model.kv, model.ffn_size
    b, s = tokens.shape

    def linear(x: torch.Tensor, width: int) -> torch.Tensor:
        return x @ torch.randn(x.shape[-1], width)

    x = torch.randn(model.vocab, d)[tokens]
    for _ in range(model.layers):
        q = linear(x, h * k).view(b, s, h, k).transpose(1, 2)
        keys, values = (
            linear(x, g * k).view(b, s, g, k).transpose(1, 2).repeat_interleave(h // g, 1)
            for _ in range(2)
        )
        scores = (q @ keys.transpose(2, 3)).masked_fill(torch.ones(s, s).triu(1).bool(), -1e9)
        x = x + linear((scores.softmax(-1) @ values).transpose(1, 2).reshape(b, s, h * k), d)
        up = linear(x, f)
        up = torch.nn.functional.silu(linear(x, f)) * up if model.gated else up.relu()
        x = x + linear(up, d)
    return linear(x, model.vocab)


@pytest.mark.parametrize("name", MODELS)
def test_dense_count_equals_hand_count_and_torch_counter(name: str) -> None:
    """causal=False times tokens is 2mkn over every matrix, and what torch counts on a plain GPT."""
    model = MODELS[name]
    with FlopCounterMode(display=False) as counter:
        plain_forward(model, torch.zeros(3, model.seq_len, dtype=torch.long))
    counted = counter.get_total_flops()
    assert flops_per_token(model, causal=False).forward * 3 * model.seq_len == counted
    assert 3 * by_hand(model, model.seq_len) == counted


@pytest.mark.parametrize("name", MODELS)
def test_backward_is_two_products_for_each(name: str) -> None:
    """A product's two gradients cost it twice: torch's counter sees 3 x forward on A @ B."""
    flops = flops_per_token(MODELS[name])
    assert flops.backward == 2 * flops.forward
    assert flops.total == 3 * flops.forward
    a, b = (torch.randn(s, requires_grad=True) for s in ((3, 4), (4, 5)))
    with FlopCounterMode(display=False) as counter:
        (a @ b).sum().backward()
    assert counter.get_total_flops() == 3 * matmul_flops((3, 4, 5))


@given(seq=st.integers(1, 40), window=st.integers(0, 50))
def test_causal_count_is_the_number_of_unmasked_pairs(seq: int, window: int) -> None:
    """Attention counts 4 h k for each (query, key) that a mask built by hand lets through."""
    model = ModelConfig(layers=2, hidden=12, heads=3, sliding_window=window)
    pairs = sum(
        1 for i in range(seq) for j in range(seq) if j <= i and (window == 0 or i - j < window)
    )
    attention = flops_per_token(model, seq).attention * seq
    assert attention == pytest.approx(2 * 4 * 12 * pairs, rel=1e-12)
    rest = attrs.evolve(flops_per_token(model, seq), attention=0.0)
    assert rest == attrs.evolve(flops_per_token(model, seq, causal=False), attention=0.0)


def test_layout_and_recomputation_do_not_enter() -> None:
    """Model FLOPs are a function of the model section alone: the layout cannot change them."""
    changed = override(
        PRESETS["tiny"],
        ["parallel.tp=4", "parallel.pp=1", "train.microbatches=1", "parallel.recompute=full"],
    )
    assert flops_per_token(changed.model) == flops_per_token(PRESETS["tiny"].model)


def test_published_parameter_counts() -> None:
    """Half the matrix FLOPs are the matrix weights: 2.8 B, Llama 3 8B and 70B as published."""

    def weights(name: str) -> float:
        flops = flops_per_token(PRESETS[name].model)
        return (flops.projections + flops.mlp + flops.head) / 2

    # 2,827,821,056 in all, less one embedding table and the 4h of each block's norms
    assert weights("megatron-2.8b") == 2_827_821_056 - 50257 * 4096 - 12 * 4 * 4096
    # 8,030,261,248 less the table and 65 norms
    assert weights("llama3-8b") == 8_030_261_248 - 128256 * 4096 - 65 * 4096
    # 70,553,706,496 less the table and 161 norms
    assert weights("llama3-70b") == 70_553_706_496 - 128256 * 8192 - 161 * 8192
    # 7,241,732,096 less the table and 65 norms
    assert weights("mistral-7b") == 7_241_732_096 - 32000 * 4096 - 65 * 4096
    # 7,615,616,512 less the table, 57 norms and q, k, v biases
    assert weights("qwen2-7b") == 7_615_616_512 - 152064 * 3584 - 57 * 3584 - 28 * (3584 + 2 * 512)
    # 8,190,735,360 less the table, 73 norms and q/k norms
    assert weights("qwen3-8b") == 8_190_735_360 - 151936 * 4096 - 73 * 4096 - 36 * 2 * 128
