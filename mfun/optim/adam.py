"""Adam as a block, and AdamW as one fused step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mfun.optim.groups import Groups, check_groups, grouped
from mfun.optim.schedule import Schedule, as_schedule
from mfun.optim.transform import Leaves, State, Transform, check_match, zeros_like


def scale_by_adam(*, b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> Transform:
    """Updates divided by the root of their mean square, both means decayed and bias-corrected.

    mu = b1 mu + (1 - b1) u,  nu = b2 nu + (1 - b2) u^2,
    update = (mu / (1 - b1^n)) / (sqrt(nu / (1 - b2^n)) + eps),  n the number of the update.

    Plain differentiable tensor code, for chains and research; `adamw` is the fast whole.

    Args:
      b1, b2: decay of the mean and of the mean square.
      eps: added to the root.
    Returns: a transform with the state {"count": n, "mu": {path: mu}, "nu": {path: nu}}.
    Example:
      >>> block = scale_by_adam()
      >>> params = {"w": torch.zeros(2, dtype=torch.float64)}
      >>> gradient = {"w": torch.tensor([3.0, -0.01], dtype=torch.float64)}
      >>> block.update(gradient, block.init(params), params)[0]["w"].round(decimals=5).tolist()
      [1.0, -1.0]

    Source: Kingma and Ba 2015 (arXiv 1412.6980).
    """

    def init(params: Leaves) -> State:
        return {"count": 0, "mu": zeros_like(params), "nu": zeros_like(params)}

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("scale_by_adam", updates, params)
        n = state["count"] + 1
        mu = {path: _mean(state["mu"][path], u, b1, donate) for path, u in updates.items()}
        nu = {path: _mean(state["nu"][path], u * u, b2, donate) for path, u in updates.items()}

        def one(path: str) -> Tensor:
            root = nu[path].sqrt() / math.sqrt(1 - b2**n)
            return mu[path] / (1 - b1**n) / (root + eps)

        return {path: one(path) for path in updates}, {"count": n, "mu": mu, "nu": nu}

    return Transform(init, update)


def _mean(old: Tensor, new: Tensor, decay: float, donate: bool) -> Tensor:
    if donate:
        return old.mul_(decay).add_(new, alpha=1 - decay)
    return old * decay + new * (1 - decay)


def adamw(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups | None = None,
) -> Transform:
    """AdamW in torch's fused kernel, a terminal transform: it returns new parameters.

    p = p - lr weight_decay p - lr (mu / (1 - b1^n)) / (sqrt(nu / (1 - b2^n)) + eps)

    with mu, nu and n as in `scale_by_adam`. It equals, to rounding,
      terminal(named_chain(adam=scale_by_adam(...), decay=add_decayed_weights(...),
                           schedule=scale_by_learning_rate(...)))
    but reads and writes each tensor once. It is not differentiable.

    Args:
      learning_rate: a number or a schedule n -> float, n from 1.
      b1, b2, eps: as in `scale_by_adam`.
      weight_decay: decoupled, as torch.optim.AdamW's.
      groups: path -> (lr, decay) multipliers, or whether the leaf decays; None decays all.
    Returns: a transform with the state {"count": n, "lr": the learning rate last used, without
      multipliers, "mu": {path: mu}, "nu": {path: nu}}.
    Raises: ValueError naming a leaf whose gradient has another dtype, shape or device than its
      parameter, or that the groups do not know.
    Example: a constant gradient moves a parameter by the learning rate
      >>> opt = adamw(0.1, weight_decay=0.0)
      >>> params = {"w": torch.tensor([1.0])}
      >>> params, state = opt.update({"w": torch.tensor([7.0])}, opt.init(params), params)
      >>> params["w"], state["count"], state["lr"]
      (tensor([0.9000]), 1, 0.1)

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); torch.optim.AdamW(fused=True).
    """
    schedule = as_schedule(learning_rate)

    def init(params: Leaves) -> State:
        check_groups(groups, params)
        moments = {"mu": zeros_like(params), "nu": zeros_like(params)}
        return {"count": 0, "lr": 0.0, **moments}

    @torch.no_grad()
    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("adamw", updates, params)
        check_kernel("adamw", updates, params)
        n = state["count"] + 1
        lr = schedule(n)
        new, mu, nu = (writable(t, donate) for t in (params, state["mu"], state["nu"]))
        for paths, (rate, decay) in grouped(params, groups):
            first = params[paths[0]]
            step = torch.full((), float(n), dtype=torch.float32, device=first.device)
            torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
                [new[path] for path in paths],
                [updates[path].contiguous() for path in paths],
                [mu[path] for path in paths],
                [nu[path] for path in paths],
                [],
                [step] * len(paths),
                lr=lr * rate,
                beta1=b1,
                beta2=b2,
                weight_decay=weight_decay * decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )
        return new, {"count": n, "lr": lr, "mu": mu, "nu": nu}

    return Transform(init, update)


def writable(leaves: Leaves, donate: bool) -> Leaves:
    """The leaves themselves if donated, else copies; contiguous, as the kernel walks memory."""
    layout = torch.contiguous_format

    def one(x: Tensor) -> Tensor:
        return x if donate and x.is_contiguous() else x.clone(memory_format=layout)

    return {path: one(x) for path, x in leaves.items()}


def check_kernel(who: str, updates: Leaves, params: Leaves) -> None:
    """Refuse a gradient whose dtype or device is not its parameter's: kernels take one of each.

    Raises: ValueError naming the leaf.
    """
    for path, p in params.items():
        u = updates[path]
        if u.dtype != p.dtype or u.device != p.device:
            raise ValueError(
                f"{who}: the gradient of {path!r} is {u.dtype} on {u.device}, the parameter "
                f"{p.dtype} on {p.device}; convert the gradient first"
            )
