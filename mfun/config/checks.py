"""Checks across fields, run when a whole configuration is built and before anything is allocated.

Each message names the keys, the numbers and a way out.
"""

from __future__ import annotations

from collections.abc import Iterator

from mfun.config.fields import ConfigError
from mfun.config.pipeline import chunk_count, schedule_name, slice_count
from mfun.config.precision import precision_problems
from mfun.config.sections import Config
from mfun.schedule import SCHEDULES, ScheduleError, Sizes


def check(config: Config) -> None:
    """Refuse a configuration whose parts do not fit each other, or that is not built yet.

    Raises:
      ConfigError: with every problem found, one a line.

    Example:
      >>> from mfun.config import Config, ModelConfig
      >>> check(Config(model=ModelConfig(heads=6, hidden=48, kv_heads=4)))
      Traceback (most recent call last):
      mfun.config.fields.ConfigError: model.heads is 6 and model.kv_heads is 4; each key head ...
    """
    parts = (
        _unbuilt,
        _widths,
        _heads,
        _positions,
        _stages,
        _recompute,
        _gathered,
        _batches,
        _shards,
        _checked,
        _rampup,
        _rates,
        _data,
    )
    problems = [problem for part in parts for problem in part(config)]
    problems += precision_problems(config.precision)
    if problems:
        raise ConfigError("\n".join(problems))


def _unbuilt(config: Config) -> Iterator[str]:
    parallel = config.parallel
    rows = [
        ("parallel.cp", parallel.cp, 1, "context parallelism"),
        ("parallel.ep", parallel.ep, 1, "expert parallelism"),
        ("parallel.etp", parallel.etp, (0, parallel.tp), "tensor parallelism inside experts"),
    ]
    for key, value, built, what in rows:
        allowed = built if isinstance(built, tuple) else (built,)
        if value not in allowed:
            shown = " or ".join(dict.fromkeys(_shown(one) for one in allowed))
            yield f"{key} is {_shown(value)}: {what} is not built yet; use {shown}."


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _widths(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    if not model.head_dim and model.hidden % model.heads:
        yield (
            f"model.hidden is {model.hidden}, which model.heads = {model.heads} does not divide; "
            "change one, or set model.head_dim."
        )
    if model.ffn_size % tp:
        yield _undivided("model.ffn", model.ffn_size, "parallel.tp", tp)
    if config.parallel.sequence_parallel and model.seq_len % tp:
        yield (
            f"parallel.sequence_parallel cuts model.seq_len = {model.seq_len} over parallel.tp = "
            f"{tp}, which does not divide it; use a multiple of {tp} or turn it off."
        )
    if model.seq_len % (2 * config.parallel.cp) and config.parallel.cp > 1:
        yield (
            f"model.seq_len is {model.seq_len}, not a multiple of 2 * parallel.cp = "
            f"{2 * config.parallel.cp} as the zigzag split needs; change one of them."
        )


def _heads(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    if model.heads % tp:
        yield _undivided("model.heads", model.heads, "parallel.tp", tp)
    if model.heads % model.kv:
        yield (
            f"model.heads is {model.heads} and model.kv_heads is {model.kv}; each key head serves "
            f"equally many query heads, so use a divisor of {model.heads} for model.kv_heads."
        )
    if model.kv % tp and tp % model.kv:
        yield (
            f"model.kv_heads is {model.kv} and parallel.tp is {tp}; key heads are cut over tp or "
            "repeated on it, so one must divide the other."
        )


def _positions(config: Config) -> Iterator[str]:
    model = config.model
    if model.position == "rotary" and model.head_size % 2:
        yield (
            f"model.position is rotary, which turns pairs of elements, but a head has "
            f"{model.head_size}; use an even model.head_dim."
        )
    if model.rope_scaling != "none" and model.position != "rotary":
        yield (
            f"model.rope_scaling is {model.rope_scaling} but model.position is {model.position}; "
            "set model.position=rotary or model.rope_scaling=none."
        )
    if model.rope_scaling == "yarn" and model.rope_theta <= 1:
        yield (
            f"model.rope_theta is {model.rope_theta:g}; yarn scaling divides by its logarithm, so "
            "use a number above 1."
        )
    for scaling, low, high in (
        ("llama3", "rope_low", "rope_high"),
        ("yarn", "rope_beta_slow", "rope_beta_fast"),
    ):
        if model.rope_scaling == scaling and getattr(model, low) >= getattr(model, high):
            yield (
                f"model.{low} is {getattr(model, low):g} and model.{high} is "
                f"{getattr(model, high):g}; {scaling} scaling needs the first below the second."
            )


def _stages(config: Config) -> Iterator[str]:
    parallel, layers, slices = config.parallel, config.model.layers, slice_count(config)
    row, counted = SCHEDULES[schedule_name(config)], chunk_count(config)
    custom = parallel.layers_per_stage
    word = "stages" if counted == 1 else "slices of the model"
    product = "parallel.pp" if counted == 1 else f"parallel.pp * {counted} chunks"
    if row.replicas > 1:
        product += f" / {row.replicas} replicas"
    if custom and (len(custom) != slices or sum(custom) != layers):
        yield (
            f"parallel.layers_per_stage {list(custom)} has {len(custom)} stages and {sum(custom)} "
            f"blocks, but there are {slices} {word} ({product}) and "
            f"model.layers is {layers}; give {slices} numbers whose sum is {layers}."
        )
    counted_ends = int(parallel.count_embedding) + int(parallel.count_loss)
    if not custom and layers + counted_ends < slices:
        yield (
            f"model.layers is {layers} but there are {slices} {word} ({product}); "
            "use fewer stages or chunks, or allow empty ones by parallel.layers_per_stage."
        )
        return
    try:
        row.place(Sizes(parallel.pp, config.train.microbatches, counted, parallel.microbatch_group))
    except ScheduleError as error:
        yield (
            f"parallel.schedule is {row.name} and parallel.pp is {parallel.pp}: {error}; "
            "change one of them (parallel.chunks=0 is the schedule's own number)."
        )


def _recompute(config: Config) -> Iterator[str]:
    parallel = config.parallel
    if (parallel.recompute == "first") != (parallel.recompute_layers > 0):
        yield (
            f"parallel.recompute is {parallel.recompute} and parallel.recompute_layers is "
            f"{parallel.recompute_layers}; recompute=first needs a number of layers above 0, and "
            "nothing else has one."
        )


def _gathered(config: Config) -> Iterator[str]:
    params, compute, *_ = config.precision.formats
    sharding, ahead = config.parallel.sharding, config.parallel.gather_ahead
    if ahead and sharding not in ("optim", "optim_grads"):
        yield (
            f"parallel.gather_ahead is for parallel.sharding = optim and optim_grads, and it is "
            f"{sharding}, which "
            + ("cuts nothing" if sharding == "no_shard" else "gathers by its stream (prefetch)")
            + "; leave it out, or change the sharding."
        )
    if (ahead or sharding == "optim_grads_params") and params != compute:
        what, instead = "sharding = optim_grads_params", "use sharding=optim_grads"
        if ahead:
            what, instead = "gather_ahead", "leave it out"
        yield (
            f"precision.params is {params} and precision.compute is {compute}, but parallel."
            f"{what} gathers parameters as they are used; give both one format, or {instead}."
        )


def _batches(config: Config) -> Iterator[str]:
    train, dp = config.train, config.parallel.dp or 1
    if train.global_batch % dp:
        yield _undivided("train.global_batch", train.global_batch, "parallel.dp", dp)
    elif train.microbatches > train.global_batch // dp:
        yield (
            f"train.microbatches is {train.microbatches}, more than the {train.global_batch // dp} "
            f"sequences of a data parallel rank (train.global_batch = {train.global_batch} over "
            f"parallel.dp = {dp}); use fewer microbatches or a larger batch."
        )


def _shards(config: Config) -> Iterator[str]:
    parallel = config.parallel
    copies, dp = parallel.shard_copies, parallel.dp or 1
    if copies > 1 and parallel.sharding == "no_shard":
        yield (
            f"parallel.shard_copies is {copies}, but parallel.sharding is no_shard, which cuts "
            "nothing; choose a sharding, or 1."
        )
    elif parallel.dp and dp % copies:
        yield _undivided("parallel.dp", dp, "parallel.shard_copies", copies)
    grads = config.precision.formats.grads
    if parallel.wide_sums and (
        parallel.sharding == "no_shard" or copies > 1 or grads not in ("bf16", "fp16")
    ):
        yield (
            "parallel.wide_sums adds 16-bit gradients up in the exchange of shards, but parallel."
            f"sharding is {parallel.sharding}, parallel.shard_copies {copies} and precision.grads "
            f"{grads}; choose a sharding without copies and grads=bf16, or leave it out."
        )


def _checked(config: Config) -> Iterator[str]:
    train, scaling = config.train, config.precision.scaling
    if scaling == "dynamic" and (train.check_gradients or train.large_gradient):
        yield (
            "train.check_gradients (or large_gradient) is set, but with precision.policy = "
            f"{config.precision.policy} scaled gradients overflow by design, and the step is "
            "skipped; leave it out, or use precision.policy=bf16."
        )


def _rampup(config: Config) -> Iterator[str]:
    train, dp = config.train, config.parallel.dp or 1
    if not train.rampup:
        return
    if len(train.rampup) != 3:
        yield f"train.rampup is {[*train.rampup]}; give three numbers, [start, increment, samples]."
        return
    start, increment, _ = train.rampup
    whole = train.global_batch
    if start > whole or (whole - start) % increment:
        fix = (
            f"increment that divides {whole} - {start}" if start < whole else f"start below {whole}"
        )
        yield (
            f"train.rampup goes from {start} in steps of {increment}, which does not reach "
            f"train.global_batch = {whole}; use a{'n' * (start < whole)} {fix}."
        )
    if whole % (dp * train.microbatches):
        yield (
            f"train.rampup needs microbatches of one size, but train.global_batch = {whole} is no "
            f"multiple of parallel.dp * train.microbatches = {dp} * {train.microbatches}."
        )
        return
    unit = whole // train.microbatches
    for name, size in (("start", start), ("increment", increment)):
        if size % unit:
            yield (
                f"train.rampup's {name} is {size}, no multiple of the {unit} sequences that one "
                f"microbatch of all data parallel ranks has (train.global_batch = {whole} over "
                f"train.microbatches = {train.microbatches}); use a multiple of {unit}."
            )


def _rates(config: Config) -> Iterator[str]:
    optim = config.optim
    if optim.min_lr > optim.lr:
        yield f"optim.min_lr is {optim.min_lr:g}, above optim.lr = {optim.lr:g}; lower it."


def _data(config: Config) -> Iterator[str]:
    data = config.data
    for weights, path in (("weights", "path"), ("val_weights", "val_path")):
        given, paths = getattr(data, weights), getattr(data, path)
        if given and len(given) != len(paths):
            yield (
                f"data.{weights} has {len(given)} numbers and data.{path} names {len(paths)} "
                "datasets; give one number for each, or none."
            )
        if given and not any(given):
            yield f"data.{weights} is {[*given]}; give at least one number above 0."
    if len(data.split) > 3 or (data.split and not data.split[0]):
        yield (
            f"data.split is {[*data.split]}; give up to three numbers, for training, validation "
            "and test, the first above 0."
        )
    if data.split and data.val_path:
        yield "data.split and data.val_path both say what validation uses; leave one out."
    if data.mock and (data.path or data.val_path):
        yield "data.mock is true and data.path names data; leave one out."


def _undivided(key: str, value: int, by: str, size: int) -> str:
    return f"{key} is {value}, which {by} = {size} does not divide; use a multiple of {size}."
