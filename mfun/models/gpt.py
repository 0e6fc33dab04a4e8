"""The dense GPT as a list of layers: embedding, pre-norm blocks, head.

    h = h + dropout(attention(norm1(h)));  h = h + dropout(mlp(norm2(h)))

Between layers the activation is (b, s, d), I over tp; under sequence parallelism (b, s/tp, d), V.
Over dp it is V: each rank has its own samples.

Shape letters: b batch, s sequence, t sequence (keys), d model, h heads, k head dim, v vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from einops import rearrange
from torch import Tensor

from mfun.config import Config
from mfun.models.specs import block_specs, embedding_specs, head_specs
from mfun.nn.attention import attention, attention_mask, project_qkv
from mfun.nn.dropout import dropout, score_grid, token_grid
from mfun.nn.embedding import position_embedding, vocab_embedding
from mfun.nn.head import linear_cross_entropy
from mfun.nn.layer import Ctx, Layer, Params, Values
from mfun.nn.linear import column_linear, row_linear
from mfun.nn.mlp import mlp
from mfun.nn.norm import layer_norm, rms_norm
from mfun.nn.rotary import rotary_table, rotate

Head = Literal["loss", "logits", "columns"]


def gpt(config: Config, head: Head = "loss") -> list[Layer]:
    """The layers of a GPT, for this configuration's layout.

    Args:
        config: reads `model`, `parallel.tp`, `parallel.sequence_parallel`, and of `train` the
            label smoothing and z-loss.
        head: what the last layer gives: `loss`, a scalar `loss`: the sum over this rank's tokens
            of mask times loss, in nats, I over tp; `logits`: (b, s, v) `logits` of the whole
            vocabulary without padding, I over tp; or `columns`: (b, s, ceil(v/tp)) `logits` of this
            rank's part of it, V over tp.

    Returns:
        [embedding, block 0, .., head]. The first takes {}; each passes {"h": (b, s, d)} on.

    Example:
        >>> from mfun.config import load
        >>> layers = gpt(load("tiny", ["model.layers=2"]))
        >>> [layer.name for layer in layers]
        ['embed', 'blocks.0', 'blocks.1', 'head']
        >>> layers[1].specs["blocks"]["0"]["attn"]["out"].shape
        (128, 4, 32)

    Source: Radford et al. 2019 (GPT-2); Touvron et al. 2023 (arXiv 2302.13971) for rotary
    positions, RMS norms and gated activations.
    """
    model = config.model
    rotary = rotary_table(model, model.seq_len) if model.position == "rotary" else None
    return [
        Layer("embed", embedding_specs(config), partial(apply_embedding, config)),
        *[_block(config, i, rotary) for i in range(model.layers)],
        Layer("head", head_specs(config), partial(HEADS[head], config)),
    ]


def _block(config: Config, i: int, rotary: Tensor | None) -> Layer:
    """A block, whose parts are its attention and its feed-forward half."""
    specs = block_specs(config, i)
    leaves = specs["blocks"][str(i)]
    attn, ffn = partial(apply_attention, config, i, rotary), partial(apply_mlp, config, i)

    def half(name: str, apply: Any, *keys: str) -> Layer:
        own = {"blocks": {str(i): {key: leaves[key] for key in keys}}}
        return Layer(f"blocks.{i}.{name}", own, apply)

    parts = half("attn", attn, "norm1", "attn"), half("mlp", ffn, "norm2", "mlp")
    return Layer(f"blocks.{i}", specs, partial(apply_block, config, i, rotary), parts)


def apply_embedding(config: Config, params: Params, x: Values, ctx: Ctx) -> Values:
    """h = dropout(tokens[ids] + positions)."""
    leaves, tokens_bs, tp = params["embed"], ctx.batch["tokens"], ctx.groups.tp
    sequence_parallel = config.parallel.sequence_parallel
    how: Any = {"sequence_parallel": sequence_parallel, "weight_grads": ctx.weight_grads}
    h_bsd = vocab_embedding(tokens_bs, leaves["tokens"], tp, **how)
    if "positions" in leaves:
        h_bsd = h_bsd + position_embedding(
            leaves["positions"],
            tokens_bs.shape[1],
            tp,
            positions_bs=ctx.batch.get("positions"),
            sequence_parallel=sequence_parallel,
        )
    return {"h": _drop_tokens(config, h_bsd, ctx, "embed")}


def apply_block(
    config: Config, i: int, rotary: Tensor | None, params: Params, x: Values, ctx: Ctx
) -> Values:
    """Its attention half, then its feed-forward half."""
    return apply_mlp(config, i, params, apply_attention(config, i, rotary, params, x, ctx), ctx)


def apply_attention(
    config: Config, i: int, rotary: Tensor | None, params: Params, x: Values, ctx: Ctx
) -> Values:
    """h = h + dropout(attention(norm1 h))."""
    block, h_bsd = params["blocks"][str(i)], x["h"]
    a_bsd = _norm(config, block["norm1"], h_bsd)
    a_bsd = _self_attention(config, i, rotary, block["attn"], a_bsd, ctx)
    return {"h": h_bsd + _drop_tokens(config, a_bsd, ctx, "blocks", i, "attn")}


def apply_mlp(config: Config, i: int, params: Params, x: Values, ctx: Ctx) -> Values:
    """h = h + dropout(mlp(norm2 h))."""
    block, h_bsd = params["blocks"][str(i)], x["h"]
    m_bsd = mlp(
        block["mlp"],
        _norm(config, block["norm2"], h_bsd),
        ctx.groups.tp,
        activation=config.model.activation,
        sequence_parallel=config.parallel.sequence_parallel,
        weight_grads=ctx.weight_grads,
    )
    return {"h": h_bsd + _drop_tokens(config, m_bsd, ctx, "blocks", i, "mlp")}


def apply_loss(config: Config, params: Params, x: Values, ctx: Ctx) -> Values:
    """The weighted sum of this rank's token losses."""
    loss = linear_cross_entropy(
        _norm(config, params["final_norm"], x["h"]),
        _head_weight(config, params),
        ctx.batch["labels"],
        ctx.batch["mask"],
        ctx.groups.tp,
        vocab=config.model.vocab,
        label_smoothing=config.train.label_smoothing,
        z_loss=config.train.z_loss,
        sequence_parallel=config.parallel.sequence_parallel,
        chunk=None if ctx.derivatives == "first" else 0,
        weight_grads=ctx.weight_grads,
    )
    return {"loss": loss}


def apply_columns(
    config: Config, params: Params, x: Values, ctx: Ctx, gather: bool = False
) -> Values:
    """Logits of this rank's part of the vocabulary, with its padding."""
    logits_bsv = column_linear(
        _norm(config, params["final_norm"], x["h"]),
        _head_weight(config, params),
        None,
        ctx.groups.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        gather_output=gather,
    )
    return {"logits": logits_bsv}


def apply_logits(config: Config, params: Params, x: Values, ctx: Ctx) -> Values:
    """Logits of the whole vocabulary on every rank, without padding."""
    logits_bsv = apply_columns(config, params, x, ctx, gather=True)["logits"]
    return {"logits": logits_bsv[..., : config.model.vocab]}


HEADS = {"loss": apply_loss, "logits": apply_logits, "columns": apply_columns}


def _self_attention(
    config: Config, i: int, rotary: Tensor | None, params: Params, x_bsd: Tensor, ctx: Ctx
) -> Tensor:
    tp, sequence_parallel = ctx.groups.tp, config.parallel.sequence_parallel
    how: Any = {"sequence_parallel": sequence_parallel, "weight_grads": ctx.weight_grads}
    q, k, v = project_qkv(params, x_bsd, tp, **how)
    if config.model.qk_norm:
        q = rms_norm(q, params["q_norm"], config.model.norm_eps)
        k = rms_norm(k, params["k_norm"], config.model.norm_eps)
    if rotary is not None:
        q, k = (rotate(y, rotary, ctx.batch.get("positions")) for y in (q, k))
    mask = attention_mask(
        q.shape[1],
        window=config.model.sliding_window,
        documents_bs=ctx.batch.get("documents"),
        device=q.device,
    )
    y_bshk = attention(
        q, k, v, mask=mask, fused=ctx.derivatives == "first", drop=_drop_scores(config, i, ctx)
    )
    out, bias = rearrange(params["out"], "d h k -> d (h k)"), params.get("out_bias")
    return row_linear(rearrange(y_bshk, "b s h k -> b s (h k)"), out, bias, tp, **how)


def _drop_scores(config: Config, i: int, ctx: Ctx) -> Any:
    """Dropout of one block's attention probabilities, or None."""
    rate, key = config.model.dropout, ctx.fold("blocks", i, "attn_probs")
    if key is None or rate == 0.0:
        return None
    sample_b, tp = ctx.batch["sample"], ctx.groups.tp
    return lambda p_bhst: dropout(p_bhst, rate, key, score_grid(p_bhst, sample_b, tp))


def _drop_tokens(config: Config, x_bsd: Tensor, ctx: Ctx, *place: str | int) -> Tensor:
    """Dropout of activations, whole or a shard of the sequence."""
    rate, key = config.model.dropout, ctx.fold(*place)
    if key is None or rate == 0.0:
        return x_bsd
    cut = config.parallel.sequence_parallel
    return dropout(x_bsd, rate, key, token_grid(x_bsd, ctx.batch["sample"], ctx.groups.tp, cut))


def _norm(config: Config, params: Params, x: Tensor) -> Tensor:
    eps = config.model.norm_eps
    if config.model.norm == "rmsnorm":
        return rms_norm(x, params["weight"], eps)
    return layer_norm(x, params["weight"], params["bias"], eps)


def _head_weight(config: Config, params: Params) -> Tensor:
    return params["embed"]["tokens"] if config.model.tied else params["head"]["weight"]
