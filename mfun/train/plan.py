"""`Plan`: everything about a run that is known before it starts; nothing in it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import attrs
import torch

from mfun import config as cfg
from mfun import optim, tree
from mfun.config import Config, ConfigError
from mfun.flat import Bucket
from mfun.grads import GradBuffers, Reduction, lay_out, reductions
from mfun.mesh import Mesh
from mfun.models.gpt import Head, gpt
from mfun.pipeline.stage import Stage, cut
from mfun.schedule import Checked, Extras, Op, ScheduleError, dress, sends_first, whole
from mfun.schedule import plan as plan_schedule
from mfun.schedule.ops import AnyOp, Compute
from mfun.schedule.sizes import Sizes
from mfun.schedule.table import Schedule
from mfun.spec import DTYPES, ParamSpec
from mfun.train.extras import apart, bucket_size, extras

Streams = tuple[Checked[Op], ...]
Dressed = tuple[Checked[AnyOp], ...]


@attrs.frozen(eq=False)
class Plan:
    """A run's layout.

    Args:
        config: resolved.
        mesh: of its ranks.
        stages: the model's layers by pipeline stage.
        table: how each parameter's gradient is reduced.
        streams: each stage's ops of a training step, with all that they do besides the schedule.
    """

    config: Config
    mesh: Mesh
    stages: tuple[Stage, ...]
    table: dict[str, Reduction]
    streams: Dressed

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters; see `ParamSpec.dtype_among` for each."""
        return DTYPES[self.config.precision.formats.params]

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations and messages, and of parameters where they are used."""
        return DTYPES[self.config.precision.formats.compute]

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of gradients."""
        return DTYPES[self.config.precision.formats.grads]

    @property
    def specs(self) -> dict[str, ParamSpec]:
        """Every parameter once, by path, in the model's order."""
        return {path: s for stage in self.stages for path, s in tree.flatten(stage.specs).items()}

    @property
    def groups(self) -> dict[str, optim.Multipliers]:
        """Each parameter's multipliers of the learning rate and of weight decay."""
        decay = {path: spec.decay for path, spec in self.specs.items()}
        return optim.groups_of(decay, self.config.optim)

    @property
    def sharded(self) -> bool:
        """Whether optimizer and more are cut over the ranks that hold the same parameters."""
        return self.config.parallel.sharding != "no_shard"

    @property
    def shards_params(self) -> bool:
        """Whether parameters are cut too, and gathered where they are used."""
        return self.config.parallel.sharding == "optim_grads_params"

    @property
    def gathers_ahead(self) -> bool:
        """Whether updated parameters are gathered beside the next forward, layer by layer."""
        return self.config.parallel.gather_ahead

    @property
    def holds_shards(self) -> bool:
        """Whether a state holds this rank's shards of the parameters, not the whole of them."""
        return self.shards_params or self.gathers_ahead

    @property
    def shards_grads(self) -> bool:
        """Whether gradients are cut too: reduced microbatch by microbatch, and let go of."""
        return self.shards_params or self.config.parallel.sharding == "optim_grads"

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """How a stage's gradients lie in flat buffers; sharded, its parameters too.

        Sharded, what one bucket holds has equal multipliers (`optim.groups_of`), and for Muon it is
        hidden matrices or none; where buffers come and go with the layers that use them, it is also
        of one layer.
        """
        apart: dict[str, tuple[Any, ...]] = {**self.groups} if self.sharded else {}
        if self.config.optim.name == "muon":
            apart = {path: (*key, bool(self.specs[path].matrix)) for path, key in apart.items()}
        users = self.stages[stage].holders
        layers = {path: min(users({path}), default=()) for path in apart if self.shards_grads}
        return lay_out(
            self.stages[stage].specs,
            self.table,
            self.mesh,
            self.dtype,
            bucket_size=bucket_size(self.config, stage),
            sharded=self.sharded,
            apart=apart,
            layers=layers,
            pad=self.config.parallel.bucket_pad,
        )

    def buffers(
        self, stage: int, lead: Sequence[int] = (), device: torch.device | str = "meta"
    ) -> GradBuffers:
        """The gradient buffers of a stage; by default without memory.

        Args:
            stage: which.
            lead: dims in front of every tensor (`World.lead`).
            device: where.
        """
        return GradBuffers(
            self.stages[stage].specs,
            self.table,
            self.buckets(stage),
            self.grad_dtype,
            lead=lead,
            device=device,
            sharded=self.sharded,
            release=self.shards_grads,
            mean=self.mesh if self.config.parallel.mean_gradients else None,
            wide=self.config.parallel.wide_sums,
        )


def plan(config: Config, head: Head = "loss") -> Plan:
    """Lay a resolved configuration out.

    Args:
        config: from `mfun.config.resolve`.
        head: "loss", or "logits" for sampling.

    Returns:
        The plan; its schedule has been checked.

    Raises:
        ConfigError: the numbers do not fit together.

    Example:
        >>> from mfun.config import load, resolve
        >>> p = plan(resolve(load("tiny"), None))
        >>> len(p.stages), p.mesh.world
        (2, 4)
    """
    mesh = cfg.mesh(config)
    row, sizes = cfg.schedule(config)
    stages = cut(gpt(config, head=head), cfg.stage_layers(config), row.place(sizes))
    if config.parallel.recompute == "selective":
        stages = [apart(stage) for stage in stages]
    layout = Plan(
        config=config,
        mesh=mesh,
        stages=tuple(stages),
        table=reductions([s.specs for s in stages], mesh, config.parallel.shard_copies),
        streams=streams(config),
    )
    for size in cfg.rampup.sizes(config.train)[:-1]:  # refuses what the schedule cannot run
        dressed(layout, cfg.rampup.of_size(config, size).train.microbatches)
    _ = layout.groups  # refuses an override that matches no parameter before anything starts
    return attrs.evolve(layout, streams=dressed(layout))


def dressed(layout: Plan, microbatches: int = 0) -> Dressed:
    """The streams of a plan with what the configuration asks for besides the schedule.

    Args:
        layout: the plan.
        microbatches: 0 is the configuration's own number.

    Raises:
        ConfigError: fewer activations on the device than a schedule works with.
    """
    asked = [extras(layout.config, stage, layout.buffers(stage.index)) for stage in layout.stages]
    if all(one == Extras() for one in asked):
        return streams(layout.config, microbatches)
    try:
        return dress(streams(layout.config, microbatches), asked)
    except ScheduleError as error:
        depth, name = layout.config.parallel.offload, cfg.schedule_name(layout.config)
        if depth:
            raise ConfigError(
                f"parallel.offload is {depth} and the schedule is {name}: {error}; use a larger "
                "number, or 0 to keep all"
            ) from error
        raise


def forward_streams(layout: Plan, microbatches: int) -> Dressed:
    """The streams of an evaluation of so many microbatches."""
    bare = streams(layout.config, microbatches, forward_only=True)
    if not layout.shards_params:
        return bare
    found = [extras(layout.config, stage, layout.buffers(stage.index)) for stage in layout.stages]
    asked = [Extras(layers=x.layers, gather=x.gather, prefetch=x.prefetch) for x in found]
    return dress(bare, asked)


def streams(config: Config, microbatches: int = 0, *, forward_only: bool = False) -> Streams:
    """The ops of every stage, checked.

    Args:
        config: resolved.
        microbatches: 0 is the configuration's own number.
        forward_only: for evaluation.
    """
    row, sizes = cfg.schedule(config)
    row = _sends_first(row) if config.parallel.split_backward else _unsplit(row)
    return plan_schedule(
        row,
        sizes.stages,
        microbatches or sizes.microbatches,
        forward_only,
        chunks=sizes.chunks,
        group=sizes.group,
        costs=sizes.costs,
        memory=sizes.memory,
    )


@cache
def _unsplit(row: Schedule) -> Schedule:
    """The schedule with whole backwards; one for one, since plans are kept by it."""
    return attrs.evolve(row, ops=lambda stage, sizes: whole(row.ops(stage, sizes)))


@cache
def _sends_first(row: Schedule) -> Schedule:
    """The schedule with gradients of inputs sent before those of weights are computed."""

    def ops(stage: int, sizes: Sizes) -> Iterator[Compute]:
        return sends_first(row.ops(stage, sizes), stage, row.place(sizes))

    return attrs.evolve(row, ops=ops)
