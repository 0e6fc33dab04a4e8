"""Loss scaling: a factor of the loss that keeps small gradients within the range of fp16.

The loss's seed is multiplied by the scale and the gradients are divided by it before anything looks
at them. An update with a gradient that is infinite or NaN is skipped, and the scale falls.

    with_loss_scale(transform, scale)     the transform that skips, and whose state holds the scale
    unscale_(gradients, scale)            divides, and tells whether one was not finite
    loss_scale(state)                     the scale for the next step

Whether a step overflowed is one decision of all ranks: the caller takes the maximum of the flags.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun.optim.transform import Leaves, State, Transform, state_scalars

MAX_SCALE = 2.0**120  # only gradients of zero get here; its reciprocal is still a float32


class ScaleState(NamedTuple):
    """The numbers of a loss scale; a checkpoint holds them.

    Args:
      scale: the factor for the next step.
      clean: steps without an overflow since the last one or the last growth.
      hysteresis: overflows that are still forgiven, down to 0.
      skipped: steps skipped so far.
    """

    scale: float
    clean: int
    hysteresis: int
    skipped: int


class LossScale(NamedTuple):
    """A rule for the loss scale: a pair of pure functions on numbers.

    Args:
      init: () -> state.
      update: (state, whether the step overflowed) -> state.
    """

    init: Callable[[], ScaleState]
    update: Callable[[ScaleState, bool], ScaleState]


def constant_scale(scale: float) -> LossScale:
    """A scale that stays; steps that overflow are skipped all the same.

    Args:
      scale: positive; a power of two changes no bit of a gradient that does not underflow.
    Raises: ValueError if it is not positive and finite.
    Example:
      >>> rule = constant_scale(128.0)
      >>> rule.update(rule.init(), True)
      ScaleState(scale=128.0, clean=0, hysteresis=0, skipped=1)

    Source: Micikevicius et al. 2018 (arXiv 1710.03740); Megatron-LM's ConstantGradScaler.
    """
    _positive("constant_scale: scale", scale)

    def update(state: ScaleState, overflow: bool) -> ScaleState:
        if overflow:
            return state._replace(clean=0, skipped=state.skipped + 1)
        return state._replace(clean=state.clean + 1)

    return LossScale(lambda: ScaleState(float(scale), 0, 0, 0), update)


def dynamic_scale(
    initial: float = 2.0**32,
    *,
    growth: float = 2.0,
    growth_every: int = 1000,
    backoff: float = 0.5,
    hysteresis: int = 2,
    minimum: float = 1.0,
) -> LossScale:
    """A scale that falls at overflows and grows after steps without one.

    overflow:   scale = max(backoff * scale, minimum), from the `hysteresis`-th on
    otherwise:  scale = growth * scale after `growth_every` clean steps in a row

    The overflows are counted from the last growth, and once they are `hysteresis`, each further one
    lets the scale fall; only growth forgives them.

    Args:
      initial: the first scale.
      growth: above 1.
      growth_every: at least 1.
      backoff: between 0 and 1.
      hysteresis: at least 1, which lets the scale fall at once.
      minimum: lowest scale.
    Raises: ValueError naming a number that is out of its range.
    Example: of three overflows the first is forgiven
      >>> rule = dynamic_scale(8.0, growth_every=2)
      >>> state, scales = rule.init(), []
      >>> for overflow in (True, True, True, False, False):
      ...     state = rule.update(state, overflow)
      ...     scales.append(state.scale)
      >>> scales, state.skipped
      ([8.0, 4.0, 2.0, 2.0, 4.0], 3)

    Source: Megatron-LM's DynamicGradScaler.
    """
    _positive("dynamic_scale: initial", initial)
    _positive("dynamic_scale: minimum", minimum)
    if not (growth > 1 > backoff > 0 and growth_every >= 1 and hysteresis >= 1):
        raise ValueError(
            f"dynamic_scale: growth is {growth}, backoff {backoff}, growth_every {growth_every} and"
            f" hysteresis {hysteresis}; give growth above 1, backoff between 0 and 1, and at least "
            "1 for the others"
        )

    def update(state: ScaleState, overflow: bool) -> ScaleState:
        scale, left = state.scale, state.hysteresis
        if overflow:
            left = max(left - 1, 0)
            scale = scale if left else max(scale * backoff, minimum)
            return ScaleState(scale, 0, left, state.skipped + 1)
        if state.clean + 1 < growth_every:
            return state._replace(clean=state.clean + 1)
        return ScaleState(min(scale * growth, MAX_SCALE), 0, hysteresis, state.skipped)

    return LossScale(lambda: ScaleState(float(initial), 0, hysteresis, 0), update)


def _positive(name: str, value: float) -> None:
    if not (0 < value < math.inf):
        raise ValueError(f"{name} is {value}; give a positive, finite number")


def with_loss_scale(transform: Transform, rule: LossScale) -> Transform:
    """The transform that skips updates that overflowed, and keeps the loss scale in its state.

    A skipped update returns the parameters and the inner state as they were: moments, step count
    and learning rate know nothing of it. Only the scale's own numbers change.

    Args:
      transform: a terminal transform. It is given gradients that are divided by the scale.
      rule: how the scale changes.
    Returns: a transform with the state {"loss_scale": ScaleState, "inner": transform's}. Its update
      takes `overflow`, the decision of all ranks.
    Raises: ValueError if `overflow` is not given.
    Example:
      >>> from mfun.optim import sgd
      >>> opt = with_loss_scale(sgd(0.5, momentum=0.0), dynamic_scale(8.0, hysteresis=1))
      >>> params = {"w": torch.tensor([1.0])}
      >>> bad = {"w": torch.tensor([float("inf")])}
      >>> params, state = opt.update(bad, opt.init(params), params, overflow=True)
      >>> params["w"], loss_scale(state), state["inner"]["count"]
      (tensor([1.]), 4.0, 0)

    Source: Megatron-LM's MixedPrecisionOptimizer.step.
    """

    def init(params: Leaves) -> State:
        return {"loss_scale": rule.init(), "inner": transform.init(params)}

    def update(
        updates: Leaves,
        state: State,
        params: Leaves,
        *,
        overflow: bool | None = None,
        **extra: Any,
    ) -> tuple[Leaves, State]:
        if overflow is None:
            raise ValueError(
                "with_loss_scale: whether the step overflowed was not given; call "
                "update(..., overflow=...) with what all ranks agreed on"
            )
        scale = rule.update(state["loss_scale"], overflow)
        if overflow:
            return params, {"loss_scale": scale, "inner": state["inner"]}
        new, inner = transform.update(updates, state["inner"], params, **extra)
        return new, {"loss_scale": scale, "inner": inner}

    return Transform(init, update)


@torch.no_grad()
def unscale_(grads: Sequence[Tensor], scale: float) -> Tensor:
    """Divide gradients by the scale in place, and tell whether any element is not finite.

    Args:
      grads: buffers or leaves of this rank, on one device.
      scale: what the loss was multiplied by. One pass over memory for a power of two, else two.
    Returns: float32, 1 where some element is infinite or NaN, else 0; without dims.
    Example:
      >>> gradients = [torch.tensor([8.0, 12.0]), torch.tensor([float("inf")])]
      >>> unscale_(gradients, 4.0), gradients[0]
      (tensor(1.), tensor([2., 3.]))
    """
    grads = [x for x in grads if x.numel()]
    device = grads[0].device if grads else None
    found = torch.zeros((), device=device)
    exact = math.frexp(scale)[0] == 0.5
    inverse = torch.full((), 1.0 / scale if exact else 1.0, device=device)
    for dtype in {x.dtype for x in grads}:  # the kernel takes one type at a time
        same = [x for x in grads if x.dtype == dtype]
        torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateImportUsage]
            same, found, inverse
        )
    if not exact:
        for x in grads:
            x.div_(scale)
    return found


def loss_scale(state: State) -> float:
    """The scale for the next step, read out of an optimizer's state; 1.0 where there is none.

    Example:
      >>> loss_scale({"adamw": {"count": 3}})
      1.0
    """
    return float(_number(state, "loss_scale.scale", 1.0))


def skipped_steps(state: State) -> int:
    """How many updates were skipped, read out of an optimizer's state; 0 where none can be.

    Example:
      >>> skipped_steps({"loss_scale": ScaleState(2.0, 0, 1, 5)})
      5
    """
    return int(_number(state, "loss_scale.skipped", 0))


def _number(state: State, name: str, default: float) -> float:
    found = [x for p, x in state_scalars(state).items() if f".{p}".endswith(f".{name}")]
    return found[0] if found else default
