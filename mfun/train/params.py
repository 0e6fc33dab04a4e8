"""A stage's parameters in a run: as a state holds them, as they are updated, as layers use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mfun import tree
from mfun.checkpoint.room import zeros
from mfun.comm.world import Waits, World
from mfun.grads import ParamBuffers, shard_name
from mfun.pipeline.program import Program
from mfun.spec import ParamSpec, init_params, local_shape
from mfun.train.plan import Plan
from mfun.train.shards import by_shard, flat_params, shard_of


class StageParams:
    """The forms that parameters take, and the flat buffers they lie in where they are cut.

    sharding             a state holds         the optimizer updates   layers use
    no_shard             leaves by path        them                    them, or copies of fewer bits
    optim, optim_grads   views of the buffers  shards, in the buffers  likewise
     ... gather_ahead    shards                them                    views, which they wait for
    optim_grads_params   shards                them                    views, gathered by the stream

    Args:
        plan: the layout.
        world: of this rank.

    Attributes:
        flat: the buffers; working memory, whose content belongs to the newest state.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.stage = plan.stages[world.stage]
        self.flat: ParamBuffers | None = None
        self._whole_of: Any = None  # the shards whose parameters `flat` has, or is getting

    # ------------------------------------------------------------ for a state

    def drawn(self) -> Any:
        """Initial weights, bitwise the same in every layout."""
        if not self.plan.holds_shards:
            return self.cut(self._draw(self.stage.specs))
        specs, out = self.plan.specs, {}
        for bucket in self.plan.buckets(self.stage.index):  # the whole may be too large
            leaves = self._draw({span.path: specs[span.path] for span in bucket.spans})
            out[shard_name(bucket.index)] = shard_of(self.plan, self.world, bucket, leaves)
        return out

    def _draw(self, specs: Any) -> Any:
        plan = self.plan
        return self.world.build(
            lambda coords: init_params(specs, plan.config.train.seed, plan.mesh, coords, plan.dtype)
        )

    def blank(self) -> Any:
        """Zeros, to be filled from a checkpoint."""
        plan, world = self.plan, self.world
        like = tree.flatten(world.build(lambda coords: tree.map(self._nothing, self.stage.specs)))
        if plan.holds_shards:
            out: dict[str, Tensor] = {}
            for bucket in plan.buckets(self.stage.index):
                path = bucket.spans[0].path
                shards = math.prod(map(plan.mesh.size, plan.table[path].shard_axes))
                shape = (*world.lead, bucket.size // shards)
                out[shard_name(bucket.index)] = zeros(shape, like[path].dtype, like[path].device)
            return out
        if plan.sharded:
            self.flat = flat_params(plan, world, like)
            return tree.unflatten(self.flat.views)
        return tree.unflatten({path: zeros(x.shape, x.dtype, x.device) for path, x in like.items()})

    def _nothing(self, spec: ParamSpec) -> Tensor:
        """Zeros of a parameter's shape and type, in the memory of one element."""
        one = torch.zeros((), dtype=spec.dtype_among(self.plan.dtype))
        return one.expand(local_shape(spec, self.plan.mesh))

    def cut(self, params: Any) -> Any:
        """Parameters by path as a state holds them."""
        if self.plan.holds_shards:
            return by_shard(self.plan, self.world, tree.flatten(params))
        if not self.plan.sharded:
            return params
        return tree.unflatten(self._flat(tree.flatten(params)).views)

    # ------------------------------------------------------------ for the optimizer

    def leaves(self, params: Any) -> dict[str, Tensor]:
        """What the optimizer updates: a state's parameters by path, or this rank's shards."""
        if self.plan.holds_shards:
            return params
        leaves = tree.flatten(params)
        return self._flat(leaves).shards() if self.plan.sharded else leaves

    def _flat(self, leaves: Mapping[str, Tensor]) -> ParamBuffers:
        """The flat buffers of these parameters; a state that came from elsewhere is copied."""
        if self.flat is None or not self.flat.holds(leaves):
            self.flat = flat_params(self.plan, self.world, leaves)
            self.flat.load(leaves)
        return self.flat

    def updated(self, new: dict[str, Tensor], donate: bool) -> Waits[Any]:
        """The next state's parameters.

        Args:
            new: the optimizer's leaves.
            donate: the state before may lose its memory.
        """
        if not self.plan.sharded:
            return tree.unflatten(new)
        if self.plan.gathers_ahead:
            return self._ahead(new, self.flat if donate else None)
        if self.plan.shards_params:
            return new
        if self.flat is None or not donate:
            self.flat = flat_params(self.plan, self.world, new)
        yield from self.flat.fill(new)
        return tree.unflatten(self.flat.views)

    def _ahead(self, shards: dict[str, Tensor], flat: ParamBuffers | None) -> dict[str, Tensor]:
        """Start to gather the parameters of a state that holds shards; layers wait for theirs.

        Args:
            shards: of the state.
            flat: buffers that no other state needs; None makes new ones.

        Returns:
            The state's shards: on processes their places in the buffers.
        """
        self.flat = flat or flat_params(self.plan, self.world, shards)
        self._whole_of = self.flat.start_all(shards)
        return self._whole_of

    def settle(self) -> Waits[None]:
        """Wait for what is on its way for a next step, where none comes."""
        if self.flat is not None:
            yield from self.flat.settle()

    # ------------------------------------------------------------ for layers

    def program(self, params: Any) -> Program:
        """The stage on a state's parameters.

        Processes take first derivatives of plain tensors; the mailbox runs under vmap.
        """
        kind = "any" if self.world.lead else "first"
        if not self.plan.holds_shards:
            dtype = self.plan.compute_dtype  # a leaf is itself, or a copy of fewer bits
            used = tree.map(lambda s, x: x.to(s.dtype_among(dtype)), self.stage.specs, params)
            return Program(self.world, self.stage, used, derivatives=kind)
        if self.plan.shards_params:
            if self.flat is None:
                self.flat = flat_params(self.plan, self.world, params, released=True)
        elif params is not self._whole_of:  # not what the last update has left
            self._ahead(params, None)
        assert self.flat is not None
        return Program(
            self.world,
            self.stage,
            tree.unflatten(self.flat.views),
            derivatives=kind,
            flat=self.flat,
            shards=params if self.plan.shards_params else {},
        )
