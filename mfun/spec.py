"""What a parameter is in every layout: global shape, cut, gradient types, initial value.

`P` says over which mesh axis each tensor dim is cut. `ParamSpec` adds what every layer of mfun
reads: the shape without padding, the rule for initial weights, and how the gradient of a replica
relates to its peers'. Padding belongs to the layout: a vocabulary that does not divide is cut into
equal pieces by ceiling division, the last ones filled up with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from mfun import rng, tree
from mfun.mesh import AxisLike, Factor, Mesh

DTYPES = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }
)
"""The configuration's names of number formats."""
Entry = None | AxisLike | tuple[AxisLike, ...]
Coords = Mapping[str, int]


@attrs.frozen(init=False)
class P:
    """How a tensor is cut: one entry per dim; dims not mentioned are whole.

    Args:
        entries: None (whole), an axis, a `Factor` of one, or several axes, the first varying
            slowest.
        sums: axes over which a value leaving the mesh is summed, or over which the gradients of
            an entering value are (it is R there, used differently by each rank). Over all other
            axes that are not mentioned it is I: equal, with equal gradients.

    Example:
        >>> P(None, "tp")
        P(None, 'tp')
        >>> P("dp", sums=("cp",))
        P('dp', sums=('cp',))
    """

    entries: tuple[Entry, ...]
    sums: tuple[AxisLike, ...]

    def __init__(self, *entries: Entry, sums: Sequence[AxisLike] = ()) -> None:
        if isinstance(sums, str | Factor):
            raise ValueError(f"P: sums={sums!r} is one axis; write sums=({sums!r},)")
        self.__attrs_init__(tuple(entries), tuple(sums))  # type: ignore[attr-defined]
        _check_axes(self)

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.entries]
        parts += [f"sums={self.sums!r}"] if self.sums else []
        return f"P({', '.join(parts)})"

    def cuts(self, dim: int) -> tuple[AxisLike, ...]:
        """The axes dim `dim` is cut over, slowest first."""
        entry = self.entries[dim] if dim < len(self.entries) else None
        if entry is None:
            return ()
        return entry if isinstance(entry, tuple) else (entry,)

    @property
    def axes(self) -> tuple[AxisLike, ...]:
        """All axes some dim is cut over."""
        return tuple(axis for dim in range(len(self.entries)) for axis in self.cuts(dim))


def _check_axes(p: P) -> None:
    """Entries are axes, and no axis cuts twice (its ranks would hold a diagonal of pieces)."""
    for entry in (*p.entries, *p.sums):
        for axis in entry if isinstance(entry, tuple) else (entry,):
            if not (isinstance(axis, str | Factor) or (axis is None and entry is None)):
                raise ValueError(
                    f"P: entry {entry!r} is not None, an axis name, a Factor, or a tuple of them"
                )
    for i, axis in enumerate(p.axes):
        whole = axis.axis if isinstance(axis, Factor) else None
        if axis in p.axes[:i] or whole in p.axes:
            raise ValueError(f"{p}: axis {whole or axis!r} cuts twice; cut by it once")


@attrs.frozen
class Init:
    """Initial values: `normal`, `truncated_normal`, `uniform` in [-std, std], `zeros`, `ones`."""

    kind: str = "normal"
    std: float = 0.02


GRAD_KINDS = ("partial", "equal", "mean")


def _frozen_map(grad: Mapping[AxisLike, str]) -> Mapping[AxisLike, str]:
    return MappingProxyType(dict(grad))


def _check_kinds(_: Any, __: attrs.Attribute[Any], grad: Mapping[AxisLike, str]) -> None:
    for axis, kind in grad.items():
        if kind not in GRAD_KINDS:
            raise ValueError(f"grad over {axis!r} is {kind!r}; use one of {GRAD_KINDS}")


@attrs.frozen(kw_only=True)
class ParamSpec:
    """One parameter tensor, whatever the layout.

    Args:
        shape: global shape, without padding.
        p: how it is cut.
        init: its initial value, drawn by global index.
        grad: for each model-parallel axis it is replicated over, whether the ranks' gradients are
            summands (`partial`), copies (`equal`) or to be averaged (`mean`). Data axes (`dp`,
            `cp`) are always `partial`.
        decay: whether weight decay applies.
        pads: dims that may be padded up to a multiple of their cut (the vocabulary's).
        matrix: of a hidden matrix, how many of its last dims are rows, and how many columns; the
            dims before them count separate matrices. Muon moves these whole. None for the rest:
            embeddings, heads, norms, biases.
        wide: of at least float32, whatever the other parameters' type.
    """

    shape: tuple[int, ...]
    p: P = P()
    init: Init = Init()
    grad: Mapping[AxisLike, str] = attrs.field(
        factory=dict,
        converter=_frozen_map,
        validator=_check_kinds,
        eq=lambda m: frozenset(m.items()),
    )
    decay: bool = True
    pads: tuple[int, ...] = ()
    matrix: tuple[int, int] | None = None
    wide: bool = False

    def __repr__(self) -> str:
        grad = "".join(f" {kind} over {axis}" for axis, kind in self.grad.items())
        rest = f"{'' if self.decay else ' no decay'}{' fp32' if self.wide else ''}"
        return f"{[*self.shape]} {self.p}{grad}{rest}"

    def dtype_among(self, others: torch.dtype) -> torch.dtype:
        """Its type among parameters of the type `others`.

        Example:
            >>> ParamSpec(shape=(8,), wide=True).dtype_among(torch.bfloat16)
            torch.float32
        """
        return torch.promote_types(others, torch.float32) if self.wide else others

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


def axis_index(axis: AxisLike, mesh: Mesh, coords: Coords) -> int:
    """Position on an axis, or on a factor of one, of the rank at `coords`."""
    if isinstance(axis, str):
        return coords[axis]
    inner = mesh.size(axis.axis) // axis.parts
    at = coords[axis.axis]
    return at // inner if axis.part == "outer" else at % inner


def pieces(p: P, dim: int, mesh: Mesh) -> int:
    """Into how many pieces dim `dim` is cut."""
    return math.prod(mesh.size(axis) for axis in p.cuts(dim))


def piece_index(p: P, dim: int, mesh: Mesh, coords: Coords) -> int:
    """Which piece of dim `dim` the rank at `coords` holds."""
    index = 0
    for axis in p.cuts(dim):
        index = index * mesh.size(axis) + axis_index(axis, mesh, coords)
    return index


def local_shape(spec: ParamSpec, mesh: Mesh) -> tuple[int, ...]:
    """Shape of one rank's piece, padding included.

    Raises:
        ValueError: a dim that may not be padded does not divide.

    Example:
        >>> local_shape(ParamSpec(shape=(37, 8), p=P("tp"), pads=(0,)), Mesh(tp=2))
        (19, 8)
    """
    out = []
    for dim, size in enumerate(spec.shape):
        cut = pieces(spec.p, dim, mesh)
        if size % cut and dim not in spec.pads:
            raise ValueError(
                f"dim {dim} of a parameter of shape {[*spec.shape]} does not divide into {cut} "
                f"pieces over {spec.p.cuts(dim)}; choose a size that is a multiple of {cut}"
            )
        out.append(-(-size // cut))
    return tuple(out)


def window(spec: ParamSpec, mesh: Mesh, coords: Coords) -> tuple[tuple[int, int], ...]:
    """(start, stop) of this rank's piece in each global dim, clipped to the unpadded shape.

    Example:
        >>> window(ParamSpec(shape=(37, 8), p=P("tp"), pads=(0,)), Mesh(tp=2), {"tp": 1})
        ((19, 37), (0, 8))
    """
    out = []
    for dim, (size, length) in enumerate(zip(spec.shape, local_shape(spec, mesh), strict=True)):
        start = min(length * piece_index(spec.p, dim, mesh, coords), size)
        out.append((start, min(start + length, size)))
    return tuple(out)


def pad_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` filled up with zeros at the end of each dim.

    Raises:
        ValueError: `x` is longer somewhere, or has another number of dims.
    """
    if tuple(x.shape) == tuple(shape):
        return x
    if x.ndim != len(shape) or any(n > m for n, m in zip(x.shape, shape, strict=True)):
        raise ValueError(f"pad_to: shape {[*x.shape]} does not fit into {[*shape]}")
    pads = [n for have, want in zip(x.shape, shape, strict=True) for n in (want - have, 0)]
    return F.pad(x, pads[::-1])


def init_leaf(
    path: str, spec: ParamSpec, seed: int, mesh: Mesh, coords: Coords, dtype: torch.dtype
) -> Tensor:
    """This rank's piece of an initial weight: bitwise the slice of the whole, drawn without it.

    Args:
        path: dotted path, which names its random stream.
        spec: its spec.
        seed: of the run.
        mesh: the mesh.
        coords: this rank's.
        dtype: of the parameters; of the result, unless the spec is `wide`.

    Returns:
        The piece, of `local_shape(spec, mesh)`; padding is zero.
    """
    dtype = spec.dtype_among(dtype)
    grid = rng.Grid(tuple(range(a, b) for a, b in window(spec, mesh, coords)), spec.shape)
    key = rng.key(seed, "init", path)
    match spec.init.kind:
        case "normal":
            x = rng.normal(key, grid, dtype=dtype, std=spec.init.std)
        case "truncated_normal":
            x = rng.truncated_normal(key, grid, dtype=dtype, std=spec.init.std)
        case "uniform":
            x = rng.uniform(key, grid, dtype=dtype, low=-spec.init.std, high=spec.init.std)
        case "zeros":
            x = torch.zeros(grid.shape, dtype=dtype)
        case "ones":
            x = torch.ones(grid.shape, dtype=dtype)
        case kind:
            raise ValueError(
                f"init rule {kind!r} of {path!r} is not known; use normal, truncated_normal, "
                "uniform, zeros or ones"
            )
    return pad_to(x, local_shape(spec, mesh))


def init_params(specs: Any, seed: int, mesh: Mesh, coords: Coords, dtype: torch.dtype) -> Any:
    """Initial weights of one rank for a tree of specs."""
    return tree.map_with_path(
        lambda path, spec: init_leaf(path, spec, seed, mesh, coords, dtype), specs
    )


def shard_leaf(
    x: Tensor, spec: ParamSpec, mesh: Mesh, coords: Coords, path: str = "shard_leaf"
) -> Tensor:
    """One rank's piece of a whole tensor, padded; its path is for the error.

    Raises:
        ValueError: x has another shape than the spec.
    """
    if tuple(x.shape) != spec.shape:
        raise ValueError(
            f"{path}: a tensor of shape {[*x.shape]} for a spec of shape {[*spec.shape]}; give the "
            "whole, unpadded tensor"
        )
    box = tuple(slice(a, b) for a, b in window(spec, mesh, coords))
    return pad_to(x[box], local_shape(spec, mesh))


def shard(params: Any, specs: Any, mesh: Mesh, coords: Coords) -> Any:
    """One rank's pieces of a tree of whole tensors.

    Example:
        >>> whole = {"w": torch.arange(4.0)}
        >>> shard(whole, {"w": ParamSpec(shape=(4,), p=P("tp"))}, Mesh(tp=2), {"tp": 1})
        {'w': tensor([2., 3.])}
    """
    return tree.map_with_path(
        lambda path, spec, x: shard_leaf(x, spec, mesh, coords, path), specs, params
    )


def unshard_leaf(parts: Sequence[tuple[Coords, Tensor]], spec: ParamSpec, mesh: Mesh) -> Tensor:
    """The whole tensor from the pieces of some ranks; every element must be covered.

    Raises:
        ValueError: the pieces leave a hole, or one has a wrong shape.
    """
    local = local_shape(spec, mesh)
    whole = parts[0][1].new_zeros(spec.shape)
    seen = torch.zeros(spec.shape, dtype=torch.bool)
    for coords, part in parts:
        if tuple(part.shape) != local:
            raise ValueError(
                f"unshard: the piece at {dict(coords)} has shape {[*part.shape]}; every piece of "
                f"{spec} has {[*local]}"
            )
        bounds = window(spec, mesh, coords)
        box = tuple(slice(a, b) for a, b in bounds)
        whole[box] = part[tuple(slice(0, b - a) for a, b in bounds)]
        seen[box] = True
    if not bool(seen.all()):
        raise ValueError(f"unshard: the pieces do not cover a tensor of shape {[*spec.shape]}")
    return whole


def replicated(p: P, mesh: Mesh, axes: Sequence[str]) -> tuple[AxisLike, ...]:
    """The axes, or halves of axes, of size above 1 over which ranks hold the same piece.

    Example:
        >>> replicated(P("tp"), Mesh(tp=2, dp=2), ("tp", "dp"))
        ('dp',)
        >>> replicated(P(Factor("tp", 2)), Mesh(tp=4), ("tp",))
        (Factor(axis='tp', parts=2, part='inner'),)
    """
    return others(p.axes, mesh, axes)


def others(named: Sequence[AxisLike], mesh: Mesh, axes: Sequence[str]) -> tuple[AxisLike, ...]:
    """Of `axes`, those (or the halves of those) of size above 1 that `named` leaves out."""
    out: list[AxisLike] = []
    for axis in axes:
        halves = [a for a in named if isinstance(a, Factor) and a.axis == axis]
        rest = [halves[0].outer, halves[0].inner] if halves else [axis]
        if axis not in named:
            out += [part for part in rest if part not in halves and mesh.size(part) > 1]
    return tuple(out)
