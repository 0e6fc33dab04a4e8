"""DualPipe and DualPipeV: forwards of one way through the pipeline beside backwards of the other.

Both are one order of two *ways* on a stage. In DualPipeV they are the two chunks of a wave. In
DualPipe they are the two directions in which the same model, held twice, is run; either half of its
stages is then ordered like a DualPipeV half as long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from mfun.schedule.ops import B, Compute, F, I, W
from mfun.schedule.sizes import Sizes

Step = tuple[type[F] | type[B] | type[I] | type[W], int]  # an op without its microbatch: kind, way


def _steps(stage: int, stages: int, count: int) -> Iterator[Step]:
    """The published order of one stage, with at least 2 * stages microbatches a way.

    `W` is the oldest that is open. The last backwards are split, so that weights fill what the
    draining pipeline leaves empty.
    """
    after, upto = stages - stage - 1, stage + 1
    yield from [(F, 0)] * (2 * after)
    yield from [(F, 0), (F, 1)] * upto
    yield from [(I, 1), (W, 1), (F, 1)] * after
    yield from [(F, 0), (B, 1), (F, 1), (B, 0)] * (count - 2 * stages + upto)
    yield from [(B, 1), (F, 1), (B, 0)] * after
    for at in range(upto):
        yield (B if at < (upto + 1) // 2 else I, 1)
        yield (B if at < upto // 2 else I, 0)
    yield from [(W, 0), (I, 0)] * after
    yield from [(W, 0)] * upto


def _numbered(steps: Iterable[Step], starts: tuple[int, int]) -> Iterator[Compute]:
    """The steps with their microbatches, which count up by way and kind."""
    forwards, backwards, later = list(starts), list(starts), deque[W]()
    for kind, way in steps:
        if kind is W:
            yield later.popleft()
            continue
        counts = forwards if kind is F else backwards
        yield kind(counts[way], way)
        if kind is I:
            later.append(W(counts[way], way))
        counts[way] += 1


def dualpipev(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """DualPipe's order on a wave of two chunks: each stage holds a piece of the model's either end.

    With F = I = W every stage idles stages - 1 chunks and keeps 2 stages + 1 chunks' activations.
    With fewer than 2 stages microbatches it is the order for that many, with those left out that
    are not there.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> list(dualpipev(0, Sizes(1, 3, chunks=2)))
      [F0, F0.1, F1, B0.1, F1.1, B0, F2, B1.1, F2.1, B1, B2.1, I2, W2]

    Source: DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe (DualPipeV, "cut-in-half").
    """
    count = sizes.microbatches
    steps = _steps(stage, sizes.stages, max(count, 2 * sizes.stages))
    yield from (op for op in _numbered(steps, (0, 0)) if op.mb < count)


def dualpipe(stage: int, sizes: Sizes) -> Iterator[Compute]:
    """Microbatches fed from both ends of a pipeline that holds the model twice.

    Chunk 0 is the first half of the microbatches from stage 0 on, chunk 1 the rest from the last
    stage on. With F = I = W every stage idles stages / 2 - 1 chunks and keeps stages + 1 of them.
    The published order is for an even number of stages, an even number of microbatches, and at
    least twice as many as stages. An odd number of stages has the order of one more with a middle
    one left out; microbatches that are not there are left out as in `dualpipev`.

    Args:
      stage: this stage, 0-based.
      sizes: of the pipeline.
    Example:
      >>> list(dualpipe(0, Sizes(2, 4, chunks=2)))
      [F0, F2.1, F1, B2.1, F3.1, B0, B3.1, I1, W1]

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1; github.com/deepseek-ai/DualPipe.
    """
    half, fold = -(-sizes.microbatches // 2), -(-sizes.stages // 2)
    ends = (half, sizes.microbatches)
    mirrored = stage >= fold
    row = sizes.stages - 1 - stage if mirrored else stage
    steps = _steps(row, fold, max(half, 2 * fold))
    turned = ((kind, 1 - way) for kind, way in steps) if mirrored else steps
    yield from (op for op in _numbered(turned, (0, half)) if op.mb < ends[op.chunk])


def dualpipev_in_flight(stage: int, sizes: Sizes) -> int:
    """The most chunks whose activations a stage keeps: exact for any number of microbatches."""
    return _in_flight(stage, sizes.stages, sizes.microbatches, sizes.microbatches)


def dualpipe_in_flight(stage: int, sizes: Sizes) -> int:
    """The most chunks whose activations a stage keeps: exact for any number of microbatches."""
    half = -(-sizes.microbatches // 2)
    mirrored = stage >= -(-sizes.stages // 2)
    row = sizes.stages - 1 - stage if mirrored else stage
    ways = (half, sizes.microbatches - half)
    return _in_flight(row, -(-sizes.stages // 2), *(ways[::-1] if mirrored else ways))


def _in_flight(stage: int, stages: int, first: int, second: int) -> int:
    """Before the first backward stage + 1 microbatches of way 1 have run, and those of way 0."""
    return min(first + min(stage + 1, second), 2 * stages + 1)
