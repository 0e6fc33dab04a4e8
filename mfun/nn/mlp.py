"""The feed-forward block: up by columns, activation, down by rows.

Shape letters: b batch, s sequence, d model, f feed-forward (this rank's part).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from mfun.comm import Axis
from mfun.nn.linear import column_linear, row_linear
from mfun.nn.weight_grads import WeightGrads

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")


def mlp(
    params: Mapping[str, Tensor],
    x_bsd: Tensor,
    axis: Axis,
    *,
    activation: str,
    sequence_parallel: bool = False,
    weight_grads: WeightGrads | None = None,
) -> Tensor:
    """y = g(act(f(x) up_r^T) down_r^T), one reduction for two products.

    A gated activation has up = (gate, value), each cut over the axis: silu(gate) * value.

    Args:
        params: up (f, d) or gated (2, f, d); down (d, f); optionally up_bias, like up without d,
            and down_bias (d,). V over `axis` but down_bias, which is I.
        x_bsd: (b, s, d), I over `axis`; under sequence parallelism (b, s/n, d), V.
        axis: the tensor-parallel axis, of size n.
        activation: one of `ACTIVATIONS`.
        sequence_parallel: see `column_linear` and `row_linear`.
        weight_grads: see there.

    Returns:
        The shape and type of x.

    Raises:
        ValueError: unknown activation.

    Example:
        >>> import torch
        >>> from mfun.comm import single_groups
        >>> params = {"up": torch.ones(2, 3, 1), "down": torch.ones(1, 3)}
        >>> mlp(params, torch.ones(1, 1, 1), single_groups().tp, activation="swiglu")
        tensor([[[2.1932]]])

    Source: Shoeybi et al. 2019 (arXiv 1909.08053) section 3; Shazeer 2020 (2002.05202).
    Proof: proofs/Linear.v, mlp, mlp_backward, attention_heads.
    """
    up, bias = params["up"], params.get("up_bias")
    h_bsf = column_linear(
        x_bsd,
        up.flatten(0, -2),
        None if bias is None else bias.flatten(),
        axis,
        sequence_parallel=sequence_parallel,
        weight_grads=weight_grads,
    )
    return row_linear(
        activate(h_bsf, activation),
        params["down"],
        params.get("down_bias"),
        axis,
        sequence_parallel=sequence_parallel,
        weight_grads=weight_grads,
    )


def activate(h: Tensor, activation: str) -> Tensor:
    """The activation by name; a gated one halves the last dim.

    Raises:
        ValueError: unknown activation.
    """
    match activation:
        case "gelu":
            return F.gelu(h)
        case "gelu_tanh":
            return F.gelu(h, approximate="tanh")
        case "swiglu":
            gate, value = h.chunk(2, -1)
            return F.silu(gate) * value
    raise ValueError(f"activation is {activation!r}; use one of {', '.join(ACTIVATIONS)}")
