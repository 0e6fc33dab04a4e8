"""Shrink a configuration to seconds of work while keeping everything a layout can get wrong.

Kept: the mesh and its order, the pipeline schedule, uneven stages, every feature of the model, how
heads, vocabulary and sequence divide (or do not), loss terms and optimizer. Made small: widths,
depth, batch, and data-parallel copies beyond two when the world is large.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

import attrs

from mfun import tree
from mfun.config import (
    Config,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainConfig,
    resolve,
    slice_count,
)
from mfun.config import microbatch_sizes as microbatches_of
from mfun.models.gpt import gpt

LOCAL_RANKS = 8
"""Most ranks that are started as processes; larger layouts are run in one process."""
LEAST_EPS = 1e-4
"""Least `optim.eps`: some true gradients are 0 (a key bias's), and Adam would turn their rounding,
1e-17, into updates of 1e-17 / eps learning rates: compared to 1e-10, that must stay far below."""

STILL = {"*.qkv_bias": {"lr": 0.0}, "*.kv_bias": {"lr": 0.0}}
"""What Lion must not move where layouts are compared: it takes the sign of a key bias's gradient,
which is 0 but for its rounding. (The gradient itself is compared.)"""


def shrink(config: Config, steps: int = 3) -> Config:
    """The small twin of a resolved configuration, in float64.

    Args:
        config: resolved.
        steps: updates to compare.

    Returns:
        A resolved configuration with the same layout and features.

    Example:
        >>> from mfun.config import load
        >>> big = resolve(load("llama3-8b", ["parallel.tp=2", "parallel.pp=2"]), 4)
        >>> small = shrink(big)
        >>> small.model.layers, small.model.heads, small.model.kv_heads, small.parallel.pp
        (4, 8, 4, 2)
    """
    parallel = _parallel(config.parallel)
    layers, per_stage = _layers(config)
    model = _model(config.model, config.parallel, layers)
    parallel = attrs.evolve(parallel, layers_per_stage=per_stage)
    small = attrs.evolve(
        config,
        model=model,
        parallel=parallel,
        precision=PrecisionConfig(policy="fp64"),
        optim=_optim(config.optim, config.train, steps),
        train=_train(config, parallel, steps),
    )
    return resolve(attrs.evolve(small, optim=_matched(small)), None)


def _parallel(parallel: ParallelConfig) -> ParallelConfig:
    """The same mesh, with at most two data ranks where it is too large to start here."""
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    return attrs.evolve(parallel, dp=parallel.dp if world <= LOCAL_RANKS else min(parallel.dp, 2))


def _layers(config: Config) -> tuple[int, tuple[int, ...]]:
    """Depth and slices: two blocks a slice, or as few as keep larger slices larger."""
    given, layers = config.parallel.layers_per_stage, config.model.layers
    slices = slice_count(config)
    if not given:
        return (slices + layers % slices if layers % slices else min(layers, 2 * slices)), ()
    if max(given) <= 2:
        return layers, given
    sizes = sorted(set(given) - {0})
    small = tuple(0 if n == 0 else 2 if len(sizes) == 1 else 1 + sizes.index(n) for n in given)
    return sum(small), small


def _model(model: ModelConfig, parallel: ParallelConfig, layers: int) -> ModelConfig:
    tp = parallel.tp
    heads, kv = _heads(model.heads, model.kv, tp)
    own_width = model.hidden != model.heads * model.head_size
    shard = max(2, math.ceil(8 / tp))
    seq = shard * tp if model.seq_len % tp == 0 else 2 * tp + 1
    window = model.sliding_window
    original = model.rope_original
    return attrs.evolve(
        model,
        layers=layers,
        heads=heads,
        kv_heads=0 if model.kv == model.heads else kv,
        head_dim=4 if own_width else 0,
        hidden=heads * 4 + (2 * tp if own_width else 0),
        ffn=tp * 5 if model.ffn else 0,
        vocab=min(model.vocab, (8 + math.ceil(16 / tp)) * tp + model.vocab % tp),
        seq_len=seq,
        sliding_window=0 if not window else max(2, min(window, seq // 2 + 1)),
        rope_original=0 if not original else max(2, round(seq * original / model.seq_len)),
    )


def _heads(heads: int, kv: int, tp: int) -> tuple[int, int]:
    """The fewest heads with the same relations to kv heads and tp; two a rank stand for more."""
    if kv == heads:
        small = tp * min(2, heads // tp)
        return small, small
    if kv % tp == 0:
        small_kv = tp * min(2, kv // tp)
        return small_kv * 2, small_kv
    return tp * min(2, heads // tp), kv


def _optim(optim: OptimConfig, train: TrainConfig, steps: int) -> OptimConfig:
    """Warm-up and decay squeezed into the compared steps; no noise amplified by Adam."""
    warmup = min(optim.warmup, 1)
    end = optim.decay_steps and max(warmup + 1, round(steps * optim.decay_steps / train.steps))
    still = STILL if optim.name == "lion" else {}
    return attrs.evolve(
        optim,
        warmup=warmup,
        decay_steps=end,
        eps=max(optim.eps, LEAST_EPS),
        overrides={**optim.overrides, **still},
    )


def _matched(small: Config) -> OptimConfig:
    """Without the overrides of blocks that the twin does not have."""
    paths = [path for layer in gpt(small) for path in tree.flatten(layer.specs)]
    kept = {
        pattern: change
        for pattern, change in small.optim.overrides.items()
        if any(fnmatchcase(path, pattern) for path in paths)
    }
    return attrs.evolve(small.optim, overrides=kept)


def _train(config: Config, parallel: ParallelConfig, steps: int) -> TrainConfig:
    """Two samples a microbatch, one more in the first if they are unequal; few microbatches."""
    count = min(config.train.microbatches, max(5, parallel.pp + 1))
    sizes = microbatches_of(config)
    uneven = len(set(sizes)) > 1
    per_rank = count * (2 if min(sizes) > 1 else 1) + (1 if uneven and count > 1 else 0)
    return attrs.evolve(
        config.train,
        steps=steps,
        microbatches=count,
        global_batch=per_rank * parallel.dp,
        rampup=(),
    )
