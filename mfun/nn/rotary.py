"""Rotary position embedding, half-split, with the linear, llama3 and yarn ways of stretching it.

Pair j of a head is the dims (j, j + k/2); at position p it is turned by p * frequency[j]. The
definitions are those of Hugging Face transformers, computed in float64.

Shape letters: b batch, s sequence, h heads, k head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mfun.config import ModelConfig
from mfun.nn.norm import at_least_fp32


def frequencies(model: ModelConfig) -> tuple[Tensor, float]:
    """Angle per position of each pair, and the factor that multiplies cosine and sine.

    Without scaling f_j = theta^(-2j/k). `linear` divides all by `rope_factor`; `llama3` only long
    waves; `yarn` likewise, by pair number, and gives the factor 1 + ln(rope_factor) / 10.

    Args:
        model: reads head_size and the `rope_*` fields.

    Returns:
        (k/2,) float64, and the factor.

    Example:
        >>> frequencies(ModelConfig(hidden=8, heads=2, rope_theta=100.0))
        (tensor([1.0000, 0.1000], dtype=torch.float64), 1.0)

    Source: Su et al. 2021 (arXiv 2104.09864); Chen et al. 2023 (2306.15595); Llama 3.1; Peng et
    al. 2023 (2309.00071).
    """
    k = model.head_size
    plain = model.rope_theta ** (-torch.arange(0, k, 2, dtype=torch.float64) / k)
    stretched = plain / model.rope_factor
    match model.rope_scaling:
        case "linear":
            return stretched, 1.0
        case "llama3":
            return torch.lerp(stretched, plain, _llama3_keep(plain, model)), 1.0
        case "yarn":
            factor = 1.0 + 0.1 * math.log(max(model.rope_factor, 1.0))
            return torch.lerp(stretched, plain, _yarn_keep(model)), factor
        case _:
            return plain, 1.0


def _original(model: ModelConfig) -> int:
    return model.rope_original or model.seq_len


def _llama3_keep(plain: Tensor, model: ModelConfig) -> Tensor:
    """1 for waves of at least `rope_high` turns over the original length, 0 at `rope_low` turns."""
    turns = _original(model) * plain / (2.0 * math.pi)
    return ((turns - model.rope_low) / (model.rope_high - model.rope_low)).clamp(0.0, 1.0)


def _yarn_keep(model: ModelConfig) -> Tensor:
    """1 up to the pair that turns `rope_beta_fast` times, 0 from that of `rope_beta_slow`."""
    k = model.head_size

    def pair(turns: float) -> float:
        longest = _original(model) / (turns * 2.0 * math.pi)
        return k * math.log(longest) / (2.0 * math.log(model.rope_theta))

    low = max(math.floor(pair(model.rope_beta_fast)), 0)
    high = min(math.ceil(pair(model.rope_beta_slow)), k - 1)
    ramp = (torch.arange(k // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    return 1.0 - ramp.clamp(0.0, 1.0)


def rotary_table(model: ModelConfig, length: int) -> Tensor:
    """Cosines and sines of every position up to `length`: (2, length, k/2) float64."""
    frequency, factor = frequencies(model)
    angle = torch.arange(length, dtype=torch.float64).unsqueeze(-1) * frequency
    return torch.stack([angle.cos(), angle.sin()]) * factor


def rotate(x_bshk: Tensor, table: Tensor, positions_bs: Tensor | None = None) -> Tensor:
    """Turn every pair of every head by its token's angle.

    y = (a cos - c sin, c cos + a sin), where x = (a, c) are the two halves of a head; in at least
    float32.

    Args:
        x_bshk: queries or keys of the whole sequence.
        table: from `rotary_table`.
        positions_bs: (b, s) int64, where documents restart them; by default 0, 1, 2, ..

    Returns:
        The shape and dtype of x.

    Raises:
        ValueError: the sequence is longer than the table.
    """
    s = x_bshk.shape[1]
    if s > table.shape[1]:
        raise ValueError(
            f"rotate: a sequence of {s} tokens for a table of {table.shape[1]} positions; shorten "
            f"the sequence or set model.seq_len to at least {s}"
        )
    wide = at_least_fp32(x_bshk)
    table = table.to(wide)
    table = table[:, :s] if positions_bs is None else table[:, positions_bs]
    cos, sin = table.unsqueeze(-2).unbind(0)
    a, c = wide.chunk(2, -1)
    return torch.cat([a * cos - c * sin, c * cos + a * sin], -1).to(x_bshk.dtype)
