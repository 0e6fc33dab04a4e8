"""The order of samples: sample number -> window, computed anywhere, in any order, without a table.

Sample n is in epoch e = n // windows and gets window permute(n % windows) of that epoch. The
permutation is a keyed network of additions, so it needs no generator, no shuffled index and no
cache: the same numbers on every rank, at every resume, in every numpy version.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt

import numpy as np

# Eight rounds a digest: the orders of five windows are uneven with 8 rounds and even from 16 on.
_DIGESTS = 3


def order(samples: np.ndarray, windows: int, seed: int | None) -> np.ndarray:
    """The window of each sample number.

    Over the samples e*windows .. (e+1)*windows - 1 of epoch e every window comes exactly once.

    Args:
        samples: (n,) int64, >= 0.
        windows: number of windows, >= 1.
        seed: of the run; None is the one validation order, the same in every run and epoch.

    Returns: (n,) int64 in 0..windows - 1.

    Example:
        >>> sorted(order(np.arange(5, 10), 5, seed=0).tolist())
        [0, 1, 2, 3, 4]
    """
    out = np.empty_like(samples)
    epochs = samples // windows
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        path = ("validation",) if seed is None else ("train", seed, epoch)
        out[here] = permute(samples[here] % windows, windows, path)
    return out


def permute(index: np.ndarray, size: int, key: tuple[str | int, ...]) -> np.ndarray:
    """A permutation of 0..size - 1 picked by a key, applied to some of its points.

    x = (left, right) in Z_rows x Z_cols; rounds alternate left += f(right) and right += f(left),
    each a bijection; a point outside 0..size - 1 goes through again until it is inside.

    Args:
        index: (n,) int64 in 0..size - 1.
        size: >= 1.
        key: values whose text picks the permutation.

    Returns: (n,) int64.

    Example:
        >>> permute(np.arange(4), 4, ("doc",)).tolist()
        [3, 1, 2, 0]

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains" (generalised Feistel
        network and cycle walking); the mixing function is splitmix64's (Steele et al. 2014).
    """
    rows = isqrt(size - 1) + 1 if size > 1 else 1
    cols = -(-size // rows)
    words = _words(key)
    x = _network(index.astype(np.uint64), rows, cols, words)
    while (outside := x >= size).any():
        x[outside] = _network(x[outside], rows, cols, words)
    return x.astype(np.int64)


def _words(key: tuple[str | int, ...]) -> np.ndarray:
    """One 64-bit word a round."""
    texts = ("\x1f".join(map(str, ("order", *key, i))) for i in range(_DIGESTS))
    digests = b"".join(blake2b(text.encode(), digest_size=64).digest() for text in texts)
    return np.frombuffer(digests, dtype="<u8")


def _network(x: np.ndarray, rows: int, cols: int, words: np.ndarray) -> np.ndarray:
    left, right = x // np.uint64(cols), x % np.uint64(cols)
    for a, b in words.reshape(-1, 2):
        left = (left + _mix(right + a) % np.uint64(rows)) % np.uint64(rows)
        right = (right + _mix(left + b) % np.uint64(cols)) % np.uint64(cols)
    return left * np.uint64(cols) + right


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: 64 well mixed bits of 64; arrays wrap modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
