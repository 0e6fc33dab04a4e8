"""Frozen configurations: what they hold, where they come from, and what they mean in integers."""

from __future__ import annotations

from mfun.config import rampup
from mfun.config.checks import check
from mfun.config.fields import ConfigError
from mfun.config.flops import ModelFlops, flops_per_token
from mfun.config.layout import mesh, resolve
from mfun.config.load import from_file, from_toml, load, override, to_toml
from mfun.config.pipeline import (
    chunk_count,
    microbatch_sizes,
    schedule,
    schedule_name,
    slice_costs,
    slice_count,
    stage_layers,
)
from mfun.config.presets import DEFAULT, PRESETS
from mfun.config.sections import (
    SECTIONS,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
)

__all__ = [
    "DEFAULT",
    "PRESETS",
    "SECTIONS",
    "Config",
    "ConfigError",
    "DataConfig",
    "ModelConfig",
    "ModelFlops",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainConfig",
    "check",
    "chunk_count",
    "flops_per_token",
    "from_file",
    "from_toml",
    "load",
    "mesh",
    "microbatch_sizes",
    "override",
    "rampup",
    "resolve",
    "schedule",
    "schedule_name",
    "slice_costs",
    "slice_count",
    "stage_layers",
    "to_toml",
]
