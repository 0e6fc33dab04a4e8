"""One training step: seeds, the pipeline, finalize, the optimizer. Values in, values out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun import optim, rng
from mfun.checkpoint.room import zeros
from mfun.comm.world import Message, Waits, World
from mfun.grads import (
    GradBuffers,
    Guard,
    finalize_steps,
    global_norm,
    num_zeros,
    seeds,
    shard_name,
)
from mfun.pipeline import executor
from mfun.schedule import Checked
from mfun.schedule.ops import AnyOp
from mfun.train.params import StageParams
from mfun.train.plan import Dressed, Plan, dressed, forward_streams
from mfun.train.rounding import words_by_path, words_by_shard
from mfun.train.shards import by_shard, sharded_matrices

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
        self.params = StageParams(plan, world)

    def init(self) -> State:
        """Initial weights, bitwise the same in every layout, and a fresh optimizer."""
        return self.fresh(self.params.drawn())

    def fresh(self, params: Any) -> State:
        """Step 0 of these parameters, in this trainer's form, and a fresh optimizer."""
        return State(0, params, self.optimizer.init(self.params.leaves(params)))

    def blank(self) -> State:
        """A state of zeros in this trainer's form, to be filled from a checkpoint."""
        params = self.params.blank()
        if self.plan.config.parallel.offload_optimizer:
            return self.fresh(params)
        leaves = self.params.leaves(params)
        opt = self.optimizer.init({name: x.to("meta") for name, x in leaves.items()})
        device = self._device()
        room = {n: zeros(x.shape, x.dtype, device) for n, x in optim.state_tensors(opt).items()}
        return State(0, params, optim.restore_state(opt, room, optim.state_scalars(opt)))

    def adopt(self, state: State) -> State:
        """A state by path, as checkpoints hold it, as this trainer runs it."""
        if not self.plan.sharded:
            return state
        opt = by_shard(self.plan, self.world, state.opt)
        return state._replace(params=self.params.cut(state.params), opt=opt)

    def _device(self) -> torch.device:
        """Where this stage's tensors are, though a stage without layers has no parameters."""
        return self.world.build(lambda coords: torch.zeros(())).device

    def buffers(self) -> GradBuffers:
        """Gradient buffers for this stage, made at the first step."""
        if self.grads is None:
            self.grads = self.plan.buffers(self.stage.index, self.world.lead, self._device())
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
        config, grads = self.plan.config, self.buffers()
        scale, tokens = yield from seeds(
            self.world, [count_tokens(b) for b in batches], config.train.loss_norm
        )
        model = config.model
        key = rng.key(config.train.seed, "dropout", state.step) if model.dropout else None
        program = self.params.program(state.params)
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
        leaves = self.params.leaves(state.params)
        new, opt = self.optimizer.update(
            grads, state.opt, leaves, norm=norm, donate=donate, overflow=overflow
        )
        params = yield from self.params.updated(new, donate)
        if state.step + 1 >= self.plan.config.train.steps:  # nobody may come to wait for it
            yield from self.params.settle()
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

    def _forward(self, state: State, batches: Sequence[Batch]) -> Waits[dict[int, Message]]:
        program = self.params.program(state.params)
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
