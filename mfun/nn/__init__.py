"""Layer 3: rank-local pure functions over plain tensors."""

from __future__ import annotations

from mfun.nn.attention import attention, attention_mask, project_qkv
from mfun.nn.dropout import coordinates, dropout, score_grid, token_grid
from mfun.nn.embedding import position_embedding, vocab_embedding
from mfun.nn.head import linear_cross_entropy
from mfun.nn.layer import Ctx, Layer, Params, Values
from mfun.nn.linear import column_linear, row_linear
from mfun.nn.loss import TokenLoss, vocab_cross_entropy
from mfun.nn.mlp import activate, mlp
from mfun.nn.norm import layer_norm, rms_norm
from mfun.nn.rotary import rotary_table, rotate

__all__ = [
    "Ctx",
    "Layer",
    "Params",
    "TokenLoss",
    "Values",
    "activate",
    "attention",
    "attention_mask",
    "column_linear",
    "coordinates",
    "dropout",
    "layer_norm",
    "linear_cross_entropy",
    "mlp",
    "position_embedding",
    "project_qkv",
    "rms_norm",
    "rotary_table",
    "rotate",
    "row_linear",
    "score_grid",
    "token_grid",
    "vocab_cross_entropy",
    "vocab_embedding",
]
