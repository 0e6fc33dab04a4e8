"""The real collectives, as integer matrices, against the model of `Collectives.v`.

Each collective of `DUALS` runs through `simulate`'s door on every unit vector: forward, and
backward by autograd. Both matrices must be those of the model ([run] and [dual] in `Collectives.v`,
written here a second time), and each other's transpose under the pairing of their types ([dot]).
All numbers are small integers, compared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mfun import comm
from mfun.comm import DUALS, map_ranks
from mfun.mesh import Mesh
from proofs.claims import Claim, claim

Ids = Callable[[int], np.ndarray]
"""For each rank of a group the numbers of the elements that it holds, in their shape there."""


class Model(NamedTuple):
    """A collective over n ranks as the theorems have it.

    Args:
        params: of the call.
        takes: elements before.
        gives: elements after.
        sources: the ranks whose element e is summed to make rank r's element e.
        types: before and after.
        dual: name of the backward.
    """

    params: tuple[int, ...]
    takes: Ids
    gives: Ids
    sources: Callable[[int, int], list[int]]
    types: tuple[str, str]
    dual: str


def models(name: str, n: int) -> Iterator[Model]:
    """The model of a collective, for some parameters."""
    ranks, flat = list(range(n)), np.arange(2)
    middle = 2 if n <= 4 else 1  # of 8 ranks' matrices half are enough
    cube = np.arange(middle * n * n).reshape(n, middle, n)  # both outer dims divide

    def piece(whole: np.ndarray, dim: int) -> Ids:
        return lambda r: np.split(whole, n, dim)[r]

    def owner(whole: np.ndarray, dim: int) -> Callable[[int], int]:
        return lambda e: int(np.argwhere(whole == e)[0][dim]) // (whole.shape[dim] // n)

    def same(whole: np.ndarray) -> Ids:
        return lambda r: whole

    match name:
        case "copy":
            yield Model((), same(flat), same(flat), lambda r, e: [r], ("I", "R"), "reduce")
        case "reduce":
            yield Model((), same(flat), same(flat), lambda r, e: ranks, ("P", "I"), "copy")
        case "all_reduce":
            yield Model((), same(flat), same(flat), lambda r, e: ranks, ("P", "R"), "all_reduce")
        case "gather" | "unsplit":
            for dim in (0, -1):
                own = owner(cube, dim)
                types, dual = {
                    "gather": (("V", "R"), "reduce_scatter"),
                    "unsplit": (("V", "I"), "split"),
                }[name]
                whole, part = same(cube), piece(cube, dim)
                yield Model((dim,), part, whole, lambda r, e, o=own: [o(e)], types, dual)
        case "reduce_scatter":
            for dim in (0, -1):
                part = piece(cube, dim)
                yield Model((dim,), same(cube), part, lambda r, e: ranks, ("P", "V"), "gather")
        case "split":
            for dim in (0, -1):
                part = piece(cube, dim)
                yield Model((dim,), same(cube), part, lambda r, e: [r], ("I", "V"), "unsplit")
        case "all_to_all":
            for cut, glue in ((0, 2), (2, 0)):
                own = owner(cube, glue)
                before, after = piece(cube, glue), piece(cube, cut)
                yield Model(
                    (cut, glue), before, after, lambda r, e, o=own: [o(e)], ("V", "V"), name
                )
            # One dim cut and glued: rank a's piece b becomes rank b's piece a.
            pieces = np.arange(2 * n * n).reshape(n, n, 2)
            yield Model(
                (0, 0),
                lambda r: pieces[r],
                lambda r: pieces[:, r],
                lambda r, e: [e // (2 * n)],
                ("V", "V"),
                name,
            )
        case "shift":
            for k in (1, -1, n + 1, 0):
                yield Model(
                    (k,), same(flat), same(flat), lambda r, e, k=k: [(r - k) % n], ("V", "V"), name
                )
        case "broadcast":
            for root in {0, n - 1}:
                yield Model(
                    (root,), same(flat), same(flat), lambda r, e, t=root: [t], ("V", "R"), "collect"
                )
        case "collect":
            for root in {0, n - 1}:
                yield Model(
                    (root,),
                    same(flat),
                    same(flat),
                    lambda r, e, t=root: ranks if r == t else [],
                    ("P", "V"),
                    "broadcast",
                )
        case _:
            raise ValueError(f"{name} is a row of DUALS without a model: add it here and in Rocq")


def matrix(model: Model, groups: tuple[tuple[int, ...], ...]) -> np.ndarray:
    """(out, in) on the elements of all ranks, one block a group."""
    n, world = len(groups[0]), sum(map(len, groups))
    before, after = model.takes(0).size, model.gives(0).size
    out = np.zeros((world, after, world, before), dtype=np.int64)
    for r in range(n):
        for at, e in enumerate(model.gives(r).flat):
            for s in model.sources(r, int(e)):
                (place,) = np.flatnonzero(model.takes(s).ravel() == e)
                for group in groups:
                    out[group[r], at, group[s], place] += 1
    return out.reshape(world * after, world * before)


def real(name: str, model: Model, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """The matrices of mfun's collective and of its backward, by unit vectors."""

    def local(groups: comm.Groups, x: Tensor) -> Tensor:
        return getattr(comm, name)(x, groups.over(*axes), *model.params)

    run = map_ranks(local, mesh)
    shape = (mesh.stage_size, *model.takes(0).shape)
    zero = torch.zeros(shape, dtype=torch.float64)
    y, pull, *_ = torch.func.vjp(run, zero)
    units = torch.eye(zero.numel(), dtype=torch.float64).view(-1, *shape)
    forward = torch.func.vmap(run)(units).flatten(1).T
    grads = torch.eye(y.numel(), dtype=torch.float64).view(-1, *y.shape)
    backward = torch.func.vmap(lambda g: pull(g)[0])(grads).flatten(1).T
    return forward, backward


def pairing(kind: str, size: int, groups: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """What counts of a value of a type, and the valid values: [dot] and [valid] of the model."""
    world = sum(map(len, groups))
    one = torch.eye(size, dtype=torch.float64)
    counts, equal = torch.eye(world), torch.zeros(world, len(groups))
    for i, group in enumerate(groups):
        equal[list(group), i] = 1
        if kind == "I":
            counts[list(group[1:])] = 0
    valid = equal if kind in "IR" else torch.eye(world)
    return torch.kron(counts.double(), one), torch.kron(valid.double(), one)


COTANGENT = {"R": "P", "P": "R", "I": "I", "V": "V"}


def problems(name: str, mesh: Mesh, axes: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with a collective over some axes of a mesh."""
    groups = mesh.stage_groups(*axes)
    n, where = len(groups[0]), f"{name} over {'+'.join(axes)} of {mesh}"
    for model in models(name, n):
        if DUALS[name].types != " -> ".join(model.types):
            yield f"{where}: its types are {DUALS[name].types}, the theorem's {model.types}"
        if DUALS[name].dual != model.dual:
            yield f"{where}: its dual is {DUALS[name].dual}, the theorem's {model.dual}"
        forward, backward = real(name, model, mesh, axes)
        expected = torch.from_numpy(matrix(model, groups)).double()
        if not torch.equal(forward, expected):
            yield f"{where} {model.params}: does not do what the model does"
        (counts_in, valid_in) = pairing(model.types[0], model.takes(0).size, groups)
        cotangent = COTANGENT[model.types[1]]
        (counts_out, _) = pairing(model.types[1], model.gives(0).size, groups)
        (_, valid_out) = pairing(cotangent, model.gives(0).size, groups)
        left = (forward @ valid_in).T @ counts_out @ valid_out
        right = valid_in.T @ counts_in @ (backward @ valid_out)
        if not torch.equal(left, right):
            yield f"{where} {model.params}: the backward is not the transpose of the forward"


def meshes(world: int = 8) -> Iterator[Mesh]:
    """Every mesh of one stage of at most so many ranks."""
    for tp in range(1, world + 1):
        for cp in range(1, world // tp + 1):
            for dp in range(1, world // tp // cp + 1):
                yield Mesh(tp=tp, cp=cp, dp=dp)


def cases(world: int = 8) -> Iterator[tuple[Mesh, tuple[str, ...]]]:
    """Every such mesh with every choice of axes, none of them of size 1."""
    for mesh in meshes(world):
        used = [axis for axis in ("tp", "cp", "dp") if mesh.size(axis) > 1]
        for count in range(1, len(used) + 1):
            yield from ((mesh, axes) for axes in combinations(used, count))


def claims(world: int = 8) -> Iterator[Claim]:
    """Every row of `DUALS`, on all meshes of at most `world` ranks."""
    where = list(cases(world))
    assert prod(where[-1][0].size(a) for a in where[-1][1]) <= world
    for name in DUALS:
        found = (text for mesh, axes in where for text in problems(name, mesh, axes))
        yield claim(f"{name} and its backward are transposes, {len(where)} mesh axes", found)
