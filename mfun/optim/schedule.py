"""Learning-rate schedules: functions from the number of an update, from 1, to a Python float.

All share three phases, for update n:
  n <= warmup                    lr * n / warmup
  n > decay_steps                min_lr
  between                        min_lr + (lr - min_lr) * shape(x)
where x = (n - warmup) / (decay_steps - warmup) in (0, 1] and shape falls from 1 to 0. The warm-up
comes first, so a `decay_steps` below `warmup` leaves no middle phase. `constant` has no end, and
`inverse_sqrt` a law of its own.

Source: Megatron-LM core/optimizer_param_scheduler.py, whose update n is its step n here (its
first update has step 0, and with a warm-up a learning rate of 0).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Schedule = Callable[[int], float]
WsdShape = Literal["linear", "cosine", "exponential", "minus_sqrt"]

WSD_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


def as_schedule(learning_rate: float | Schedule) -> Schedule:
    """A number as the schedule that always returns it; a schedule as itself.

    Example:
      >>> as_schedule(0.5)(1000)
      0.5
    """
    return learning_rate if callable(learning_rate) else constant(learning_rate)


def constant(lr: float, *, warmup: int = 0) -> Schedule:
    """lr after a linear warm-up.

    Args:
      lr: the learning rate.
      warmup: updates over which it rises from 0; update `warmup` is the first at `lr`.
    Raises: ValueError if a number is negative, as every schedule here.
    Example:
      >>> [constant(1.0, warmup=4)(n) for n in (1, 2, 4, 5, 100)]
      [0.25, 0.5, 1.0, 1.0, 1.0]
    """
    _check(lr=lr, warmup=warmup)
    return lambda n: lr * n / warmup if n <= warmup else float(lr)


def linear(lr: float, decay_steps: int, *, min_lr: float = 0.0, warmup: int = 0) -> Schedule:
    """A straight fall: shape(x) = 1 - x.

    Args:
      lr: highest learning rate, at the end of the warm-up.
      decay_steps: the update at which `min_lr` is reached.
      min_lr: lowest learning rate.
      warmup: updates of the warm-up.
    Example:
      >>> [linear(1.0, 10, warmup=2)(n) for n in (1, 2, 6, 10, 11)]
      [0.5, 1.0, 0.5, 0.0, 0.0]
    """
    return _falling(lr, decay_steps, min_lr, warmup, lambda x: 1.0 - x)


def cosine(lr: float, decay_steps: int, *, min_lr: float = 0.0, warmup: int = 0) -> Schedule:
    """Half a cosine: shape(x) = (1 + cos(pi x)) / 2.

    Args: as `linear`.
    Example:
      >>> [round(cosine(1.0, 10, min_lr=0.5, warmup=2)(n), 3) for n in (2, 4, 6, 10, 11)]
      [1.0, 0.927, 0.75, 0.5, 0.5]

    Source: Loshchilov and Hutter 2017 (arXiv 1608.03983).
    """
    return _falling(lr, decay_steps, min_lr, warmup, WSD_SHAPES["cosine"])


def wsd(
    lr: float,
    decay_steps: int,
    fall_steps: int,
    *,
    min_lr: float = 0.0,
    warmup: int = 0,
    shape: WsdShape = "linear",
) -> Schedule:
    """Warm-up, stable, decay: lr until the last `fall_steps` updates, which fall to min_lr.

    Between, with y = (n - (decay_steps - fall_steps)) / fall_steps:
      lr where y <= 0, else min_lr + (lr - min_lr) * shape(y)
    with shapes linear 1 - y, cosine (1 + cos(pi y)) / 2, exponential 2 / 2^y - 1 and minus_sqrt
    1 - sqrt(y).

    Args: as `linear`, and
      fall_steps: updates of the fall, at least 1.
      shape: of the fall.
    Example:
      >>> [wsd(1.0, 20, 4, warmup=2)(n) for n in (1, 2, 16, 17, 18, 20, 21)]
      [0.5, 1.0, 1.0, 0.75, 0.5, 0.0, 0.0]

    Source: Hu et al. 2024 (arXiv 2404.06395, MiniCPM).
    """
    if fall_steps < 1:
        raise ValueError(f"wsd: fall_steps is {fall_steps}; the fall takes at least one update")
    if shape not in WSD_SHAPES:
        raise ValueError(f"wsd: shape {shape!r} is not one of {sorted(WSD_SHAPES)}")
    _check(lr=lr, decay_steps=decay_steps, min_lr=min_lr, warmup=warmup)

    def at(n: int) -> float:
        if n <= warmup:
            return lr * n / warmup
        if n > decay_steps:
            return float(min_lr)
        y = max(0.0, (n - (decay_steps - fall_steps)) / fall_steps)
        return min_lr + (lr - min_lr) * WSD_SHAPES[shape](y)

    return at


def inverse_sqrt(
    lr: float, *, warmup: int = 0, min_lr: float = 0.0, decay_steps: int | None = None
) -> Schedule:
    """The inverse square root: between, max(min_lr, lr sqrt(max(warmup, 1) / n)).

    Args: as `linear`; with `decay_steps` None it never ends.
    Example:
      >>> [inverse_sqrt(1.0, warmup=4)(n) for n in (2, 4, 16, 64)]
      [0.5, 1.0, 0.5, 0.25]

    Source: Vaswani et al. 2017 (arXiv 1706.03762).
    """
    _check(lr=lr, warmup=warmup, min_lr=min_lr, decay_steps=decay_steps or 0)

    def at(n: int) -> float:
        if n <= warmup:
            return lr * n / warmup
        if decay_steps is not None and n > decay_steps:
            return float(min_lr)
        return max(min_lr, lr * math.sqrt(max(warmup, 1) / n))

    return at


def _falling(
    lr: float, decay_steps: int, min_lr: float, warmup: int, shape: Callable[[float], float]
) -> Schedule:
    _check(lr=lr, decay_steps=decay_steps, min_lr=min_lr, warmup=warmup)

    def at(n: int) -> float:
        if n <= warmup:
            return lr * n / warmup
        if n > decay_steps:
            return float(min_lr)
        return min_lr + (lr - min_lr) * shape((n - warmup) / (decay_steps - warmup))

    return at


def _check(**numbers: float) -> None:
    for name, number in numbers.items():
        if number < 0:
            raise ValueError(f"learning-rate schedule: {name} is {number}; give 0 or more")
    if numbers.get("min_lr", 0) > numbers["lr"]:
        raise ValueError(
            f"learning-rate schedule: min_lr {numbers['min_lr']} is above lr {numbers['lr']}"
        )
