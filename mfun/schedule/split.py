"""Stream transformers of the backward: `split` it into I and W, `merge` these again, or go without.

Each takes a stage's compute ops and yields them changed, so they compose with every generator and
with each other; messages are inserted afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from typing import TypeVar

from mfun.schedule.ops import AnyOp, B, Compute, I, W
from mfun.schedule.streams import Placement, routes

Some = TypeVar("Some", bound=AnyOp)


def split(
    ops: Iterable[Some], delay: int = 0, chunks: Container[int] | None = None
) -> Iterator[Some | I | W]:
    """Each whole backward as its two parts, the weights' after `delay` more backwards.

    The input gradient can be sent before the weights' gradient is computed. A stage keeps up to
    `delay` more activations. Weights keep the order of the backwards, and the stream's own `W`
    theirs.

    Args:
      ops: one stage's compute ops.
      delay: how many later backwards come first; weights that are left come at the end.
      chunks: whose backwards are split; None is all.
    Example:
      >>> from mfun.schedule.generators import one_f_one_b
      >>> from mfun.schedule.sizes import Sizes
      >>> list(split(one_f_one_b(1, Sizes(2, 2))))
      [F0, I0, W0, F1, I1, W1]
      >>> list(split(one_f_one_b(1, Sizes(2, 2)), delay=1))
      [F0, I0, F1, I1, W0, W1]

    Source: Qi et al. 2023 (arXiv 2401.10241): backward for the input and for the weights.
    """
    later: deque[W] = deque()
    for op in ops:
        if not isinstance(op, B) or (chunks is not None and op.chunk not in chunks):
            yield op
            continue
        yield I(op.mb, op.chunk, op.layer)
        later.append(W(op.mb, op.chunk, op.layer))
        if len(later) > delay:
            yield later.popleft()
    yield from later


def sends_first(ops: Iterable[Some], stage: int, place: Placement) -> Iterator[Some | I | W]:
    """Split the backwards that send a gradient, which then leaves before the weights' is computed.

    The stage that waits for it begins earlier by its sender's `W`. No more microbatches are kept;
    of one, also the gradients of its layers' outputs until its `W`.

    Args:
      ops: one stage's compute ops.
      stage: this stage.
      place: where virtual stages are.
    Example:
      >>> from mfun.schedule.generators import one_f_one_b
      >>> from mfun.schedule.sizes import Sizes
      >>> list(sends_first(one_f_one_b(1, Sizes(2, 2)), 1, Placement(2)))
      [F0, I0, W0, F1, I1, W1]
      >>> list(sends_first(one_f_one_b(0, Sizes(2, 2)), 0, Placement(2)))
      [F0, F1, B0, B1]
    """
    table = routes(stage, place)
    sending = {chunk for chunk in range(place.chunks) if table[B, chunk].target != stage}
    return split(ops, chunks=sending)


def merge(ops: Iterable[Some]) -> Iterator[Some | B | I]:
    """Each `I` with its `W` right after it as one whole backward, which costs one launch less.

    Args:
      ops: one stage's compute ops.
    Example:
      >>> from mfun.schedule.ops import F
      >>> list(merge([F(0), I(0), W(0), F(1), I(1), F(2), W(1)]))
      [F0, B0, F1, I1, F2, W1]
    """
    held: I | None = None
    for op in ops:
        if held and op == W(held.mb, held.chunk, held.layer):
            yield B(held.mb, held.chunk, held.layer)
            held = None
            continue
        if held:
            yield held
        held = op if isinstance(op, I) else None
        if not held:
            yield op
    if held:
        yield held


def whole(ops: Iterable[Compute]) -> Iterator[Compute]:
    """Every backward whole, where its `I` stands, and no `W`; wherever that stood.

    Unlike `merge` it changes when weights' gradients are computed, and frees activations sooner.

    Args:
      ops: one stage's compute ops.
    Example:
      >>> from mfun.schedule.ops import F
      >>> list(whole([F(0), I(0), F(1), W(0), B(1)]))
      [F0, B0, F1, B1]
    """
    for op in ops:
        if not isinstance(op, W):
            yield B(op.mb, op.chunk, op.layer) if isinstance(op, I) else op
