"""One layer forward, and how to pull a cotangent back through it.

Two interpretations of the same derivative: `autograd_layer` (detached leaves and
`torch.autograd.grad`; the executor's, a little faster) and `vjp_layer` (`torch.func.vjp`). A test
holds them equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from mfun import tree

Message = dict[str, Tensor]
Apply = Callable[[Any, Message], Message]
Pull = Callable[[Message], tuple[dict[str, Tensor | None], Message]]
Linearize = Callable[[Apply, Any, Message], tuple[Message, Pull]]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def autograd_layer(apply: Apply, params: Any, x: Message) -> tuple[Message, Pull]:
    """Run a layer and return its output with a pullback that may be called once.

    Args:
        apply: (params, x) -> y on trees of float tensors.
        params: the layer's parameters.
        x: its input tensors by name.

    Returns:
        y, detached, and `pull(dy) -> (gradients by path, dx)`; a gradient is None where the layer
        does not use the leaf.
    """
    leaves, inputs = tree.map(_leaf, params), {k: _leaf(v) for k, v in x.items()}
    with torch.enable_grad():
        y = apply(leaves, inputs)
    flat = tree.flatten(leaves)
    # The graph hangs on its edges, so that the output itself can go as soon as it was sent.
    graph = [{k: get_gradient_edge(v) for k, v in y.items() if v.requires_grad}]

    def pull(dy: Message) -> tuple[dict[str, Tensor | None], Message]:
        out = graph.pop()
        wanted = [*flat.values(), *inputs.values()]
        used = [k for k in dy if k in out]
        grads = torch.autograd.grad(
            [out[k] for k in used], wanted, [dy[k] for k in used], allow_unused=True
        )
        dx = {
            k: torch.zeros_like(v) if g is None else g
            for (k, v), g in zip(inputs.items(), grads[len(flat) :], strict=True)
        }
        return dict(zip(flat, grads[: len(flat)], strict=True)), dx

    return {k: v.detach() for k, v in y.items()}, pull


def vjp_layer(apply: Apply, params: Any, x: Message) -> tuple[Message, Pull]:
    """As `autograd_layer`, by `torch.func.vjp`."""
    y, pullback = torch.func.vjp(apply, params, x)  # type: ignore[misc]  # no aux, so a pair

    def pull(dy: Message) -> tuple[dict[str, Tensor | None], Message]:
        with torch.no_grad():
            dparams, dx = pullback(dy, retain_graph=False)
        return tree.flatten(dparams), dx

    return y, pull
