"""What products with a matrix tell of it: trace, diagonal, largest eigenvalues, solutions.

A matrix is a function from vectors to vectors, each a tree of parameters, whole or one rank's
pieces; a `Space` has their inner product. Nothing here looks at a number, so all of it also runs
under `simulate` and `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun import rng, tree
from mfun.func.space import WHOLE, Space
from mfun.mesh import Mesh
from mfun.rng import Grid, Key
from mfun.spec import Coords, ParamSpec, local_shape, pad_to, window

Tree = Any
Matrix = Callable[[Tree], Tree]


class Estimate(NamedTuple):
    """A mean over probes and its standard error."""

    mean: Tensor
    error: Tensor


class Spectrum(NamedTuple):
    """Largest eigenvalues by Lanczos.

    Args:
        values: (k,) Ritz values, ascending.
        bounds: (k,) how far from each an eigenvalue lies at most.
        vector: tree, the unit Ritz vector of the last value.
    """

    values: Tensor
    bounds: Tensor
    vector: Tree


def probe(
    key: Key, specs: Tree, mesh: Mesh, coords: Coords, dtype: torch.dtype = torch.float64
) -> Tree:
    """Random signs for every element, by its global index: the same vector in every layout.

    Args:
        key: names the draw.
        specs: tree of `ParamSpec`.
        mesh: the mesh; `Mesh()` for whole tensors.
        coords: of the rank.
        dtype: of the result.

    Returns:
        One rank's pieces of +1 and -1; padding is 0.

    Example:
        >>> spec, one = {"w": ParamSpec(shape=(4,))}, {"tp": 0, "cp": 0, "dp": 0, "pp": 0}
        >>> probe(rng.key(0), spec, Mesh(), one)["w"].abs()
        tensor([1., 1., 1., 1.], dtype=torch.float64)

    Source: Hutchinson 1990.
    """

    def one(path: str, spec: ParamSpec) -> Tensor:
        bounds = window(spec, mesh, coords)
        grid = Grid(tuple(range(a, b) for a, b in bounds), spec.shape)
        signs = 2.0 * rng.bernoulli(key.fold(path), grid, 0.5).to(dtype) - 1.0
        return pad_to(signs, local_shape(spec, mesh))

    return tree.map_with_path(one, specs)


def trace_estimate(matrix: Matrix, probes: Sequence[Tree], space: Space = WHOLE) -> Estimate:
    """The mean of v . M v over random signs v, which is the trace in expectation.

    Args:
        matrix: v -> M v.
        probes: from `probe` under different keys, two or more.
        space: of the vectors.

    Returns:
        The trace and its standard error, the same on every rank.

    Example:
        >>> probes = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])]
        >>> trace_estimate(lambda v: torch.tensor([3.0, 5.0]) * v, probes).mean
        tensor(8.)

    Source: Hutchinson 1990.
    """
    return _estimate(torch.stack([space.dot(v, matrix(v)) for v in probes]))


def diagonal_estimate(matrix: Matrix, probes: Sequence[Tree]) -> Tree:
    """The mean of v * M v over random signs v, element by element: the diagonal in expectation.

    Args:
        matrix: v -> M v.
        probes: from `probe`, two or more.

    Returns:
        A tree of `Estimate`.

    Example:
        >>> probes = [torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])]
        >>> diagonal_estimate(lambda v: torch.tensor([3.0, 5.0]) * v, probes).mean
        tensor([3., 5.])

    Source: Bekas, Kokiopoulou and Saad 2007.
    """
    products = [tree.map(torch.mul, v, matrix(v)) for v in probes]
    return tree.map(lambda *each: _estimate(torch.stack(each)), *products)


def _estimate(each: Tensor) -> Estimate:
    return Estimate(each.mean(0), each.std(0) / len(each) ** 0.5)


def lanczos(matrix: Matrix, start: Tree, steps: int, space: Space = WHOLE) -> Spectrum:
    """Eigenvalues of a symmetric matrix from its products with a few vectors.

    Q^T M Q = T, tridiagonal, with Q an orthonormal basis of start, M start, .., M^(k-1) start.

    The outermost eigenvalues come first. Every new vector is made orthogonal to all the old ones,
    twice: without it, copies of found eigenvalues appear.

    Args:
        matrix: v -> M v.
        start: any vector, not orthogonal to what is looked for; `probe` is one.
        steps: k, at most the size of the matrix.
        space: of the vectors.

    Returns:
        Ritz values with bounds, the same on every rank.

    Raises:
        ValueError: no step at all.

    Example:
        >>> found = lanczos(lambda v: torch.tensor([1.0, 9.0]) * v, torch.ones(2), 2)
        >>> [round(float(x), 4) for x in found.values]
        [1.0, 9.0]

    Source: Lanczos 1950; Paige 1972 for the bounds; Ghorbani et al. 2019 (arXiv 1901.10159).
    """
    if steps < 1:
        raise ValueError(f"lanczos: {steps} steps; give at least 1")
    basis, alphas, betas = [_unit(start, space)[0]], [], []
    for _ in range(steps):
        w = matrix(basis[-1])
        alphas.append(space.dot(basis[-1], w))
        for q in basis * 2:
            w = add(w, q, -space.dot(q, w))
        q, beta = _unit(w, space)
        basis.append(q)
        betas.append(beta)
    values, vectors = torch.linalg.eigh(_tridiagonal(alphas, betas[:-1]))
    top = tree.map(lambda *qs: _combine(qs, vectors[:, -1]), *basis[:-1])
    return Spectrum(values, betas[-1] * vectors[-1].abs(), top)


def conjugate_gradients(
    matrix: Matrix, b: Tree, steps: int, space: Space = WHOLE, *, damping: float = 0.0
) -> Tree:
    """x with (M + damping) x = b, for a positive definite M + damping.

    Args:
        matrix: v -> M v.
        b: the right side.
        steps: products with M; as many as its size solve it up to rounding.
        space: of the vectors.
        damping: added to the diagonal.

    Returns:
        x, held as b is.

    Example:
        >>> conjugate_gradients(lambda v: torch.tensor([2.0, 4.0]) * v, torch.tensor([2.0, 8.0]), 2)
        tensor([1., 2.])

    Source: Hestenes and Stiefel 1952.
    """
    x, r = tree.map(torch.zeros_like, b), b
    direction, size = r, space.dot(r, r)
    for _ in range(steps):
        product = add(matrix(direction), direction, damping)
        along = _over(size, space.dot(direction, product))
        x, r = add(x, direction, along), add(r, product, -along)
        size, before = space.dot(r, r), size
        direction = add(r, direction, _over(size, before))
    return x


def add(a: Tree, b: Tree, by: Tensor | float = 1.0) -> Tree:
    """a + by b, leaf by leaf.

    Example:
        >>> add({"w": torch.tensor(1.0)}, {"w": torch.tensor(2.0)}, 3.0)
        {'w': tensor(7.)}
    """
    return tree.map(lambda x, y: x + by * y, a, b)


def _over(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where there is nothing left to divide."""
    some = b != 0
    return torch.where(some, a / torch.where(some, b, 1.0), 0.0)


def _unit(v: Tree, space: Space) -> tuple[Tree, Tensor]:
    """v / |v| and |v|."""
    norm = space.dot(v, v).sqrt()
    by = _over(torch.ones_like(norm), norm)
    return tree.map(lambda x: by * x, v), norm


def _tridiagonal(diagonal: Sequence[Tensor], beside: Sequence[Tensor]) -> Tensor:
    t = torch.stack(list(diagonal)).diag()
    if not beside:
        return t
    off = torch.stack(list(beside))
    return t + off.diag(1) + off.diag(-1)


def _combine(qs: Sequence[Tensor], weights: Tensor) -> Tensor:
    return sum((weights[i] * q for i, q in enumerate(qs)), torch.zeros_like(qs[0]))
