"""Clipping: by the global norm, and element by element."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mfun.optim.transform import Leaves, State, Transform, check_match

_EPS = 1e-6  # Megatron-LM's and torch's: the clipped norm stays below max_norm


def clip_by_global_norm(max_norm: float) -> Transform:
    """Updates scaled down to a global norm of at most max_norm.

    u * c,  c = max_norm / (norm + 1e-6) if that is below 1, else 1

    The norm is given by the caller, `update(..., norm=norm)`: which elements a rank owns, so that
    each counts once, is known where gradients are reduced, not here. A NaN norm leaves the
    updates as they are; refusing the step is the caller's.

    Args:
      max_norm: the largest norm, positive.
    Returns: a transform with the state {"norm": the norm last given, "coefficient": the c last
      used}, both of the shape of the world's leading dims (0 and 1 before the first update).
    Raises: ValueError if max_norm is not positive, the norm is absent, or its shape is not that
      of the leading dims of a leaf.
    Example:
      >>> clip = clip_by_global_norm(1.0)
      >>> gradient = {"w": torch.tensor([3.0, 4.0])}
      >>> state = clip.init(gradient)
      >>> updates, state = clip.update(gradient, state, gradient, norm=torch.tensor(5.0))
      >>> updates["w"], state["norm"], state["coefficient"]
      (tensor([0.6000, 0.8000]), tensor(5.), tensor(0.2000))

    Source: Pascanu et al. 2013 (arXiv 1211.5063); Megatron-LM core/optimizer/clip_grads.py.
    """
    if not max_norm > 0:
        raise ValueError(
            f"clip_by_global_norm: max_norm is {max_norm}; give a positive number, or no clipping"
        )

    def init(params: Leaves) -> State:
        device = next(iter(params.values())).device if params else None
        return {
            "norm": torch.zeros((), device=device),
            "coefficient": torch.ones((), device=device),
        }

    def update(
        updates: Leaves,
        state: State,
        params: Leaves,
        *,
        norm: Tensor | None = None,
        donate: bool = False,
        **extra: Any,
    ) -> tuple[Leaves, State]:
        del state, extra
        if norm is None:
            raise ValueError("clip_by_global_norm: no norm given; call update(..., norm=norm)")
        check_match("clip_by_global_norm", updates, params)
        ratio = max_norm / (norm + _EPS)
        coefficient = torch.where(ratio < 1, ratio, torch.ones_like(ratio))
        state = {"norm": norm.clone(), "coefficient": coefficient}
        if donate and norm.device.type == "cpu" and bool((coefficient == 1).all()):
            return updates, state  # saves a pass over memory where looking costs nothing
        return {path: _scaled(path, u, coefficient, donate) for path, u in updates.items()}, state

    return Transform(init, update)


def clip_by_value(largest: float) -> Transform:
    """Updates with every element brought into [-largest, largest].

    u = min(max(u, -largest), largest)

    A NaN stays one; an infinity becomes the bound.

    Args:
      largest: the bound, positive.
    Raises: ValueError if it is not.
    Example:
      >>> clip = clip_by_value(1.0)
      >>> gradient = {"w": torch.tensor([3.0, -0.5])}
      >>> clip.update(gradient, clip.init(gradient), gradient)[0]
      {'w': tensor([ 1.0000, -0.5000])}

    Source: torch.nn.utils.clip_grad_value_.
    """
    if not largest > 0:
        raise ValueError(
            f"clip_by_value: the largest value is {largest}; give a positive number, or no clipping"
        )

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("clip_by_value", updates, params)

        def one(u: Tensor) -> Tensor:
            return (u.clamp_ if donate else u.clamp)(-largest, largest)

        return {path: one(u) for path, u in updates.items()}, state

    return Transform(lambda params: {}, update)


def _scaled(path: str, u: Tensor, coefficient: Tensor, donate: bool) -> Tensor:
    """The leaf times a coefficient that has the shape of its leading dims."""
    lead = coefficient.ndim
    if u.shape[:lead] != coefficient.shape:
        raise ValueError(
            f"clip_by_global_norm: the norm has shape {tuple(coefficient.shape)}, which is not "
            f"the leading dims of {path!r} {tuple(u.shape)}; give one norm per rank"
        )
    factor = coefficient.to(u.dtype).reshape(coefficient.shape + (1,) * (u.ndim - lead))
    return (u.mul_ if donate else u.mul)(factor)
