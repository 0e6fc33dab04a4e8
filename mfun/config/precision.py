"""Number formats: policies, what may be changed of them, and which formats fit together."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import attrs

from mfun.config.fields import choice, flag, real, whole

Policy = Literal["fp32", "fp64", "bf16", "fp16"]
Format = Literal["auto", "fp32", "fp64", "bf16", "fp16"]
Masters = Literal["auto", "none", "fp32", "fp64"]
NormFormat = Literal["params", "fp32"]
LossScaling = Literal["auto", "none", "constant", "dynamic"]


class Formats(NamedTuple):
    """Number formats by use; the masters' may be "none"."""

    params: str
    compute: str
    grads: str
    masters: str


POLICIES = MappingProxyType(
    {
        "fp32": Formats("fp32", "fp32", "fp32", "none"),
        "fp64": Formats("fp64", "fp64", "fp64", "none"),
        "bf16": Formats("bf16", "bf16", "fp32", "fp32"),
        "fp16": Formats("fp16", "fp16", "fp32", "fp32"),
    }
)
BITS = MappingProxyType({"none": 0, "bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64})


@attrs.frozen(kw_only=True)
class PrecisionConfig:
    """Number formats. Statistics of norms, softmax, rotary angles and loss have at least 32 bits.

    Args:
      policy: formats of all that is ``auto``; bf16 and fp16 have fp32 gradients and masters.
      params: of parameters.
      compute: of activations, messages, and parameters where they are used.
      grads: in which gradients are added up and reduced, and those of matrices and tables computed;
        a microbatch's of other 16-bit parameters are rounded once.
      masters: of the optimizer's own copy of narrower parameters; none updates them directly.
      norms: of norms' parameters: as the others, or fp32.
      stochastic_rounding: round updated bf16 parameters without masters up or down by chance.
      loss_scale: factor of the loss against underflow; auto is dynamic for fp16, else none.
      initial_scale: first dynamic, or constant, loss scale.
      growth: factor of a dynamic scale after ``growth_every`` clean steps.
      growth_every: clean steps in a row.
      backoff: factor of a dynamic scale at an overflow.
      hysteresis: overflows since it last grew from which a dynamic scale falls.
      min_scale: lowest dynamic scale.
    """

    section: ClassVar[str] = "precision"

    policy: Policy = choice("fp32", Policy)
    params: Format = choice("auto", Format)
    compute: Format = choice("auto", Format)
    grads: Format = choice("auto", Format)
    masters: Masters = choice("auto", Masters)
    norms: NormFormat = choice("params", NormFormat)
    stochastic_rounding: bool = flag(False)
    loss_scale: LossScaling = choice("auto", LossScaling)
    initial_scale: float = real(2.0**32, open_=True)
    growth: float = real(2.0, least=1.0, open_=True)
    growth_every: int = whole(1000, least=1)
    backoff: float = real(0.5, below=1.0, open_=True)
    hysteresis: int = whole(2, least=1)
    min_scale: float = real(1.0, open_=True)

    @property
    def formats(self) -> Formats:
        """The formats, ``auto`` worked out; wide parameters need no masters."""
        given = Formats(self.params, self.compute, self.grads, self.masters)
        pairs = zip(given, POLICIES[self.policy], strict=True)
        out = Formats(*(policy if own == "auto" else own for own, policy in pairs))
        if self.masters == "auto" and (
            self.stochastic_rounding or BITS[out.params] >= BITS[out.masters]
        ):
            return out._replace(masters="none")
        return out

    @property
    def scaling(self) -> str:
        """The loss scaling, ``auto`` worked out."""
        auto = "dynamic" if self.formats.compute == "fp16" else "none"
        return auto if self.loss_scale == "auto" else self.loss_scale


def precision_problems(precision: PrecisionConfig) -> list[str]:
    """What does not fit together, in sentences.

    Example:
      >>> precision_problems(PrecisionConfig(policy="bf16", grads="fp16"))
      ['precision.grads is fp16 and precision.compute is bf16; gradients come out in ...']
    """
    return [*_formats(precision), *_scaling(precision)]


def _formats(precision: PrecisionConfig) -> Iterator[str]:
    params, compute, grads, masters = precision.formats
    if BITS[params] < BITS[compute] or (BITS[params] == BITS[compute] and params != compute):
        yield (
            f"precision.params is {params} and precision.compute is {compute}; parameters are used "
            "in the compute format, so give the same one, or parameters of more bits."
        )
    if BITS[grads] < BITS[compute] or (BITS[grads] == BITS[compute] and grads != compute):
        yield (
            f"precision.grads is {grads} and precision.compute is {compute}; gradients come out in "
            "the compute format, so give the same one, or one of more bits."
        )
    if masters != "none" and BITS[masters] <= BITS[params]:
        yield (
            f"precision.masters is {masters} and precision.params is {params}, which keeps as much;"
            " use masters=none."
        )
    if precision.stochastic_rounding and (params, masters) != ("bf16", "none"):
        yield (
            "precision.stochastic_rounding is for parameters in bf16 without masters, but "
            f"precision.params is {params} and precision.masters is {masters}; turn it off, or use "
            "policy=bf16 masters=none."
        )


def _scaling(precision: PrecisionConfig) -> Iterator[str]:
    if precision.scaling != "dynamic":
        return
    if precision.formats.compute != "fp16":
        yield (
            f"precision.loss_scale is dynamic, but precision.compute is {precision.formats.compute}"
            ", which has the range of fp32 or more; use none."
        )
    if precision.initial_scale < precision.min_scale:
        yield (
            f"precision.initial_scale is {precision.initial_scale:g}, below precision.min_scale = "
            f"{precision.min_scale:g}; raise one or lower the other."
        )
