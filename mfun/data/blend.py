"""Shares: which dataset of a blend gives each sample, and which sequences of one each part gets.

Shape suffixes: b blocks of samples, d datasets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mfun.data.corpus import DataError
from mfun.data.indexed import chunks

MOST = 32767
"""Datasets of a blend: their numbers are int16."""
SURPLUS = 0.005
"""Part of its samples that a dataset is built for beyond them."""
BLOCKS = 1 << 13
"""Blocks of samples that advance together."""


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in Megatron's arithmetic.

    Example:
        >>> normalise([2, 1, 1])
        [0.5, 0.25, 0.25]
    """
    values = np.array(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def split_bounds(weights: Sequence[float], sequences: int) -> list[range]:
    """The sequences of each part of a dataset: training, validation, test.

    Args:
        weights: of the parts, such as 969, 30, 1.
        sequences: of the dataset.

    Returns: a range for each weight, one after the other.

    Example:
        >>> split_bounds([8, 1, 1], 20)
        [range(0, 16), range(16, 18), range(18, 20)]

    Source: Megatron-Core 0.16.1, `convert_split_vector_to_split_matrix`.
    """
    ends = [0.0]
    for part in normalise(weights):
        ends.append(ends[-1] + part)
    places = [round(end * float(sequences)) for end in ends]
    return [range(a, b) for a, b in pairwise(places)]


def sizes_of(weights: Sequence[float], samples: int, surplus: float = 0.0) -> list[int]:
    """Samples that each dataset gives to a blend of `samples`: ceil(ceil(samples w) (1 + surplus)).

    Example:
        >>> sizes_of([0.3, 0.7], 1000), sizes_of([0.3, 0.7], 1000, SURPLUS)
        ([300, 700], [302, 704])
    """
    return [math.ceil(math.ceil(samples * w) * (1 + surplus)) for w in weights]


def blend_index(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each sample of a blend, its dataset and its number there.

    Sample i is of the dataset whose weight_d * max(i, 1) - samples_d is largest, the first of equal
    ones: at no point has one had a sample more than its share, nor, of two, a sample less.

    Args:
        weights: of the datasets, of any sum.
        size: samples of the blend.

    Returns: (size,) int16 datasets, (size,) int64 sample numbers.

    Raises: DataError for too many datasets, a weight below 0, or none above.

    Example:
        >>> dataset, sample = blend_index([0.5, 0.25, 0.25], 8)
        >>> dataset.tolist(), sample.tolist()
        ([0, 1, 2, 0, 0, 1, 2, 0], [0, 0, 0, 1, 2, 1, 1, 3])

    Source: Megatron-Core 0.16.1, `helpers.build_blending_indices`.
    """
    return _greedy(_checked(weights), size, None)


def exhaustive_index(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The same with shares of the sizes, where each dataset gives every one of its samples once.

    Source: Megatron-Core 0.16.1, `helpers.build_exhaustive_blending_indices`.

    Example:
        >>> exhaustive_index([1, 2])[0].tolist()
        [1, 0, 1]
    """
    _checked(sizes)
    limits_d, total = np.array(sizes, dtype=np.float64), sum(sizes)
    return _greedy(limits_d / float(total), total, limits_d)


def _checked(weights: Sequence[float]) -> np.ndarray:
    if not 0 < len(weights) <= MOST:
        raise DataError(f"data: a blend of {len(weights)} datasets: give 1 to {MOST}")
    bad = [w for w in weights if not 0 <= w < math.inf]
    if bad or not any(weights):
        raise DataError(
            f"data.weights: {bad[0] if bad else 0} is no weight of a dataset: give finite numbers "
            "of at least 0, one of them above"
        )
    return np.array(normalise(weights))


def _greedy(
    weights_d: np.ndarray, size: int, limits_d: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of samples advance side by side, each from a guess of what was given before it.

    The rule soon forgets where it began, so nearly every block ends right even from a wrong guess.
    A block whose guess was not what the one before it ended with runs again from that; when all
    agree, every count is what it would be one sample after the other.
    """
    steps = max(64, -(-size // BLOCKS))
    starts_b = np.arange(0, max(size, 1), steps)
    dataset = np.empty((len(starts_b), steps), np.int16)
    sample = np.empty((len(starts_b), steps), np.int64)
    counts_bd, ends_bd = _guess(starts_b, weights_d), np.empty((len(starts_b), len(weights_d)))
    todo = np.arange(len(starts_b))
    while len(todo):
        ends_bd[todo] = _advance(
            weights_d, starts_b[todo], counts_bd[todo], limits_d, dataset, sample, todo
        )
        todo = np.flatnonzero((ends_bd[:-1] != counts_bd[1:]).any(1)) + 1
        counts_bd[1:] = ends_bd[:-1]
    return dataset.reshape(-1)[:size], sample.reshape(-1)[:size]


def _guess(starts_b: np.ndarray, weights_d: np.ndarray) -> np.ndarray:
    """Samples each dataset gave before a block: its share, rounded so that they add up."""
    share_bd = starts_b[:, None] * weights_d
    counts_bd = np.floor(share_bd)
    missing_b = starts_b - counts_bd.sum(1)
    rank_bd = np.argsort(np.argsort(counts_bd - share_bd, axis=1), axis=1)
    return counts_bd + (rank_bd < missing_b[:, None])


def _advance(
    weights_d: np.ndarray,
    starts_b: np.ndarray,
    counts_bd: np.ndarray,
    limits_d: np.ndarray | None,
    dataset: np.ndarray,
    sample: np.ndarray,
    rows: np.ndarray,
) -> np.ndarray:
    """Fill some rows of `dataset` and `sample`; the counts behind their last samples."""
    blocks = np.arange(len(rows))
    for part in chunks(dataset.shape[1], 64):  # turned 64 columns at a time: rows are contiguous
        picked = np.empty((part.stop - part.start, len(rows)), np.int16)
        number = np.empty(picked.shape, np.int64)
        for step in range(len(picked)):
            at_b = np.maximum(starts_b + part.start + step, 1).astype(np.float64)
            lag_bd = at_b[:, None] * weights_d - counts_bd
            if limits_d is not None:
                lag_bd[counts_bd >= limits_d] = -np.inf
            best_b = lag_bd.argmax(axis=1)
            picked[step], number[step] = best_b, counts_bd[blocks, best_b]
            counts_bd[blocks, best_b] += 1
        dataset[rows, part], sample[rows, part] = picked.T, number.T
    return counts_bd
