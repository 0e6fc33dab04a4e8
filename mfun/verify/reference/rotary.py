"""Rotary positions and the three ways of stretching them, as the models' authors define them.

Pair `j` of a head (dimensions j and j + k/2) turns by `position * frequency[j]`.

Source: Su et al., RoFormer; linear: Chen et al., position interpolation; llama3: Llama 3.1's
release; yarn: Peng et al., YaRN. Definitions are those of Hugging Face transformers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def rotary_frequencies(model: dict[str, Any]) -> tuple[list[float], float]:
    """Radians per position of every pair, and the factor on both cosine and sine.

    Args:
        model: the completed model settings.

    Returns:
        k/2 frequencies, highest first; the attention factor (1 except for yarn).
    """
    k, theta = model["head_dim"], model["rope_theta"]
    plain = [theta ** (-2.0 * j / k) for j in range(k // 2)]
    match model["rope_scaling"]:
        case "none":
            return plain, 1.0
        case "linear":
            return [f / model["rope_factor"] for f in plain], 1.0
        case "llama3":
            return [_llama3(f, model) for f in plain], 1.0
        case "yarn":
            factor = model["rope_factor"]
            attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            return [_yarn(j, f, model) for j, f in enumerate(plain)], attention
        case other:
            raise ValueError(f"model.rope_scaling is {other!r}")


def _llama3(frequency: float, model: dict[str, Any]) -> float:
    """Keep short waves, divide long ones by the factor, blend in between.

    The blend is linear in the number of turns a wave makes over the original length: all of the
    plain frequency at `rope_high` turns, none of it at `rope_low`.
    """
    turns = model["rope_original"] * frequency / (2.0 * math.pi)
    keep = (turns - model["rope_low"]) / (model["rope_high"] - model["rope_low"])
    keep = min(1.0, max(0.0, keep))
    return keep * frequency + (1.0 - keep) * frequency / model["rope_factor"]


def _yarn(pair: int, frequency: float, model: dict[str, Any]) -> float:
    """Keep pairs below `low`, divide those above `high` by the factor, blend linearly between.

    `low` (`high`) is the pair, rounded down (up) and kept in [0, k - 1], whose wave makes
    `rope_beta_fast` (`rope_beta_slow`) turns over the original length.
    """
    k, theta = model["head_dim"], model["rope_theta"]

    def pair_with(turns: float) -> float:
        ratio = model["rope_original"] / (turns * 2.0 * math.pi)
        return k * math.log(ratio) / (2.0 * math.log(theta))

    low = max(math.floor(pair_with(model["rope_beta_fast"])), 0)
    high = min(math.ceil(pair_with(model["rope_beta_slow"])), k - 1)
    width = high - low if high != low else 0.001
    stretch = min(1.0, max(0.0, (pair - low) / width))
    return stretch * frequency / model["rope_factor"] + (1.0 - stretch) * frequency


def rotate(x_bsk: Tensor, positions_bs: Tensor, model: dict[str, Any]) -> Tensor:
    """Turn every pair (j, j + k/2) of one head's vectors by its angle."""
    frequencies, factor = rotary_frequencies(model)
    angle = positions_bs.double()[..., None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = ((factor * t).to(x_bsk.dtype) for t in (angle.cos(), angle.sin()))
    half = x_bsk.shape[-1] // 2
    left, right = x_bsk[..., :half], x_bsk[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
