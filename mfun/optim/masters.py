"""Updates in float32 of parameters that have fewer bits.

    with_masters(transform)       the optimizer keeps a float32 copy and the parameters follow it
    without_masters(transform)    the parameters are widened for each update and rounded after it

Rounded to nearest, an update below half a unit in the last place is lost, which for bf16 is 1/512
of the parameter: hence masters. Rounded up or down by chance, no update is lost on average.

Leaves are whatever the optimizer sees, parameters by path or flat shards, of any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mfun import rng
from mfun.optim.transform import Leaves, State, Transform, check_match
from mfun.rng import Grid, Key

Words = Callable[[Key, str, Tensor], Tensor]
"""(key of the update, path, leaf) -> a random 32-bit word for each of its elements, in int64."""


def with_masters(transform: Transform, dtype: torch.dtype = torch.float32) -> Transform:
    """The transform on copies of more bits, whose roundings the parameters are.

    master = transform(master, gradient in dtype),  parameter = round(master)

    Args:
      transform: a terminal transform.
      dtype: of the copies.
    Returns: a terminal transform with the state {"master": {path: copy}, "inner": transform's}. The
      copies begin as the parameters are, and are part of a checkpoint: they cannot be made again
      from the parameters.
    Example: updates of half a unit in the last place of bf16 add up
      >>> from mfun.optim import sgd
      >>> opt = with_masters(sgd(1.0, momentum=0.0))
      >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
      >>> state = opt.init(params)
      >>> for _ in range(4):
      ...     params, state = opt.update({"w": torch.tensor([0.001])}, state, params)
      >>> params["w"], state["master"]["w"]
      (tensor([0.9961], dtype=torch.bfloat16), tensor([0.9960]))

    Source: Micikevicius et al. 2018 (arXiv 1710.03740).
    """

    def init(params: Leaves) -> State:
        master = {path: _wide(p, dtype) for path, p in params.items()}
        return {"master": master, "inner": transform.init(master)}

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        check_match("with_masters", updates, params)
        up = {path: u.to(dtype) for path, u in updates.items()}
        master, inner = transform.update(up, state["inner"], state["master"], **extra)
        donate = extra.get("donate", False)
        new = {
            path: _stored(params[path], x.to(p.dtype, copy=True), donate)
            for path, x, p in _both(master, params)
        }
        return new, {"master": master, "inner": inner}

    return Transform(init, update)


def without_masters(
    transform: Transform,
    dtype: torch.dtype = torch.float32,
    *,
    key: Key | None = None,
    words: Words | None = None,
) -> Transform:
    """The transform on parameters that are widened for the update only.

    parameter = round(transform(parameter in dtype, gradient in dtype))

    With a key, bf16 parameters are rounded by chance (`round_by_chance`), the same in every layout
    as far as `words` is; other parameters to nearest.

    Args:
      transform: a terminal transform; its moments are of `dtype`.
      dtype: of the update; float32 with a key.
      key: of all roundings; None rounds to nearest.
      words: draws for a leaf; by default leaves are whole tensors (`whole_words`). A rank that
        holds a piece must draw by global index, see `flat_words`.
    Returns: a terminal transform with the state {"rounded": updates so far, "inner": transform's}.
    Raises: ValueError for a key with another dtype than float32.
    Example: 1 - 0.001 lies a quarter of the way from 1 down to the next number of bf16
      >>> from mfun.optim import sgd
      >>> opt = without_masters(sgd(1.0, momentum=0.0), key=rng.key(0, "rounding"))
      >>> params = {"w": torch.ones(10000, dtype=torch.bfloat16)}
      >>> gradient = {"w": torch.full((10000,), 0.001)}
      >>> params, _ = opt.update(gradient, opt.init(params), params)
      >>> params["w"].unique().tolist(), round(params["w"].double().mean().item(), 4)
      ([0.99609375, 1.0], 0.999)
    """
    if key is not None and dtype != torch.float32:
        raise ValueError(f"without_masters: rounding by chance is from float32, not {dtype}")
    draw = whole_words if words is None else words

    def init(params: Leaves) -> State:
        wide = {path: _wide(p, dtype) for path, p in params.items()}
        return {"rounded": 0, "inner": transform.init(wide)}

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        check_match("without_masters", updates, params)
        up = {path: u.to(dtype) for path, u in updates.items()}
        wide = {path: p.to(dtype) for path, p in params.items()}
        wide, inner = transform.update(up, state["inner"], wide, **extra)
        donate, count = extra.get("donate", False), state["rounded"] + 1

        def rounded(path: str, x: Tensor, p: Tensor) -> Tensor:
            if key is None or p.dtype != torch.bfloat16:
                return x.to(p.dtype)
            return round_by_chance(x, draw(key.fold(count), path, p))

        new = {path: _stored(p, rounded(path, x, p), donate) for path, x, p in _both(wide, params)}
        return new, {"rounded": count, "inner": inner}

    return Transform(init, update)


def _wide(p: Tensor, dtype: torch.dtype) -> Tensor:
    return p.to(dtype, memory_format=torch.contiguous_format, copy=True)


def _both(wide: Leaves, params: Leaves) -> list[tuple[str, Tensor, Tensor]]:
    return [(path, wide[path], p) for path, p in params.items()]


def _stored(p: Tensor, new: Tensor, donate: bool) -> Tensor:
    """The new parameter, in the old one's memory if that is donated."""
    return p.copy_(new) if donate else new


def round_by_chance(x: Tensor, word: Tensor) -> Tensor:
    """bf16 of float32, rounded up or down with the probability that makes the mean right.

    A number between two of bf16 becomes the further from zero with the probability of its distance
    from the nearer to zero, in steps of 2^-16 of their gap. Numbers of bf16 stay, as do infinities
    and NaNs.

    Args:
      x: float32.
      word: random words of the shape of x, int64 in [0, 2^32); the upper 16 bits are used.
    Returns: bf16, of the shape of x.
    Example: 1 + 2^-9 lies a quarter of the way to the next number, 1 + 2^-7
      >>> x = torch.full((2,), 1 + 2.0**-9)
      >>> round_by_chance(x, torch.tensor([0xBFFF0000, 0xC0000000])).tolist()
      [1.0, 1.0078125]

    Source: Gupta et al. 2015 (arXiv 1502.02551).
    """
    bits = x.contiguous().view(torch.int32) + (word >> 16).to(torch.int32)
    chosen = (bits & ~0xFFFF).view(torch.float32)  # a carry goes into the exponent, as it should
    return torch.where(x.isfinite(), chosen, x).to(torch.bfloat16)


def whole_words(key: Key, path: str, leaf: Tensor) -> Tensor:
    """Words for a leaf that is a whole tensor, by the index of its elements."""
    return rng.bits(key.fold(path), Grid.whole(tuple(leaf.shape)), device=leaf.device)


def flat_words(starts: Mapping[str, int]) -> Words:
    """Words for flat leaves that are pieces of longer ones, by the index there.

    All ranks together draw what `whole_words` draws for the longer leaf, however it is cut. What
    the index of an element in it is, its layout says: a bucket of other parameters, or of another
    piece of them, draws other words. The rounding is then another one, and as good.

    Args:
      starts: path -> index of the first element in the whole leaf.
    Example:
      >>> whole = whole_words(rng.key(0), "bucket.0", torch.empty(8))
      >>> piece = flat_words({"bucket.0": 3})(rng.key(0), "bucket.0", torch.empty(5))
      >>> torch.equal(piece, whole[3:])
      True
    """

    def words(key: Key, path: str, leaf: Tensor) -> Tensor:
        start, size = starts[path], leaf.numel()
        grid = Grid((range(start, start + size),), (start + size,))
        return rng.bits(key.fold(path), grid, device=leaf.device).reshape(leaf.shape)

    return words
