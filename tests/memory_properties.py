"""Properties of the memory account and of Megatron's options, for planted faults."""

from __future__ import annotations

from mfun.config import ConfigError, load
from mfun.plan.memory import account
from research import zero_memory
from tests.properties import Broken, Property, named

FEW = 64
"""Bytes of an optimizer's reported numbers, which the account leaves out."""


def said(strategy: str, *settings: str, ranks: int = 4) -> Property:
    """One real rank of four holds what the account says, and at the worst moment within 2 %."""

    def check() -> None:
        settings_ = ("model.layers=2", *settings)
        have = zero_memory.run(strategy, ranks, *settings_).measured
        want = account(zero_memory.layout_of(strategy, ranks, *settings_), 0)
        for kind in ("params", "grads", "opt"):
            if not 0 <= getattr(have, kind) - getattr(want, kind) <= FEW:
                raise Broken(f"{kind}: {getattr(have, kind)}, not {getattr(want, kind)} bytes")
        if abs(have.peak / want.total - 1) > 0.02:
            raise Broken(f"at the worst moment {have.peak}, not {want.total} bytes")

    return Property(f"memory of {strategy} {' '.join(settings)}", check)


@named
def options_are_told() -> None:
    """a configuration that sets an option of Megatron's is told what it is here."""
    for name, want in (
        ("nccl_ub", "is refused: it registers buffers with NCCL"),
        ("overlap_grad_reduce", "is parallel.overlap here"),
    ):
        try:
            load("tiny", [f"parallel.{name}=true"])
        except ConfigError as error:
            if want not in str(error):
                raise Broken(f"{name} is not told: {error}") from error
        else:
            raise Broken(f"{name} is accepted")
