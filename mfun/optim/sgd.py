"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mfun.optim.adam import check_kernel, writable
from mfun.optim.groups import Groups, check_groups, grouped
from mfun.optim.schedule import Schedule, as_schedule
from mfun.optim.transform import Leaves, State, Transform, check_match, zeros_like


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
    """SGD with momentum in torch's fused kernel, a terminal transform: it returns new parameters.

    g = u + weight_decay p,  t = momentum t + g,  p = p - lr t

    It equals, to rounding,
      terminal(named_chain(decay=add_decayed_weights(...), trace=trace(...),
                           schedule=scale_by_learning_rate(...)))
    but reads and writes each tensor once. It is not differentiable.

    Args:
      learning_rate: a number or a schedule.
      momentum: 0 keeps no trace.
      weight_decay: L2 regularisation through the gradient, as torch.optim.SGD; not decoupled.
      groups: path -> (lr, decay) multipliers, or whether the leaf decays; None decays all.
    Returns: a transform with the state {"count": n, "lr": the learning rate last used, without
      multipliers, "trace": {path: t}}.
    Raises: ValueError naming a leaf whose gradient has another dtype, shape or device than its
      parameter, or that the groups do not know.
    Example:
      >>> import torch
      >>> opt = sgd(0.5, momentum=0.0)
      >>> params = {"w": torch.tensor([1.0])}
      >>> params, state = opt.update({"w": torch.tensor([1.0])}, opt.init(params), params)
      >>> params["w"], state
      (tensor([0.5000]), {'count': 1, 'lr': 0.5, 'trace': {}})

    Source: torch.optim.SGD(fused=True).
    """
    schedule = as_schedule(learning_rate)

    def init(params: Leaves) -> State:
        check_groups(groups, params)
        return {"count": 0, "lr": 0.0, "trace": zeros_like(params) if momentum else {}}

    @torch.no_grad()
    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("sgd", updates, params)
        check_kernel("sgd", updates, params)
        n = state["count"] + 1
        lr = schedule(n)
        new, traces = (writable(t, donate) for t in (params, state["trace"]))
        for paths, (rate, decay) in grouped(params, groups):
            torch._fused_sgd_(  # pyright: ignore[reportPrivateImportUsage]
                [new[path] for path in paths],
                [updates[path].contiguous() for path in paths],
                [traces[path] for path in paths if momentum],
                weight_decay=weight_decay * decay,
                momentum=momentum,
                lr=lr * rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )
        return new, {"count": n, "lr": lr, "trace": traces}

    return Transform(init, update)
