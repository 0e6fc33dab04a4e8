"""The independent reference against Hugging Face, torch, hand arithmetic and published vectors."""

from __future__ import annotations

import ast
import hashlib
import math
import struct
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hf import CASES, VOCAB, hf_case
from torch import Tensor
from torch.nn import functional as F

from mfun.verify import reference
from mfun.verify.reference import philox

TINY: dict[str, Any] = {
    "vocab": 37, "hidden": 24, "heads": 6, "kv_heads": 2, "layers": 2, "ffn": 40, "seq_len": 8,
    "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "tied": False,
    "init_std": 0.2,
}  # fmt: skip


def batch_of(b: int, s: int, seed: int = 0, **more: Tensor) -> dict[str, Tensor]:
    """Random tokens and labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(VOCAB, (2, b, s), generator=generator)
    return {"tokens": tokens, "labels": labels, **more}


def rows(batch: dict[str, Tensor], *cut: int) -> list[dict[str, Tensor]]:
    """Microbatches of the given sizes."""
    pieces = {name: x.split(list(cut)) for name, x in batch.items()}
    return [{name: pieces[name][i] for name in batch} for i in range(len(cut))]


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest max|a-b| / max(max|right leaf|, 1e-4 max|right over all leaves|)."""
    assert found.keys() == right.keys()
    floor = 1e-4 * max(float(r.abs().max()) for r in right.values())
    return max(
        float((found[p] - right[p]).abs().max()) / max(float(right[p].abs().max()), floor)
        for p in right
    )


# ---------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, expected: Any) -> None:
    """The three published vectors of Random123 for philox4x32-10."""
    w0, w1, w2, w3 = (np.array([c], np.uint64) for c in counter)
    assert tuple(int(w) for w in philox.philox((w0, w1, w2, w3), key)[0]) == expected


def python_philox(counter: list[int], k0: int, k1: int) -> list[int]:
    """Philox4x32-10 in Python's own integers."""
    x = counter
    for r in range(10):
        a, b = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        ka, kb = (k0 + r * 0x9E3779B9) % 2**32, (k1 + r * 0xBB67AE85) % 2**32
        x = [(b >> 32) ^ x[1] ^ ka, b % 2**32, (a >> 32) ^ x[3] ^ kb, a % 2**32]
    return x


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 1022, 4 * 2**32 + 3, 4 * 2**33 + 6])
def test_elements_are_addressed_by_global_index(index: int) -> None:
    """Word, uniform, normal and truncated normal of one element, recomputed with `math`."""
    text = "7\x1finit\x1fblocks.0.attn.q"
    k0, k1, c2, c3 = struct.unpack("<4I", hashlib.blake2b(text.encode(), digest_size=16).digest())
    block = index // 4
    four = python_philox([block % 2**32, block // 2**32, c2, c3], k0, k1)
    u = [(w + 0.5) / 2**32 for w in four]
    lane = index % 4
    s = philox.stream(7, "init", "blocks.0.attn.q")
    at = np.array([[index]])
    assert philox.words(s, at)[0, 0] == four[lane]
    assert philox.uniform(s, at, -3, 5)[0, 0] == pytest.approx(-3 + 8 * u[lane], rel=1e-15)
    even = lane - lane % 2
    radius, angle = math.sqrt(-2 * math.log(u[even])), 2 * math.pi * u[even + 1]
    right = radius * (math.sin(angle) if lane % 2 else math.cos(angle))
    assert philox.normal(s, at, 0.02)[0, 0] == pytest.approx(0.02 * right, rel=1e-13)
    x = philox.truncated_normal(s, at, 3.0)[0, 0] / 3.0

    def cdf(z: float) -> float:
        return (1 + math.erf(z / math.sqrt(2))) / 2

    assert abs(x) < 2
    assert (cdf(x) - cdf(-2)) / (cdf(2) - cdf(-2)) == pytest.approx(u[lane], abs=1e-12)
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert philox.bernoulli(s, at, p)[0, 0] == (four[lane] < round(p * 2**32))


def test_streams_have_the_moments_they_claim() -> None:
    """Mean, deviation and keep rate of 40,000 numbers, within five standard errors."""
    index, s = np.arange(40_000), philox.stream(1, "moments")
    z = philox.normal(s, index, 2.0)
    assert abs(z.mean()) < 5 * 2 / 200 and abs(z.std() - 2) < 5 * 2 / math.sqrt(80_000)
    assert abs(np.corrcoef(z[0::2], z[1::2])[0, 1]) < 5 / math.sqrt(20_000)
    kept = philox.bernoulli(s, index, 0.9).mean()
    assert abs(kept - 0.9) < 5 * 0.3 / 200
    t = philox.truncated_normal(s, index, 1.0)
    # The deviation of a standard normal cut at 2 is 0.8796.
    assert np.abs(t).max() < 2 and abs(t.std() - 0.8796) < 0.02


def test_initial_weights_follow_the_rules() -> None:
    """Scaled residual writers, ones and zeros, and elements drawn by place in the whole leaf."""
    settings = {"model": {**TINY, "norm": "layernorm", "bias": "all", "qk_norm": True}}
    params = reference.init(settings, 3)
    assert {p: tuple(x.shape) for p, x in params.items()} == reference.shapes(settings)
    unit_std = {}
    for path, x in params.items():
        if path.endswith("bias"):
            assert not x.any(), path
        elif "norm" in path:
            assert (x == 1).all(), path
        else:
            s = philox.stream(3, "init", path)
            flat = philox.normal(s, np.arange(x.numel()), 1.0)
            unit_std[path] = float(x.flatten()[5] / flat[5])
            np.testing.assert_allclose(x.flatten().numpy(), unit_std[path] * flat, rtol=1e-13)
    small = [p for p in unit_std if p.endswith(("attn.out", "mlp.down"))]
    assert len(small) == 4
    for path, std in unit_std.items():
        assert std == pytest.approx(0.2 / 2 if path in small else 0.2, rel=1e-13), path
    half = reference.init(settings, 3, torch.float32)
    assert all(torch.equal(half[p], params[p].float()) for p in params)
    assert not torch.equal(reference.init(settings, 4)["embed.tokens"], params["embed.tokens"])


def test_shapes_of_every_kind_of_leaf() -> None:
    """Leaf names and layouts, written out by hand for both attention and both MLP layouts."""
    gqa = {
        "embed.tokens": (37, 24), "blocks.0.norm1.weight": (24,), "blocks.0.attn.q": (6, 4, 24),
        "blocks.0.attn.kv": (2, 2, 4, 24), "blocks.0.attn.q_bias": (6, 4),
        "blocks.0.attn.kv_bias": (2, 2, 4), "blocks.0.attn.q_norm": (4,),
        "blocks.0.attn.k_norm": (4,), "blocks.0.attn.out": (24, 6, 4),
        "blocks.0.norm2.weight": (24,), "blocks.0.mlp.up": (2, 40, 24),
        "blocks.0.mlp.down": (24, 40), "final_norm.weight": (24,), "head.weight": (37, 24),
    }  # fmt: skip
    model = {**TINY, "layers": 1, "bias": "qkv", "qk_norm": True}
    assert reference.shapes({"model": model}) == gqa
    mha = {
        "embed.tokens": (10, 8), "embed.positions": (5, 8), "blocks.0.norm1.weight": (8,),
        "blocks.0.norm1.bias": (8,), "blocks.0.attn.qkv": (3, 2, 4, 8),
        "blocks.0.attn.qkv_bias": (3, 2, 4), "blocks.0.attn.out": (8, 2, 4),
        "blocks.0.attn.out_bias": (8,), "blocks.0.norm2.weight": (8,), "blocks.0.norm2.bias": (8,),
        "blocks.0.mlp.up": (32, 8), "blocks.0.mlp.up_bias": (32,), "blocks.0.mlp.down": (8, 32),
        "blocks.0.mlp.down_bias": (8,), "final_norm.weight": (8,), "final_norm.bias": (8,),
    }  # fmt: skip
    model = {"vocab": 10, "hidden": 8, "heads": 2, "layers": 1, "seq_len": 5, "bias": "all"}
    assert reference.shapes({"model": model}) == mha
    decayed = {p for p in {**gqa, **mha} if reference.decayed(p)}
    assert decayed == {p for p in {**gqa, **mha} if not p.endswith("bias") and "norm" not in p}


# ---------------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_hugging_face(name: str) -> None:
    """Logits at every position and the gradient of every weight, float64, ignored labels present
    (bugs rows 116 and 119)."""
    case = hf_case(name)
    params = case.params
    assert {p: tuple(x.shape) for p, x in params.items()} == reference.shapes(case.settings)
    batch = batch_of(2, case.settings["model"]["seq_len"])
    labels = batch["labels"].masked_fill(batch["labels"] % 5 == 0, -100)
    right = case.logits(batch["tokens"]).detach()
    found = reference.forward(case.settings, params, batch)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-10
    assert float(right.std()) > 0.5  # a model whose logits say something
    masked = {"tokens": batch["tokens"], "labels": labels, "mask": (labels >= 0).float()}
    grads = reference.loss_and_grads(case.settings, params, masked).grads
    assert error(grads, case.grads(batch["tokens"], labels)) < 1e-10


@pytest.mark.parametrize("name", ["gpt2_gelu", "llama_llama3", "mistral"])
def test_packed_documents_equal_each_document_alone(name: str) -> None:
    """Attention and positions restart: a packed row's logits are each document's own."""
    case = hf_case(name)
    lengths = (7, 1, 8)
    batch = batch_of(2, 16)
    documents = torch.repeat_interleave(torch.tensor([4, 9, 2]), torch.tensor(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    batch |= {"documents": documents.expand(2, 16), "positions": positions.expand(2, 16)}
    pieces = [case.logits(t) for t in batch["tokens"].split(lengths, dim=1)]
    right = torch.cat(pieces, dim=1).detach()
    found = reference.forward(case.settings, case.params, batch)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-10
    del batch["positions"]
    with pytest.raises(ValueError, match="positions"):
        reference.forward(case.settings, case.params, batch)


def test_dropout_falls_where_gpt2_drops() -> None:
    """GPT-2 in training mode, its masks replaced by keyed ones, gives the same logits."""
    case = hf_case("gpt2_dropout")
    b, s, d, h, keep = 2, 16, 24, 6, 0.75
    samples = torch.tensor([5, 2])
    residual = np.array(
        [[[(n * s + i) * d + j for j in range(d)] for i in range(s)] for n in (5, 2)]
    )
    probs = np.array(
        [
            [
                [[((n * h + a) * s + q) * s + k for k in range(s)] for q in range(s)]
                for a in range(h)
            ]
            for n in (5, 2)
        ]
    )
    places: list[tuple[tuple[str | int, ...], np.ndarray]] = [(("embed",), residual)]
    for i in (0, 1):
        places.append((("blocks", i, "attn_probs"), probs))
        places.append((("blocks", i, "attn"), residual))
        places.append((("blocks", i, "mlp"), residual))
    masks = [
        philox.words(philox.stream(11, "dropout", 4, *place), at) < round(keep * 2**32)
        for place, at in places
    ]
    calls = iter(masks)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mask = next(calls)
        assert training and p == 0.25 and mask.shape == x.shape
        return x * torch.from_numpy(mask) / keep

    tokens = batch_of(b, s)["tokens"]
    case.model.train()
    with mock.patch.object(torch.nn.functional, "dropout", dropout):
        right = case.logits(tokens).detach()
    assert next(calls, None) is None
    batch = {"tokens": tokens, "sample": samples}
    found = reference.forward(case.settings, case.params, batch, seed=11, step=4)
    assert float((found - right).abs().max() / right.abs().max()) < 1e-10
    still = reference.forward(case.settings, case.params, batch)
    assert float((found - still).abs().max() / right.abs().max()) > 0.1
    for seed, step in ((11, 5), (12, 4)):
        other = reference.forward(case.settings, case.params, batch, seed=seed, step=step)
        assert float((found - other).abs().max() / right.abs().max()) > 0.1


def test_no_positions_sees_a_set() -> None:
    """Without positions, one layer's last token does not notice the order of the others."""
    settings = {"model": {**TINY, "position": "none", "layers": 1}}
    params = reference.init(settings, 0)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [4, 2, 1, 3, 5]])
    logits = reference.forward(settings, params, {"tokens": tokens})
    torch.testing.assert_close(logits[0, -1], logits[1, -1], rtol=1e-12, atol=1e-12)
    settings = {"model": {**TINY, "layers": 1}}
    logits = reference.forward(settings, params, {"tokens": tokens})
    assert float((logits[0, -1] - logits[1, -1]).abs().max()) > 1e-3


def test_llama3_frequencies_of_the_real_model() -> None:
    """With Llama 3.1's own numbers 35 of 64 frequencies change, 29 of them by the full factor."""
    model = reference.complete({
        "model": {"hidden": 128, "heads": 1, "rope_theta": 5e5, "rope_scaling": "llama3",
                  "rope_factor": 8.0, "rope_low": 1.0, "rope_high": 4.0, "rope_original": 8192}
    })["model"]  # fmt: skip
    found, factor = reference.rotary_frequencies(model)
    plain, _ = reference.rotary_frequencies({**model, "rope_scaling": "none"})
    ratio = [b / a for a, b in zip(plain, found, strict=True)]
    assert factor == 1.0
    assert sum(r != 1 for r in ratio) == 35
    assert sum(abs(r - 1 / 8) < 1e-12 for r in ratio) == 29


# ---------------------------------------------------------------------------- loss


def test_token_losses_equal_torch() -> None:
    """Cross entropy, label smoothing and z-loss, value and gradient, against torch's own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 11, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (3, 5), generator=generator)
    weight = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    for smoothing in (0.0, 0.1, 0.7):
        for z in (0.0, 0.01):
            settings = {"train": {"label_smoothing": smoothing, "z_loss": z}}
            found = reference.token_losses(settings, x, labels)
            right = (
                F.cross_entropy(
                    x.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, reduction="none"
                ).view(3, 5)
                + z * torch.log(torch.exp(x).sum(-1)) ** 2
            )
            torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
            (a,) = torch.autograd.grad((found * weight).sum(), x)
            (b,) = torch.autograd.grad((right * weight).sum(), x)
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_known_losses() -> None:
    """Bugs rows 22 and 23: logits (0.3, -1, 2, 0.5), target 2, with and without smoothing."""
    logits = torch.tensor([[[0.3, -1.0, 2.0, 0.5]]], dtype=torch.float64)
    label = torch.tensor([[2]])
    smooth = reference.token_losses({"train": {"label_smoothing": 0.1}}, logits, label)
    assert float(smooth) == pytest.approx(0.530419, abs=5e-7)
    assert float(reference.token_losses({}, logits, label)) == pytest.approx(0.375419, abs=5e-7)


def test_wide_logits_stay_finite() -> None:
    """Bugs row 22: logits (0, -200, 0, 200), every target, with smoothing and z-loss."""
    logits = torch.tensor([0.0, -200, 0, 200], dtype=torch.float64).expand(1, 4, 4).clone()
    logits.requires_grad_()
    settings = {"train": {"label_smoothing": 0.1, "z_loss": 1e-4}}
    losses = reference.token_losses(settings, logits, torch.arange(4)[None])
    (grad,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isfinite().all() and grad.isfinite().all()
    # lse = 200 to 1e-80: target 1 costs 200 + 0.9 * 200 - 0.1 * 0 + 1e-4 * 200^2
    assert losses.flatten().tolist() == pytest.approx([204, 384, 204, 24])


def test_normalisation_by_hand() -> None:
    """Bugs row 1: token losses 8 | 1, 2, 3 give 3.5 by tokens and 5 by microbatch."""
    sums = list(torch.tensor([8.0, 6.0], dtype=torch.float64))
    counts = list(torch.tensor([1.0, 3.0], dtype=torch.float64))
    assert float(reference.normalise(sums, counts, "tokens")) == 3.5
    assert float(reference.normalise(sums, counts, "microbatch")) == 5.0
    nothing = [torch.tensor(0.0, dtype=torch.float64)]
    assert float(reference.normalise(nothing, nothing, "tokens")) == 0.0
    assert float(
        reference.normalise([*nothing, *sums], [*nothing, *counts], "microbatch")
    ) == pytest.approx(10 / 3)


def lengths_batch() -> dict[str, Tensor]:
    """Six samples with 1, 2, 3, 5, 7 and 8 valid tokens; other labels are -100."""
    valid = torch.arange(8)[None, :] < torch.tensor([1, 2, 3, 5, 7, 8])[:, None]
    batch = batch_of(6, 8)
    return batch | {
        "labels": batch["labels"].masked_fill(~valid, -100),
        "mask": valid.float(),
        "sample": torch.arange(6),
    }


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_token_normalisation_ignores_microbatches(smoothing: float, dropout: float) -> None:
    """Bugs rows 1, 2, 3, 14: 6 samples as 6x1, 3x2, 1x6 and unevenly: torch's sum / count."""
    settings = {"model": {**TINY, "dropout": dropout}, "train": {"label_smoothing": smoothing}}
    params = reference.init(settings, 0)
    batch = lengths_batch()
    leaves = {p: x.clone().requires_grad_() for p, x in params.items()}
    logits = reference.forward(settings, leaves, batch, seed=1, step=2).flatten(0, 1)
    right = F.cross_entropy(
        logits, batch["labels"].flatten(), label_smoothing=smoothing, reduction="sum"
    )
    grads = torch.autograd.grad(right / 26, list(leaves.values()))
    for cut in ((6,), (1,) * 6, (2, 2, 2), (1, 5)):
        found = reference.loss_and_grads(settings, params, rows(batch, *cut), 1, 2)
        assert float(found.tokens) == 26
        assert float(found.loss_sum) == pytest.approx(float(right.detach()), rel=1e-12)
        assert float(found.loss) == pytest.approx(float(right.detach()) / 26, rel=1e-12)
        assert error(found.grads, dict(zip(leaves, grads, strict=True))) < 1e-12


def test_microbatch_normalisation_is_a_mean_of_means() -> None:
    """Each microbatch's own token mean (torch's), averaged over microbatches."""
    settings = {"model": TINY, "train": {"loss_norm": "microbatch"}}
    params = reference.init(settings, 0)
    cut = rows(lengths_batch(), 1, 3, 2)
    leaves = {p: x.clone().requires_grad_() for p, x in params.items()}
    means = [
        F.cross_entropy(reference.forward(settings, leaves, m).flatten(0, 1), m["labels"].flatten())
        for m in cut
    ]
    right = torch.stack(means).sum() / 3
    grads = torch.autograd.grad(right, list(leaves.values()))
    found = reference.loss_and_grads(settings, params, cut)
    assert float(found.loss) == pytest.approx(float(right.detach()), rel=1e-12)
    assert error(found.grads, dict(zip(leaves, grads, strict=True))) < 1e-12
    whole = reference.loss_and_grads(settings, params, lengths_batch())
    assert abs(float(whole.loss) - float(found.loss)) > 1e-3


def test_a_missing_mask_means_every_token() -> None:
    """No mask, and a mask of ones, are torch's mean over all tokens."""
    settings = {"model": TINY}
    params, batch = reference.init(settings, 0), batch_of(2, 8)
    logits = reference.forward(settings, params, batch)
    right = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    for more in ({}, {"mask": torch.ones(2, 8)}):
        objective, _, count = reference.loss(settings, params, {**batch, **more})
        assert float(objective) == pytest.approx(float(right), rel=1e-12)
        assert float(count) == 16


# ---------------------------------------------------------------------------- optimisation


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # lr 1, min 0.1, warm-up 4 updates, end at 12: updates 1, 4, 5, 8, 10, 12, 20
        ({"schedule": "constant"}, [0.25, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "linear"}, [0.25, 1, 0.8875, 0.55, 0.325, 0.1, 0.1]),
        (
            {"schedule": "cosine"},
            [0.25, 1, 0.55 + 0.45 * math.cos(math.pi / 8), 0.55, 0.55 - 0.45 / 2**0.5, 0.1, 0.1],
        ),
        (
            {"schedule": "inverse_sqrt", "min_lr": 0.5},
            [0.25, 1, math.sqrt(0.8), math.sqrt(0.5), math.sqrt(0.4), math.sqrt(1 / 3), 0.5],
        ),
        ({"schedule": "wsd", "wsd_decay": 1 / 3}, [0.25, 1, 1, 1, 0.55, 0.1, 0.1]),
        ({"schedule": "linear", "warmup": 0}, [1 - 0.9 / 12, 0.7, 0.625, 0.4, 0.25, 0.1, 0.1]),
        (
            {"schedule": "inverse_sqrt", "warmup": 0},
            [1, 0.5, *(math.sqrt(1 / n) for n in (5, 8, 10, 12, 20))],
        ),
    ],
)
def test_learning_rates_by_hand(fields: dict[str, Any], expected: list[float]) -> None:
    """Every schedule at seven updates, by hand; decay_steps also when taken from train.steps."""
    optim = {"lr": 1.0, "min_lr": 0.1, "warmup": 4, **fields}
    for settings in (
        {"optim": {**optim, "decay_steps": 12}},
        {"optim": optim, "train": {"steps": 12}},
    ):
        found = [reference.learning_rate(settings, n) for n in (1, 4, 5, 8, 10, 12, 20)]
        assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_warm_up_goes_before_the_end(schedule: str) -> None:
    """Where warm-up lasts to the end or past it, its last update still has the whole rate."""
    for end in (2, 4):
        optim = {"schedule": schedule, "lr": 1.0, "min_lr": 0.1, "warmup": 4, "decay_steps": end}
        found = [reference.learning_rate({"optim": optim}, n) for n in (3, 4, 5)]
        assert found == pytest.approx([0.75, 1.0, 0.1])


def training_settings(**optim: Any) -> dict[str, dict[str, Any]]:
    """A tiny model with dropout, a warm-up and a decay."""
    base = {"lr": 0.05, "schedule": "linear", "warmup": 2, "decay_steps": 5, "clip": 0.5}
    return {"model": {**TINY, "dropout": 0.1}, "train": {"seed": 9}, "optim": {**base, **optim}}


RATES = [0.025, 0.05, 0.05 * 2 / 3, 0.05 / 3]


def by_torch(
    settings: dict[str, Any], steps: list[Any], make: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The same training with torch's own optimizer and clipping."""
    params = {p: torch.nn.Parameter(x) for p, x in reference.init(settings, 9).items()}
    decay = [x for p, x in params.items() if "norm" not in p and not p.endswith("bias")]
    other = [x for p, x in params.items() if "norm" in p or p.endswith("bias")]
    optimizer = make([{"params": decay}, {"params": other, "weight_decay": 0.0}])
    norms = []
    for t, batches in enumerate(steps):
        for path, g in reference.loss_and_grads(settings, params, batches, 9, t).grads.items():
            params[path].grad = g
        if settings["optim"]["clip"]:
            norms.append(
                float(torch.nn.utils.clip_grad_norm_(params.values(), settings["optim"]["clip"]))
            )
        for group in optimizer.param_groups:
            group["lr"] = RATES[t]
        optimizer.step()
    return norms, {p: x.detach() for p, x in params.items()}


def training_steps() -> list[list[dict[str, Tensor]]]:
    """Four steps of two microbatches."""
    return [
        rows(batch_of(3, 8, seed=t, sample=torch.arange(3 * t, 3 * t + 3)), 1, 2) for t in range(4)
    ]


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_training_equals_torch_adamw(clip: float) -> None:
    """Four updates: norms, learning rates and weights equal torch.optim.AdamW's."""
    settings = training_settings(clip=clip)
    steps = training_steps()

    def make(groups: Any) -> Any:
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

    norms, right = by_torch(settings, steps, make)
    found = reference.train(settings, steps)
    assert error(found.params, right) < 1e-10
    assert not norms or found.grad_norms == pytest.approx(norms, rel=1e-12)
    assert found.learning_rates == pytest.approx(RATES, rel=1e-12)
    if clip == 0.5:
        assert min(found.grad_norms) > clip


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_training_equals_torch_sgd_with_momentum(decay: float) -> None:
    """Four updates with momentum, without and with decay, equal torch.optim.SGD's."""
    settings = training_settings(name="sgd", momentum=0.8, weight_decay=decay)
    steps = training_steps()
    make = lambda g: torch.optim.SGD(g, lr=1.0, momentum=0.8, weight_decay=decay)  # noqa: E731
    _, right = by_torch(settings, steps, make)
    assert error(reference.train(settings, steps).params, right) < 1e-10


def test_history_is_of_the_weights_before_each_update() -> None:
    """Losses, and the first gradients, are those of the weights and masks each step starts with."""
    settings, steps = training_settings(), training_steps()
    two = reference.train(settings, steps[:2])
    first = reference.loss_and_grads(settings, reference.init(settings, 9), steps[0], 9, 0)
    assert two.losses[0] == float(first.loss)
    assert all(torch.equal(two.first_grads[p], g) for p, g in first.grads.items())
    one = reference.train(settings, steps[:1])
    second, _, _ = reference.loss(settings, one.params, steps[1], 9, 1)
    assert two.losses[1] == float(second)
    squares = sum(float((g**2).sum()) for g in first.grads.values())
    assert two.grad_norms[0] == pytest.approx(math.sqrt(squares), rel=1e-12)


# ---------------------------------------------------------------------------- independence


def test_zero_means_derived() -> None:
    """Fields left at 0 follow from others."""
    full = reference.complete({"model": {"hidden": 24, "heads": 6, "seq_len": 64}})
    names = ("kv_heads", "head_dim", "ffn", "rope_original")
    assert [full["model"][name] for name in names] == [6, 4, 96, 64]
    assert full["optim"]["decay_steps"] == full["train"]["steps"] == 200


def test_settings_it_cannot_honour_are_refused() -> None:
    """An unknown model field or choice is an error, never ignored (bugs row 119)."""
    with pytest.raises(ValueError, match="experts"):
        reference.complete({"model": {"experts": 8}})
    with pytest.raises(ValueError, match="longrope"):
        reference.complete({"model": {"rope_scaling": "longrope"}})
    with pytest.raises(ValueError, match="adagrad"):
        reference.complete({"optim": {"name": "adagrad"}})
    assert reference.complete({"parallel": {"tp": 2}, "train": {"log_every": 3}})["model"]


def test_imports_nothing_else_of_mfun() -> None:
    """Only torch, numpy, the standard library and itself."""
    own = "mfun.verify.reference"
    for file in Path(reference.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module is not None, file
                names = [node.module]
            for name in names:
                top = name.split(".")[0]
                fine = top in {"torch", "numpy"} or top in sys.stdlib_module_names
                assert fine or name == own or name.startswith(own + "."), f"{file.name}: {name}"
