"""The reference's own random numbers: Philox4x32-10 addressed by an element's global index.

A stream is named by a seed and a path. Element `i` of a stream is lane `i % 4` of the block
`i // 4`, whatever device or shape asks for it.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np
import torch

Words = np.ndarray
MASK = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
MULTIPLY = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))


class Stream(NamedTuple):
    """The part of a Philox block's input that does not depend on the element."""

    k0: int
    k1: int
    c2: int
    c3: int


def stream(seed: int, *path: str | int) -> Stream:
    """Derive a stream from a seed and a path.

    Four little-endian 32-bit words of blake2b over the parts joined by the unit separator.
    """
    text = "\x1f".join(str(part) for part in (seed, *path))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return Stream(*(int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8, 12)))


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[int, int]) -> Words:
    """Ten rounds of Philox4x32 on uint64 arrays that hold 32-bit words.

    Args:
        counter: four arrays of one shape.
        key: the two key words.

    Returns:
        The four output words, stacked in a last dimension.

    Example:
        >>> zero = np.zeros(1, np.uint64)
        >>> [hex(w) for w in philox((zero, zero, zero, zero), (0, 0))[0]]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    x0, x1, x2, x3 = counter
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    for _ in range(10):
        product0, product1 = x0 * MULTIPLY[0], x2 * MULTIPLY[1]
        high0, low0 = product0 >> HALF, product0 & MASK
        high1, low1 = product1 >> HALF, product1 & MASK
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return np.stack([x0, x1, x2, x3], axis=-1)


def blocks(s: Stream, index: np.ndarray) -> Words:
    """The whole block, four words, in which each element of `index` lies."""
    block = np.asarray(index, dtype=np.uint64) // np.uint64(4)
    c2, c3 = np.full_like(block, s.c2), np.full_like(block, s.c3)
    return philox((block & MASK, block >> HALF, c2, c3), (s.k0, s.k1))


def words(s: Stream, index: np.ndarray) -> Words:
    """One 32-bit word (as uint64) for each element of `index`."""
    lane = np.asarray(index, dtype=np.int64) % 4
    return np.take_along_axis(blocks(s, index), lane[..., None], axis=-1)[..., 0]


def unit(w: Words) -> np.ndarray:
    """Map a 32-bit word to the middle of its cell in (0, 1), float64."""
    return (w.astype(np.float64) + 0.5) * 2.0**-32


def uniform(s: Stream, index: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Uniform numbers in (low, high)."""
    return low + (high - low) * unit(words(s, index))


def normal(s: Stream, index: np.ndarray, std: float = 1.0) -> np.ndarray:
    """Normal numbers by Box and Muller: an even lane takes the cosine, an odd one the sine.

    Lanes 0 and 1 share the words (0, 1), lanes 2 and 3 the words (2, 3).
    """
    lane = np.asarray(index, dtype=np.int64) % 4
    block = blocks(s, index)
    first, second = (
        unit(np.take_along_axis(block, (lane // 2 * 2 + j)[..., None], axis=-1)[..., 0])
        for j in (0, 1)
    )
    radius, angle = np.sqrt(-2.0 * np.log(first)), 2.0 * np.pi * second
    return std * np.where(lane % 2 == 0, radius * np.cos(angle), radius * np.sin(angle))


def truncated_normal(
    s: Stream, index: np.ndarray, std: float = 1.0, bound: float = 2.0
) -> np.ndarray:
    """Normal numbers conditioned on |x| < bound * std, by the inverse of the distribution."""
    below = 0.5 * (1.0 + math.erf(-bound / math.sqrt(2.0)))
    inside = math.erf(bound / math.sqrt(2.0))
    argument = torch.from_numpy(2.0 * (below + unit(words(s, index)) * inside) - 1.0)
    return std * math.sqrt(2.0) * torch.special.erfinv(argument).numpy()


def bernoulli(s: Stream, index: np.ndarray, p: float) -> np.ndarray:
    """True with probability p: where the word is below round(p * 2^32)."""
    return words(s, index) < np.uint64(round(p * 2**32))
