"""Normalisation over the last dim, with statistics in at least float32. No communication.

Shape letters: d model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Norm = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def at_least_fp32(x: Tensor) -> Tensor:
    """Widen 16-bit values to float32; float32 and float64 stay as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def layer_norm(x: Tensor, weight_d: Tensor, bias_d: Tensor | None, eps: float) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with the biased variance.

    Args:
        x: (..., d), any type over any axis.
        weight_d: (d,). On sequence shards each rank's gradient is its own tokens' summand.
        bias_d: as the weight, or None.
        eps: added to the variance.

    Returns:
        The shape, dtype and type over axes of x.

    Example:
        >>> one, zero = torch.ones(2), torch.zeros(2)
        >>> layer_norm(torch.tensor([1.0, 5.0]), one, zero, 0.0).tolist()
        [-1.0, 1.0]

    Source: Ba, Kiros and Hinton 2016 (arXiv 1607.06450).
    """
    return _wide(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps), x, weight_d, bias_d)


def rms_norm(x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        x: (..., d), any type over any axis.
        weight_d: (d,). On sequence shards each rank's gradient is its own tokens' summand.
        eps: added to the mean square.

    Returns:
        The shape, dtype and type over axes of x.

    Example:
        >>> rms_norm(torch.tensor([3.0, 3.0]), torch.ones(2), 0.0).tolist()
        [1.0, 1.0]

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467).
    """
    return _wide(lambda x, w, _: F.rms_norm(x, x.shape[-1:], w, eps), x, weight_d, None)


def _wide(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = at_least_fp32(x)
    if wide.dtype == x.dtype:
        return norm(x, weight, bias)
    bias = None if bias is None else bias.to(wide.dtype)
    return norm(wide, weight.to(wide.dtype), bias).to(x.dtype)
