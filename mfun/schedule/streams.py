"""Stream transformers, and what each op needs from and gives to other virtual stages.

`needs` and `gives` are the whole data flow of a pipeline. `with_p2p` turns them into messages,
`check` verifies a stream against them; an op of a new kind is a new row in both.

Consecutive `Send` and `Recv` ops of a stage are one *batch*: posted together, and the next compute
op waits for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs

from mfun.schedule.ops import B, Compute, F, Message, Op, Recv, Send, Tag


@attrs.frozen
class Placement:
    """Where virtual stages live: chunk c of stage s is virtual stage c * stages + s.

    Args:
      stages: pipeline stages.
      chunks: chunks of a stage.
    Example:
      >>> place = Placement(stages=4, chunks=2)
      >>> place.virtual(stage=1, chunk=1), place.stage(5), place.last
      (5, 1, 7)

    Source: Megatron-LM core/pipeline_parallel/schedules.py (virtual pipeline).
    """

    stages: int
    chunks: int = 1

    def virtual(self, stage: int, chunk: int) -> int:
        """The virtual stage of a stage's chunk."""
        return chunk * self.stages + stage

    def stage(self, virtual: int) -> int:
        """The stage on which a virtual stage lives."""
        return virtual % self.stages

    @property
    def last(self) -> int:
        """The virtual stage that holds the loss."""
        return self.stages * self.chunks - 1


def needs(op: Compute, virtual: int, last: int) -> Tag | None:
    """The message without which an op of a virtual stage cannot start, if any.

    Args:
      op: a compute op.
      virtual: the virtual stage it runs on.
      last: the virtual stage with the loss.
    Returns: the tag; None for a forward of the first and a backward of the last virtual stage.
    Example:
      >>> needs(F(3), 1, 3), needs(B(3), 1, 3), needs(F(3), 0, 3)
      (('act', 3, 1), ('grad', 3, 1), None)
    """
    match op:
        case F(mb):
            return ("act", mb, virtual) if virtual > 0 else None
        case B(mb):
            return ("grad", mb, virtual) if virtual < last else None


def gives(op: Compute, virtual: int, last: int) -> Tag | None:
    """The message that an op of a virtual stage makes for another, if any.

    Args:
      op: a compute op.
      virtual: the virtual stage it runs on.
      last: the virtual stage with the loss.
    Returns: the tag; None for a forward of the last and a backward of the first virtual stage.
    Example:
      >>> gives(F(3), 1, 3), gives(B(3), 1, 3), gives(F(3), 3, 3)
      (('act', 3, 2), ('grad', 3, 0), None)
    """
    match op:
        case F(mb):
            return ("act", mb, virtual + 1) if virtual < last else None
        case B(mb):
            return ("grad", mb, virtual - 1) if virtual > 0 else None


def source(tag: Tag, place: Placement) -> int:
    """The stage that makes a message: before its receiver for "act", after it for "grad"."""
    kind, _, to = tag
    return place.stage(to - 1 if kind == "act" else to + 1)


def with_p2p(ops: Iterable[Compute], stage: int, stages: int, chunks: int = 1) -> Iterator[Op]:
    """Insert the receive before and the send after each compute op that has one.

    A message whose two ends are the same stage is handed over in place and gets no op.

    Args:
      ops: one stage's compute ops.
      stage: that stage, 0-based.
      stages: pipeline stages.
      chunks: chunks of a stage.
    Returns: the stream with `Send` and `Recv`.
    Example:
      >>> list(with_p2p([F(0), B(0)], stage=0, stages=2))
      [F0, Send(act0>1), Recv(grad0>0), B0]

    Source: Megatron-LM core/pipeline_parallel/p2p_communication.py.
    """
    place = Placement(stages, chunks)
    for op in ops:
        virtual = place.virtual(stage, op.chunk)
        taken, made = needs(op, virtual, place.last), gives(op, virtual, place.last)
        if taken and (peer := source(taken, place)) != stage:
            yield Recv(taken[1], taken[2], taken[0], peer)
        yield op
        if made and (peer := place.stage(made[2])) != stage:
            yield Send(made[1], made[2], made[0], peer)


def batches(ops: Sequence[Op]) -> Iterator[Compute | tuple[Message, ...]]:
    """A stream as it runs: compute ops, and between them batches of messages posted together.

    Args:
      ops: one stage's stream.
    Returns: each compute op by itself, each run of consecutive messages as one tuple.
    Example:
      >>> list(batches(list(with_p2p([F(0), B(0)], stage=0, stages=2))))
      [F0, (Send(act0>1), Recv(grad0>0)), B0]
    """
    batch: list[Message] = []
    for op in ops:
        if isinstance(op, Send | Recv):
            batch.append(op)
            continue
        if batch:
            yield tuple(batch)
            batch = []
        yield op
    if batch:
        yield tuple(batch)
