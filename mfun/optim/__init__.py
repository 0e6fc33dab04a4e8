"""Optimizers as pairs of pure functions: blocks, named chains, AdamW, SGD, schedules."""

from mfun.optim.adam import adamw, scale_by_adam
from mfun.optim.build import build, build_schedule, learning_rate
from mfun.optim.clip import clip_by_global_norm
from mfun.optim.decay import add_decayed_weights, scale_by_learning_rate
from mfun.optim.schedule import Schedule, constant, cosine, inverse_sqrt, linear, wsd
from mfun.optim.sgd import sgd, trace
from mfun.optim.transform import (
    Leaves,
    State,
    Transform,
    apply_updates,
    named_chain,
    restore_state,
    state_scalars,
    state_tensors,
    terminal,
)

__all__ = [
    "Leaves",
    "Schedule",
    "State",
    "Transform",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "build",
    "build_schedule",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "inverse_sqrt",
    "learning_rate",
    "linear",
    "named_chain",
    "restore_state",
    "scale_by_adam",
    "scale_by_learning_rate",
    "sgd",
    "state_scalars",
    "state_tensors",
    "terminal",
    "trace",
    "wsd",
]
