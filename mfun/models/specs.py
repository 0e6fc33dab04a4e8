"""The parameters of a GPT: shape, cut over tp, gradient type, initial value, decay.

Which gradients are summands over tp is declared here, once, leaf by leaf; a test measures it.

    matrices and vocabulary tables   cut over tp: each rank's gradient is complete
    norms, row biases, positions     replicated: equal, under sequence parallelism summands
    q and k norms                    replicated, used on cut heads: summands
    k and v of repeated heads        cut over a factor of tp: summands over the rest of it

Shapes are those of the whole model: v vocabulary, s sequence, d model, h query heads, g key and
value heads, k head dim, f feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mfun.config import Config
from mfun.mesh import AxisLike, Factor
from mfun.spec import Init, P, ParamSpec

Specs = dict[str, Any]
ONES, ZEROS = Init("ones"), Init("zeros")


def embedding_specs(config: Config) -> Specs:
    """embed.tokens (v, d), and embed.positions (s, d) where they are learned."""
    model = config.model
    leaves: Specs = {"tokens": _vocabulary(config)}
    if model.position == "learned":
        leaves["positions"] = ParamSpec(
            shape=(model.seq_len, model.hidden),
            init=Init("normal", model.init_std),
            grad=_replicated(config),
        )
    return {"embed": leaves}


def block_specs(config: Config, i: int) -> Specs:
    """blocks.i: norm1, attn, norm2, mlp."""
    block = {
        "norm1": _norm(config),
        "attn": _attention(config),
        "norm2": _norm(config),
        "mlp": _mlp(config),
    }
    return {"blocks": {str(i): block}}


def head_specs(config: Config) -> Specs:
    """final_norm, and head.weight (v, d) or, tied, embed.tokens itself."""
    table = {"embed": {"tokens": _vocabulary(config)}}
    untied = {"head": {"weight": _vocabulary(config)}}
    return {"final_norm": _norm(config), **(table if config.model.tied else untied)}


def _replicated(config: Config) -> Mapping[AxisLike, str]:
    """Gradient of what every rank holds whole and uses on its tokens."""
    return {"tp": "partial" if config.parallel.sequence_parallel else "equal"}


def _vocabulary(config: Config) -> ParamSpec:
    model = config.model
    return ParamSpec(
        shape=(model.vocab, model.hidden),
        p=P("tp"),
        init=Init("normal", model.init_std),
        pads=(0,),
    )


def _norm(config: Config) -> Specs:
    how: Any = {"grad": _replicated(config), "decay": False, "wide": _wide_norms(config)}
    leaves = {"weight": ParamSpec(shape=(config.model.hidden,), init=ONES, **how)}
    if config.model.norm == "layernorm":
        leaves["bias"] = ParamSpec(shape=(config.model.hidden,), init=ZEROS, **how)
    return leaves


def _wide_norms(config: Config) -> bool:
    return config.precision.norms == "fp32"


def _attention(config: Config) -> Specs:
    model = config.model
    d, h, k = model.hidden, model.heads, model.head_size
    if model.kv == h:
        leaves = {"qkv": _matrix(config, (3, h, k, d), (2, 1))}
        leaves |= {"qkv_bias": _bias((3, h, k), P(None, "tp"))} if model.bias != "none" else {}
    else:
        leaves = _grouped(config)
    if model.qk_norm:
        how: Any = {"grad": {"tp": "partial"}, "decay": False, "wide": _wide_norms(config)}
        norm = ParamSpec(shape=(k,), init=ONES, **how)
        leaves |= {"q_norm": norm, "k_norm": norm}
    leaves["out"] = _matrix(config, (d, h, k), (1, 2), residual=True)
    if model.bias == "all":
        leaves["out_bias"] = _bias((d,), P(), _replicated(config))
    return leaves


def _grouped(config: Config) -> Specs:
    """Fewer key and value heads than query heads; fewer than ranks, they are held several times."""
    model, tp = config.model, config.parallel.tp
    d, h, g, k = model.hidden, model.heads, model.kv, model.head_size
    cut: AxisLike = "tp" if g % tp == 0 else Factor("tp", g)
    grad: dict[AxisLike, str] = {cut.inner: "partial"} if isinstance(cut, Factor) else {}
    std = Init("normal", model.init_std)
    leaves = {
        "q": ParamSpec(shape=(h, k, d), p=P("tp"), init=std, matrix=(2, 1)),
        "kv": ParamSpec(shape=(2, g, k, d), p=P(None, cut), init=std, grad=grad, matrix=(2, 1)),
    }
    if model.bias != "none":
        leaves["q_bias"] = _bias((h, k), P("tp"))
        leaves["kv_bias"] = _bias((2, g, k), P(None, cut), grad)
    return leaves


def _mlp(config: Config) -> Specs:
    model = config.model
    d, f = model.hidden, model.ffn_size
    gates, cut = ((2,), P(None, "tp")) if model.gated else ((), P("tp"))
    std = Init("normal", model.init_std)
    leaves = {
        "up": ParamSpec(shape=(*gates, f, d), p=cut, init=std, matrix=(1, 1)),
        "down": _matrix(config, (d, f), (1, 1), residual=True),
    }
    if model.bias == "all":
        leaves["up_bias"] = _bias((*gates, f), cut)
        leaves["down_bias"] = _bias((d,), P(), _replicated(config))
    return leaves


def _matrix(
    config: Config, shape: tuple[int, ...], matrix: tuple[int, int], *, residual: bool = False
) -> ParamSpec:
    """A matrix whose second dim is cut over tp; what writes to the residual stream starts small."""
    model = config.model
    std = model.init_std / math.sqrt(2 * model.layers) if residual else model.init_std
    return ParamSpec(shape=shape, p=P(None, "tp"), init=Init("normal", std), matrix=matrix)


def _bias(shape: tuple[int, ...], p: P, grad: Mapping[AxisLike, str] | None = None) -> ParamSpec:
    return ParamSpec(shape=shape, p=p, init=ZEROS, grad=grad or {}, decay=False)
