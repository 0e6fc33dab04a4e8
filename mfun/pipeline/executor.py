"""The executor: interprets a stage's stream of ops on a `World`.

`F` runs a chunk's layers one by one and keeps a pullback of each; `B` pops them, last first, and
adds each layer's gradients straight into the flat buffers, so that a gradient tree lives no longer
than one layer. `I` does the same but leaves the weights' products to `W`. Messages go out and come
in where the stream says. Nothing else happens in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from mfun import tree
from mfun.comm.groups import Groups
from mfun.comm.world import Message, Waits, World
from mfun.grads import GradBuffers, ParamBuffers, shard_name, start_reduce
from mfun.nn.layer import Ctx, Layer
from mfun.nn.weight_grads import Paths, WeightGrads, paths_by_memory
from mfun.pipeline.offload import Place, Shelf, without_input
from mfun.pipeline.pullback import Linearize, Pull, autograd_layer
from mfun.pipeline.stage import Stage
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
        flat: buffers of sharded parameters, which the stream gathers; `params` are its views.
        shards: this rank's pieces of them.
    """

    world: World
    stage: Stage
    params: Any
    linearize: Linearize = autograd_layer
    derivatives: Literal["any", "first"] = "any"
    flat: ParamBuffers | None = None
    shards: Mapping[str, Tensor] = attrs.field(factory=dict)

    def layer(
        self,
        layer: Layer,
        batch: Batch,
        key: Key | None,
        weight_grads: WeightGrads | None = None,
    ) -> Callable[..., Message]:
        """`(params, x) -> y` of a layer on this world's tensors, with the batch closed over."""

        def local(groups: Groups, params: Any, x: Message, batch: dict[str, Tensor]) -> Message:
            ctx = Ctx(groups, batch, key, self.derivatives, weight_grads)
            return layer.apply(params, x, ctx)

        lifted, batch = self.world.lift(local), dict(batch)
        return lambda params, x: lifted(params, x, batch)

    def paths(self) -> Paths | None:
        """Parameters by memory, where weights' gradients are taken out of autograd's hands."""
        if self.derivatives == "any":
            return None
        return {} if self.flat else paths_by_memory(tree.flatten(self.params))

    def gather(self, op: Gather | Release, paths: Paths | None) -> None:
        """Start to gather a bucket of parameters, or let go of it: nobody's memory is theirs."""
        assert self.flat is not None, "a stream gathers parameters that are sharded"
        if isinstance(op, Gather):
            self.flat.start(op.bucket, self.shards[shard_name(op.bucket)])
            return
        gone = set(self.flat.release(op.bucket))
        for at in [at for at, path in (paths or {}).items() if path in gone]:
            del paths[at]  # type: ignore[index]

    def ready(self, layer: Layer, paths: Paths | None) -> Waits[None]:
        """Wait for a layer's gathered parameters, and note where they lie."""
        if self.flat is not None:
            views = self.flat.views
            arrived = yield from self.flat.ready(tree.flatten(layer.specs))
            if paths is not None:
                paths.update(paths_by_memory({path: views[path] for path in arrived}))

    def own(self, layer: Layer) -> Any:
        """The part of the parameters that a layer uses."""
        return tree.select(self.params, layer.specs)


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
    flights: dict[tuple[int, int], _Flight] = {}
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
                    flights[mb, chunk] = _Flight(grads, paths, len(layers), leaves)
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


@attrs.define(eq=False)
class _Layer:
    """What one layer's forward leaves for its backward: the pullback, then the weights' products.

    Args:
        sink: takes the products, or None where gradients come out of the pullback.
        pull: until the backward to the inputs.
        x: the input, where the forward is run again for the backward.
        kept: gradients that wait for W, without a sink.
        shelf: where what the pullback needs and x are, if they go to the host.
    """

    sink: WeightGrads | None
    pull: Pull | None = None
    x: dict[str, Tensor | Place] = attrs.field(factory=dict)
    kept: dict[str, Tensor | None] = attrs.field(factory=dict)
    shelf: Shelf | None = None

    def saving(self, params: Any, batch: Batch) -> AbstractContextManager[None]:
        """Put what autograd saves on the shelf, but for parameters and the batch."""
        if self.shelf is None:
            return nullcontext()
        stay = (*tree.flatten(params).values(), *batch.values())
        known = (lambda x: False) if self.sink is None else self.sink.knows
        return self.shelf.saving(stay, known)

    def keep(self, x: Message) -> None:
        """Keep the input only."""
        self.x = {**x} if self.shelf is None else {k: self.shelf.put(v) for k, v in x.items()}

    def take(self) -> Message:
        """The input, which is let go of."""
        get = (self.shelf or Shelf()).get
        x = {name: get(value) for name, value in self.x.items()}
        self.x, self.shelf = {}, None
        return x


class _Flight:
    """A microbatch on a chunk, from its forward to the end of its backward.

    Args:
        grads: where gradients go.
        paths: of parameters by memory, or None where their gradients come out of the pullbacks.
        count: layers of the chunk.
        leaves: what is kept goes to the host for a while.
    """

    def __init__(
        self, grads: GradBuffers, paths: Paths | None, count: int, leaves: bool = False
    ) -> None:
        self._grads = grads
        self.value: Message = {}
        self.layers = [
            _Layer(
                None if paths is None else WeightGrads(paths, grads.claim),
                shelf=Shelf() if leaves else None,
            )
            for _ in range(count)
        ]

    def take(self) -> Message:
        """The value, which is not kept: what was sent can go."""
        value, self.value = self.value, {}
        return value

    @torch.no_grad()
    def forward(
        self,
        i: int,
        program: Program,
        layer: Layer,
        batch: Batch,
        key: Key | None,
        keep: bool = True,
    ) -> None:
        """Run layer i on the value; without `keep` only its input is left, for `again`."""
        own, x = self.layers[i], self.value
        apply, params = program.layer(layer, batch, key, own.sink), program.own(layer)
        if keep:
            if own.shelf is not None:
                apply, x = without_input(apply, x)
            with own.saving(params, batch):
                self.value, own.pull = program.linearize(apply, params, x)
        else:
            own.keep(x)
            self.value = apply(params, x)

    @torch.no_grad()
    def again(self, i: int, program: Program, layer: Layer, batch: Batch, key: Key | None) -> None:
        """Run layer i again from its input, with the same keys and bits."""
        own = self.layers[i]
        apply = program.layer(layer, batch, key, own.sink)
        _, own.pull = program.linearize(apply, program.own(layer), own.take())

    def backward(self, i: int, later: bool) -> None:
        """Pull the value back through layer i; weights' gradients now, or kept for `weights`."""
        layer = self.layers[i]
        pull, layer.pull = layer.pull, None
        assert pull is not None, "a stream that was checked runs every backward once"
        if layer.sink is not None:
            layer.sink.later = later
        grads, self.value = pull(self.value)
        layer.shelf = None
        if later and layer.sink is None:
            layer.kept = grads
        else:
            self._grads.add(grads)

    def move(self, op: Offload | Reload) -> None:
        """All that is kept, to the host or back."""
        for layer in self.layers:
            assert layer.shelf is not None, "a stream that was checked reloads what it needs"
            layer.shelf.offload() if isinstance(op, Offload) else layer.shelf.reload()

    def weights(self, i: int) -> None:
        """Add what layer i has kept."""
        layer = self.layers[i]
        if layer.sink is not None:
            layer.sink.run()
        self._grads.add(layer.kept)
        layer.kept = {}


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
