"""Learning rates, clipping, AdamW, SGD, Lion and Muon by their formulas, and a training run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun.verify.reference.gpt import Batch, Params, init, loss_and_grads
from mfun.verify.reference.settings import Settings, complete

DECAYED = ("tokens", "positions", "qkv", "q", "kv", "out", "up", "down")


class History(NamedTuple):
    """What a run leaves behind; lists have one entry a step, before that step's update."""

    losses: list[float]
    grad_norms: list[float]
    learning_rates: list[float]
    params: dict[str, Tensor]
    first_grads: dict[str, Tensor]


def learning_rate(settings: Settings, n: int) -> float:
    """Learning rate of update n, counted from 1.

    Up to `warmup` it is lr n / warmup. After that, with t the fraction of [warmup, decay_steps]
    that has passed: constant lr; linear lr + (min - lr) t; cosine
    min + (lr - min) (1 + cos(pi t)) / 2; inverse_sqrt lr sqrt(max(warmup, 1) / n), never below
    min and with no end; wsd lr, then linear to min over the last `wsd_decay` of
    decay_steps (whole updates, at least one).
    From decay_steps on, linear, cosine and wsd stay at min.
    """
    optim = complete(settings)["optim"]
    high, low, kind = optim["lr"], optim["min_lr"], optim["schedule"]
    warmup, end = optim["warmup"], optim["decay_steps"]
    if n <= warmup:
        return high * n / warmup
    if kind == "constant":
        return high
    if kind == "inverse_sqrt":
        return max(low, high * math.sqrt(max(warmup, 1) / n))
    if n >= end:
        return low
    if kind == "wsd":
        start = end - max(1, round(end * optim["wsd_decay"]))
        return high if n <= start else high + (low - high) * (n - start) / (end - start)
    t = (n - warmup) / (end - warmup)
    if kind == "linear":
        return high + (low - high) * t
    return low + (high - low) * (1.0 + math.cos(math.pi * t)) / 2.0


def decayed(path: str) -> bool:
    """Whether weight decay applies: to matrices and embeddings, not to biases and norms."""
    return path == "head.weight" or path.split(".")[-1] in DECAYED


def global_norm(grads: Params) -> Tensor:
    """Square root of the sum of squares over every element of every leaf."""
    return torch.sqrt(sum(((g**2).sum() for g in grads.values()), torch.tensor(0.0).double()))


def clip(grads: Params, norm: Tensor, limit: float, value: float = 0.0) -> dict[str, Tensor]:
    """Scale all gradients by min(1, limit / (norm + 1e-6)), then cut each element to +- value.

    A 0 turns either off.
    """
    scale = min(1.0, limit / (float(norm) + 1e-6)) if limit else 1.0
    bound = value or math.inf
    return {path: (g * scale).clamp(-bound, bound) for path, g in grads.items()}


def multipliers(optim: dict[str, Any], path: str) -> tuple[float, float]:
    """Of the learning rate and the weight decay: by `decayed`, then by each override in order."""
    lr, decay = 1.0, float(decayed(path))
    for pattern, change in optim["overrides"].items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), path):
            lr, decay = change.get("lr", lr), change.get("decay", decay)
    return lr, decay


def num_zeros(grads: Params) -> int:
    """Elements that are exactly 0."""
    return sum(int((g == 0).sum()) for g in grads.values())


def adamw(
    optim: dict[str, Any], path: str, p: Tensor, g: Tensor, state: dict[str, Tensor], n: int
) -> Tensor:
    """Update n: bias-corrected first moment over root of the second."""
    del path
    b1, b2 = optim["b1"], optim["b2"]
    state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1.0 - b1) * g
    state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1.0 - b2) * g * g
    m_hat, v_hat = state["m"] / (1.0 - b1**n), state["v"] / (1.0 - b2**n)
    return m_hat / (torch.sqrt(v_hat) + optim["eps"])


def sgd(
    optim: dict[str, Any], path: str, p: Tensor, g: Tensor, state: dict[str, Tensor], n: int
) -> Tensor:
    """Update n: a sum of past gradients, each older one times momentum."""
    del path, n
    state["m"] = optim["momentum"] * state.get("m", torch.zeros_like(p)) + g
    return state["m"]


def lion(
    optim: dict[str, Any], path: str, p: Tensor, g: Tensor, state: dict[str, Tensor], n: int
) -> Tensor:
    """Update n: the sign of a mean of gradients; another mean is kept."""
    del path, n
    old = state.get("m", torch.zeros_like(p))
    state["m"] = optim["b2"] * old + (1.0 - optim["b2"]) * g
    return torch.sign(optim["b1"] * old + (1.0 - optim["b1"]) * g)


def muon(
    optim: dict[str, Any], path: str, p: Tensor, g: Tensor, state: dict[str, Tensor], n: int
) -> Tensor:
    """Update n: Nesterov's mean gradient of a hidden matrix made nearly orthogonal; else AdamW's.

    With U s V^T the singular values of the mean over its Frobenius norm: U f(s) V^T, where f is
    `ns_steps` times x -> 3.4445 x - 4.7750 x^3 + 2.0315 x^5. It is scaled by 0.2 sqrt(max(rows,
    columns)), or as first published by sqrt(max(1, rows / columns)).
    """
    if path.split(".")[-1] not in ("qkv", "q", "kv", "out", "up", "down"):
        return adamw(optim, path, p, g, state, n)
    keep = optim["momentum"]
    state["m"] = keep * state.get("m", torch.zeros_like(p)) + (1.0 - keep) * g
    mean = matrices(path, (1.0 - keep) * g + keep * state["m"])
    size = mean.square().sum((-2, -1), keepdim=True).sqrt().clamp(min=1e-7)
    u, s, v = torch.linalg.svd(mean / size, full_matrices=False)
    for _ in range(optim["ns_steps"]):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    rows, columns = mean.shape[-2:]
    first = math.sqrt(max(1.0, rows / columns))
    scale = first if optim["muon_scale"] == "original" else 0.2 * math.sqrt(max(rows, columns))
    return (scale * (u * s[..., None, :]) @ v).reshape(p.shape)


def matrices(path: str, x: Tensor) -> Tensor:
    """A leaf as separate matrices (n, out, in): q, k and v each one over all heads, gate and up."""
    name = path.split(".")[-1]
    count = {"qkv": 3, "kv": 2, "up": x.shape[0] if x.ndim == 3 else 1}.get(name, 1)
    columns = x[0].numel() if name in ("out", "down") else x.shape[-1]
    return x.reshape(count, -1, columns)


RULES = {"adamw": adamw, "sgd": sgd, "lion": lion, "muon": muon}


def train(
    settings: Settings,
    steps: Sequence[Sequence[Batch]],
    params: Params | None = None,
    dtype: torch.dtype = torch.float64,
) -> History:
    """Train by p <- p - lr update, with weight decay on matrices and embeddings unless overridden.

    SGD adds the decay to the gradient, the others to the update (decoupled), as torch.optim does.

    Args:
        settings: nested dict; see `complete`.
        steps: for every step, the microbatches of all dp ranks.
        params: where to start; by default `init(settings, train.seed, dtype)`.
        dtype: of everything.
    """
    full = complete(settings)
    optim, seed = full["optim"], full["train"]["seed"]
    weights = dict(params) if params is not None else init(settings, seed, dtype)
    state: dict[str, dict[str, Tensor]] = {path: {} for path in weights}
    losses, norms, rates, first = [], [], [], {}
    for t, batches in enumerate(steps):
        result = loss_and_grads(settings, weights, batches, seed, t)
        norm, lr = global_norm(result.grads), learning_rate(settings, t + 1)
        first = result.grads if t == 0 else first
        for path, g in clip(result.grads, norm, optim["clip"], optim["clip_value"]).items():
            p, (rate, decay) = weights[path], multipliers(optim, path)
            pull = optim["weight_decay"] * decay * p
            if optim["name"] == "sgd":
                g, pull = g + pull, torch.zeros_like(p)
            update = RULES[optim["name"]](optim, path, p, g, state[path], t + 1)
            weights[path] = p - lr * rate * (update + pull)
        losses.append(float(result.loss))
        norms.append(float(norm))
        rates.append(lr)
    return History(losses, norms, rates, weights, first)
