"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mfun.optim.decay import add_decayed_weights, scale_by_learning_rate
from mfun.optim.groups import Groups
from mfun.optim.schedule import Schedule
from mfun.optim.transform import (
    Leaves,
    State,
    Transform,
    check_match,
    named_chain,
    terminal,
    zeros_like,
)


def trace(momentum: float) -> Transform:
    """The decayed sum of the updates: t = momentum * t + u, handed on as the update.

    Args:
      momentum: the factor, from 0 to below 1.
    Returns: a transform with the state {"trace": {path: t}}.
    Example:
      >>> import torch
      >>> block = trace(0.5)
      >>> params = {"w": torch.zeros(1)}
      >>> _, state = block.update({"w": torch.ones(1)}, block.init(params), params)
      >>> block.update({"w": torch.ones(1)}, state, params)[0]
      {'w': tensor([1.5000])}

    Source: Polyak 1964; torch.optim.SGD with dampening 0.
    """

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("trace", updates, params)

        def one(old: Tensor, u: Tensor) -> Tensor:
            return old.mul_(momentum).add_(u) if donate else old * momentum + u

        new = {path: one(state["trace"][path], u) for path, u in updates.items()}
        # A donated update must not be the state itself: the next transform may write to it.
        out = {path: u.copy_(new[path]) for path, u in updates.items()} if donate else new
        return out, {"trace": new}

    return Transform(lambda params: {"trace": zeros_like(params)}, update)


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    groups: Groups | None = None,
) -> Transform:
    """SGD with momentum, a terminal transform: it returns new parameters.

    g = u + weight_decay p,  t = momentum t + g,  p = p - lr t

    Args:
      learning_rate: a number or a schedule.
      momentum: 0 keeps no trace.
      weight_decay: L2 regularisation through the gradient, as torch.optim.SGD; not decoupled.
      groups: path -> (lr, decay) multipliers, or whether the leaf decays; None decays all.
    Returns: a transform with the state {"decay": {}, "trace": ..., "schedule": {"count", "lr"}}.
    Example:
      >>> import torch
      >>> opt = sgd(0.5, momentum=0.0)
      >>> params = {"w": torch.tensor([1.0])}
      >>> params, state = opt.update({"w": torch.tensor([1.0])}, opt.init(params), params)
      >>> params["w"], state["schedule"]
      (tensor([0.5000]), {'count': 1, 'lr': 0.5})

    Source: torch.optim.SGD.
    """
    blocks = {
        "decay": add_decayed_weights(weight_decay, groups) if weight_decay else None,
        "trace": trace(momentum) if momentum else None,
        "schedule": scale_by_learning_rate(learning_rate, groups),
    }
    return terminal(named_chain(**{name: block for name, block in blocks.items() if block}))
