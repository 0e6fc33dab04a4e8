"""Optimizers as pairs of pure functions: blocks, named chains, whole optimizers, schedules."""

from mfun.optim.adam import adamw, scale_by_adam
from mfun.optim.build import build, build_schedule, learning_rate, moments
from mfun.optim.clip import clip_by_global_norm, clip_by_value
from mfun.optim.decay import add_decayed_weights, scale_by_learning_rate
from mfun.optim.groups import Groups, Multipliers, groups_of
from mfun.optim.layout import Matrices, matrices_of
from mfun.optim.lion import lion, scale_by_lion
from mfun.optim.masters import Words, with_masters, without_masters
from mfun.optim.muon import Matrix, muon, orthogonalise, scale_by_muon
from mfun.optim.offload import with_offload
from mfun.optim.precision import with_precision
from mfun.optim.scaler import (
    LossScale,
    constant_scale,
    dynamic_scale,
    loss_scale,
    unscale_,
    with_loss_scale,
)
from mfun.optim.schedule import Schedule, constant, cosine, inverse_sqrt, linear, wsd
from mfun.optim.sgd import sgd, trace
from mfun.optim.transform import (
    Leaves,
    State,
    Transform,
    apply_updates,
    named_chain,
    partition,
    restore_state,
    state_scalars,
    state_tensors,
    terminal,
)

__all__ = [
    "Groups",
    "Leaves",
    "LossScale",
    "Matrices",
    "Matrix",
    "Multipliers",
    "Schedule",
    "State",
    "Transform",
    "Words",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "build",
    "build_schedule",
    "clip_by_global_norm",
    "clip_by_value",
    "constant",
    "constant_scale",
    "cosine",
    "dynamic_scale",
    "groups_of",
    "inverse_sqrt",
    "learning_rate",
    "linear",
    "lion",
    "loss_scale",
    "matrices_of",
    "moments",
    "muon",
    "named_chain",
    "orthogonalise",
    "partition",
    "restore_state",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_muon",
    "sgd",
    "state_scalars",
    "state_tensors",
    "terminal",
    "trace",
    "unscale_",
    "with_loss_scale",
    "with_masters",
    "with_offload",
    "with_precision",
    "without_masters",
    "wsd",
]
