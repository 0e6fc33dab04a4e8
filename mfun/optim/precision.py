"""The precision policy of a configuration, put around an optimizer."""

from __future__ import annotations

from mfun.config import PrecisionConfig
from mfun.optim.masters import Words, with_masters, without_masters
from mfun.optim.offload import with_offload
from mfun.optim.scaler import LossScale, constant_scale, dynamic_scale, with_loss_scale
from mfun.optim.transform import Transform
from mfun.rng import Key
from mfun.spec import DTYPES


def with_precision(
    transform: Transform,
    config: PrecisionConfig,
    *,
    key: Key | None = None,
    words: Words | None = None,
    offload: bool = False,
) -> Transform:
    """A terminal transform as a configuration's formats need it: with masters, with a loss scale.

    Args:
      transform: updates parameters of the gradients' type.
      config: the section `precision`.
      key: of roundings by chance; needed where `precision.stochastic_rounding` is on.
      words: see `without_masters`.
      offload: keep the state in the host's memory (`with_offload`); a skipped step moves nothing.
    Returns: `transform` itself where parameters and gradients are of one wide type and the loss is
      not scaled; otherwise with `with_masters` or `without_masters`, and `with_loss_scale` outside.
    Raises: ValueError for roundings by chance without a key.
    Example:
      >>> import torch
      >>> from mfun.optim import adamw
      >>> opt = with_precision(adamw(0.1), PrecisionConfig(policy="fp16"))
      >>> state = opt.init({"w": torch.ones(2, dtype=torch.float16)})
      >>> list(state), list(state["inner"]), state["loss_scale"].scale
      (['loss_scale', 'inner'], ['master', 'inner'], 4294967296.0)
    """
    formats = config.formats
    if config.stochastic_rounding and key is None:
        raise ValueError("with_precision: stochastic_rounding needs the key of its roundings")
    if formats.masters != "none":
        transform = with_masters(transform, DTYPES[formats.masters])
    elif formats.params in ("bf16", "fp16") or formats.params != formats.grads:
        chance = key if config.stochastic_rounding else None
        dtype = DTYPES["fp64" if "fp64" in (formats.params, formats.grads) else "fp32"]
        transform = without_masters(transform, dtype, key=chance, words=words)
    if offload:
        transform = with_offload(transform)
    rule = build_scale(config)
    return transform if rule is None else with_loss_scale(transform, rule)


def build_scale(config: PrecisionConfig) -> LossScale | None:
    """The loss scale of a configuration, None where the loss is not scaled.

    Example:
      >>> build_scale(PrecisionConfig()) is None
      True
    """
    if config.scaling == "none":
        return None
    if config.scaling == "constant":
        return constant_scale(config.initial_scale)
    return dynamic_scale(
        config.initial_scale,
        growth=config.growth,
        growth_every=config.growth_every,
        backoff=config.backoff,
        hysteresis=config.hysteresis,
        minimum=config.min_scale,
    )
