"""What a rank's memory holds during a step, from shapes alone: a formula, not a measurement.

    parameters    sum of local shapes
    gradients     the flat buffers, padding included
    optimizer     AdamW two moments a parameter, SGD one; in the parameters' type
    activations   in-flight microbatches (of the schedule) times what one keeps, by `kept_elements`

A block keeps, for each token (d hidden, h query and g key heads of k, f feed-forward, t = tp,
r = t under sequence parallelism, else 1):

    norms         4 d / r              inputs and outputs of both
    attention     (2 h + 2 g) k / t    q, k, v and the output; rotary keeps q and k once more
    feed-forward  2 f / t              before and after the activation; 4 f / t with a gate
    dropout       2 d / r bytes, and for the scores h s / t bytes with two copies of the scores

The head keeps 3 d / r (its norm's input and output, the gradient computed with the loss), its
weight's gradient, and for a moment a chunk of logits. Temporaries, the allocator's slack and the
buffers of the communication library come on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate

import attrs

from mfun import config as cfg
from mfun import tree
from mfun.config import Config
from mfun.schedule import B, F, I, Op, W
from mfun.schedule.layers import bare
from mfun.spec import local_shape
from mfun.train.plan import Plan


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of one rank of a pipeline stage.

    Args:
        params, grads, opt, activations: as in the module's docstring.
        in_flight: chunks of microbatches whose activations are kept at once.
    """

    params: int
    grads: int
    opt: int
    activations: int
    in_flight: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.params + self.grads + self.opt + self.activations


def memory(plan: Plan, stage: int) -> Memory:
    """The estimate for a rank of a stage; all ranks of a stage are alike.

    Args:
        plan: the layout.
        stage: which.

    Example:
        >>> from mfun.config import load, resolve
        >>> from mfun.train.plan import plan
        >>> m = memory(plan(resolve(load("tiny"), None)), stage=0)
        >>> m.opt == 2 * m.params, m.in_flight
        (True, 2)
    """
    config, itemsize = plan.config, plan.dtype.itemsize
    specs = tree.flatten(plan.stages[stage].specs)
    elements = sum(math.prod(local_shape(spec, plan.mesh)) for spec in specs.values())
    moments = {"adamw": 2, "sgd": 1}[config.optim.name]
    return Memory(
        params=elements * itemsize,
        grads=sum(buffer.numel() for buffer in plan.buffers(stage).buffers) * itemsize,
        opt=moments * elements * itemsize,
        activations=max(live_activations(plan, stage)),
        in_flight=max(in_flight(plan, stage)),
    )


def in_flight(plan: Plan, stage: int) -> list[int]:
    """Forwards of a chunk that wait for their backward's end, after each op of a stage."""
    return [*accumulate(map(_change, _on_chunks(plan, stage)))]


def live_activations(plan: Plan, stage: int) -> list[int]:
    """Bytes of activations that a stage keeps, after each op of its stream."""
    chunks = [kept_bytes(plan, stage, chunk) for chunk in range(plan.stages[stage].place.chunks)]
    ops = (op for op in _on_chunks(plan, stage) if isinstance(op, F | B | I | W))
    return [*accumulate(_change(op) * chunks[op.chunk] for op in ops)]


def _on_chunks(plan: Plan, stage: int) -> Iterator[Op]:
    """A stage's schedule, without what was inserted."""
    return bare(plan.streams[stage], [*map(len, plan.stages[stage].chunks)])


def _change(op: Op) -> int:
    return 1 if isinstance(op, F) else -1 if isinstance(op, B | W) else 0


def kept_bytes(plan: Plan, stage: int, chunk: int = 0) -> int:
    """Bytes kept of one microbatch, the largest, from a chunk's forward to its backward."""
    config, itemsize = plan.config, plan.dtype.itemsize
    tokens = cfg.microbatch_sizes(config)[0] * config.model.seq_len
    place = plan.stages[stage].place
    virtual = place.virtual(stage, chunk)
    blocks = len(cfg.stage_layers(config)[place.slice(virtual)])
    if config.parallel.recompute == "full":
        return math.ceil(tokens * itemsize * blocks * config.model.hidden / _sequence(config))
    bytes_ = blocks * tokens * (itemsize * kept_elements(config) + mask_bytes(config))
    if place.last(virtual):
        head = tokens * 3 * config.model.hidden / _sequence(config)
        weight = -(-config.model.vocab // config.parallel.tp) * config.model.hidden
        bytes_ += itemsize * (head + weight)
    return math.ceil(bytes_)


def kept_elements(config: Config) -> float:
    """Elements of the parameters' type that a block keeps for each token."""
    model, tp = config.model, config.parallel.tp
    heads = 2 * model.heads + 2 * max(model.kv, tp)
    if model.position == "rotary":
        heads += model.heads + max(model.kv, tp)
    scores = 2 * model.heads * model.seq_len if model.dropout else 0
    feed_forward = (4 if model.gated else 2) * model.ffn_size
    cut = heads * model.head_size + scores + feed_forward
    return 4 * model.hidden / _sequence(config) + cut / tp


def mask_bytes(config: Config) -> float:
    """Bytes of dropout masks that a block keeps for each token."""
    model = config.model
    if not model.dropout:
        return 0
    scores = model.heads * model.seq_len / config.parallel.tp
    return 2 * model.hidden / _sequence(config) + scores


def _sequence(config: Config) -> int:
    """Into how many pieces the sequence is cut outside the linear layers."""
    return config.parallel.tp if config.parallel.sequence_parallel else 1
