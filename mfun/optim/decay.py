"""Weight decay as an update, and the learning rate as the last scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mfun.optim.schedule import Schedule, as_schedule
from mfun.optim.transform import Leaves, State, Transform, check_match

DecayMask = Mapping[str, bool]


def add_decayed_weights(weight_decay: float, mask: DecayMask | None = None) -> Transform:
    """u + weight_decay * p, where the mask says so.

    Before the momentum of SGD this is L2 regularisation, as torch.optim.SGD's `weight_decay`;
    after `scale_by_adam` it is AdamW's decoupled decay.

    Args:
      weight_decay: the factor.
      mask: path -> whether the leaf decays; None decays all. It may know more leaves than a
        stage holds.
    Raises: ValueError naming a parameter that the mask does not know.
    Example:
      >>> import torch
      >>> block = add_decayed_weights(0.1, {"w": True, "b": False})
      >>> params = {"w": torch.tensor([10.0]), "b": torch.tensor([10.0])}
      >>> block.update({"w": torch.zeros(1), "b": torch.zeros(1)}, {}, params)[0]
      {'w': tensor([1.]), 'b': tensor([0.])}
    """

    def init(params: Leaves) -> State:
        check_mask(mask, params)
        return {}

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("add_decayed_weights", updates, params)

        def one(path: str, u: Tensor) -> Tensor:
            if not decays(mask, path):
                return u
            add = u.add_ if donate else u.add
            return add(params[path], alpha=weight_decay)

        return {path: one(path, u) for path, u in updates.items()}, state

    return Transform(init, update)


def scale_by_learning_rate(learning_rate: float | Schedule) -> Transform:
    """-lr(n) * u, for the update of number n, from 1.

    Args:
      learning_rate: a number, or a schedule n -> float. An update that the caller skips does not
        count.
    Returns: a transform whose state is {"count": n, "lr": the learning rate last used}, (0, 0.0)
      before the first update.
    Example:
      >>> import torch
      >>> block = scale_by_learning_rate(lambda n: 1.0 / n)
      >>> params = {"w": torch.tensor([1.0])}
      >>> _, state = block.update({"w": torch.tensor([3.0])}, block.init(params), params)
      >>> block.update({"w": torch.tensor([3.0])}, state, params)
      ({'w': tensor([-1.5000])}, {'count': 2, 'lr': 0.5})
    """
    schedule = as_schedule(learning_rate)

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del params, extra
        count = state["count"] + 1
        lr = schedule(count)
        scaled = {path: (u.mul_ if donate else u.mul)(-lr) for path, u in updates.items()}
        return scaled, {"count": count, "lr": lr}

    return Transform(lambda params: {"count": 0, "lr": 0.0}, update)


def decays(mask: DecayMask | None, path: str) -> bool:
    """Whether the mask lets a leaf decay."""
    return mask is None or mask[path]


def check_mask(mask: DecayMask | None, params: Leaves) -> None:
    """Refuse a mask that does not know every parameter.

    Raises: ValueError naming the parameters.
    """
    unknown = [path for path in params if mask is not None and path not in mask]
    if unknown:
        raise ValueError(f"decay mask: no entry for {unknown[:5]}; give True or False for each")
