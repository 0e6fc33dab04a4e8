"""Which elements of a whole tensor a rank holds, and what two ranks' pieces have in common.

A rank's part of a parameter is a *box*: a range of every dim. Sharded over data ranks, it is a
*run* of such a box: consecutive elements of it, row-major. A run consists of few blocks, which are
boxes again, and boxes are intersected dim by dim. So any two layouts exchange what they have in
common by a few strided copies, whatever the sizes. Integers only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import attrs

Shape = tuple[int, ...]


@attrs.frozen(kw_only=True)
class Piece:
    """The elements [first, first + count) of a box, row-major.

    Args:
        global_shape: shape of the whole tensor, without padding.
        start: index of the box's first element along each dim.
        box: its size along each dim.
        first: elements of the box before the piece.
        count: of the piece.
        spec: the `P` that cut it, as text.

    Example: the second half of the second of two column shards
        >>> piece = Piece(global_shape=(2, 6), start=(0, 3), box=(2, 3), first=3, count=3)
        >>> piece.shape, [*blocks(piece)]
        ((3,), [Block(at=0, start=(1, 3), shape=(1, 3))])
    """

    global_shape: Shape
    start: Shape
    box: Shape
    first: int = 0
    count: int = attrs.field(default=attrs.Factory(lambda self: math.prod(self.box), True))
    spec: str = "P()"

    @property
    def whole_box(self) -> bool:
        """Whether it is all of its box."""
        return self.first == 0 and self.count == math.prod(self.box)

    @property
    def shape(self) -> Shape:
        """How it is stored: as its box, or flat."""
        return self.box if self.whole_box else (self.count,)


def whole(shape: Sequence[int]) -> Piece:
    """A tensor that is not cut.

    Example:
        >>> whole((2, 3)).box
        (2, 3)
    """
    return Piece(global_shape=tuple(shape), start=(0,) * len(shape), box=tuple(shape))


class Block(NamedTuple):
    """A box within a piece: where in the piece's elements, where in the whole, and its shape."""

    at: int
    start: Shape
    shape: Shape


class Copy(NamedTuple):
    """What two pieces have in common: slices of a block of each.

    A block's elements are consecutive in its piece: from `at` on, of `shape`; of these, `box`.
    """

    source_at: int
    source_shape: Shape
    source_box: tuple[slice, ...]
    target_at: int
    target_shape: Shape
    target_box: tuple[slice, ...]
    count: int


def blocks(piece: Piece) -> Iterator[Block]:
    """The boxes that a piece consists of, in the order of its elements: at most 2 dims - 1."""
    at = 0
    for low, shape in _runs(piece.box, piece.first, piece.first + piece.count):
        start = tuple(a + b for a, b in zip(piece.start, low, strict=True))
        yield Block(at, start, shape)
        at += math.prod(shape)


def _runs(box: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape]]:
    """Start and shape of the boxes of the elements [low, high) of a box."""
    if low >= high:
        return
    if (low, high) == (0, math.prod(box)):
        yield (0,) * len(box), box
        return
    inner = math.prod(box[1:])
    (i, a), (j, b) = divmod(low, inner), divmod(high, inner)
    if i == j:
        yield from _row(i, box, a, b)
        return
    if a:
        yield from _row(i, box, a, inner)
        i += 1
    if i < j:
        yield (i, *(0,) * (len(box) - 1)), (j - i, *box[1:])
    yield from _row(j, box, 0, b)


def _row(i: int, box: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape]]:
    for start, shape in _runs(box[1:], low, high):
        yield (i, *start), (1, *shape)


def common(source: Piece, target: Piece) -> Iterator[Copy]:
    """The copies that bring what two pieces have in common from one to the other.

    Example:
        >>> rows = Piece(global_shape=(4, 2), start=(2, 0), box=(2, 2))
        >>> [copy.count for copy in common(whole((4, 2)), rows)]
        [4]
    """
    if not (source.count and target.count):
        return
    if (source.start, source.box) == (target.start, target.box):
        yield from _flat(source, target)
        return
    if _meet(source.start, source.box, target.start, target.box) is None:
        return
    mine = [*blocks(target)]
    for a in blocks(source):
        for b in mine:
            box = _meet(a.start, a.shape, b.start, b.shape)
            if box is not None:
                yield _copy(a, b, box)


def _flat(source: Piece, target: Piece) -> Iterator[Copy]:
    """Runs of one box have a run in common."""
    low = max(source.first, target.first)
    count = min(source.first + source.count, target.first + target.count) - low
    if count > 0:
        every = (slice(0, count),)
        a, b = low - source.first, low - target.first
        yield Copy(a, (count,), every, b, (count,), every, count)


def _meet(
    a_start: Shape, a_shape: Shape, b_start: Shape, b_shape: Shape
) -> tuple[Shape, Shape] | None:
    """Start and shape of the intersection of two boxes, None if it is empty."""
    start = tuple(map(max, a_start, b_start))
    stop = [
        min(a + n, b + m) for a, n, b, m in zip(a_start, a_shape, b_start, b_shape, strict=True)
    ]
    shape = tuple(high - low for low, high in zip(start, stop, strict=True))
    return None if any(n <= 0 for n in shape) else (start, shape)


def _copy(a: Block, b: Block, box: tuple[Shape, Shape]) -> Copy:
    return Copy(a.at, a.shape, _slices(a, box), b.at, b.shape, _slices(b, box), math.prod(box[1]))


def _slices(block: Block, box: tuple[Shape, Shape]) -> tuple[slice, ...]:
    return tuple(slice(a - s, a - s + n) for a, n, s in zip(*box, block.start, strict=True))


def problem_of(pieces: Sequence[Piece]) -> str | None:
    """What keeps pieces from being a whole tensor, each element once; None if nothing does."""
    for piece in pieces:
        if problem := _misplaced(piece, pieces[0].global_shape):
            return problem
    boxes: dict[tuple[Shape, Shape], list[Piece]] = {}
    for piece in pieces:
        if piece.count:
            boxes.setdefault((piece.start, piece.box), []).append(piece)
    if _cross([*boxes]) or any(map(_overlap, boxes.values())):
        return "two pieces overlap"
    held, full = sum(piece.count for piece in pieces), math.prod(pieces[0].global_shape)
    return f"its pieces hold {held} of {full} elements" if held != full else None


def _misplaced(piece: Piece, shape: Shape) -> str | None:
    numbers = (*piece.global_shape, *piece.start, *piece.box, piece.first, piece.count)
    if min(numbers) < 0 or piece.global_shape != shape:
        return f"a piece has negative numbers or another shape than {shape}"
    same = len(piece.start) == len(piece.box) == len(shape)
    if not same or any(a + n > m for a, n, m in zip(piece.start, piece.box, shape, strict=True)):
        return f"a piece reaches beyond {shape}"
    if piece.first + piece.count > math.prod(piece.box):
        return "a piece is longer than its box"
    return None


def _cross(boxes: Sequence[tuple[Shape, Shape]]) -> bool:
    """Whether two different boxes have elements in common: sorted, only near ones can."""
    ordered = sorted(boxes)
    for i, (start, shape) in enumerate(ordered):
        for other_start, other_shape in ordered[i + 1 :]:
            if start and other_start[0] >= start[0] + shape[0]:
                break
            if _meet(start, shape, other_start, other_shape) is not None:
                return True
    return False


def _overlap(runs: Sequence[Piece]) -> bool:
    """Whether two runs of one box have elements in common."""
    ordered = sorted(runs, key=lambda piece: piece.first)
    return any(a.first + a.count > b.first for a, b in pairwise(ordered))
