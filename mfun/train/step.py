"""One training step: seeds, the pipeline, finalize, the optimizer. Values in, values out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun import optim, rng, tree
from mfun.comm.world import Message, Waits, World
from mfun.grads import (
    GradBuffers,
    Guard,
    ParamBuffers,
    finalize_steps,
    global_norm,
    num_zeros,
    seeds,
    shard_name,
)
from mfun.pipeline import executor
from mfun.pipeline.program import Program
from mfun.schedule import Checked
from mfun.schedule.ops import AnyOp
from mfun.spec import ParamSpec, init_params, local_shape
from mfun.train.plan import Dressed, Plan, dressed, forward_streams
from mfun.train.rounding import words_by_path, words_by_shard
from mfun.train.shards import by_shard, flat_params, shard_of, sharded_matrices

Batch = Mapping[str, Tensor]


class State(NamedTuple):
    """All that changes during a run; it changes by being replaced.

    `step` counts the batches taken, `params` is the stage's tree, `opt` the optimizer's state; its
    own count of updates leaves skipped ones out. The dropout key and the data position are
    functions of the configuration and `step`.
    """

    step: int
    params: Any
    opt: Any


class Metrics(NamedTuple):
    """A step's numbers, the same on every rank.

    Args:
        loss, grad_norm: before the update; the norm is of gradients that the loss scale is out of.
        lr: of the update, or where it was skipped of the last one.
        tokens: that counted in the loss.
        loss_scale: of this step, None where the loss is not scaled.
        skipped: whether a gradient overflowed and so nothing was updated.
        num_zeros: elements of the gradient that are exactly 0, None where they are not counted.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    loss_scale: float | None = None
    skipped: bool = False
    num_zeros: int | None = None


class Gradients(NamedTuple):
    """What a step's backward gives; the numbers are of shape `world.lead` and equal on all ranks.

    Args:
        leaves: the optimizer's: by path, or this rank's shards (`by_path` makes them whole). They
            are overwritten by the next call.
        loss, norm, tokens: of the global batch; the norm is that of all gradients.
        overflow: whether some rank has a gradient that is not finite, where the loss is scaled.
    """

    leaves: dict[str, Tensor]
    loss: Tensor
    norm: Tensor
    tokens: Tensor
    overflow: bool


def build_optimizer(
    plan: Plan,
    shards_of: int | None = None,
    words: optim.Words | None = None,
    world: World | None = None,
) -> optim.Transform:
    """The optimizer of a plan for leaves by path, or for the shards of a stage.

    Args:
        plan: the layout.
        shards_of: the stage; the parameters of a bucket have equal multipliers.
        words: random ones for rounding; only a state's shapes need none.
        world: to make cut matrices whole; only a state's shapes need none.
    """
    groups = plan.groups
    if shards_of is not None:
        buckets = plan.buckets(shards_of)
        groups = {shard_name(i): groups[bucket.spans[0].path] for i, bucket in enumerate(buckets)}
    config = plan.config
    if shards_of is None or world is None:
        matrices = optim.matrices_of(plan.specs, world)
    else:
        matrices = sharded_matrices(plan, world)
    optimizer = optim.build(config.optim, config.train.steps, groups, matrices)
    key = rng.key(config.train.seed, "rounding")
    away = config.parallel.offload_optimizer
    return optim.with_precision(optimizer, config.precision, key=key, words=words, offload=away)


class Trainer:
    """Runs a plan on a world. Holds working memory (gradient buffers), never training state.

    Args:
        plan: the layout.
        world: this rank's, or a stage of the mailbox.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.stage = plan.stages[world.stage]
        shards_of, words = (
            (self.stage.index, words_by_shard) if plan.sharded else (None, words_by_path)
        )
        self.optimizer = build_optimizer(plan, shards_of, words(plan, world), world)
        self.grads: GradBuffers | None = None
        self.streams: dict[int, Dressed] = {}
        self.flat: ParamBuffers | None = None
        self.whole_of: Any = None  # the shards whose parameters are in `flat`, or on their way

    def init(self) -> State:
        """Initial weights, bitwise the same in every layout, and a fresh optimizer."""
        if self.plan.holds_shards:  # bucket by bucket: the whole may be too large
            params: Any = {
                shard_name(bucket.index): shard_of(
                    self.plan,
                    self.world,
                    bucket,
                    self._drawn({span.path: self.plan.specs[span.path] for span in bucket.spans}),
                )
                for bucket in self.plan.buckets(self.stage.index)
            }
        else:
            params = self._cut(self._drawn(self.stage.specs))
        return self.fresh(params)

    def fresh(self, params: Any) -> State:
        """Step 0 of these parameters, in this trainer's form, and a fresh optimizer."""
        return State(0, params, self.optimizer.init(self._leaves(params)))

    def _drawn(self, specs: Any) -> Any:
        """Initial weights of these specs."""
        plan = self.plan
        return self.world.build(
            lambda coords: init_params(specs, plan.config.train.seed, plan.mesh, coords, plan.dtype)
        )

    def blank(self) -> State:
        """A state of zeros in this trainer's form, to be filled from a checkpoint."""
        plan, world = self.plan, self.world
        like = tree.flatten(world.build(lambda coords: tree.map(self._nothing, self.stage.specs)))
        if plan.holds_shards:
            params: Any = {}
            for bucket in plan.buckets(self.stage.index):
                path = bucket.spans[0].path
                shards = math.prod(map(plan.mesh.size, plan.table[path].shard_axes))
                zeros = like[path].new_zeros(*world.lead, bucket.size // shards)
                params[shard_name(bucket.index)] = zeros
        elif plan.sharded:
            self.flat = flat_params(plan, world, like)
            params = tree.unflatten(self.flat.views)
        else:
            params = tree.unflatten({path: x.new_zeros(x.shape) for path, x in like.items()})
        return self.fresh(params)

    def _nothing(self, spec: ParamSpec) -> Tensor:
        """Zeros of a parameter's shape and type, in the memory of one element."""
        one = torch.zeros((), dtype=spec.dtype_among(self.plan.dtype))
        return one.expand(local_shape(spec, self.plan.mesh))

    def adopt(self, state: State) -> State:
        """A state by path, as checkpoints hold it, as this trainer runs it."""
        if not self.plan.sharded:
            return state
        opt = by_shard(self.plan, self.world, state.opt)
        return state._replace(params=self._cut(state.params), opt=opt)

    def _cut(self, params: Any) -> Any:
        """The parameters as the state holds them: whole, or this rank's shards."""
        if self.plan.holds_shards:
            return by_shard(self.plan, self.world, tree.flatten(params))
        if not self.plan.sharded:
            return params
        return tree.unflatten(self._flat(tree.flatten(params)).views)

    def _leaves(self, params: Any) -> dict[str, Tensor]:
        """What the optimizer updates: the parameters by path, or this rank's shards of them."""
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

    def buffers(self, params: Any) -> GradBuffers:
        """Gradient buffers for this stage, made at the first step."""
        if self.grads is None:
            device = next(iter(tree.flatten(params).values())).device
            self.grads = self.plan.buffers(self.stage.index, self.world.lead, device)
            train = self.plan.config.train
            if train.check_gradients or train.large_gradient:
                rank = self.plan.mesh.stage_ranks(self.stage.index)[0]
                self.grads.guard = Guard(
                    getattr(self.world, "rank", rank), train.large_gradient
                ).check
        return self.grads

    def gradients(self, state: State, batches: Sequence[Batch]) -> Waits[Gradients]:
        """Loss, gradients, their norm and the number of valid tokens.

        Args:
            state: where to differentiate.
            batches: this rank's microbatches.
        """
        config, grads = self.plan.config, self.buffers(state.params)
        scale, tokens = yield from seeds(
            self.world, [count_tokens(b) for b in batches], config.train.loss_norm
        )
        model = config.model
        key = rng.key(config.train.seed, "dropout", state.step) if model.dropout else None
        program = self._program(state)
        stream = self._stream(len(batches))
        factor = optim.loss_scale(state.opt)
        ranks = self.plan.mesh.dp * self.plan.mesh.cp if grads.mean else 1
        scaled = [factor * ranks * seed for seed in scale]
        sums = yield from executor.train_step(program, stream, batches, scaled, grads, key)
        yield from finalize_steps(self.world, grads)
        overflow = yield from self._unscaled(grads, factor)
        norm = yield from global_norm(self.world, grads)
        loss = yield from self._total(sums, scale)
        shards = {shard_name(i): x for i, x in grads.shards.items()}
        return Gradients(shards if grads.sharded else grads.views, loss, norm, tokens, overflow)

    def _stream(self, microbatches: int) -> Checked[AnyOp]:
        """This stage's ops for so many microbatches; fewer than planned while the batch grows."""
        if microbatches == self.plan.config.train.microbatches:
            return self.plan.streams[self.stage.index]
        if microbatches not in self.streams:
            self.streams[microbatches] = dressed(self.plan, microbatches)
        return self.streams[microbatches][self.stage.index]

    def _unscaled(self, grads: GradBuffers, scale: float) -> Waits[bool]:
        """Divide by the loss scale; whether any rank of any stage has what is not finite."""
        if self.plan.config.precision.scaling == "none":
            return False
        found = optim.unscale_([*grads.finished().values()], scale)
        found = found.expand(self.world.lead).clone()
        for axes in (("tp",), ("dp", "cp")):
            everywhere = tuple(range(self.plan.mesh.pp))
            found = yield from self.world.all_reduce(found, axes, everywhere, op="max")
        return _number(found) > 0

    def step(
        self, state: State, batches: Sequence[Batch], *, donate: bool = True
    ) -> Waits[tuple[State, Metrics]]:
        """One update.

        Args:
            state: before it.
            batches: this rank's microbatches, in order.
            donate: may reuse the old state's memory; with False the old state stays valid.

        Returns:
            The new state and its metrics.
        """
        grads, loss, norm, tokens, overflow = yield from self.gradients(state, batches)
        zeros = yield from self._zeros()
        leaves = self._leaves(state.params)
        new, opt = self.optimizer.update(
            grads, state.opt, leaves, norm=norm, donate=donate, overflow=overflow
        )
        params = yield from self._gathered(new, donate)
        if state.step + 1 >= self.plan.config.train.steps:  # nobody may come to wait for it
            yield from self.settle()
        scaling = self.plan.config.precision.scaling
        metrics = Metrics(
            loss=_number(loss),
            grad_norm=_number(norm),
            lr=optim.learning_rate(opt),
            tokens=int(_number(tokens)),
            loss_scale=None if scaling == "none" else optim.loss_scale(state.opt),
            skipped=overflow,
            num_zeros=zeros,
        )
        return State(state.step + 1, params, opt), metrics

    def _zeros(self) -> Waits[int | None]:
        """Zeros of the gradient that is in the buffers, if they are to be counted."""
        if self.grads is None or not self.plan.config.optim.count_zeros:
            return None
        return int(_number((yield from num_zeros(self.world, self.grads, self.stage.specs))))

    def _gathered(self, new: dict[str, Tensor], donate: bool) -> Waits[Any]:
        """The state's parameters, from the optimizer's leaves."""
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
        self.whole_of = self.flat.start_all(shards)
        return self.whole_of

    def settle(self) -> Waits[None]:
        """Wait for parameters that are on their way for a next step, where none comes."""
        if self.flat is not None:
            yield from self.flat.settle()

    def evaluate(self, state: State, batches: Sequence[Batch]) -> Waits[float]:
        """Mean loss per valid token of the whole batch, without dropout, on every rank."""
        scale, _ = yield from seeds(self.world, [count_tokens(b) for b in batches], "tokens")
        out = yield from self._forward(state, batches)
        loss = yield from self._total({mb: y["loss"] for mb, y in out.items()}, scale)
        return _number(loss)

    def logits(self, state: State, batches: Sequence[Batch]) -> Waits[list[Tensor]]:
        """Logits of each microbatch where the head is (a plan made with head="logits"), else []."""
        out = yield from self._forward(state, batches)
        return [y["logits"] for y in out.values()]

    def _program(self, state: State) -> Program:
        """Processes take first derivatives of plain tensors; the mailbox runs under vmap."""
        kind = "any" if self.world.lead else "first"
        if self.plan.gathers_ahead:
            if state.params is not self.whole_of:  # not what the last step has returned
                self._ahead(state.params, None)
            assert self.flat is not None
            params = tree.unflatten(self.flat.views)
            return Program(self.world, self.stage, params, derivatives=kind, flat=self.flat)
        if not self.plan.shards_params:
            params = tree.map(self._computed, self.stage.specs, state.params)
            return Program(self.world, self.stage, params, derivatives=kind)
        if self.flat is None:
            self.flat = flat_params(self.plan, self.world, state.params, released=True)
        params = tree.unflatten(self.flat.views)
        return Program(
            self.world,
            self.stage,
            params,
            derivatives=kind,
            flat=self.flat,
            shards=state.params,
        )

    def _computed(self, spec: ParamSpec, x: Tensor) -> Tensor:
        """A parameter as layers use it: itself, or a copy of fewer bits."""
        return x.to(spec.dtype_among(self.plan.compute_dtype))

    def _forward(self, state: State, batches: Sequence[Batch]) -> Waits[dict[int, Message]]:
        program = self._program(state)
        stream = forward_streams(self.plan, len(batches))[self.stage.index]
        return (yield from executor.evaluate(program, stream, batches))

    def _total(self, sums: Mapping[int, Tensor], scale: Sequence[Tensor]) -> Waits[Tensor]:
        """The step's loss on every rank of every stage, from the sums where the loss is."""
        total = torch.zeros_like(scale[0])
        for mb in sorted(sums):
            total = total + sums[mb].double() * scale[mb]
        everywhere = tuple(range(self.plan.mesh.pp))
        return (yield from self.world.all_reduce(total, ("dp", "cp"), everywhere))


def count_tokens(batch: Batch) -> Tensor:
    """Valid tokens of a microbatch: the sum of its loss mask, float64, of shape `lead`."""
    return batch["mask"].double().flatten(-2).sum(-1)


def _number(x: Tensor) -> float:
    """A number that is the same on all ranks."""
    return float(x.flatten()[0])
