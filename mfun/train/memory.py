"""Activations that a rank keeps during a step, from shapes alone: a formula, not a measurement.

The layers in flight, by the schedule's stream, keep what `layer_bytes` says; `mfun.plan.memory` has
the rest of a rank's memory.

A block keeps, for each token (d hidden, h query and g key heads of k, f feed-forward, t = tp,
r = t under sequence parallelism, else 1):

    norms         4 d / r              inputs and outputs of both
    attention     (2 h + 2 g) k / t    q, k, v and the output; rotary keeps q and k once more
    feed-forward  2 f / t              before and after the activation; 4 f / t with a gate
    dropout       2 d / r bytes, and for the scores h s / t bytes with two copies of the scores

The head keeps 3 d / r (its norm's input and output, the gradient computed with the loss), its
weight's gradient, and for a moment a chunk of logits. A layer that runs again for its backward
keeps d / r, its input, until then. A layer's temporaries come on top.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from mfun import config as cfg
from mfun.config import Config
from mfun.schedule import B, F, Op, W
from mfun.schedule.layers import bare, expand
from mfun.schedule.ops import Offload, Recompute, Reload
from mfun.train.extras import recomputed
from mfun.train.plan import Plan


def in_flight(plan: Plan, stage: int) -> list[int]:
    """Forwards of a chunk that wait for their backward's end, after each op of a stage."""
    return [*accumulate(map(_change, _on_chunks(plan, stage)))]


def live_activations(plan: Plan, stage: int) -> list[int]:
    """Bytes of activations that a stage keeps on its device, after each op of its stream.

    Ops on chunks are taken as ops on their layers. What has run again is whole until its backward;
    what was offloaded is not there.
    """
    own = plan.stages[stage]
    ops = [*expand(plan.streams[stage], [*map(len, own.chunks)])]
    again = {(op.chunk, op.layer) for op in ops if isinstance(op, Recompute)}
    table: dict[tuple[int, int | None], Kept] = {**layer_bytes(plan, stage)}
    held: defaultdict[tuple[int, int], int] = defaultdict(int)  # by microbatch and chunk
    away: dict[tuple[int, int], int] = {}
    live = [0]
    for op in ops:
        change = 0
        if isinstance(op, Offload):
            away[op.mb, op.chunk] = held.pop((op.mb, op.chunk))
            change = -away[op.mb, op.chunk]
        elif isinstance(op, Reload):
            change = away.pop((op.mb, op.chunk))
        elif isinstance(op, (F, B, W, Recompute)):
            kept = table.get((op.chunk, op.layer), Kept(0, 0))
            at_first = kept.x if (op.chunk, op.layer) in again else kept.whole
            by_kind = {F: at_first, Recompute: kept.whole - at_first}
            change = by_kind.get(type(op), -kept.whole)
        if isinstance(op, (F, B, W, Recompute, Reload)):
            held[op.mb, op.chunk] += change
        live.append(live[-1] + change)
    return live[1:]


def _on_chunks(plan: Plan, stage: int) -> Iterator[Op]:
    """A stage's schedule, without what was inserted."""
    return bare(plan.streams[stage], [*map(len, plan.stages[stage].chunks)])


def _change(op: Op) -> int:
    return 1 if isinstance(op, F) else -1 if isinstance(op, B | W) else 0


def kept_bytes(plan: Plan, stage: int, chunk: int = 0) -> int:
    """Bytes kept of one microbatch, the largest, from a chunk's forward to its backward."""
    again = recomputed(plan.config, plan.stages[stage])
    return sum(
        kept.x if again == "full" or (again and at in again) else kept.whole
        for at, kept in layer_bytes(plan, stage).items()
        if at[0] == chunk
    )


class Kept(NamedTuple):
    """Bytes that a layer keeps of the largest microbatch: all, or only its input to run again."""

    whole: int
    x: int


def layer_bytes(plan: Plan, stage: int) -> dict[tuple[int, int], Kept]:
    """What each layer of a stage, (chunk, layer), keeps."""
    config, itemsize = plan.config, plan.compute_dtype.itemsize
    tokens = cfg.microbatch_sizes(config)[0] * config.model.seq_len
    x = tokens * itemsize * config.model.hidden / _sequence(config)
    attention = tokens * (itemsize * attention_elements(config) + mask_bytes(config))
    mlp = tokens * itemsize * mlp_elements(config)
    if config.model.dropout:
        mlp += x / itemsize
    weight = -(-config.model.vocab // config.parallel.tp) * config.model.hidden
    by_name = {
        "embed": (0.0, 0.0),
        "attn": (attention, x),
        "mlp": (mlp, x),
        "head": (3 * x + itemsize * weight, x),
    }
    return {
        (chunk, i): Kept(*map(math.ceil, by_name.get(_part(layer.name), (attention + mlp, x))))
        for chunk, layers in enumerate(plan.stages[stage].chunks)
        for i, layer in enumerate(layers)
    }


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def attention_elements(config: Config) -> float:
    """Elements of the parameters' type that a block's attention half keeps for each token."""
    model, tp = config.model, config.parallel.tp
    heads = 2 * model.heads + 2 * max(model.kv, tp)
    if model.position == "rotary":
        heads += model.heads + max(model.kv, tp)
    scores = 2 * model.heads * model.seq_len if model.dropout else 0
    return 2 * model.hidden / _sequence(config) + (heads * model.head_size + scores) / tp


def mlp_elements(config: Config) -> float:
    """The same of its feed-forward half."""
    feed_forward = (4 if config.model.gated else 2) * config.model.ffn_size
    return 2 * config.model.hidden / _sequence(config) + feed_forward / config.parallel.tp


def mask_bytes(config: Config) -> float:
    """Bytes of dropout masks that the attention half keeps for each token."""
    model = config.model
    if not model.dropout:
        return 0
    scores = model.heads * model.seq_len / config.parallel.tp
    return model.hidden / _sequence(config) + scores


def _sequence(config: Config) -> int:
    """Into how many pieces the sequence is cut outside the linear layers."""
    return config.parallel.tp if config.parallel.sequence_parallel else 1
