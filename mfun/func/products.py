"""Derivatives of a loss, of the first and second order, as products with vectors of parameters.

Every function takes a plain function of parameters and a `Space`, and is the same outside of a
mesh, inside of a simulated one and on processes. Second derivatives are forward over reverse: the
tangent of a gradient. Along a direction that all ranks share, each of its own pieces, that is
right whatever the layers do between the ranks, and costs about two gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vjp

from mfun import tree
from mfun.func.space import WHOLE, Space

Tree = Any
Loss = Callable[[Tree], Tensor]


def value_and_gradient(loss: Loss, params: Tree, space: Space = WHOLE) -> tuple[Tensor, Tree]:
    """A loss and its gradient.

    L = sum over data ranks of loss;  g = dL / dp.

    Args:
        loss: of parameters; inside of a mesh this rank's summand, I over tp and P over dp.
        params: whole, or one rank's pieces.
        space: which of the two.

    Returns:
        L and g, the latter held as params are.

    Example:
        >>> value_and_gradient(lambda p: p["w"].square().sum(), {"w": torch.tensor([1.0, 2.0])})
        (tensor(5.), {'w': tensor([2., 4.])})
    """
    grads, value = torch.func.grad_and_value(loss)(params)
    return space.total(value), space.whole(grads)


def gradient(loss: Loss, params: Tree, space: Space = WHOLE) -> Tree:
    """The gradient alone; see `value_and_gradient`."""
    return value_and_gradient(loss, params, space)[1]


def per_sample_gradients(
    loss: Callable[[Tree, Tree], Tensor],
    params: Tree,
    batch: Tree,
    space: Space = WHOLE,
    *,
    chunk: int | None = None,
) -> Tree:
    """The gradient of every sample's own loss.

    g_i = d loss(p, sample i) / dp.

    Args:
        loss: of parameters and a batch; it is given one row of each leaf, with its dim kept.
        params: whole, or one rank's pieces.
        batch: tree of tensors with the samples as dim 0; inside of a mesh this data rank's.
        space: for a rank `rank_space(.., over_data=False)`, since samples are its own.
        chunk: samples at a time; None for all.

    Returns:
        A tree as params with the samples as dim 0.

    Example:
        >>> loss = lambda p, x: (p["w"] * x).sum()
        >>> per_sample_gradients(loss, {"w": torch.tensor(1.0)}, torch.tensor([2.0, 3.0]))
        {'w': tensor([2., 3.])}

    Source: Goodfellow 2015 (arXiv 1510.01799); torch.func's per-sample gradients.
    """

    def one(sample: Tree) -> Tree:
        row = tree.map(lambda x: x.unsqueeze(0), sample)
        return space.whole(torch.func.grad(loss)(params, row))

    return torch.func.vmap(one, chunk_size=chunk)(batch)


def jacobian_vector(outputs: Callable[[Tree], Tree], params: Tree, v: Tree) -> tuple[Tree, Tree]:
    """What a function returns, and how it changes along a direction: (f(p), J v).

    Args:
        outputs: of parameters; any tree, of any types over the axes.
        params: whole, or one rank's pieces.
        v: held as params are; copies of a piece are equal.

    Returns:
        f(p) and J v, of the same types over the axes.

    Example:
        >>> jacobian_vector(lambda p: p * p, torch.tensor(3.0), torch.tensor(1.0))
        (tensor(9.), tensor(6.))
    """
    return jvp(outputs, (params,), (v,))  # type: ignore[return-value]


def vector_jacobian(
    outputs: Callable[[Tree], Tree], params: Tree, cotangent: Tree, space: Space = WHOLE
) -> Tree:
    """The transpose: J^T c.

    Args:
        outputs: of parameters.
        params: whole, or one rank's pieces.
        cotangent: as what outputs returns; equal on ranks that hold equal outputs.
        space: which of the two.

    Returns:
        A tree as params.

    Example:
        >>> vector_jacobian(lambda p: p * p, torch.tensor(3.0), torch.tensor(2.0))
        tensor(12.)
    """
    _, pull, *_ = vjp(outputs, params)
    return space.whole(pull(cotangent)[0])


def hessian_vector(loss: Loss, params: Tree, v: Tree, space: Space = WHOLE) -> Tree:
    """The second derivative of a loss times a direction: H v = d/de gradient(p + e v).

    Args:
        loss: see `value_and_gradient`.
        params: whole, or one rank's pieces.
        v: held as params are; copies of a piece are equal.
        space: which of the two.

    Returns:
        H v, held as params are.

    Example:
        >>> cube = lambda p: p.pow(3).sum()
        >>> hessian_vector(cube, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
        tensor([ 6., 12.])

    Source: Pearlmutter 1994.
    """
    return jvp(lambda p: gradient(loss, p, space), (params,), (v,))[1]  # type: ignore[return-value]


def gauss_newton_vector(
    outputs: Callable[[Tree], Tree],
    loss: Callable[[Tree], Tensor],
    params: Tree,
    v: Tree,
    space: Space = WHOLE,
) -> Tree:
    """The Gauss-Newton matrix times a direction: G v = J^T (d2 loss / dz2) J v.

    With cross entropy of logits z this is the Fisher information of the model's own distribution.

    Args:
        outputs: parameters -> z; on a rank its own part (of tokens, of the vocabulary).
        loss: z -> scalar, this rank's summand, I over tp.
        params: whole, or one rank's pieces.
        v: held as params are.
        space: which of the two.

    Returns:
        G v, held as params are.

    Example:
        >>> half = lambda z: 0.5 * z.square().sum()
        >>> p, v = torch.tensor([2.0]), torch.tensor([1.0])
        >>> gauss_newton_vector(lambda p: p * p, half, p, v)
        tensor([16.])

    Source: Schraudolph 2002; Martens 2014 (arXiv 1412.1193).
    """
    z, dz = jacobian_vector(outputs, params, v)
    curved = hessian_vector(loss, z, dz)
    return vector_jacobian(outputs, params, curved, space)


def fisher_vector(
    losses: Callable[[Tree], Tensor], params: Tree, v: Tree, space: Space = WHOLE
) -> Tree:
    """The empirical Fisher matrix times a direction: F v = sum_i g_i (g_i . v).

    Args:
        losses: parameters -> (n,) losses of single samples; on a rank its own samples'.
        params: whole, or one rank's pieces.
        v: held as params are.
        space: which of the two.

    Returns:
        F v, held as params are; the sum over all samples of all data ranks, not the mean.

    Example:
        >>> losses = lambda p: p * torch.tensor([1.0, 3.0])
        >>> fisher_vector(losses, torch.tensor(5.0), torch.tensor(1.0))
        tensor(10.)

    Source: Kunstner et al. 2019 (arXiv 1905.12558), on how it differs from the Fisher matrix.
    """
    return gauss_newton_vector(losses, lambda z: 0.5 * z.square().sum(), params, v, space)
