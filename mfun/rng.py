"""Random numbers addressed by a key and a global index, so that no layout can change them.

An element's number is a function of (seed, path, its global index) and of nothing else: not of
the rank that draws it, of the order of drawing, or of the shape of the piece drawn. A shard is
therefore drawn without the whole and is bitwise the same slice of it, and torch's and numpy's
global generators are neither read nor moved.

    key     (k0, k1, c2, c3) = the 16 bytes of blake2b(seed, path), as four little-endian uint32
    block   = index // 4,  lane = index % 4
    word    = output `lane` of Philox4x32-10(counter = (block lo, block hi, c2, c3), key = (k0, k1))

A word is kept in an int64 tensor, since torch has no complete uint32 arithmetic.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple, cast

import attrs
import torch
from torch import Tensor

Word = int | Tensor
Coordinate = range | Tensor
Pair = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_MASK = 0xFFFFFFFF
_TILE = 1 << 14  # blocks: a tile's temporaries stay in the second-level cache
_TILE_ACCELERATOR = 1 << 22  # there launches cost more than memory traffic


@attrs.frozen
class Key:
    """The name of one random stream: a seed and a path, hashed to four 32-bit words.

    Args:
      seed: any int.
      path: strings and ints; 3 and "3" are the same entry.
    Raises: TypeError for an entry that is neither; ValueError for one that holds the separator.
    Example:
      >>> key(0, "init").fold("blocks", 3) == key(0, "init", "blocks", 3)
      True
      >>> [hex(word) for word in key(0, "init", "embed.tokens").words]
      ['0x98641e38', '0x851bd6eb', '0xc4207b4b', '0xc56c7314']
    """

    seed: int
    path: tuple[str | int, ...] = ()
    words: tuple[int, int, int, int] = attrs.field(
        init=False,
        eq=False,
        repr=False,
        default=attrs.Factory(lambda self: _hash(self.seed, *self.path), takes_self=True),
    )

    def fold(self, *path: str | int) -> Key:
        """The key of a longer path; keys of different paths give unrelated streams."""
        return Key(self.seed, (*self.path, *path))


def key(seed: int, *path: str | int) -> Key:
    """The key of a path under a seed.

    Example:
      >>> key(7, "dropout", 12).path
      ('dropout', 12)
    """
    return Key(seed, path)


def _hash(*entries: str | int) -> tuple[int, int, int, int]:
    text = "\x1f".join(_entry(entry) for entry in entries)
    return struct.unpack("<4I", blake2b(text.encode(), digest_size=16).digest())


def _entry(part: str | int) -> str:
    if isinstance(part, bool) or not isinstance(part, str | int):
        raise TypeError(
            f"key: entry {part!r} is a {type(part).__name__}, but a path holds str and int only; "
            "convert it, for example with int(...)"
        )
    text = str(part)
    if "\x1f" in text:
        raise ValueError(f"key: entry {part!r} holds the separator '\\x1f'; remove it")
    return text


class Grid(NamedTuple):
    """The global coordinates of a tensor of random numbers.

    Element (i, j, ...) has the linear index of (coords[0][i], coords[1][j], ...), row-major over
    `sizes`. Its `shape` is the number of coordinates in each dim.

    Args:
      coords: per dim a range, or an int64 tensor of one dim (possibly batched by `vmap`), of
        global coordinates.
      sizes: per dim the global size. sizes[0] is not used: rows may be numbered without end.
    Example: the second of two column shards of a 4 x 6 matrix:
      >>> Grid((range(4), range(3, 6)), (4, 6)).shape
      (4, 3)
      >>> whole = uniform(key(0), Grid.whole((4, 6)), torch.float64)
      >>> shard = uniform(key(0), Grid((range(4), range(3, 6)), (4, 6)), torch.float64)
      >>> torch.equal(shard, whole[:, 3:6])
      True
    """

    coords: tuple[Coordinate, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Grid:
        """The grid of every element of a tensor of this global shape."""
        return cls(tuple(range(size) for size in shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of what is drawn."""
        return tuple(c.shape[0] if isinstance(c, Tensor) else len(c) for c in self.coords)


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[int, int]
) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: ten rounds that turn a 128-bit counter into four random words.

    A round, with (hi, lo) the halves of a 64-bit product:
      c0, c1, c2, c3 = hi(M1 c2) ^ c1 ^ k0,  lo(M1 c2),  hi(M0 c0) ^ c3 ^ k1,  lo(M0 c0)

    The product of two 32-bit words may pass 2^63 and wrap in int64, but bits 0 to 63 are the right
    ones, and after an arithmetic shift by 32 and a mask so is the high word.

    Args:
      counter: four words in [0, 2^32), int64 tensors (elementwise) or Python ints.
      key: two words in [0, 2^32).
    Returns: four words in [0, 2^32).
    Example:
      >>> [hex(word) for word in philox((0, 0, 0, 0), (0, 0))]
      ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Random123.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # c1 and c3 keep the high half of the product: only c0 and c2 must be clean for the next.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((p1 >> 32) ^ c1 ^ k0) & _MASK, p1
        c2, c3 = ((p0 >> 32) ^ c3 ^ k1) & _MASK, p0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def bits(key: Key, grid: Grid, *, device: torch.device | str | None = None) -> Tensor:
    """Random 32-bit words.

    Args:
      key: the stream.
      grid: the global coordinates of what is drawn.
      device: where; by default that of the grid's first tensor, else the CPU.
    Returns: int64 tensor of the grid's shape, values in [0, 2^32).
    Raises: ValueError if the grid is malformed or a range leaves the global size.
    Example:
      >>> bits(key(0, "a"), Grid.whole((4,))).tolist()
      [1820723894, 3777372141, 1769837053, 2616692855]
    """
    return _draw(key, grid, torch.int64, device, lambda even, odd: (even, odd))


def uniform(
    key: Key,
    grid: Grid,
    dtype: torch.dtype,
    *,
    low: float = 0.0,
    high: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Numbers uniform in (low, high).

    x = low + (high - low) u,  u = (word + 1/2) / 2^32, in float64, then rounded to `dtype`
    (16-bit types by way of float32, as torch converts), which may round onto an end point.

    Args: as `bits`, and `dtype`, `low`, `high`.
    Returns: tensor of `dtype` and the grid's shape.
    Example:
      >>> x = uniform(key(0), Grid.whole((1000,)), torch.float32, low=-1.0)
      >>> bool((x.abs() <= 1).all()), round(x.mean().item(), 1)
      (True, 0.0)
    """

    def pair(even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
        return low + (high - low) * _unit(even), low + (high - low) * _unit(odd)

    return _draw(key, grid, dtype, device, pair)


def normal(
    key: Key,
    grid: Grid,
    dtype: torch.dtype,
    *,
    std: float = 1.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Normal numbers of mean 0, by Box and Muller's transform, without rejection.

    Of words (w0, w1), and of (w2, w3) likewise, lanes 0 and 1 are
      std r cos t,  std r sin t,  with r = sqrt(-2 ln u(w0)), t = 2 pi u(w1),
    in float64, then rounded to `dtype`. |x| <= 6.77 std, since u >= 2^-33.

    Args: as `bits`, and `dtype`, `std`.
    Returns: tensor of `dtype` and the grid's shape.
    Example:
      >>> x = normal(key(0), Grid.whole((100, 100)), torch.float64, std=0.02)
      >>> round(x.std().item(), 3)
      0.02

    Source: Box and Muller 1958.
    """

    def pair(even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
        radius = torch.sqrt(-2.0 * torch.log(_unit(even)))
        angle = 2.0 * math.pi * _unit(odd)
        return radius * torch.cos(angle) * std, radius * torch.sin(angle) * std

    return _draw(key, grid, dtype, device, pair)


def truncated_normal(
    key: Key,
    grid: Grid,
    dtype: torch.dtype,
    *,
    std: float = 1.0,
    bound: float = 2.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Normal numbers of mean 0, conditioned on |x| < bound * std, by the inverse distribution.

    x = std sqrt(2) erfinv(2 (Phi(-bound) + u (Phi(bound) - Phi(-bound))) - 1),
    in float64, then rounded to `dtype`. `std` is the spread before the cut: with bound 2 what is
    drawn has the standard deviation 0.88 std.

    Args: as `bits`, and `dtype`, `std`, `bound` > 0 (in units of std).
    Returns: tensor of `dtype` and the grid's shape.
    Raises: ValueError if bound is not positive.
    Example:
      >>> x = truncated_normal(key(0), Grid.whole((1000,)), torch.float32, std=0.5)
      >>> bool(x.abs().max() <= 1.0)
      True
    """
    if not bound > 0:
        raise ValueError(f"truncated_normal: bound is {bound}; it must be positive")
    below = 0.5 * math.erfc(bound / math.sqrt(2.0))
    inside = math.erf(bound / math.sqrt(2.0))

    def value(word: Tensor) -> Tensor:
        return std * math.sqrt(2.0) * torch.erfinv(2.0 * (below + _unit(word) * inside) - 1.0)

    return _draw(key, grid, dtype, device, lambda even, odd: (value(even), value(odd)))


def bernoulli(
    key: Key, grid: Grid, p: float, *, device: torch.device | str | None = None
) -> Tensor:
    """Booleans that are True with probability p: word < round(p 2^32).

    Args: as `bits`, and `p` in [0, 1]; for dropout p is the probability to keep.
    Returns: bool tensor of the grid's shape.
    Raises: ValueError if p is outside [0, 1].
    Example:
      >>> bernoulli(key(0, "mask"), Grid.whole((8,)), 0.5).int().tolist()
      [1, 1, 1, 0, 0, 0, 1, 1]
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: p is {p}; a probability lies in [0, 1]")
    threshold = round(p * 2**32)

    def pair(even: Tensor, odd: Tensor) -> tuple[Tensor, Tensor]:
        return even < threshold, odd < threshold

    return _draw(key, grid, torch.bool, device, pair)


def _unit(word: Tensor) -> Tensor:
    """Words to float64 strictly inside (0, 1), exactly."""
    return (word.to(torch.float64) + 0.5) * 2.0**-32


def _draw(
    key: Key, grid: Grid, dtype: torch.dtype, device: torch.device | str | None, pair: Pair
) -> Tensor:
    """Draw a grid tile by tile; `pair` maps the words of an even and the next odd lane to values.

    Only functional operations, so that coordinates may be batched or tracked by a transform.
    """
    where = _check(grid, device)
    if where.type == "meta":
        return torch.empty(grid.shape, dtype=dtype, device=where)
    size = _TILE if where.type == "cpu" else _TILE_ACCELERATOR
    if _by_blocks(grid):
        tiles = _blocks(grid, where).flatten().split(size)
        drawn = [_four(key, block, dtype, pair) for block in tiles]
    else:
        tiles = _index(grid, where).flatten().split(size)
        drawn = [_one(key, index, dtype, pair) for index in tiles]
    return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).reshape(grid.shape)


def _four(key: Key, block: Tensor, dtype: torch.dtype, pair: Pair) -> Tensor:
    """The four values of each block, in the order of their indices."""
    w0, w1, w2, w3 = _words(key, block)
    values = (*pair(w0, w1), *pair(w2, w3))
    return torch.stack([value.to(dtype) for value in values], -1).flatten()


def _one(key: Key, index: Tensor, dtype: torch.dtype, pair: Pair) -> Tensor:
    """The value of each index, at the cost of a block each."""
    w0, w1, w2, w3 = _words(key, index >> 2)
    first_half = (index & 2) == 0
    even, odd = pair(torch.where(first_half, w0, w2), torch.where(first_half, w1, w3))
    return torch.where((index & 1) == 0, even, odd).to(dtype)


def _words(key: Key, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    k0, k1, c2, c3 = key.words
    words = philox((block & _MASK, block >> 32, c2, c3), (k0, k1))
    return cast(tuple[Tensor, Tensor, Tensor, Tensor], words)


def _by_blocks(grid: Grid) -> bool:
    """Whether the last coordinate runs over whole blocks: an aligned range in aligned rows."""
    if not grid.coords or not isinstance(grid.coords[-1], range):
        return False
    last = grid.coords[-1]
    rows_aligned = len(grid.sizes) == 1 or grid.sizes[-1] % 4 == 0
    return rows_aligned and last.step == 1 and last.start % 4 == 0 and len(last) % 4 == 0


def _blocks(grid: Grid, device: torch.device) -> Tensor:
    """The block number of every fourth element, shape (*shape[:-1], shape[-1] / 4)."""
    *rows, last = grid.coords
    assert isinstance(last, range)
    columns = range(last.start // 4, last.start // 4 + len(last) // 4)
    return _index(Grid((*rows, columns), (*grid.sizes[:-1], grid.sizes[-1] // 4)), device)


def _index(grid: Grid, device: torch.device) -> Tensor:
    """The linear index of every element, int64, of the grid's shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for coordinate, size in zip(grid.coords, grid.sizes, strict=True):
        if isinstance(coordinate, Tensor):
            position = coordinate.to(device)
        else:
            bounds = (coordinate.start, coordinate.stop, coordinate.step)
            position = torch.arange(*bounds, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * size + position
    return index


def _check(grid: Grid, device: torch.device | str | None) -> torch.device:
    """Refuse a malformed grid, and choose the device."""
    if len(grid.coords) != len(grid.sizes):
        raise ValueError(
            f"Grid: coords has {len(grid.coords)} dims and sizes has {len(grid.sizes)} "
            f"{tuple(grid.sizes)}; give one global size per dim"
        )
    for dim, (coordinate, size) in enumerate(zip(grid.coords, grid.sizes, strict=True)):
        if isinstance(coordinate, Tensor):
            _check_tensor(dim, coordinate)
        elif len(coordinate) > 0:
            _check_range(dim, coordinate, size)
    if device is not None:
        return torch.device(device)
    tensors = [c for c in grid.coords if isinstance(c, Tensor)]
    return tensors[0].device if tensors else torch.device("cpu")


def _check_tensor(dim: int, coordinate: Tensor) -> None:
    if coordinate.dtype != torch.int64 or coordinate.ndim != 1:
        raise ValueError(
            f"Grid: coords[{dim}] is a {coordinate.dtype} tensor of {coordinate.ndim} dims; "
            "give an int64 tensor of one dim"
        )


def _check_range(dim: int, coordinate: range, size: int) -> None:
    low, high = min(coordinate[0], coordinate[-1]), max(coordinate[0], coordinate[-1])
    if low < 0 or (dim > 0 and high >= size):
        raise ValueError(
            f"Grid: coords[{dim}] runs from {low} to {high}, outside the global size {size}; "
            "padding has no random numbers, so clip the range to the global shape"
        )
