"""The executor: interprets a stage's stream of ops on a `World`.

`F` runs the stage's layers one by one and keeps a pullback of each; `B` pops them, last first, and
adds each layer's gradients straight into the flat buffers, so that a gradient tree lives no longer
than one layer. Messages go out and come in where the stream says. Nothing else happens in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from mfun import tree
from mfun.comm.groups import Groups
from mfun.comm.world import Message, Waits, World
from mfun.grads import GradBuffers
from mfun.nn.layer import Ctx, Layer
from mfun.pipeline.pullback import Linearize, Pull, autograd_layer
from mfun.pipeline.stage import Stage
from mfun.rng import Key
from mfun.schedule import B, F, Op, Recv, Send
from mfun.schedule import batches as batches_of

Batch = Mapping[str, Tensor]


@attrs.frozen(eq=False)
class Program:
    """What one stage runs.

    Args:
        world: of this rank.
        stage: its layers.
        params: its parameters, nested as `stage.specs`.
        linearize: how a layer is run and pulled back.
        derivatives: "first" allows kernels without second derivatives or batching rules.
    """

    world: World
    stage: Stage
    params: Any
    linearize: Linearize = autograd_layer
    derivatives: Literal["any", "first"] = "any"

    def layer(self, layer: Layer, batch: Batch, key: Key | None) -> Callable[..., Message]:
        """`(params, x) -> y` of a layer on this world's tensors, with the batch closed over."""

        def local(groups: Groups, params: Any, x: Message, batch: dict[str, Tensor]) -> Message:
            return layer.apply(params, x, Ctx(groups, batch, key, self.derivatives))

        lifted, batch = self.world.lift(local), dict(batch)
        return lambda params, x: lifted(params, x, batch)

    def own(self, layer: Layer) -> Any:
        """The part of the parameters that a layer uses."""
        return tree.select(self.params, layer.specs)


def train_step(
    program: Program,
    stream: Sequence[Op],
    batches: Sequence[Batch],
    seeds: Sequence[Tensor],
    grads: GradBuffers,
    key: Key | None,
) -> Waits[list[Tensor]]:
    """Run a step's stream: fills `grads` and returns the loss sums.

    Args:
        program: the stage.
        stream: its ops, accepted by `schedule.plan`.
        batches: this rank's microbatches, in order.
        seeds: gradient of the step's loss with respect to each microbatch's loss sum.
        grads: buffers to fill, closed by `finalize_steps`.
        key: of this step's dropout, or None.

    Returns:
        On the last stage the loss sum of each microbatch (before normalisation), elsewhere [].

    Raises:
        ValueError: the stream asks for a microbatch that is not there.
    """
    grads.start()
    pulls: dict[tuple[int, int], list[Pull]] = {}
    losses: list[Tensor] = []
    mail = _Mail(program.world, [_sizes(b) for b in batches])
    for op in batches_of(stream):
        match op:
            case F(mb, chunk):
                _check_microbatch(mb, batches)
                x = yield from mail.incoming("act", mb)
                y, pulls[mb, chunk] = _forward(program, x, batches[mb], key)
                if program.stage.last:
                    losses.append(y["loss"])
                else:
                    mail.put("act", mb, y)
            case B(mb, chunk):
                if program.stage.last:
                    dy = {"loss": seeds[mb].to(losses[mb].dtype)}
                else:
                    dy = yield from mail.incoming("grad", mb)
                dx = _backward(pulls.pop((mb, chunk)), dy, grads)
                if not program.stage.first:
                    mail.put("grad", mb, dx)
            case tuple():
                mail.post(op)
    yield from program.world.drain()
    return losses


@torch.no_grad()
def _forward(
    program: Program, x: Message, batch: Batch, key: Key | None
) -> tuple[Message, list[Pull]]:
    pulls = []
    for layer in program.stage.layers:
        x, pull = program.linearize(program.layer(layer, batch, key), program.own(layer), x)
        pulls.append(pull)
    return x, pulls


def _backward(pulls: list[Pull], dy: Message, grads: GradBuffers) -> Message:
    while pulls:
        layer_grads, dy = pulls.pop()(dy)
        grads.add(layer_grads)
    return dy


def evaluate(
    program: Program, stream: Sequence[Op], batches: Sequence[Batch]
) -> Waits[list[Message]]:
    """Run a forward-only stream: what the last layer returns for each microbatch, elsewhere [].

    Args:
        program: the stage.
        stream: its ops, `F` and messages only.
        batches: this rank's microbatches.
    """
    out: list[Message] = []
    mail = _Mail(program.world, [_sizes(b) for b in batches])
    for op in batches_of(stream):
        match op:
            case F(mb, _):
                _check_microbatch(mb, batches)
                x = yield from mail.incoming("act", mb)
                with torch.no_grad():
                    for layer in program.stage.layers:
                        x = program.layer(layer, batches[mb], None)(program.own(layer), x)
                if program.stage.last:
                    out.append(x)
                else:
                    mail.put("act", mb, x)
            case tuple():
                mail.post(op)
    yield from program.world.drain()
    return out


class _Mail:
    """Messages of one step on one stage: made by compute ops, moved by Send and Recv ops."""

    def __init__(self, world: World, sizes: Sequence[Any]) -> None:
        self._world, self._sizes = world, sizes
        self._made: dict[tuple[str, int], Message] = {}
        self._posted: dict[tuple[str, int], Recv] = {}

    def put(self, kind: str, mb: int, message: Message) -> None:
        """Keep a message until its Send."""
        self._made[kind, mb] = message

    def post(self, batch: Sequence[Send | Recv]) -> None:
        """Start a batch of messages together; the transport keeps what is sent, not we."""
        outgoing = {op: self._made.pop((op.kind, op.mb)) for op in batch if isinstance(op, Send)}
        self._world.post(batch, outgoing, self._sizes)
        self._posted.update({(op.kind, op.mb): op for op in batch if isinstance(op, Recv)})

    def incoming(self, kind: str, mb: int) -> Waits[Message]:
        """The message a compute op needs, {} where it comes from no other stage."""
        op = self._posted.pop((kind, mb), None)
        if op is None:
            return {}
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
