"""The output head and the loss in one, a few tokens at a time, so that all logits never exist.

Shape letters: b batch, s sequence, n tokens, d model, v vocabulary (this rank's columns).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from mfun import comm
from mfun.comm import Axis
from mfun.comm.signed import signed
from mfun.nn.linear import enter, forward_mode, leave, leave_fresh, primal
from mfun.nn.loss import Columns, TokenLoss, check_width, columns_of, on_real, statistics
from mfun.nn.norm import at_least_fp32
from mfun.nn.weight_grads import WeightGrads, add_product_

LOGITS_AT_ONCE, TOKENS_AT_ONCE = 1 << 24, 256
HEADROOM = {torch.float16: 2.0**10}
"""Factor of gradients that are there before the loss's own is known: a probability of 1e-5 has all
its bits in fp16 only so. Their scaling by the loss's gradient takes it out."""


def chunk_tokens(width: int) -> int:
    """Tokens at a time: about 64 MiB of float32 logits, but enough rows for an efficient product.

    Measured on CPU with 2048 tokens and 8192 columns, against torch's linear and cross entropy:
    512 at a time 1.03, 1024 0.99, all 0.96.

    Args:
        width: this rank's columns of the vocabulary.

    Example:
        >>> chunk_tokens(256), chunk_tokens(128256)
        (65536, 256)
    """
    return max(LOGITS_AT_ONCE // width, TOKENS_AT_ONCE)


def linear_cross_entropy(
    h_bsd: Tensor,
    w_vd: Tensor,
    labels_bs: Tensor,
    weights_bs: Tensor,
    axis: Axis,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    sequence_parallel: bool = False,
    chunk: int | None = None,
    weight_grads: WeightGrads | None = None,
) -> Tensor:
    """The sum over tokens of weight times loss, of logits h w^T that never exist whole.

    L = sum_bs weight * TokenLoss(h w^T, label)

    Because the loss is a sum, its gradients are computed along with it, chunk by chunk, by three
    products instead of four. Derivatives of every order are those of the definition.

    Args:
        h_bsd: (b, s, d), I over `axis`; under sequence parallelism (b, s/n, d), V.
        w_vd: (ceil(v/n), d), V over `axis`.
        labels_bs: (b, s) int64, the whole sequence, equal over `axis`.
        weights_bs: (b, s), the whole sequence, equal over `axis`.
        axis: the tensor-parallel axis, of size n.
        vocab: v, without padding.
        label_smoothing: see `TokenLoss`.
        z_loss: see `TokenLoss`.
        sequence_parallel: h is a shard of the sequence.
        chunk: tokens at a time, by default `chunk_tokens`; 0 computes all logits at once, by the
            definition.
        weight_grads: takes the gradient of w in autograd's place.

    Returns:
        (), I over `axis`.

    Raises:
        ValueError: w does not hold this rank's share of the vocabulary.

    Example:
        >>> from mfun.comm import single_groups
        >>> h, w = torch.ones(1, 1, 1), torch.zeros(4, 1)
        >>> label, weight = torch.tensor([[2]]), torch.ones(1, 1)
        >>> linear_cross_entropy(h, w, label, weight, single_groups().tp, vocab=4)
        tensor(1.3863)
    """
    check_width("linear_cross_entropy", w_vd.shape[0], axis, vocab)
    rule = TokenLoss(vocab=vocab, label_smoothing=label_smoothing, z_loss=z_loss)
    chunk = chunk_tokens(w_vd.shape[0]) if chunk is None else chunk
    weights_bs = weights_bs.to(at_least_fp32(h_bsd).dtype)
    args = (h_bsd, w_vd, labels_bs, weights_bs)
    wanted = h_bsd.requires_grad or w_vd.requires_grad
    if chunk and wanted and torch.is_grad_enabled() and not weights_bs.requires_grad:
        late = weight_grads is not None and weight_grads.takes(w_vd)
        late &= labels_bs.numel() <= w_vd.shape[1]  # dz (n, v) is no larger than dw (v, d)
        static = (axis, rule, sequence_parallel, chunk, weight_grads, late)
        return HeadLoss.apply(*args, axis.index, *static)[0]
    return _value(*args, axis, rule, sequence_parallel, chunk)


def _value(
    h: Tensor,
    w: Tensor,
    labels: Tensor,
    weights: Tensor,
    axis: Axis,
    rule: TokenLoss,
    sequence_parallel: bool,
    chunk: int,
) -> Tensor:
    """The definition, as a composition; a chunk at a time where there is no gradient to keep."""
    tokens_nd = enter(h, axis, sequence_parallel).flatten(0, -2)
    labels, weights, losses = labels.flatten(), weights.flatten(), []
    for rows in _rows(tokens_nd.shape[0], chunk):
        z, columns = _logits(tokens_nd[rows], w, labels[rows], axis, rule)
        losses.append((weights[rows] * rule(*statistics(z, columns, axis, rule))).sum())
    return torch.stack(losses).sum()


def _rows(tokens: int, chunk: int) -> list[slice]:
    """Slices of `chunk` tokens, or one of all."""
    step = chunk or tokens
    return [slice(start, start + step) for start in range(0, tokens, step)]


def _logits(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    axis: Axis,
    rule: TokenLoss,
    product: Callable[[Tensor, Tensor], Tensor] = F.linear,
) -> tuple[Tensor, Columns]:
    columns = columns_of(labels, w.shape[0], axis, rule)
    return on_real(at_least_fp32(product(x, w)), columns, -math.inf), columns


def _product(x: Tensor, w: Tensor) -> Tensor:
    """x w^T where nobody differentiates; on CPU its rows are no multiple of a page apart.

    Such rows meet in the same few sets of a cache: with 8192 columns and 256 to 2048 tokens the
    head's three products and its loss took 1.04 to 1.10 times as long (medians of 10).
    """
    if w.is_cuda or len(w) * w.element_size() % 4096:
        return F.linear(x, w)
    z = x.new_empty(len(x), len(w) + 64)[:, : len(w)]
    return torch.mm(x, w.T, out=z)


def _value_and_grads(
    h: Tensor,
    w: Tensor,
    labels: Tensor,
    weights: Tensor,
    axis: Axis,
    rule: TokenLoss,
    sequence_parallel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss with its gradients for h and w, all three differentiable: what `HeadLoss` returns.

    dz = weight ((1 + 2 z_loss lse) softmax(z) - target);  dh = leave(dz w),  dw = dz^T x,
    the last two times `HEADROOM`, dw in at least float32.
    """
    x = enter(h, axis, sequence_parallel)
    z, columns = _logits(x, w, labels, axis, rule)
    lse, picked, total = statistics(z, columns, axis, rule)
    loss = (weights * rule(lse, picked, total)).sum()
    lse = comm.copy(lse, axis).unsqueeze(-1)
    at_label = torch.arange(w.shape[0], device=w.device) == columns.label.unsqueeze(-1)
    at_label = (at_label & columns.owned.unsqueeze(-1)).to(z.dtype)
    target = (1.0 - rule.label_smoothing) * at_label
    if rule.label_smoothing:
        uniform = torch.full_like(z, rule.label_smoothing / rule.vocab)
        target = target + on_real(uniform, columns, 0.0)
    dz = weights.unsqueeze(-1) * ((1.0 + 2.0 * rule.z_loss * lse) * (z - lse).exp() - target)
    dz = _narrow(dz, w)
    dw = at_least_fp32(dz.flatten(0, -2)).T @ at_least_fp32(x.flatten(0, -2))
    return loss, leave(dz @ w, axis, sequence_parallel), dw


def _narrow(dz: Tensor, w: Tensor) -> Tensor:
    """dz in the type of w, times the headroom."""
    headroom = HEADROOM.get(w.dtype, 1.0)
    return (dz if headroom == 1.0 else headroom * dz).to(w.dtype)


class HeadLoss(torch.autograd.Function):
    """(loss, dh, dw): the loss and its gradients, which the backward has only to scale.

    `late` leaves the product dw = dz^T x to the backward and to W, with dz in dw's place.
    The gradients are outputs like the loss, so a second derivative is the derivative of an output:
    it goes through `_value_and_grads`, as do forward mode and vmap.
    """

    @staticmethod
    @signed
    def forward(
        h: Tensor,
        w: Tensor,
        labels: Tensor,
        weights: Tensor,
        index: Tensor,
        axis: Axis,
        rule: TokenLoss,
        sequence_parallel: bool,
        chunk: int,
        weight_grads: WeightGrads | None,
        late: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Chunk by chunk, in place: logits become exponentials become their gradient."""
        axis = attrs.evolve(axis, index=index)
        x = enter(h, axis, sequence_parallel)
        tokens_nd, labels, weights = x.flatten(0, -2), labels.flatten(), weights.flatten()
        dx_nd = torch.empty_like(tokens_nd)
        dw = w.new_empty(0) if late else torch.empty_like(w, dtype=at_least_fp32(w[:0]).dtype)
        losses, factors = [], []
        for rows in _rows(tokens_nd.shape[0], chunk):
            z, columns = _logits(tokens_nd[rows], w, labels[rows], axis, rule, _product)
            losses.append(_differentiate_(z, columns, weights[rows], axis, rule))
            dz = _narrow(z, w)
            torch.mm(dz, w, out=dx_nd[rows])
            if late:
                factors.append(dz)
            else:
                add_product_(dw, dz, tokens_nd[rows], 1 if rows.start else 0)
            del z, dz  # the next chunk's memory, still in the cache
        if late:
            dw = factors[0] if len(factors) == 1 else torch.cat(factors)
        dx = leave_fresh(dx_nd.view_as(x), axis, sequence_parallel)
        return torch.stack(losses).sum(), dx, dw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep the gradients; the rest only for derivatives of derivatives."""
        *tensors, ctx.axis, ctx.rule, ctx.sequence_parallel, _, ctx.sink, ctx.late = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """g dh, g dw; and, if the gradients were used, their own derivative."""
        g, *g_grads = grads
        *tensors, dh, dw = ctx.saved_tensors
        if g_grads == [None, None]:
            return (*_scaled(ctx, g, tensors[0], tensors[1], dh, dw), *[None] * 9)
        return (*_pulled(_of_h_and_w(ctx, tensors), tensors[:2], grads), *[None] * 9)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """Through the definition."""
        tensors = ctx.saved_tensors
        with forward_mode():
            at = tuple(primal(x) for x in tensors[:2])
            given = _or_zeros(tangents[:2], at)
            return torch.func.jvp(_of_h_and_w(ctx, tensors), at, given)[1]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        """Through the definition, with the ranks where the index is batched."""
        axis, rule, sequence_parallel, *_ = args[5:]

        def one(h: Tensor, w: Tensor, y: Tensor, m: Tensor, index: Tensor) -> tuple[Tensor, ...]:
            at = attrs.evolve(axis, index=index)
            return _value_and_grads(h, w, y, m, at, rule, sequence_parallel)

        return torch.func.vmap(one, in_dims[:5])(*args[:5]), (0, 0, 0)


def _scaled(
    ctx: Any, g: Tensor | None, h: Tensor, w: Tensor, dh: Tensor, dw: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """g dh and g dw, the latter None where the sink took it; where late, dw is dz.

    The factor g of a scaled loss may be beyond the range of fp16: products are taken in float32.
    """
    if g is None:
        return None, None
    sink: WeightGrads | None = ctx.sink
    g = g / HEADROOM.get(w.dtype, 1.0)
    dh = (g * at_least_fp32(dh)).to(dh.dtype)
    if ctx.late:
        x_nd = enter(h, ctx.axis, ctx.sequence_parallel).flatten(0, -2)
        assert sink is not None
        taken = sink.product(w, dw, x_nd, by=g)
        return dh, None if taken else g * (at_least_fp32(dw).T @ at_least_fp32(x_nd))
    return dh, None if sink is not None and sink.scaled(w, dw, g) else g * dw


def _of_h_and_w(ctx: Any, tensors: Sequence[Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The definition as a function of what is differentiated."""
    labels, weights, index = tensors[2:5]
    axis = attrs.evolve(ctx.axis, index=index)
    return lambda h, w: _value_and_grads(
        h, w, labels, weights, axis, ctx.rule, ctx.sequence_parallel
    )


def _pulled(
    fn: Callable[..., tuple[Tensor, ...]],
    at: Sequence[Tensor],
    cotangents: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    outputs, pull, *_ = torch.func.vjp(fn, *at)
    return pull(_or_zeros(cotangents, outputs))


def _or_zeros(values: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    pairs = zip(values, like, strict=True)
    return tuple(torch.zeros_like(y) if value is None else value for value, y in pairs)


def _differentiate_(
    z: Tensor, columns: Columns, weights: Tensor, axis: Axis, rule: TokenLoss
) -> Tensor:
    """The weighted loss of some tokens; their logits are overwritten by their gradient."""
    label = columns.label.unsqueeze(-1)
    top = comm.max(z.amax(-1), axis)
    picked = z.gather(-1, label).squeeze(-1).where(columns.owned, 0.0)
    total = on_real(z, columns, 0.0).sum(-1) if rule.label_smoothing else torch.zeros_like(top)
    exponentials = z.sub_(top.unsqueeze(-1)).exp_().sum(-1)
    exponentials, picked, total = comm.reduce(
        torch.stack([exponentials, picked, total]), axis
    ).unbind(0)
    lse = top + exponentials.log()
    z.mul_((weights * (1.0 + 2.0 * rule.z_loss * lse) / exponentials).unsqueeze(-1))
    if rule.label_smoothing:
        uniform = (rule.label_smoothing / rule.vocab) * weights.unsqueeze(-1)
        z.sub_(on_real(uniform.expand_as(z), columns, 0.0))
    at_label = ((rule.label_smoothing - 1.0) * weights).where(columns.owned, 0.0)
    z.scatter_add_(-1, label, at_label.unsqueeze(-1))
    return (weights * rule(lse, picked, total)).sum()
