"""What differs between two sources: tensors that one has, shapes, types, numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import attrs
import torch
from torch import Tensor

from mfun.inspect.source import Source, Whole

CHUNK = 1 << 20
"""Elements that are compared at a time."""
Kind = Literal["equal", "only in the first", "only in the second", "shape", "dtype", "values"]


@attrs.frozen
class Difference:
    """How a tensor of one source is to that of the other.

    Args:
        name: of both.
        kind: the first that applies, of `shape`, `dtype` and `values`; `equal` is to the bit.
        first, second: what each has, as text.
        count: elements that differ.
        most: largest absolute difference of the elements that are finite in both.
        relative: that, by the largest absolute value of the second's.
    """

    name: str
    kind: Kind
    first: str = ""
    second: str = ""
    count: int = 0
    most: float = 0.0
    relative: float = 0.0


def compare(first: Source, second: Source, names: list[str] | None = None) -> Iterator[Difference]:
    """Go through the tensors of two sources; one tensor of each is in memory at a time.

    Args:
        first, second: of any kind and layout.
        names: which ones; by default all.
    """
    for name in names if names is not None else [*{**first.tensors, **second.tensors}]:
        a, b = first.tensors.get(name), second.tensors.get(name)
        if a is None or b is None:
            kind = "only in the first" if b is None else "only in the second"
            yield Difference(name, kind, _text(a), _text(b))
        elif a.shape != b.shape:
            yield Difference(name, "shape", _text(a), _text(b))
        else:
            yield _values(name, a, b)


def _text(one: Whole | None) -> str:
    return f"{one.dtype} {[*one.shape]}" if one else ""


def _values(name: str, a: Whole, b: Whole) -> Difference:
    x, y = a.read().flatten(), b.read().flatten()
    if a.dtype == b.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return Difference(name, "equal", _text(a), _text(b))
    kind: Kind = "values" if a.dtype == b.dtype else "dtype"
    count, most, largest = 0, 0.0, 0.0
    for at in range(0, x.numel(), CHUNK):
        u, v = x[at : at + CHUNK], y[at : at + CHUNK]
        same = _same(u, v)
        u, v = u.to(torch.float64), v.to(torch.float64)
        both = v.isfinite()
        largest = max(largest, float(v[both].abs().max()) if bool(both.any()) else 0.0)
        if not bool(same.all()):
            count += int((~same).sum())
            both &= u.isfinite() & ~same
            most = max(most, float((u - v)[both].abs().max()) if bool(both.any()) else 0.0)
    relative = most / largest if largest else float("inf") if most else 0.0
    return Difference(name, kind, _text(a), _text(b), count, most, relative)


def _same(u: Tensor, v: Tensor) -> Tensor:
    """Which elements are equal: to the bit within a type, by value between two."""
    if u.dtype != v.dtype:
        u, v = u.to(torch.float64), v.to(torch.float64)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[u.element_size()]
    return u.view(bits) == v.view(bits)
