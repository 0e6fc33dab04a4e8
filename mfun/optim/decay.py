"""Weight decay as an update, and the learning rate as the last scaling."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mfun.optim.groups import Groups, check_groups, multipliers
from mfun.optim.schedule import Schedule, as_schedule
from mfun.optim.transform import Leaves, State, Transform, check_match


def add_decayed_weights(weight_decay: float, groups: Groups | None = None) -> Transform:
    """u + weight_decay * decay * p, decay the leaf's multiplier.

    Before the momentum of SGD this is L2 regularisation, as torch.optim.SGD's `weight_decay`;
    after `scale_by_adam` it is AdamW's decoupled decay.

    Args:
      weight_decay: the factor.
      groups: path -> (lr, decay) multipliers, or whether the leaf decays; None decays all.
    Raises: ValueError naming a parameter that the groups do not know.
    Example:
      >>> import torch
      >>> block = add_decayed_weights(0.1, {"w": True, "b": False})
      >>> params = {"w": torch.tensor([10.0]), "b": torch.tensor([10.0])}
      >>> block.update({"w": torch.zeros(1), "b": torch.zeros(1)}, {}, params)[0]
      {'w': tensor([1.]), 'b': tensor([0.])}
    """

    def init(params: Leaves) -> State:
        check_groups(groups, params)
        return {}

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("add_decayed_weights", updates, params)

        def one(path: str, u: Tensor) -> Tensor:
            decay = weight_decay * multipliers(groups, path)[1]
            if not decay:
                return u
            add = u.add_ if donate else u.add
            return add(params[path], alpha=decay)

        return {path: one(path, u) for path, u in updates.items()}, state

    return Transform(init, update)


def scale_by_learning_rate(
    learning_rate: float | Schedule, groups: Groups | None = None
) -> Transform:
    """-lr(n) * m * u, for the update of number n, from 1, and the leaf's multiplier m.

    Args:
      learning_rate: a number, or a schedule n -> float. An update that the caller skips does not
        count.
      groups: path -> (lr, decay) multipliers; None multiplies by 1.
    Returns: a transform whose state is {"count": n, "lr": the learning rate last used, without
      multipliers}, (0, 0.0) before the first update.
    Raises: ValueError naming a parameter that the groups do not know.
    Example:
      >>> import torch
      >>> block = scale_by_learning_rate(lambda n: 1.0 / n)
      >>> params = {"w": torch.tensor([1.0])}
      >>> _, state = block.update({"w": torch.tensor([3.0])}, block.init(params), params)
      >>> block.update({"w": torch.tensor([3.0])}, state, params)
      ({'w': tensor([-1.5000])}, {'count': 2, 'lr': 0.5})
    """
    schedule = as_schedule(learning_rate)

    def init(params: Leaves) -> State:
        check_groups(groups, params)
        return {"count": 0, "lr": 0.0}

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del params, extra
        count = state["count"] + 1
        lr = schedule(count)

        def one(path: str, u: Tensor) -> Tensor:
            return (u.mul_ if donate else u.mul)(-lr * multipliers(groups, path)[0])

        scaled = {path: one(path, u) for path, u in updates.items()}
        return scaled, {"count": count, "lr": lr}

    return Transform(init, update)
