"""Dropout whose mask is a function of a key and of global coordinates, so no layout can change it.

Ranks that hold the same values draw the same mask; ranks that hold different tokens or heads draw
the pieces of one global mask. Nothing is read from, or left in, a global generator.

Shape letters: b batch, s sequence, d model, h heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mfun.comm import Axis
from mfun.rng import Coordinate, Grid, Key, bernoulli


def dropout(x: Tensor, rate: float, key: Key | None, grid: Grid) -> Tensor:
    """Zero each element with probability `rate`, divide the rest by 1 - rate.

    y = x * keep / (1 - rate),  keep = bernoulli(key, grid, 1 - rate).

    Args:
        x: any shape and any type over any axis.
        rate: in [0, 1).
        key: names the mask; None (evaluation) or rate 0: x is returned.
        grid: the global coordinates of x's elements; its shape is that of x.

    Returns:
        The shape and type of x.

    Raises:
        ValueError: rate outside [0, 1), or grid and x differ in shape.

    Example:
        >>> from mfun.rng import key
        >>> dropout(torch.ones(4), 0.5, key(0, "mask"), Grid.whole((4,))).tolist()
        [2.0, 2.0, 2.0, 0.0]

    Source: Srivastava et al. 2014.
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate is {rate}; it lies in [0, 1)")
    if key is None or rate == 0.0:
        return x
    if grid.shape != tuple(x.shape):
        raise ValueError(f"dropout: a grid of shape {[*grid.shape]} for x of shape {[*x.shape]}")
    keep = bernoulli(key, grid, 1.0 - rate, device=x.device)
    return torch.where(keep, x / (1.0 - rate), 0.0)


def coordinates(length: int, axis: Axis) -> Coordinate:
    """Global coordinates of this rank's piece, of `length`, of a dim cut over the axis.

    Example:
        >>> from mfun.comm import single_groups
        >>> coordinates(3, single_groups().tp)
        range(0, 3)
    """
    if axis.size == 1:
        return range(length)
    return axis.index * length + torch.arange(length, device=axis.index.device)


def token_grid(x_bsd: Tensor, sample_b: Tensor, axis: Axis, sequence_parallel: bool) -> Grid:
    """Coordinates (sample, token, feature) of activations, whole or cut along the sequence."""
    _, s, d = x_bsd.shape
    tokens = coordinates(s, axis) if sequence_parallel else range(s)
    whole = s * axis.size if sequence_parallel else s
    return Grid((sample_b, tokens, range(d)), (1, whole, d))


def score_grid(scores_bhst: Tensor, sample_b: Tensor, axis: Axis) -> Grid:
    """Coordinates (sample, head, query, key) of attention scores, heads cut over the axis."""
    _, h, s, t = scores_bhst.shape
    return Grid((sample_b, coordinates(h, axis), range(s), range(t)), (1, h * axis.size, s, t))
