"""Where virtual stages live, and what each op needs from and gives to others.

`needs` and `gives` are the whole data flow of a pipeline. `with_p2p` turns them into messages,
`check` verifies a stream against them; an op of a new kind is a new row in both.

Consecutive `Send` and `Recv` ops of a stage are one *batch*: posted together, and the next compute
op waits for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import attrs

from mfun.schedule.ops import B, Compute, F, I, Kind, Message, Recv, Send, Tag, W

Other = TypeVar("Other", bound=object)


@attrs.frozen
class Placement:
    """Where virtual stages live, and how they are chained.

    Looped: chunk c of stage s is virtual stage c * stages + s. In a wave every second chunk runs
    the stages backwards: 0 .. p-1, p-1 .. 0, .. With two replicas (DualPipe) chunk 0 is the model
    in one direction and chunk 1 the same model, held twice, in the other; the first half of the
    microbatches takes the first, the rest the second.

    Args:
      stages: pipeline stages.
      chunks: chunks of a stage.
      wave: every second chunk is laid backwards.
      replicas: how often the model is held.
    Example:
      >>> place = Placement(stages=4, chunks=2)
      >>> place.virtual(stage=1, chunk=1), place.stage(5), place.depth
      (5, 1, 8)
      >>> wave = Placement(stages=4, chunks=2, wave=True)
      >>> wave.virtual(stage=1, chunk=1), wave.stage(6)
      (6, 1)
      >>> twice = Placement(stages=4, chunks=2, wave=True, replicas=2)
      >>> [twice.slice(virtual) for virtual in range(8)]
      [0, 1, 2, 3, 0, 1, 2, 3]

    Source: Megatron-LM core/pipeline_parallel/schedules.py (virtual pipeline); Qi et al. 2024
    (arXiv 2405.15362) for the wave; DeepSeek-AI 2024 (arXiv 2412.19437) for two replicas.
    """

    stages: int
    chunks: int = 1
    wave: bool = False
    replicas: int = 1

    @property
    def depth(self) -> int:
        """Virtual stages from the batch to the loss: slices of the model."""
        return self.stages * self.chunks // self.replicas

    @property
    def count(self) -> int:
        """Virtual stages of all replicas."""
        return self.stages * self.chunks

    def virtual(self, stage: int, chunk: int) -> int:
        """The virtual stage of a stage's chunk."""
        return chunk * self.stages + self._turned(stage, chunk)

    def stage(self, virtual: int) -> int:
        """The stage on which a virtual stage lives."""
        return self._turned(virtual % self.stages, virtual // self.stages)

    def chunk(self, virtual: int) -> int:
        """Which of its stage's chunks it is."""
        return virtual // self.stages

    def slice(self, virtual: int) -> int:
        """The slice of the model that it holds, 0 with the embedding, depth - 1 with the loss."""
        return virtual % self.depth

    def first(self, virtual: int) -> bool:
        """Whether its input is the batch."""
        return self.slice(virtual) == 0

    def last(self, virtual: int) -> bool:
        """Whether it holds the loss."""
        return self.slice(virtual) == self.depth - 1

    def microbatches(self, chunk: int, count: int) -> range:
        """Which of a step's microbatches go through a chunk."""
        if self.replicas == 1:
            return range(count)
        half = -(-count // 2)
        return range(half) if chunk == 0 else range(half, count)

    def _turned(self, place: int, chunk: int) -> int:
        return self.stages - 1 - place if self.wave and chunk % 2 else place


def needs(op: Compute, virtual: int, place: Placement) -> Tag | None:
    """The message without which an op of a virtual stage cannot start, if any.

    Args:
      op: a compute op.
      virtual: the virtual stage it runs on.
      place: where virtual stages are.
    Returns: the tag; None for a forward of the first and a backward of the last slice, and for W.
    Example:
      >>> place = Placement(4)
      >>> needs(F(3), 1, place), needs(B(3), 1, place), needs(F(3), 0, place)
      (('act', 3, 1), ('grad', 3, 1), None)
    """
    match op:
        case F(mb):
            return None if place.first(virtual) else ("act", mb, virtual)
        case B(mb) | I(mb):
            return None if place.last(virtual) else ("grad", mb, virtual)
        case W():
            return None


def gives(op: Compute, virtual: int, place: Placement) -> Tag | None:
    """The message that an op of a virtual stage makes for another, if any.

    Args:
      op: a compute op.
      virtual: the virtual stage it runs on.
      place: where virtual stages are.
    Returns: the tag; None for a forward of the last and a backward of the first slice, and for W.
    Example:
      >>> place = Placement(4)
      >>> gives(F(3), 1, place), gives(I(3), 1, place), gives(F(3), 3, place)
      (('act', 3, 2), ('grad', 3, 0), None)
    """
    match op:
        case F(mb):
            return None if place.last(virtual) else ("act", mb, virtual + 1)
        case B(mb) | I(mb):
            return None if place.first(virtual) else ("grad", mb, virtual - 1)
        case W():
            return None


def source(tag: Tag, place: Placement) -> int:
    """The stage that makes a message: before its receiver for "act", after it for "grad"."""
    kind, _, to = tag
    return place.stage(to - 1 if kind == "act" else to + 1)


class Route(NamedTuple):
    """What all ops of one kind and chunk take and give.

    Args:
      takes: kind of message; None if they take nothing.
      here: their virtual stage.
      source: the stage that makes what they take.
      gives: kind of message; None if they give nothing.
      there: the virtual stage that uses it.
      target: the stage of that.
    """

    takes: Kind | None = None
    here: int = -1
    source: int = -1
    gives: Kind | None = None
    there: int = -1
    target: int = -1


Routes = Mapping[tuple[type[Compute], int], Route]


def routes(stage: int, place: Placement) -> Routes:
    """A stage's routes by (type of op, chunk): `needs` and `gives` as a table.

    Example:
      >>> route = routes(0, Placement(2))[F, 0]
      >>> route.takes, route.gives, route.there, route.target
      (None, 'act', 1, 1)
    """
    table: dict[tuple[type[Compute], int], Route] = {}
    for chunk in range(place.chunks):
        here = place.virtual(stage, chunk)
        for op in (F(0, chunk), B(0, chunk), I(0, chunk), W(0, chunk)):
            taken, given = needs(op, here, place), gives(op, here, place)
            table[type(op), chunk] = Route(
                taken and taken[0],
                here,
                source(taken, place) if taken else stage,
                given and given[0],
                given[2] if given else -1,
                place.stage(given[2]) if given else stage,
            )
    return table


def batches(ops: Sequence[Other | Message]) -> Iterator[Other | tuple[Message, ...]]:
    """A stream as it runs: compute ops, and between them batches of messages posted together.

    Args:
      ops: one stage's stream.
    Returns: each other op by itself, each run of consecutive messages as one tuple.
    Example:
      >>> act, grad = Send(0, to=1, kind="act", peer=1), Recv(0, to=0, kind="grad", peer=1)
      >>> list(batches([F(0), act, grad, B(0)]))
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
