"""What a configuration means for the pipeline: schedule, slices of the model, their costs."""

from __future__ import annotations

from mfun.config.flops import flops_per_token
from mfun.config.sections import Config
from mfun.schedule import SCHEDULES, Costs, Schedule, Sizes


def schedule_name(config: Config) -> str:
    """The pipeline schedule that runs, with ``auto`` decided by the number of stages."""
    asked = config.parallel.schedule
    return asked if asked != "auto" else "none" if config.parallel.pp == 1 else "1f1b"


def chunk_count(config: Config) -> int:
    """Chunks of a stage: what is asked for, or else the schedule's own, 2 where any number runs."""
    return config.parallel.chunks or SCHEDULES[schedule_name(config)].chunks or 2


def slice_count(config: Config) -> int:
    """Slices of the model: pipeline stages times chunks, over the model's replicas (DualPipe)."""
    row = SCHEDULES[schedule_name(config)]
    return config.parallel.pp * chunk_count(config) // row.replicas


def schedule(config: Config) -> tuple[Schedule, Sizes]:
    """The schedule that runs and the numbers it is generated from.

    Example:
      >>> from mfun.config import load
      >>> row, sizes = schedule(load("tiny", ["parallel.schedule=zbv"]))
      >>> row.name, sizes.stages, sizes.chunks
      ('zbv', 2, 2)
    """
    parallel = config.parallel
    sizes = Sizes(
        stages=parallel.pp,
        microbatches=config.train.microbatches,
        chunks=chunk_count(config),
        group=parallel.microbatch_group,
        costs=slice_costs(config),
        memory=parallel.in_flight,
    )
    return SCHEDULES[schedule_name(config)], sizes


def slice_costs(config: Config) -> Costs:
    """Costs of each slice by its matrix products, in units of one block's forward.

    The head computes its gradients along with the loss (`nn.head`), so all three of its products
    are in F; but its weight's is in W where a microbatch has no more tokens than the model is wide.
    The embedding looks up and costs nothing; an empty slice costs a tenth of a block.

    Example:
      >>> from mfun.config import Config, ModelConfig, ParallelConfig
      >>> model = ModelConfig(layers=3, hidden=8, heads=2, vocab=64, seq_len=8)
      >>> costs = slice_costs(Config(model=model, parallel=ParallelConfig(pp=2)))
      >>> costs.I, [f > i for f, i in zip(costs.F, costs.I)]
      ((2.0, 1.0), [False, True])
    """
    flops = flops_per_token(config.model)
    blocks = [float(len(part)) or 0.1 for part in stage_layers(config)]
    product = flops.head * config.model.layers / (flops.forward - flops.head)
    late = microbatch_sizes(config)[0] * config.model.seq_len <= config.model.hidden
    in_f, in_w = (2, 1) if late else (3, 0)
    return Costs(
        F=(*blocks[:-1], round(blocks[-1] + in_f * product, 3)),
        I=tuple(blocks),
        W=(*blocks[:-1], round(blocks[-1] + in_w * product, 3)),
    )


def microbatch_sizes(config: Config) -> tuple[int, ...]:
    """Sequences in each microbatch of one data parallel rank; they differ by at most one.

    Example:
      >>> from mfun.config import Config, TrainConfig
      >>> microbatch_sizes(Config(train=TrainConfig(global_batch=8, microbatches=3)))
      (3, 3, 2)
    """
    local = config.train.global_batch // (config.parallel.dp or 1)
    small, extra = divmod(local, config.train.microbatches)
    return tuple(small + (i < extra) for i in range(config.train.microbatches))


def stage_layers(config: Config) -> tuple[tuple[int, ...], ...]:
    """Block indices of each slice of the model: together 0 .. layers-1, each once and in order.

    Slice c * pp + s is chunk c of stage s (in a wave, every second chunk backwards). With one chunk
    a stage, slices are stages. ``parallel.layers_per_stage`` decides if given. Otherwise sizes
    differ by at most one, and the larger slices are those between, the later first: the first also
    has the embedding and the last, which gets an extra block after all others, the head.
    ``parallel.count_embedding`` and ``count_loss`` count these as a block each.

    Raises:
      ConfigError: custom sizes that do not fit, or more slices than blocks.

    Example:
      >>> from mfun.config import Config, ModelConfig, ParallelConfig
      >>> stage_layers(Config(model=ModelConfig(layers=5), parallel=ParallelConfig(pp=4)))
      ((0,), (1,), (2, 3), (4,))
    """
    sizes = config.parallel.layers_per_stage or _even(config, slice_count(config))
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(range(a, a + n)) for a, n in zip(starts, sizes, strict=True))


def _even(config: Config, slices: int) -> tuple[int, ...]:
    parallel = config.parallel
    ends = (int(parallel.count_embedding), int(parallel.count_loss))
    small, extra = divmod(config.model.layers + sum(ends), slices)
    larger = [*range(slices - 2, 0, -1), 0, slices - 1][:extra]
    sizes = [small + (i in larger) for i in range(slices)]
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    return tuple(sizes)
