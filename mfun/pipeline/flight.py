"""A microbatch on a chunk: what its forward leaves, and how its backward uses it up."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun import tree
from mfun.comm.world import Message
from mfun.grads import GradBuffers
from mfun.nn.layer import Layer
from mfun.nn.weight_grads import Paths, WeightGrads
from mfun.pipeline.offload import Place, Shelf, without_input
from mfun.pipeline.program import Batch, Program
from mfun.pipeline.pullback import Pull
from mfun.rng import Key
from mfun.schedule.ops import Offload, Reload


@attrs.define(eq=False)
class _Kept:
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


class Flight:
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
            _Kept(
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
