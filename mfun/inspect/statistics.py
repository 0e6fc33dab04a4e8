"""The numbers of a tensor, however large: read, looked at and let go of a few rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import numpy as np
import torch
from torch import Tensor

from mfun.checkpoint.pieces import Block
from mfun.inspect.source import Whole

CHUNK = 1 << 20
"""Elements in memory at a time."""


@attrs.frozen
class Statistics:
    """Of a whole tensor. Norm, mean, std, least and most are of its finite elements, in float64.

    Args:
        norm: root of the sum of squares.
        mean, std: the latter with the biased variance.
        least, most: nan where there is no finite element.
        nan, inf, zeros: how many elements are so.
        rows: slices along the last dim; 0 for vectors and numbers.
        dead: rows that are all zero.
    """

    norm: float
    mean: float
    std: float
    least: float
    most: float
    nan: int
    inf: int
    zeros: int
    rows: int
    dead: int


class _Sums:
    """What is added up over chunks."""

    def __init__(self) -> None:
        self.count = self.nan = self.inf = self.zeros = 0
        self.mean = self.deviations = self.squares = 0.0
        self.least, self.most = math.inf, -math.inf

    def add(self, x: Tensor) -> None:
        """Some elements, float64; they are overwritten."""
        if not bool(x.sum().isfinite()):  # a sum of what came from fewer bits is finite if all are
            finite = x.isfinite()
            nan = int(x.isnan().sum())
            self.nan += nan
            self.inf += x.numel() - int(finite.sum()) - nan
            x = x[finite]
        if x.numel():
            least, most = x.aminmax()
            self.least, self.most = min(self.least, float(least)), max(self.most, float(most))
            self.zeros += x.numel() - int(x.count_nonzero())
            self.squares += float(x.dot(x))
            mean = x.mean()
            apart = x.sub_(mean)
            self._join(x.numel(), float(mean), float(apart.dot(apart)))

    def _join(self, count: int, mean: float, deviations: float) -> None:
        """Mean and squared deviations from it, of what was seen and of what is new, together."""
        both, apart = self.count + count, mean - self.mean
        self.deviations += deviations + apart * apart * self.count * count / both
        self.mean += apart * count / both
        self.count = both

    def result(self, rows: int, dead: int) -> Statistics:
        """The statistics."""
        n = self.count
        return Statistics(
            norm=math.sqrt(self.squares),
            mean=self.mean if n else math.nan,
            std=math.sqrt(self.deviations / n) if n else math.nan,
            least=self.least if n else math.nan,
            most=self.most if n else math.nan,
            nan=self.nan,
            inf=self.inf,
            zeros=self.zeros,
            rows=rows,
            dead=dead,
        )


def statistics(whole: Whole, chunk: int = CHUNK) -> Statistics:
    """The numbers of a tensor.

    Args:
        whole: in any pieces.
        chunk: elements to read at a time.
    """
    sums, lead = _Sums(), whole.shape[:-1]
    alive = torch.zeros(math.prod(lead) if lead and whole.numel else 0, dtype=torch.bool)
    for block, weight in whole.boxes():
        for row, rows, first, columns in _cuts(block, chunk):
            length = block.shape[-1] if block.shape else 1
            x = weight.run(block.at + row * length + first, rows * columns).to(torch.float64)
            if alive.numel():
                at = _rows(block, lead, row, rows)
                alive[at] |= x.view(rows, columns).any(1)
            sums.add(x)
    return sums.result(alive.numel(), alive.numel() - int(alive.sum()))


def _cuts(block: Block, chunk: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, rows, first column, columns) of pieces that are consecutive in the file."""
    length = block.shape[-1] if block.shape else 1
    rows = math.prod(block.shape[:-1])
    if not length:
        return
    if length <= chunk:
        step = chunk // length
        for row in range(0, rows, step):
            yield row, min(step, rows - row), 0, length
        return
    for row in range(rows):
        for first in range(0, length, chunk):
            yield row, 1, first, min(chunk, length - first)


def _rows(block: Block, lead: tuple[int, ...], row: int, rows: int) -> Tensor:
    """Numbers, in the whole tensor, of some rows of a block."""
    places = np.unravel_index(np.arange(row, row + rows), block.shape[:-1])
    moved = [place + start for place, start in zip(places, block.start, strict=False)]
    return torch.from_numpy(np.ravel_multi_index(moved, lead))
