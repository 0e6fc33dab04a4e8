"""Learning rates, clipping, AdamW and SGD with momentum by their formulas, and a training run."""

from __future__ import annotations

import math
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


def clip(grads: Params, norm: Tensor, limit: float) -> dict[str, Tensor]:
    """Scale all gradients by min(1, limit / (norm + 1e-6)); a limit of 0 turns this off."""
    if limit == 0.0:
        return dict(grads)
    scale = min(1.0, limit / (float(norm) + 1e-6))
    return {path: g * scale for path, g in grads.items()}


def adamw(
    optim: dict[str, Any], p: Tensor, g: Tensor, decay: float, state: dict[str, Tensor], n: int
) -> Tensor:
    """The direction of update n: bias-corrected first moment over root of the second."""
    b1, b2 = optim["b1"], optim["b2"]
    state["m"] = b1 * state.get("m", torch.zeros_like(p)) + (1.0 - b1) * g
    state["v"] = b2 * state.get("v", torch.zeros_like(p)) + (1.0 - b2) * g * g
    m_hat, v_hat = state["m"] / (1.0 - b1**n), state["v"] / (1.0 - b2**n)
    return m_hat / (torch.sqrt(v_hat) + optim["eps"]) + decay * p


def sgd(
    optim: dict[str, Any], p: Tensor, g: Tensor, decay: float, state: dict[str, Tensor], n: int
) -> Tensor:
    """The direction of update n: a sum of past gradients, each older one times momentum."""
    del n
    state["m"] = optim["momentum"] * state.get("m", torch.zeros_like(p)) + g + decay * p
    return state["m"]


RULES = {"adamw": adamw, "sgd": sgd}


def train(
    settings: Settings,
    steps: Sequence[Sequence[Batch]],
    params: Params | None = None,
    dtype: torch.dtype = torch.float64,
) -> History:
    """Train by p <- p - lr direction, with weight decay on matrices and embeddings only.

    AdamW adds the decay to the direction (decoupled), SGD to the gradient, as torch.optim does.

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
        for path, g in clip(result.grads, norm, optim["clip"]).items():
            p = weights[path]
            decay = optim["weight_decay"] if decayed(path) else 0.0
            direction = RULES[optim["name"]](optim, p, g, decay, state[path], t + 1)
            weights[path] = p - lr * direction
        losses.append(float(result.loss))
        norms.append(float(norm))
        rates.append(lr)
    return History(losses, norms, rates, weights, first)
