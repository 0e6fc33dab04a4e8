"""`Program`: what one stage runs, as functions of this world's tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
from torch import Tensor

from mfun import tree
from mfun.comm.groups import Groups
from mfun.comm.world import Message, Waits, World
from mfun.grads import ParamBuffers, shard_name
from mfun.nn.layer import Ctx, Layer
from mfun.nn.weight_grads import Paths, WeightGrads, paths_by_memory
from mfun.pipeline.pullback import Linearize, autograd_layer
from mfun.pipeline.stage import Stage
from mfun.rng import Key
from mfun.schedule.ops import Gather, Release

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
        flat: buffers of sharded parameters, of which `params` are views; layers wait for theirs.
        shards: this rank's pieces of them, where the stream gathers and releases them.
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
        return {} if self.shards else paths_by_memory(tree.flatten(self.params))

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
        if self.flat is not None and (self.shards or self.flat.going):
            views = self.flat.views
            arrived = yield from self.flat.ready(tree.flatten(layer.specs))
            if paths is not None:
                paths.update(paths_by_memory({path: views[path] for path in arrived}))

    def own(self, layer: Layer) -> Any:
        """The part of the parameters that a layer uses."""
        return tree.select(self.params, layer.specs)
