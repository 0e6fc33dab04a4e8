"""The independent reference: a GPT and its training on one device, in plain torch and numpy.

Everything else in mfun is judged against this package, so it imports nothing else of mfun and is
written from the textbook definitions, one head and one layer at a time. Slow on purpose.
"""

from mfun.verify.reference.gpt import (
    Batch,
    Params,
    Result,
    forward,
    init,
    loss,
    loss_and_grads,
    normalise,
    shapes,
    token_losses,
)
from mfun.verify.reference.optim import History, decayed, global_norm, learning_rate, train
from mfun.verify.reference.rotary import rotary_frequencies
from mfun.verify.reference.settings import Settings, complete

__all__ = [
    "Batch",
    "History",
    "Params",
    "Result",
    "Settings",
    "complete",
    "decayed",
    "forward",
    "global_norm",
    "init",
    "learning_rate",
    "loss",
    "loss_and_grads",
    "normalise",
    "rotary_frequencies",
    "shapes",
    "token_losses",
    "train",
]
