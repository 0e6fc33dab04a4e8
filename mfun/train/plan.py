"""`Plan`: everything about a run that is known before it starts; nothing in it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import attrs
import torch

from mfun import config as cfg
from mfun import tree
from mfun.config import Config
from mfun.grads import GradBuffers, Reduction, reductions
from mfun.mesh import Mesh
from mfun.models.gpt import Head, gpt
from mfun.pipeline.stage import Stage, cut
from mfun.schedule import B, Checked, Compute, I, Op, Sizes, W
from mfun.schedule import plan as plan_schedule
from mfun.schedule.table import Generate
from mfun.spec import ParamSpec

Streams = tuple[Checked[Op], ...]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@attrs.frozen(eq=False)
class Plan:
    """A run's layout.

    Args:
        config: resolved.
        mesh: of its ranks.
        stages: the model's layers by pipeline stage.
        table: how each parameter's gradient is reduced.
        streams: each stage's ops of a training step.
    """

    config: Config
    mesh: Mesh
    stages: tuple[Stage, ...]
    table: dict[str, Reduction]
    streams: Streams

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters, activations and gradients."""
        return DTYPES[self.config.precision.policy]

    @property
    def specs(self) -> dict[str, ParamSpec]:
        """Every parameter once, by path, in the model's order."""
        return {path: s for stage in self.stages for path, s in tree.flatten(stage.specs).items()}

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
            self.mesh,
            self.dtype,
            lead=lead,
            device=device,
            bucket_size=self.config.parallel.bucket_size or None,
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
    stages = tuple(cut(gpt(config, head=head), cfg.stage_layers(config), row.place(sizes)))
    return Plan(
        config=config,
        mesh=mesh,
        stages=stages,
        table=reductions([stage.specs for stage in stages], mesh),
        streams=streams(config),
    )


def streams(config: Config, microbatches: int = 0, *, forward_only: bool = False) -> Streams:
    """The ops of every stage, checked.

    Args:
        config: resolved.
        microbatches: 0 is the configuration's own number.
        forward_only: for evaluation.
    """
    row, sizes = cfg.schedule(config)
    if not config.parallel.split_backward:
        row = attrs.evolve(row, ops=_unsplit(row.ops))
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
def _unsplit(ops: Generate) -> Generate:
    """The schedule with whole backwards: B in the place of each I, and no W."""

    def whole(stage: int, sizes: Sizes) -> Iterator[Compute]:
        for op in ops(stage, sizes):
            if not isinstance(op, W):
                yield B(op.mb, op.chunk) if isinstance(op, I) else op

    return whole
