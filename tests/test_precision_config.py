"""Number formats of a configuration: policies by hand, what may be changed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mfun.config import PrecisionConfig
from mfun.config.precision import precision_problems


def of(text: str) -> PrecisionConfig:
    """A section from `policy=bf16 norms=fp32`."""
    values = dict(word.split("=") for word in text.split())
    parsed: dict[str, Any] = {
        k: v == "true" if v in ("true", "false") else float(v) if v[0].isdigit() else v
        for k, v in values.items()
    }
    return PrecisionConfig(**parsed)


@pytest.mark.parametrize(
    ("text", "formats", "scaling"),
    [
        ("policy=fp32", "fp32 fp32 fp32 none", "none"),
        ("policy=fp64", "fp64 fp64 fp64 none", "none"),
        ("policy=bf16", "bf16 bf16 fp32 fp32", "none"),
        ("policy=fp16", "fp16 fp16 fp32 fp32", "dynamic"),
        ("policy=bf16 params=fp32", "fp32 bf16 fp32 none", "none"),  # autocast
        ("policy=bf16 grads=bf16", "bf16 bf16 bf16 fp32", "none"),
        ("policy=bf16 masters=none", "bf16 bf16 fp32 none", "none"),
        ("policy=bf16 stochastic_rounding=true", "bf16 bf16 fp32 none", "none"),
        ("policy=fp32 masters=fp64", "fp32 fp32 fp32 fp64", "none"),
        ("policy=fp16 loss_scale=constant", "fp16 fp16 fp32 fp32", "constant"),
        ("policy=fp16 loss_scale=none", "fp16 fp16 fp32 fp32", "none"),
        ("policy=bf16 loss_scale=constant", "bf16 bf16 fp32 fp32", "constant"),
    ],
)
def test_formats(text: str, formats: str, scaling: str) -> None:
    """Parameters, compute, gradients, masters; and all of them fit together."""
    precision = of(text)
    assert " ".join(precision.formats) == formats
    assert precision.scaling == scaling
    assert precision_problems(precision) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy=fp32 params=bf16", "precision.params is bf16|precision.compute is fp32|more bits"),
        ("policy=bf16 params=fp16", "precision.params is fp16|precision.compute is bf16|same one"),
        ("policy=fp32 grads=bf16", "precision.grads is bf16|precision.compute is fp32|more bits"),
        ("policy=bf16 grads=fp16", "precision.grads is fp16|precision.compute is bf16"),
        ("policy=fp16 params=bf16", "precision.params is bf16|precision.compute is fp16|same one"),
        ("policy=fp16 grads=bf16", "precision.grads is bf16|precision.compute is fp16|same one"),
        ("policy=fp32 masters=fp32", "precision.masters is fp32|precision.params is fp32|none"),
        ("policy=fp64 masters=fp32", "precision.masters is fp32|precision.params is fp64"),
        ("stochastic_rounding=true", "stochastic_rounding|params is fp32|policy=bf16"),
        ("policy=fp16 stochastic_rounding=true", "stochastic_rounding|params is fp16"),
        ("policy=bf16 masters=fp32 stochastic_rounding=true", "masters is fp32|masters=none"),
        ("policy=bf16 loss_scale=dynamic", "loss_scale is dynamic|compute is bf16|use none"),
        ("policy=fp16 initial_scale=0.5", "initial_scale is 0.5|min_scale = 1"),
    ],
)
def test_refusals(text: str, words: str) -> None:
    """One sentence with the keys, the values and a way out."""
    (problem,) = precision_problems(of(text))
    for word in words.split("|"):
        assert word in problem
