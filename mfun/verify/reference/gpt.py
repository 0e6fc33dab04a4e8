"""A GPT on one device, straight from the definitions, and its loss and gradients by autograd.

Parameters are one flat dict from dotted path to whole tensor. Shape letters: b batch, s sequence,
d model, h heads, g key-value heads, k head dimension, f feed-forward, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mfun.verify.reference import philox
from mfun.verify.reference.rotary import rotate
from mfun.verify.reference.settings import Settings, complete

Params = Mapping[str, Tensor]
Batch = Mapping[str, Tensor]


class Result(NamedTuple):
    """What one step's loss and gradients are.

    `loss` is the objective; `loss_sum` and `tokens` are the masked sum of token losses and the sum
    of the mask over everything given; `grads` is the gradient of `loss`, one leaf a parameter.
    """

    loss: Tensor
    loss_sum: Tensor
    tokens: Tensor
    grads: dict[str, Tensor]


# ---------------------------------------------------------------------------- parameters


def shapes(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Whole (unpadded) shape of every parameter, in the order the forward pass meets them."""
    model = complete(settings)["model"]
    v, d, s = model["vocab"], model["hidden"], model["seq_len"]
    leaves: dict[str, tuple[int, ...]] = {"embed.tokens": (v, d)}
    if model["position"] == "learned":
        leaves["embed.positions"] = (s, d)
    for i in range(model["layers"]):
        for name, shape in _block_shapes(model).items():
            leaves[f"blocks.{i}.{name}"] = shape
    leaves |= _norm_shapes(model, "final_norm")
    if not model["tied"]:
        leaves["head.weight"] = (v, d)
    return leaves


def _norm_shapes(model: dict[str, Any], name: str) -> dict[str, tuple[int, ...]]:
    d = model["hidden"]
    if model["norm"] == "rmsnorm":
        return {f"{name}.weight": (d,)}
    return {f"{name}.weight": (d,), f"{name}.bias": (d,)}


def _block_shapes(model: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    d, h, g = model["hidden"], model["heads"], model["kv_heads"]
    k, f = model["head_dim"], model["ffn"]
    up = (2, f) if model["activation"] == "swiglu" else (f,)
    one_leaf = g == h
    leaves = _norm_shapes(model, "norm1")
    leaves |= {"attn.qkv": (3, h, k, d)} if one_leaf else {"attn.q": (h, k, d)}
    leaves |= {} if one_leaf else {"attn.kv": (2, g, k, d)}
    if model["bias"] in ("qkv", "all"):
        leaves |= {"attn.qkv_bias": (3, h, k)} if one_leaf else {"attn.q_bias": (h, k)}
        leaves |= {} if one_leaf else {"attn.kv_bias": (2, g, k)}
    if model["qk_norm"]:
        leaves |= {"attn.q_norm": (k,), "attn.k_norm": (k,)}
    leaves["attn.out"] = (d, h, k)
    leaves |= {"attn.out_bias": (d,)} if model["bias"] == "all" else {}
    leaves |= _norm_shapes(model, "norm2")
    leaves["mlp.up"] = (*up, d)
    leaves |= {"mlp.up_bias": up} if model["bias"] == "all" else {}
    leaves["mlp.down"] = (d, f)
    leaves |= {"mlp.down_bias": (d,)} if model["bias"] == "all" else {}
    return leaves


def init(settings: Settings, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Initial parameters, each element drawn by its index in the whole tensor.

    Matrices and embeddings are normal(init_std); the two that write to the residual stream
    (attn.out, mlp.down) normal(init_std / sqrt(2 layers)); norm weights 1; biases 0.
    """
    model = complete(settings)["model"]
    return {
        path: _initial(path, shape, model, seed).to(dtype)
        for path, shape in shapes(settings).items()
    }


def _initial(path: str, shape: tuple[int, ...], model: dict[str, Any], seed: int) -> Tensor:
    name = path.split(".")[-1]
    if name.endswith("bias"):
        return torch.zeros(shape, dtype=torch.float64)
    if "norm" in path:
        return torch.ones(shape, dtype=torch.float64)
    std = model["init_std"]
    if name in ("out", "down"):
        std = std / math.sqrt(2 * model["layers"])
    index = np.arange(math.prod(shape)).reshape(shape)
    return torch.from_numpy(philox.normal(philox.stream(seed, "init", path), index, std))


# ---------------------------------------------------------------------------- forward


class Dropout:
    """Dropout whose masks are named by (seed, step, place) and addressed by global index."""

    def __init__(self, rate: float, seed: int, step: int, sample_b: Tensor) -> None:
        """Of the rows with global sample numbers `sample_b`, in step `step`."""
        self.rate, self.root, self.samples = rate, (seed, "dropout", step), sample_b.tolist()

    def __call__(self, x: Tensor, *place: str | int, item: int = 0, items: int = 1) -> Tensor:
        """Drop from `x` (b, ...): row r is item `item` of the `items` of sample `sample[r]`."""
        if self.rate == 0.0:
            return x
        size = math.prod(x.shape[1:])
        within = np.arange(size).reshape(x.shape[1:])
        index = np.stack([within + (n * items + item) * size for n in self.samples])
        keep = philox.bernoulli(philox.stream(*self.root, *place), index, 1.0 - self.rate)
        return x * torch.from_numpy(keep).to(x.dtype) / (1.0 - self.rate)


def forward(
    settings: Settings,
    params: Params,
    batch: Batch,
    seed: int | None = None,
    step: int | None = None,
) -> Tensor:
    """Logits (b, s, v) of a batch.

    Args:
        settings: nested dict; see `complete`.
        params: whole tensors by path.
        batch: tokens (b, s); for packed documents also documents and positions (b, s); for
            dropout also sample (b,), the rows' global sample numbers.
        seed: with `step`, names the dropout masks; without them nothing is dropped.
        step: number of updates made before this one.
    """
    model = complete(settings)["model"]
    tokens_bs = batch["tokens"]
    positions_bs = torch.arange(tokens_bs.shape[1]).expand(tokens_bs.shape)
    if "documents" in batch and "positions" not in batch:
        raise ValueError("a batch with documents needs positions (b, s) that restart with them")
    positions_bs = batch.get("positions", positions_bs)
    drop = Dropout(0.0, 0, 0, torch.zeros(0))
    if model["dropout"] > 0.0 and seed is not None and step is not None:
        drop = Dropout(model["dropout"], seed, step, batch["sample"])

    h_bsd = params["embed.tokens"][tokens_bs]
    if model["position"] == "learned":
        h_bsd = h_bsd + params["embed.positions"][positions_bs]
    h_bsd = drop(h_bsd, "embed")
    visible_bst = visible(tokens_bs, batch.get("documents"), model["sliding_window"])
    for i in range(model["layers"]):
        block = {p.removeprefix(f"blocks.{i}."): w for p, w in params.items()}
        a_bsd = _attention(
            model, block, _norm(model, block, "norm1", h_bsd), positions_bs, visible_bst, drop, i
        )
        h_bsd = h_bsd + drop(a_bsd, "blocks", i, "attn")
        m_bsd = _mlp(model, block, _norm(model, block, "norm2", h_bsd))
        h_bsd = h_bsd + drop(m_bsd, "blocks", i, "mlp")
    head_vd = params["embed.tokens"] if model["tied"] else params["head.weight"]
    return _norm(model, params, "final_norm", h_bsd) @ head_vd.T


def visible(tokens_bs: Tensor, documents_bs: Tensor | None, window: int) -> Tensor:
    """True where query s may look at key t: not later, same document, at most window-1 back."""
    b, length = tokens_bs.shape
    query_s1, key_1t = torch.arange(length)[:, None], torch.arange(length)[None, :]
    allowed_bst = (key_1t <= query_s1).expand(b, length, length)
    if window > 0:
        allowed_bst = allowed_bst & (query_s1 - key_1t < window)
    if documents_bs is not None:
        allowed_bst = allowed_bst & (documents_bs[:, :, None] == documents_bs[:, None, :])
    return allowed_bst


def _norm(model: dict[str, Any], params: Params, name: str, x: Tensor) -> Tensor:
    weight = params[f"{name}.weight"]
    if model["norm"] == "rmsnorm":
        return _rms(x, weight, model["norm_eps"])
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred**2).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + model["norm_eps"]) * weight + params[f"{name}.bias"]


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps) * weight


def _heads(model: dict[str, Any], block: Params, kind: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Weight (k, d) and bias (k) of every query (kind 0), key (1) or value (2) head."""
    heads = model["heads"] if kind == 0 else model["kv_heads"]
    for head in range(heads):
        if model["kv_heads"] == model["heads"]:
            leaf, place = "attn.qkv", (kind, head)
        elif kind == 0:
            leaf, place = "attn.q", (head,)
        else:
            leaf, place = "attn.kv", (kind - 1, head)
        weight_kd = block[leaf][place]
        if model["bias"] == "none":
            yield weight_kd, weight_kd.new_zeros(weight_kd.shape[0])
        else:
            yield weight_kd, block[f"{leaf}_bias"][place]


def _attention(
    model: dict[str, Any],
    block: Params,
    x_bsd: Tensor,
    positions_bs: Tensor,
    visible_bst: Tensor,
    drop: Dropout,
    layer: int,
) -> Tensor:
    """Scaled dot-product attention, one head after the other, each added to the output."""
    queries, keys, values = (
        [x_bsd @ weight.T + bias for weight, bias in _heads(model, block, kind)]
        for kind in (0, 1, 2)
    )
    if model["qk_norm"]:
        queries = [_rms(q, block["attn.q_norm"], model["norm_eps"]) for q in queries]
        keys = [_rms(k, block["attn.k_norm"], model["norm_eps"]) for k in keys]
    if model["position"] == "rotary":
        queries = [rotate(q, positions_bs, model) for q in queries]
        keys = [rotate(k, positions_bs, model) for k in keys]
    heads, shared_by = model["heads"], model["heads"] // model["kv_heads"]
    out_bsd = torch.zeros_like(x_bsd)
    for head, query_bsk in enumerate(queries):
        key_btk, value_btk = keys[head // shared_by], values[head // shared_by]
        score_bst = query_bsk @ key_btk.transpose(1, 2) / math.sqrt(model["head_dim"])
        probs_bst = torch.softmax(score_bst.masked_fill(~visible_bst, -math.inf), dim=-1)
        probs_bst = drop(probs_bst, "blocks", layer, "attn_probs", item=head, items=heads)
        out_bsd = out_bsd + probs_bst @ value_btk @ block["attn.out"][:, head, :].T
    return out_bsd + block["attn.out_bias"] if model["bias"] == "all" else out_bsd


def _mlp(model: dict[str, Any], block: Params, x_bsd: Tensor) -> Tensor:
    biased = model["bias"] == "all"
    if model["activation"] == "swiglu":
        gate_bsf, value_bsf = (
            x_bsd @ block["mlp.up"][j].T + (block["mlp.up_bias"][j] if biased else 0.0)
            for j in (0, 1)
        )
        inner_bsf = gate_bsf * torch.sigmoid(gate_bsf) * value_bsf
    else:
        x_bsf = x_bsd @ block["mlp.up"].T + (block["mlp.up_bias"] if biased else 0.0)
        inner_bsf = _gelu(x_bsf, tanh=model["activation"] == "gelu_tanh")
    return inner_bsf @ block["mlp.down"].T + (block["mlp.down_bias"] if biased else 0.0)


def _gelu(x: Tensor, tanh: bool) -> Tensor:
    """The Gaussian error linear unit, x Phi(x), exact or by its tanh approximation."""
    if tanh:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


# ---------------------------------------------------------------------------- loss


def token_losses(settings: Settings, logits_bsv: Tensor, labels_bs: Tensor) -> Tensor:
    """Loss (b, s) of every token, in nats.

    lse - [(1 - e) logit(label) + e mean over the vocabulary of logit] + z lse^2, with
    lse = log sum exp logits, e = train.label_smoothing (torch's definition), z = train.z_loss.
    """
    train = complete(settings)["train"]
    smoothing = train["label_smoothing"]
    lse_bs = torch.logsumexp(logits_bsv, dim=-1)
    label_logit_bs = logits_bsv.gather(-1, labels_bs[..., None])[..., 0]
    expected_bs = (1.0 - smoothing) * label_logit_bs + smoothing * logits_bsv.mean(dim=-1)
    return lse_bs - expected_bs + train["z_loss"] * lse_bs**2


def normalise(loss_sums: Sequence[Tensor], counts: Sequence[Tensor], how: str) -> Tensor:
    """One objective from the loss sum and token count of every microbatch of every dp rank.

    "tokens": sum of all / count of all. "microbatch": the mean over microbatches of each one's
    own token mean, whatever its size. No valid token at all counts as a loss of 0.

    Example: one token of loss 8, and three of 1, 2 and 3 (bugs row 1).
        >>> sums, counts = torch.tensor([8.0, 6.0]), torch.tensor([1.0, 3.0])
        >>> float(normalise(sums, counts, "tokens")), float(normalise(sums, counts, "microbatch"))
        (3.5, 5.0)
    """
    sums, n = torch.stack(list(loss_sums)), torch.stack(list(counts))
    if how == "tokens":
        return sums.sum() / _or_one(n.sum())
    return (sums / _or_one(n)).mean()


def _or_one(count: Tensor) -> Tensor:
    return torch.where(count > 0, count, torch.ones_like(count))


def loss(
    settings: Settings,
    params: Params,
    batches: Batch | Sequence[Batch],
    seed: int | None = None,
    step: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The objective, the sum of token losses and the count of tokens, over one or more batches.

    Args:
        settings: nested dict; see `complete`.
        params: whole tensors by path.
        batches: every microbatch of every dp rank, in any order: tokens, labels (b, s), mask
            (b, s) or absent (all ones), and what `forward` reads. Labels where the mask is 0 are
            not looked at.
        seed: with `step`, turns dropout on.
        step: number of updates made before this one.
    """
    sums, counts = [], []
    for batch in [batches] if isinstance(batches, Mapping) else batches:
        logits_bsv = forward(settings, params, batch, seed, step)
        mask_bs = batch.get("mask", torch.ones(batch["labels"].shape)).to(logits_bsv.dtype)
        labels_bs = torch.where(mask_bs != 0, batch["labels"], 0)
        sums.append((token_losses(settings, logits_bsv, labels_bs) * mask_bs).sum())
        counts.append(mask_bs.sum())
    how = complete(settings)["train"]["loss_norm"]
    return normalise(sums, counts, how), torch.stack(sums).sum(), torch.stack(counts).sum()


def loss_and_grads(
    settings: Settings,
    params: Params,
    batches: Batch | Sequence[Batch],
    seed: int | None = None,
    step: int | None = None,
) -> Result:
    """The objective and its gradient for every parameter; arguments as in `loss`."""
    leaves = {path: value.detach().clone().requires_grad_() for path, value in params.items()}
    objective, loss_sum, count = loss(settings, leaves, batches, seed, step)
    grads = torch.autograd.grad(objective, list(leaves.values()))
    return Result(
        objective.detach(), loss_sum.detach(), count, dict(zip(leaves, grads, strict=True))
    )
