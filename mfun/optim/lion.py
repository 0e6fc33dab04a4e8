"""Lion as a block, and as one step on flat memory."""

# pyright: reportPrivateImportUsage=false
# torch's kernels for lists of tensors have no public names.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mfun.optim.adam import check_kernel, writable
from mfun.optim.groups import Groups, check_groups, grouped
from mfun.optim.schedule import Schedule, as_schedule
from mfun.optim.transform import Leaves, State, Transform, check_match, zeros_like


def scale_by_lion(*, b1: float = 0.9, b2: float = 0.99) -> Transform:
    """The sign of a mean of the updates; what is remembered is another, slower mean.

    update = sign(b1 mu + (1 - b1) u),  then mu = b2 mu + (1 - b2) u

    Plain tensor code, for chains and research; `lion` is the fast whole. The sign of 0 is 0.

    Args:
      b1: decay of the mean whose sign is taken.
      b2: decay of the mean that is kept.
    Returns: a transform with the state {"mu": {path: mu}}.
    Example: one large update does not outweigh the sign
      >>> block = scale_by_lion()
      >>> params = {"w": torch.zeros(3)}
      >>> block.update({"w": torch.tensor([5.0, -0.1, 0.0])}, block.init(params), params)[0]
      {'w': tensor([ 1., -1.,  0.])}

    Source: Chen et al. 2023 (arXiv 2302.06675), algorithm 2.
    """

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("scale_by_lion", updates, params)
        mu = state["mu"]
        signs = {path: mu[path].lerp(u, 1 - b1).sign() for path, u in updates.items()}

        def keep(old: Tensor, u: Tensor) -> Tensor:
            return (old.lerp_ if donate else old.lerp)(u, 1 - b2)

        return signs, {"mu": {path: keep(mu[path], u) for path, u in updates.items()}}

    return Transform(lambda params: {"mu": zeros_like(params)}, update)


def lion(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    groups: Groups | None = None,
) -> Transform:
    """Lion, a terminal transform: it returns new parameters.

    p = p - lr weight_decay p - lr sign(b1 mu + (1 - b1) u),  then mu = b2 mu + (1 - b2) u

    It equals, to rounding,
      terminal(named_chain(lion=scale_by_lion(...), decay=add_decayed_weights(...),
                           schedule=scale_by_learning_rate(...)))
    in fewer passes over memory: kernels for lists of tensors, or on a CPU for pieces of tensors
    that stay in its cache. It is not differentiable. A gradient that is 0 but for its rounding
    still moves its parameter by a whole learning rate, so layouts that round differently differ
    there (a key bias, say).

    Args:
      learning_rate: a number or a schedule n -> float, n from 1.
      b1, b2: as in `scale_by_lion`.
      weight_decay: decoupled; three to ten times AdamW's, at a third to a tenth of its rate.
      groups: path -> (lr, decay) multipliers, or whether the leaf decays; None decays all.
    Returns: a transform with the state {"count": n, "lr": the learning rate last used, without
      multipliers, "mu": {path: mu}}.
    Raises: ValueError naming a leaf whose gradient has another dtype, shape or device than its
      parameter, or that the groups do not know.
    Example:
      >>> opt = lion(0.5, weight_decay=0.5)
      >>> params = {"w": torch.tensor([1.0, 1.0])}
      >>> params, state = opt.update({"w": torch.tensor([3.0, -0.1])}, opt.init(params), params)
      >>> params["w"], state["count"], state["lr"]
      (tensor([0.2500, 1.2500]), 1, 0.5)

    Source: Chen et al. 2023 (arXiv 2302.06675).
    """
    schedule = as_schedule(learning_rate)

    def init(params: Leaves) -> State:
        check_groups(groups, params)
        return {"count": 0, "lr": 0.0, "mu": zeros_like(params)}

    @torch.no_grad()
    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("lion", updates, params)
        check_kernel("lion", updates, params)
        n = state["count"] + 1
        lr = schedule(n)
        new, mu = (writable(t, donate) for t in (params, state["mu"]))
        for paths, (rate, decay) in grouped(params, groups):
            p, u, m = ([t[path] for path in paths] for t in (new, updates, mu))
            _step(p, u, m, b1, b2, lr * rate, weight_decay * decay)
        return new, {"count": n, "lr": lr, "mu": mu}

    return Transform(init, update)


def _step(
    p: list[Tensor], u: list[Tensor], m: list[Tensor], b1: float, b2: float, lr: float, decay: float
) -> None:
    """Update parameters and means in place."""
    if p[0].device.type == "cpu":
        for p_tile, u_tile, m_tile in zip(tiles(p), tiles(u), tiles(m), strict=True):
            _lists([p_tile], [u_tile], [m_tile], b1, b2, lr, decay)
    else:
        _lists(p, u, m, b1, b2, lr, decay)


def _lists(
    p: list[Tensor], u: list[Tensor], m: list[Tensor], b1: float, b2: float, lr: float, decay: float
) -> None:
    signs = torch._foreach_lerp(m, u, 1 - b1)
    torch._foreach_sign_(signs)
    if decay:
        torch._foreach_mul_(p, 1 - lr * decay)
    torch._foreach_add_(p, signs, alpha=-lr)
    torch._foreach_lerp_(m, u, 1 - b2)


TILE = 1 << 18
"""Elements of a piece that a CPU's cache holds with its fellows."""


def tiles(tensors: list[Tensor]) -> list[Tensor]:
    """Contiguous tensors as flat pieces, views of them."""
    return [piece for x in tensors for piece in x.contiguous().view(-1).split(TILE)]
