"""Second derivatives through a pipeline: a stage's forward and backward, each with its tangent.

Outside of a mesh a pipeline is a composition of stage functions, and every transform of this
package applies to it as it stands. Where stages are apart, a Hessian-vector product is the forward
and the backward of one microbatch with every message doubled: what a stage sends on is (x, dx/de),
what it sends back (ct, dct/de), along p + e v.

    forward   (x', dx')              = jvp of the stage
    backward  (g, Hv), (ct, dct)     = jvp of its vjp

The products of several microbatches add up, and so do those of stages that share a leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vjp

from mfun import tree

Tree = Any
Apply = Callable[[Tree, Tree], Tree]
"""(params, x) -> y, a stage."""


class Dual(NamedTuple):
    """A tree and its tangent."""

    value: Tree
    tangent: Tree


def stage_forward(apply: Apply, params: Dual, x: Dual) -> Dual:
    """What a stage sends on: its output and the output's tangent.

    Args:
        apply: the stage.
        params: its parameters, with the direction as tangent.
        x: what it received; of the first stage two empty trees.

    Returns:
        y and dy.

    Example:
        >>> p, x = (Dual(torch.tensor(a), torch.tensor(b)) for a, b in ((2.0, 1.0), (3.0, 0.0)))
        >>> stage_forward(torch.mul, p, x)
        Dual(value=tensor(6.), tangent=tensor(3.))
    """
    return Dual(*jvp(apply, (params.value, x.value), (params.tangent, x.tangent)))  # type: ignore[misc]


def stage_backward(apply: Apply, params: Dual, x: Dual, ct: Dual) -> tuple[Dual, Dual]:
    """The gradient of a stage's parameters with its tangent, and what it sends back.

    Args:
        apply: the stage.
        params: as in `stage_forward`.
        x: as in `stage_forward`.
        ct: the cotangent of y and its tangent, received; of the loss 1 and 0.

    Returns:
        (g, Hv) of the parameters, as `torch.func` gives them (a rank's `Space.whole` makes them
        whole), and (ct, dct) of x.

    Example:
        >>> one, zero, two = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(2.0)
        >>> stage_backward(torch.mul, Dual(two, one), Dual(two, zero), Dual(one, zero))[1]
        Dual(value=tensor(2.), tangent=tensor(1.))
    """

    def pull(p: Tree, x: Tree, ct: Tree) -> tuple[Tree, Tree]:
        return vjp(apply, p, x)[1](ct)

    values, tangents = zip(params, x, ct, strict=True)
    (g, gx), (hv, hx) = jvp(pull, values, tangents)  # type: ignore[misc]
    return Dual(g, hv), Dual(gx, hx)


def stage_products(
    apply: Apply, params: Dual, x: Dual, exchange: Callable[[Dual], Dual]
) -> tuple[Dual, Dual]:
    """One stage's part of a gradient and a Hessian-vector product, for one microbatch.

    Args:
        apply: the stage.
        params: its parameters, with the direction as tangent.
        x: what it received.
        exchange: sends (y, dy) to the next stage and returns what comes back, (ct, dct); for the
            last stage `seed`.

    Returns:
        As `stage_backward`.
    """
    return stage_backward(apply, params, x, exchange(stage_forward(apply, params, x)))


def seed(loss: Dual) -> Dual:
    """Where the backward starts: the loss counts once, along every direction.

    Example:
        >>> seed(Dual({"loss": torch.tensor(3.0)}, {"loss": torch.tensor(1.0)})).value
        {'loss': tensor(1.)}
    """
    return Dual(tree.map(torch.ones_like, loss.value), tree.map(torch.zeros_like, loss.value))


def pipeline_products(stages: Sequence[Apply], params: Sequence[Tree], v: Sequence[Tree]) -> Dual:
    """Gradient and Hessian-vector product of a composition of stages, all in this process.

    L = stages[-1](.. stages[0](p_0, {})): a dict with one scalar.

    Args:
        stages: from first to last; the first takes {}.
        params: of each stage. A leaf that several name (a tied weight) stands in each.
        v: the direction, of each stage.

    Returns:
        (g, Hv), nested as the union of all stages' parameters; what stages share is summed.

    Example:
        >>> stages = [lambda p, x: {"h": p["a"]}, lambda p, x: {"loss": p["a"] * x["h"]}]
        >>> three, one = {"a": torch.tensor(3.0)}, {"a": torch.tensor(1.0)}
        >>> pipeline_products(stages, [three, three], [one, one])
        Dual(value={'a': tensor(6.)}, tangent={'a': tensor(2.)})
    """
    found: list[Dual] = []

    def run(i: int, x: Dual) -> Dual:
        if i == len(stages):
            return seed(x)
        mine = Dual(params[i], v[i])
        products, back = stage_products(stages[i], mine, x, lambda y: run(i + 1, y))
        found.append(products)
        return back

    run(0, Dual({}, {}))
    return Dual(*(_sum([getattr(dual, field) for dual in found[::-1]]) for field in Dual._fields))


def _sum(trees: Sequence[Tree]) -> Tree:
    """The union of nested trees; leaves of one path are added."""
    total: dict[str, Tensor] = {}
    for one in trees:
        for path, x in tree.flatten(one).items():
            total[path] = total[path] + x if path in total else x
    return tree.unflatten(total)
