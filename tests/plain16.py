"""Training in 16 bits as plain torch has it: one process, a loop, nothing of mfun.

A GPT with learned positions, layer norms, gelu and tied head, in bf16 or fp16 with gradients of
matrices computed in float32, masters and loss scaling; data parallel ranks are summed up in turn.
It does what `mfun.nn` documents, operation by operation, so that bits can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Batch = Mapping[str, Tensor]
Leaves = dict[str, Tensor]
HEADROOM = {torch.float16: 1024.0, torch.bfloat16: 1.0}


class Sums:
    """Float32 gradients of one rank, added up over its microbatches."""

    def __init__(self, params: Leaves) -> None:
        self.views = {path: torch.zeros(p.shape) for path, p in params.items()}
        self.empty = set(self.views)

    def claim(self, path: str) -> tuple[Tensor, int]:
        """The sum, and whether it has begun."""
        keep = int(path not in self.empty)
        self.empty.discard(path)
        return self.views[path], keep

    def product(self, path: str, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x, computed in float32."""
        view, keep = self.claim(path)
        view.view(dy.shape[-1], x.shape[-1]).addmm_(dy.float().T, x.float(), beta=keep)

    def add(self, path: str, grad: Tensor) -> None:
        """Add a gradient."""
        view, keep = self.claim(path)
        view.add_(grad) if keep else view.copy_(grad)


class Linear(torch.autograd.Function):
    """x w^T; the gradient of w goes into the sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, path: str, sums: Sums) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.where = path, sums
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, w), (path, sums) = grads, ctx.saved_tensors, ctx.where
        sums.product(path, dy.flatten(0, -2), x.flatten(0, -2))
        return dy @ w, None, None, None


def norm(x: Tensor, leaves: Leaves, name: str, eps: float) -> Tensor:
    """Layer norm in float32."""
    w, b = (leaves[f"{name}.{part}"].float() for part in ("weight", "bias"))
    return F.layer_norm(x.float(), x.shape[-1:], w, b, eps).to(x.dtype)


def block(leaves: Leaves, i: int, h: Tensor, model: Mapping[str, Any], sums: Sums) -> Tensor:
    """Attention and feed-forward, each after a norm, each added to the residual."""
    at, eps = f"blocks.{i}", model["norm_eps"]

    def linear(x: Tensor, name: str, begin: int, end: int) -> Tensor:
        w = leaves[f"{at}.{name}"].detach().flatten(begin, end)
        return Linear.apply(x, w, f"{at}.{name}", sums)

    x = norm(h, leaves, f"{at}.norm1", eps)
    heads = model["heads"]
    qkv = linear(x, "attn.qkv", 0, 2).unflatten(-1, (3, heads, model["hidden"] // heads))
    q, k, v = (y.transpose(-3, -2) for y in qkv.unbind(-3))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2)
    h = h + linear(y.flatten(-2), "attn.out", 1, 2)
    x = norm(h, leaves, f"{at}.norm2", eps)
    return h + linear(F.gelu(linear(x, "mlp.up", 0, 0)), "mlp.down", 0, 0)


def head(x: Tensor, w: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The loss in float32, the gradient of logits and that of x, before the loss's own gradient."""
    labels, weights = batch["labels"].flatten(), batch["mask"].float().flatten()
    z = F.linear(x.flatten(0, -2), w).float()
    top = z.amax(-1)
    picked = z.gather(-1, labels[:, None]).squeeze(-1)
    z = (z - top[:, None]).exp()
    total = z.sum(-1)
    loss = (weights * (top + total.log() - picked)).sum()
    z = z * (weights / total)[:, None]
    z.scatter_add_(-1, labels[:, None], -weights[:, None])
    dz = (z * HEADROOM[w.dtype]).to(w.dtype)
    return loss, dz, (dz @ w).view_as(x)


def microbatch(
    params: Leaves, batch: Batch, seed: Tensor, model: Mapping[str, Any], sums: Sums
) -> Tensor:
    """Loss sum of a microbatch; the gradients of seed * loss go into the sums."""
    leaves = {path: p.detach().requires_grad_() for path, p in params.items()}
    table, tokens = leaves["embed.tokens"].detach(), batch["tokens"]
    rows = F.embedding(tokens, table).requires_grad_()
    h = rows + leaves["embed.positions"][: tokens.shape[1]]
    for i in range(model["layers"]):
        h = block(leaves, i, h, model, sums)
    x = norm(h, leaves, "final_norm", model["norm_eps"])
    with torch.no_grad():
        loss, dz, dx = head(x, table, batch)
        seed = seed.float() / HEADROOM[table.dtype]
        dw = dz.float().T @ x.flatten(0, -2).float()
        view, keep = sums.claim("embed.tokens")
        view.addcmul_(dw, seed) if keep else view.copy_(dw * seed)
    small = [p for p in leaves if "norm" in p or p == "embed.positions"]
    wanted = [rows, *(leaves[p] for p in small)]
    d_rows, *grads = torch.autograd.grad(x, wanted, (seed * dx.float()).to(dx.dtype))
    for path, grad in zip(small, grads, strict=True):
        sums.add(path, grad)
    view, _ = sums.claim("embed.tokens")
    view.index_add_(0, tokens.flatten(), d_rows.flatten(0, -2).float())
    return loss


class Scale(NamedTuple):
    """Counters of a dynamic loss scale that count up."""

    scale: float
    good: int = 0
    bad_since_growth: int = 0


def rescaled(now: Scale, overflow: bool, every: int, hysteresis: int, minimum: float) -> Scale:
    """Halved from the `hysteresis`-th overflow since the last growth on, doubled after `every`."""
    if overflow:
        bad = now.bad_since_growth + 1
        lower = max(minimum, now.scale / 2) if bad >= hysteresis else now.scale
        return Scale(lower, 0, bad)
    if now.good + 1 == every:
        return Scale(now.scale * 2, 0, 0)
    return now._replace(good=now.good + 1)


def added(a: Leaves, b: Leaves) -> Leaves:
    """Sums by path; {} is zero."""
    return {p: a[p] + g if a else g for p, g in b.items()}


class Run(NamedTuple):
    """What a run leaves: a list has one entry a step."""

    params: Leaves
    masters: Leaves
    losses: list[float]
    scales: list[float]
    skipped: list[bool]
    rates: list[float]


def train(
    params: Leaves,
    steps: Sequence[Sequence[Sequence[Batch]]],
    model: Mapping[str, Any],
    rate: Callable[[int], float],
    decayed: Callable[[str], bool],
    *,
    eps: float = 1e-8,
    scale: Scale | None = None,
    rule: Mapping[str, Any] | None = None,
    each: bool = False,
) -> Run:
    """Train by torch.optim's AdamW on float32 masters.

    Args:
        params: initial, of 16 bits.
        steps: for each step, each data rank's microbatches.
        model: hidden, heads, layers, norm_eps.
        rate: learning rate of update n, from 1.
        decayed: whether a path decays.
        eps: AdamW's.
        scale: the first loss scale; None does not scale.
        rule: `rescaled`'s every, hysteresis and minimum.
        each: ranks are summed up microbatch by microbatch, else once.
    """
    masters = {path: p.float().requires_grad_() for path, p in params.items()}
    params = {path: p.clone() for path, p in params.items()}
    groups = [
        {"params": [x for p, x in masters.items() if decayed(p) == yes], "weight_decay": 0.1 * yes}
        for yes in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=eps, fused=True)
    out, updates = Run(params, {}, [], [], [], []), 0
    for ranks in steps:
        factor = scale.scale if scale else 1.0
        count = sum(float(b["mask"].double().sum()) for rank in ranks for b in rank)
        seed = torch.tensor(factor * (1.0 / count), dtype=torch.float64)
        loss, total = 0.0, {}
        for window in [[(b,) for b in bs] for bs in zip(*ranks, strict=True)] if each else [ranks]:
            part: Leaves = {}
            for rank in window:
                sums = Sums(params)
                for b in rank:
                    loss += float(microbatch(params, b, seed, model, sums).double()) / count
                part = added(part, sums.views)
            total = added(total, part)
        total = {p: g * (1.0 / factor) for p, g in total.items()}
        overflow = scale is not None and not all(g.isfinite().all() for g in total.values())
        if not overflow:
            updates += 1
            for group in optimizer.param_groups:
                group["lr"] = rate(updates)
            for path, x in masters.items():
                x.grad = total[path]
            optimizer.step()
            for path, x in masters.items():
                params[path].copy_(x.detach())
        out.losses.append(loss)
        out.scales.append(factor)
        out.skipped.append(overflow)
        out.rates.append(rate(updates) if updates else 0.0)
        if scale is not None and rule is not None:
            scale = rescaled(scale, overflow, **rule)
    out.masters.update({p: x.detach() for p, x in masters.items()})
    return out
