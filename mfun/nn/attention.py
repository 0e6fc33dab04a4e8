"""Causal attention over this rank's heads: projection, masks, and the weighted sum of values.

Heads are independent, so between the column-cut projection and the row-cut output nothing is
communicated.

Shape letters: b batch, s sequence (queries), t sequence (keys), d model, h query heads, g key and
value heads, k head dim; h and g as this rank holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from mfun.comm import Axis
from mfun.nn.linear import column_linear
from mfun.nn.norm import at_least_fp32
from mfun.nn.weight_grads import WeightGrads


def project_qkv(
    params: Mapping[str, Tensor],
    x_bsd: Tensor,
    axis: Axis,
    *,
    sequence_parallel: bool = False,
    weight_grads: WeightGrads | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of this rank's heads, by one column-cut product.

    With fewer key and value heads than ranks, several ranks hold the same such head, each for its
    own query heads: the gradients of `kv` are then summands over those ranks.

    Args:
        params: qkv (3, h, k, d) with optional qkv_bias (3, h, k); or q (h, k, d) and
            kv (2, g, k, d) with optional q_bias (h, k) and kv_bias (2, g, k).
        x_bsd: I over `axis`; under sequence parallelism (b, s/n, d), V.
        axis: the tensor-parallel axis, of size n.
        sequence_parallel: x is a shard of the sequence.
        weight_grads: see `column_linear`.

    Returns:
        q (b, s, h, k), k and v (b, s, g, k), V over `axis`.

    Source: Ainslie et al. 2023 (arXiv 2305.13245) for h > g.
    """
    linear = partial(column_linear, sequence_parallel=sequence_parallel, weight_grads=weight_grads)
    if "qkv" in params:
        w, bias = params["qkv"], params.get("qkv_bias")
        y = linear(
            x_bsd,
            rearrange(w, "n h k d -> (n h k) d"),
            None if bias is None else rearrange(bias, "n h k -> (n h k)"),
            axis,
        )
        q, key, value = rearrange(y, "b s (n h k) -> n b s h k", n=3, h=w.shape[1])
        return q, key, value
    h, k, _ = params["q"].shape
    g = params["kv"].shape[1]
    parts = [params["q"].flatten(0, 1), params["kv"].flatten(0, 2)]
    w, bias = torch.cat(parts), None
    if weight_grads is not None:
        weight_grads.stacked(w, parts)
    if "q_bias" in params:
        bias = torch.cat([params["q_bias"].flatten(), params["kv_bias"].flatten()])
    q, kv = linear(x_bsd, w, bias, axis).split([h * k, 2 * g * k], -1)
    key, value = rearrange(kv, "b s (n g k) -> n b s g k", n=2, g=g)
    return rearrange(q, "b s (h k) -> b s h k", h=h), key, value


def attention_mask(
    length: int,
    *,
    window: int = 0,
    documents_bs: Tensor | None = None,
    device: torch.device | None = None,
) -> Tensor | None:
    """Which keys a query sees, where that is not simply all up to itself.

    Args:
        length: s, of the whole sequence.
        window: keys seen, the query's own included; 0 means all before it.
        documents_bs: number of the document each token belongs to; others are not seen.
        device: of the result.

    Returns:
        bool, True = seen, (s, t) or (b, 1, s, t); None for plain causal attention.

    Example:
        >>> attention_mask(3, window=2).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    """
    if documents_bs is None and not 0 < window < length:
        return None
    at = torch.arange(length, device=device)
    back_st = at.unsqueeze(-1) - at
    seen = back_st >= 0
    if window > 0:
        seen = seen & (back_st < window)
    if documents_bs is not None:
        seen = seen & (documents_bs.unsqueeze(-1) == documents_bs.unsqueeze(-2)).unsqueeze(-3)
    return seen


def attention(
    q_bshk: Tensor,
    k_btgk: Tensor,
    v_btgk: Tensor,
    *,
    mask: Tensor | None = None,
    fused: bool = False,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Scaled dot-product attention, causal unless a mask says more.

    y = drop(softmax(q k^T / sqrt(k) + mask)) v; query head i uses key and value head i g / h.

    Args:
        q_bshk: queries, any type over any axis.
        k_btgk: keys; h is a multiple of g.
        v_btgk: values.
        mask: from `attention_mask`, which includes causality; None is plain causal.
        fused: use torch's kernel, which never holds the scores but (on CPU) has neither second
            derivative nor forward mode nor vmap. Ignored where `drop` is given.
        drop: dropout on the probabilities (b, h, s, t).

    Returns:
        (b, s, h, k).

    Example:
        >>> x = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
        >>> attention(torch.zeros(1, 2, 1, 1), x, x).flatten().tolist()
        [1.0, 2.0]

    Source: Vaswani et al. 2017 (arXiv 1706.03762).
    """
    q, k, v = (x.transpose(-3, -2) for x in (q_bshk, k_btgk, v_btgk))
    if fused and drop is None:
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[-3] != k.shape[-3]
        )
    else:
        y = _plain(q, k, v, mask, drop)
    return y.transpose(-3, -2)


def _plain(
    q_bhsk: Tensor,
    k_bgtk: Tensor,
    v_bgtk: Tensor,
    mask: Tensor | None,
    drop: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Attention from its definition: every derivative, any mask, dropout."""
    h, s, g, t = *q_bhsk.shape[-3:-1], *k_bgtk.shape[-3:-1]
    if mask is None:
        mask = torch.ones(s, t, dtype=torch.bool, device=q_bhsk.device).tril()
    # The h/g query heads of a group are stacked as further queries, so keys are not copied.
    q = (q_bhsk / math.sqrt(q_bhsk.shape[-1])).reshape(-1, g, h // g * s, q_bhsk.shape[-1])
    scores = at_least_fp32(q @ k_bgtk.transpose(-2, -1)).reshape(-1, h, s, t)
    probabilities = scores.masked_fill(~mask, -math.inf).softmax(-1).to(v_bgtk.dtype)
    if drop is not None:
        probabilities = drop(probabilities)
    y = probabilities.reshape(-1, g, h // g * s, t) @ v_bgtk
    return y.reshape(q_bhsk.shape)
