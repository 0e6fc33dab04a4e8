"""Layer 4: flat gradient buffers, the reduction table, `finalize`."""

from mfun.grads.buffers import GradBuffers
from mfun.grads.finalize import finalize, finalize_steps, global_norm, start_reduce
from mfun.grads.normalise import seeds
from mfun.grads.table import KINDS, Reduction, Row, explain, needed_groups, reductions

__all__ = [
    "KINDS",
    "GradBuffers",
    "Reduction",
    "Row",
    "explain",
    "finalize",
    "finalize_steps",
    "global_norm",
    "needed_groups",
    "reductions",
    "seeds",
    "start_reduce",
]
