"""Jacobians and Hessians in full, for tiny models: products with every direction of a global basis.

A direction changes one element of the whole model. On a mesh it is therefore one on the rank, or
on all ranks, that hold this element, and zero elsewhere: a basis of local elements would move one
element of every shard at once, and padding as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun import tree
from mfun.func.products import hessian_vector, jacobian_vector
from mfun.func.space import WHOLE, Space
from mfun.spec import P, ParamSpec

Tree = Any


def basis(specs: Tree, dtype: torch.dtype = torch.float64) -> Tree:
    """One direction for each element of the whole model, leaf after leaf.

    Args:
        specs: tree of `ParamSpec`.
        dtype: of the result.

    Returns:
        Whole tensors (n, *shape) for n elements in all; `mfun.spec.shard` cuts them by
        `stacked(specs, n)`.

    Example:
        >>> basis({"a": ParamSpec(shape=(2,)), "b": ParamSpec(shape=())}, torch.float32)["a"]
        tensor([[1., 0.],
                [0., 1.],
                [0., 0.]])
    """
    leaves = tree.flatten(specs)
    sizes = [spec.numel for spec in leaves.values()]
    columns = torch.eye(sum(sizes), dtype=dtype).split(sizes, 1)
    whole = {
        path: column.unflatten(1, spec.shape) if spec.shape else column.squeeze(1)
        for (path, spec), column in zip(leaves.items(), columns, strict=True)
    }
    return tree.map_with_path(lambda path, _: whole[path], specs)


def stacked(specs: Tree, n: int, axis: str | None = None) -> Tree:
    """The specs of n trees of parameters stacked in front, whole or cut over an axis.

    Example:
        >>> stacked({"w": ParamSpec(shape=(4,), p=P("tp"))}, 3)["w"]
        [3, 4] P(None, 'tp')
    """

    def one(spec: ParamSpec) -> ParamSpec:
        p = P(axis, *spec.p.entries, sums=spec.p.sums)
        pads = tuple(dim + 1 for dim in spec.pads)
        return attrs.evolve(spec, shape=(n, *spec.shape), p=p, pads=pads, matrix=None)

    return tree.map(one, specs)


def jacobian(
    outputs: Callable[[Tree], Tree], params: Tree, directions: Tree, *, chunk: int | None = None
) -> Tree:
    """The derivative of a function along each of a stack of directions.

    Args:
        outputs: parameters -> tree.
        params: whole, or one rank's pieces.
        directions: as params with the directions as dim 0; all of `basis` for the full Jacobian.
        chunk: directions at a time; None for all.

    Returns:
        As what outputs returns, with the directions as dim 0.

    Example:
        >>> jacobian(lambda p: p.square(), torch.tensor([1.0, 2.0]), torch.eye(2))
        tensor([[2., 0.],
                [0., 4.]])
    """
    along = torch.func.vmap(lambda v: jacobian_vector(outputs, params, v)[1], chunk_size=chunk)
    return along(directions)


def hessian(
    loss: Callable[[Tree], Tensor],
    params: Tree,
    directions: Tree,
    space: Space = WHOLE,
    *,
    chunk: int | None = None,
) -> Tree:
    """The Hessian's product with each of a stack of directions; all of `basis` give all of it.

    Args:
        loss: see `value_and_gradient`.
        params: whole, or one rank's pieces.
        directions: as params with the directions as dim 0.
        space: of params.
        chunk: directions at a time; None for all.

    Returns:
        As params, with the directions as dim 0.

    Example:
        >>> hessian(lambda p: p[0] * p[1], torch.zeros(2), torch.eye(2))
        tensor([[0., 1.],
                [1., 0.]])
    """
    along = torch.func.vmap(lambda v: hessian_vector(loss, params, v, space), chunk_size=chunk)
    return along(directions)
