"""The executor: interprets a stage's stream of ops on a `World`.

`F` runs a chunk's layers one by one and keeps a pullback of each; `B` pops them, last first, and
adds each layer's gradients straight into the flat buffers, so that a gradient tree lives no longer
than one layer. `I` does the same but leaves the weights' products to `W`. Messages go out and come
in where the stream says. Nothing else happens in a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mfun.comm.world import Message, Waits
from mfun.grads import GradBuffers, start_reduce
from mfun.pipeline.flight import Flight
from mfun.pipeline.program import Batch, Program
from mfun.rng import Key
from mfun.schedule import (
    B,
    Checked,
    Compute,
    F,
    I,
    Recv,
    ScheduleError,
    Send,
    Tag,
    W,
    gives,
    needs,
)
from mfun.schedule import batches as batches_of
from mfun.schedule.ops import AnyOp, Gather, Offload, Recompute, Reduce, Release, Reload


def train_step(
    program: Program,
    stream: Checked[AnyOp],
    batches: Sequence[Batch],
    seeds: Sequence[Tensor],
    grads: GradBuffers,
    key: Key | None,
) -> Waits[dict[int, Tensor]]:
    """Run a step's stream: fills `grads` and returns the loss sums.

    Args:
        program: the stage.
        stream: its ops, from `schedule.plan` or `schedule.check`.
        batches: this rank's microbatches, in order.
        seeds: gradient of the step's loss with respect to each microbatch's loss sum.
        grads: buffers to fill, closed by `finalize_steps`.
        key: of this step's dropout, or None.

    Returns:
        Where the loss is, the loss sum (before normalisation) by microbatch; elsewhere {}.

    Raises:
        ValueError: the stream was not checked, or asks for a microbatch that is not there.
    """
    if not isinstance(stream, Checked):
        raise ScheduleError("the stream was not checked: run what schedule.plan or check returns")
    grads.start()
    stage, place = program.stage, program.stage.place
    paths = program.paths()
    flights: dict[tuple[int, int], Flight] = {}
    losses: dict[int, Tensor] = {}
    again = {(op.mb, op.chunk, op.layer) for op in stream if isinstance(op, Recompute)}
    away = {(op.mb, op.chunk) for op in stream if isinstance(op, Offload)}
    mail = _Mail(program, [_sizes(b) for b in batches])
    for op in batches_of(stream):
        match op:
            case tuple():
                mail.post(op)
            case F(mb, chunk):
                _check_microbatch(mb, batches)
                virtual, layers = stage.virtual(chunk), stage.chunks[chunk]
                if not op.layer:
                    leaves = (mb, chunk) in away
                    flights[mb, chunk] = Flight(grads, paths, len(layers), leaves)
                flight = flights[mb, chunk]
                if not op.layer:
                    flight.value = yield from mail.incoming(needs(op, virtual, place))
                for i in _layers(op, len(layers)):
                    yield from program.ready(layers[i], paths)
                    once = {(mb, chunk, None), (mb, chunk, i)}.isdisjoint(again)
                    flight.forward(i, program, layers[i], batches[mb], key, keep=once)
                if op.layer is None or op.layer == len(layers) - 1:
                    if place.last(virtual):
                        losses[mb] = flight.value["loss"]
                    mail.put(gives(op, virtual, place), flight.take())
            case B(mb, chunk) | I(mb, chunk):
                virtual, flight = stage.virtual(chunk), flights[mb, chunk]
                if op.layer is None or op.layer == len(flight.layers) - 1:
                    flight.value = yield from mail.incoming(needs(op, virtual, place))
                    if place.last(virtual):
                        flight.value = {"loss": seeds[mb].to(losses[mb].dtype)}
                for i in reversed(_layers(op, len(flight.layers))):
                    yield from program.ready(stage.chunks[chunk][i], paths)
                    flight.backward(i, later=isinstance(op, I))
                if not op.layer:
                    mail.put(gives(op, virtual, place), flight.take())
                    if isinstance(op, B):
                        del flights[mb, chunk]
            case W(mb, chunk):
                flight = flights[mb, chunk]
                for i in reversed(_layers(op, len(flight.layers))):
                    flight.weights(i)
                if not op.layer:
                    del flights[mb, chunk]
            case Recompute(mb, chunk):
                flight = flights[mb, chunk]
                for i in _layers(op, len(flight.layers)):
                    yield from program.ready(stage.chunks[chunk][i], paths)
                    flight.again(i, program, stage.chunks[chunk][i], batches[mb], key)
            case Offload(mb, chunk) | Reload(mb, chunk):
                flights[mb, chunk].move(op)
            case Reduce(bucket):
                start_reduce(program.world, grads, bucket)
            case Gather() | Release():
                program.gather(op, paths)
            case _:
                raise ScheduleError(f"{op}: the executor does not run ops of this kind yet")
    yield from program.world.drain()
    return losses


def _layers(op: Compute | Recompute, count: int) -> range:
    """The layers of its chunk that an op runs."""
    return range(count) if op.layer is None else range(op.layer, op.layer + 1)


def evaluate(
    program: Program, stream: Checked[AnyOp], batches: Sequence[Batch]
) -> Waits[dict[int, Message]]:
    """Run a forward-only stream.

    Args:
        program: the stage.
        stream: its ops: `F`, messages, and gathers of sharded parameters.
        batches: this rank's microbatches.

    Returns:
        Where the head is, what it returns by microbatch; elsewhere {}.
    """
    out: dict[int, Message] = {}
    stage, place = program.stage, program.stage.place
    values: dict[tuple[int, int], Message] = {}
    mail = _Mail(program, [_sizes(b) for b in batches])
    for op in batches_of(stream):
        match op:
            case tuple():
                mail.post(op)
            case F(mb, chunk):
                _check_microbatch(mb, batches)
                virtual, layers = stage.virtual(chunk), stage.chunks[chunk]
                if not op.layer:
                    values[mb, chunk] = yield from mail.incoming(needs(op, virtual, place))
                x = values.pop((mb, chunk))
                for i in _layers(op, len(layers)):
                    yield from program.ready(layers[i], None)
                    with torch.no_grad():
                        run = program.layer(layers[i], batches[mb], None)
                        x = run(program.own(layers[i]), x)
                if op.layer is None or op.layer == len(layers) - 1:
                    if place.last(virtual):
                        out[mb] = x
                    mail.put(gives(op, virtual, place), x)
                else:
                    values[mb, chunk] = x
            case Gather() | Release():
                program.gather(op, None)
            case _:
                raise ScheduleError(f"{op}: an evaluation has forwards and messages only")
    yield from program.world.drain()
    return dict(sorted(out.items()))


class _Mail:
    """Messages of one step on one stage: made by compute ops, moved by Send and Recv ops."""

    def __init__(self, program: Program, sizes: Sequence[Any]) -> None:
        self._world, self._sizes = program.world, sizes
        self._made: dict[Tag, Message] = {}
        self._posted: dict[Tag, Recv] = {}

    def put(self, tag: Tag | None, message: Message) -> None:
        """Keep a message until its Send, or until the op of this stage that uses it."""
        if tag:
            self._made[tag] = message

    def post(self, batch: Sequence[Send | Recv]) -> None:
        """Start a batch of messages together; the transport keeps what is sent, not we."""
        outgoing = {op: self._made.pop(op.tag) for op in batch if isinstance(op, Send)}
        self._world.post(batch, outgoing, self._sizes)
        self._posted.update({op.tag: op for op in batch if isinstance(op, Recv)})

    def incoming(self, tag: Tag | None) -> Waits[Message]:
        """The message a compute op needs, {} where it needs none."""
        if tag is None:
            return {}
        op = self._posted.pop(tag, None)
        if op is None:  # made on this stage
            return self._made.pop(tag)
        return (yield from self._world.take(op))


def _sizes(batch: Batch) -> tuple[int, ...]:
    """What the shapes of a microbatch's messages depend on."""
    return tuple(batch["tokens"].shape)


def _check_microbatch(mb: int, batches: Sequence[Batch]) -> None:
    if mb >= len(batches):
        raise ValueError(
            f"the stream runs microbatch {mb}, but the step has {len(batches)}; plan the schedule "
            "for the same number"
        )
