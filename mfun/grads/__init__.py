"""Layer 4: flat gradient buffers, the reduction table, `finalize`."""

from mfun.grads.buffers import GradBuffers, lay_out
from mfun.grads.finalize import finalize, finalize_steps, global_norm, start_reduce
from mfun.grads.guard import GradientError, Guard
from mfun.grads.normalise import seeds
from mfun.grads.params import ParamBuffers, shard_name
from mfun.grads.table import KINDS, Reduction, Row, explain, needed_groups, reductions
from mfun.grads.zeros import num_zeros

__all__ = [
    "KINDS",
    "GradBuffers",
    "GradientError",
    "Guard",
    "ParamBuffers",
    "Reduction",
    "Row",
    "explain",
    "finalize",
    "finalize_steps",
    "global_norm",
    "lay_out",
    "needed_groups",
    "num_zeros",
    "reductions",
    "seeds",
    "shard_name",
    "start_reduce",
]
