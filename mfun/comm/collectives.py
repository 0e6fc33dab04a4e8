"""The collectives, each an autograd Function whose backward is its dual's `.apply`.

Every value has a type per mesh axis: `R` replicate (equal on all ranks, its gradient is a summand),
`P` partial (a summand), `I` invariant (equal, and so is its gradient), `V` varying (each rank its
own piece). A collective changes the type, and its derivative is the collective of the transposed
change: the table `DUALS`. Megatron-LM's f is `copy`, its g is `reduce`.

The same call runs on process groups, on the ranks of `simulate` (one `torch.func.vmap` axis), and
as the identity on an axis of size 1. Because backwards are collectives too, derivatives of every
order, forward and reverse, inside and outside of the mesh, are those of the global program.

`dim` counts from the end inside this file, so that extra leading batch dims never shift it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun.comm import kernels
from mfun.comm.axis import Axis
from mfun.comm.signed import signed

Params = tuple[int, ...]


class Rule(NamedTuple):
    """One row of `DUALS`: the type change, the backward collective, Megatron-LM's name."""

    types: str
    dual: str
    megatron: str

    @property
    def equal_input(self) -> bool:
        """Whether the input must be the same on all ranks of the axis."""
        return self.types[0] in "IR"


# The theorem of a row is `<name>_transpose` in proofs/Collectives.v.
DUALS: dict[str, Rule] = {
    "copy": Rule("I -> R", "reduce", "copy_to_tensor_model_parallel_region (f)"),
    "reduce": Rule("P -> I", "copy", "reduce_from_tensor_model_parallel_region (g)"),
    "all_reduce": Rule("P -> R", "all_reduce", "all_reduce of metrics and norms"),
    "gather": Rule("V -> R", "reduce_scatter", "gather_from_sequence_parallel_region"),
    "reduce_scatter": Rule("P -> V", "gather", "reduce_scatter_to_sequence_parallel_region"),
    "split": Rule("I -> V", "unsplit", "scatter_to_sequence_parallel_region"),
    "unsplit": Rule("V -> I", "split", "gather_from_tensor_model_parallel_region"),
    "all_to_all": Rule("V -> V", "all_to_all", "all_to_all"),
    "shift": Rule("V -> V", "shift", "ring exchange"),
    "broadcast": Rule("V -> R", "collect", "broadcast"),
    "collect": Rule("P -> V", "broadcast", "reduce to one rank"),
}


def dual_of(name: str, params: Params) -> tuple[str, Params]:
    """The backward collective of `name` and its parameters (all_to_all swaps, shift reverses)."""
    if name == "all_to_all":
        params = (params[1], params[0])
    elif name == "shift":
        params = (-params[0],)
    return DUALS[name].dual, params


def _shift_batch(x: Tensor, batch_dim: int | None) -> Tensor:
    return x if batch_dim is None else x.movedim(batch_dim, 0)


def _rank_stacked(x: Tensor, x_dim: int | None, ranks: int, axis: Axis, name: str) -> Tensor:
    """`x` with the ranks in front; a value that does not depend on the rank is each rank's own."""
    if axis.scope is not None and not axis.scope.open:
        raise RuntimeError(
            f"`{name}` over axis {axis.name!r} (size {axis.size}): this axis was made by a "
            "`simulate` run that has ended; take it from the `groups` argument of the running "
            "function"
        )
    return x.expand(ranks, *x.shape) if x_dim is None else x.movedim(x_dim, 0)


class Collective(torch.autograd.Function):
    """A collective on one rank's tensor; `axis.index` decides at which vmap level ranks live."""

    @staticmethod
    @signed
    def forward(x: Tensor, index: Tensor, axis: Axis, name: str, params: Params) -> Tensor:
        """Run it on the process group (a simulated rank never gets here)."""
        return kernels.on_group(name, x, axis, params)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the index, which carries the rank level, and the static arguments."""
        _, index, *static = inputs
        ctx.static = static
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The dual's `.apply`, so that gradients of gradients are right."""
        (index,) = ctx.saved_tensors
        axis, name, params = ctx.static
        return (Collective.apply(grad, index, axis, *dual_of(name, params)), *[None] * 4)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Collectives are linear: the tangent goes through the same one."""
        (index,) = ctx.saved_tensors
        return Collective.apply(tangent, index, *ctx.static)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        index: Tensor,
        axis: Axis,
        name: str,
        params: Params,
    ) -> tuple[Tensor, int]:
        """Ranks where the index is batched; any other level is an ordinary batch dim in front."""
        x_dim, index_dim = in_dims[:2]
        if index_dim is None:
            return Collective.apply(_shift_batch(x, x_dim), index, axis, name, params), 0
        x = _rank_stacked(x, x_dim, info.batch_size, axis, name)
        return Ranked.apply(x, axis, name, params, -x.ndim), 0


class Ranked(torch.autograd.Function):
    """The same collectives on rank-stacked tensors: `rank_dim` (from the end) lists all ranks."""

    @staticmethod
    @signed
    def forward(x: Tensor, axis: Axis, name: str, params: Params, rank_dim: int) -> Tensor:
        """Run it on the stack, after checking that a value declared equal is equal."""
        if axis.check and DUALS[name].equal_input:
            kernels.check_equal(x, axis, rank_dim, f"the input of `{name}` ({DUALS[name].types})")
        return kernels.on_ranks(name, x, axis, params, rank_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """All arguments but the tensor are static."""
        ctx.static = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The dual on the stack: plain autograd here would count every rank's copy."""
        axis, name, params, rank_dim = ctx.static
        return (Ranked.apply(grad, axis, *dual_of(name, params), rank_dim), *[None] * 4)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        """Linear."""
        return Ranked.apply(tangent, *ctx.static)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        x: Tensor,
        axis: Axis,
        name: str,
        params: Params,
        rank_dim: int,
    ) -> tuple[Tensor, int]:
        """A batch dim outside of the mesh goes to the front; dims from the end stay valid."""
        return Ranked.apply(_shift_batch(x, in_dims[0]), axis, name, params, rank_dim), 0


class Max(torch.autograd.Function):
    """Largest value over the ranks of an axis, without gradient."""

    @staticmethod
    @signed
    def forward(x: Tensor, index: Tensor, axis: Axis) -> Tensor:
        """Run it on the process group."""
        return kernels.on_group("max", x, axis, ())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Nothing is needed: the gradient stops."""
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Stop-gradient."""
        return None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> None:
        """Stop-gradient."""
        return None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: Tensor, index: Tensor, axis: Axis
    ) -> tuple[Tensor, int]:
        """As `Collective.vmap`."""
        x_dim, index_dim = in_dims[:2]
        if index_dim is None:
            return Max.apply(_shift_batch(x, x_dim), index, axis), 0
        x = _rank_stacked(x, x_dim, info.batch_size, axis, "max")
        return kernels.on_ranks("max", x.detach(), axis, (), -x.ndim), 0


def _apply(name: str, x: Tensor, axis: Axis, *params: int) -> Tensor:
    if axis.size == 1:
        return x
    return Collective.apply(x, axis.index, axis, name, params)


def _dim(x: Tensor, dim: int, axis: Axis, name: str, *, divide: bool) -> int:
    """`dim` from the end, checked to exist and (if `divide`) to divide over the axis."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"{name}: dim {dim} is out of range for a tensor of shape {[*x.shape]}; name one of "
            f"its {x.ndim} dims"
        )
    if divide and x.shape[dim] % axis.size:
        raise ValueError(
            f"{name}: dim {dim} of shape {[*x.shape]} does not divide over axis {axis.name!r} of "
            f"size {axis.size}; pad it to a multiple of {axis.size}"
        )
    return dim - x.ndim if dim >= 0 else dim


def copy(x: Tensor, axis: Axis) -> Tensor:
    """The identity whose backward sums: Megatron-LM's f.

    y_r = x;   dx = sum_r dy_r.

    Args:
        x: any shape, I over `axis` (equal on its ranks).
        axis: the axis.

    Returns:
        x, R over `axis`: used by each rank for its own part of the work.

    Example:
        >>> import torch
        >>> from mfun.comm import simulate
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import P
        >>> f = lambda groups, x, w: reduce((copy(x, groups.tp) * w).sum(), groups.tp)
        >>> run = simulate(f, Mesh(tp=2), in_specs=(P(), P("tp")), out_specs=P())
        >>> torch.func.grad(run)(torch.tensor(3.0), torch.tensor([10.0, 20.0]))
        tensor(30.)

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
    Proof: proofs/Collectives.v, copy_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("copy", x, axis)


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, meant once; its backward is the identity: Megatron-LM's g.

    y = sum_r x_r;   dx_r = dy.

    Use it where the result is one value that all ranks go on to use alike; a gradient through
    `all_reduce`, by contrast, counts every rank's use.

    Args:
        x: any shape, P over `axis` (a summand).
        axis: the axis.

    Returns:
        The sum, I over `axis`.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: reduce(x, groups.tp), Mesh(tp=2))
        >>> run(torch.tensor([1.0, 2.0])).tolist()
        [3.0, 3.0]

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3.
    Proof: proofs/Collectives.v, reduce_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("reduce", x, axis)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the ranks, used differently by each; its backward is itself.

    y_r = sum_s x_s;   dx_r = sum_s dy_s.

    A value meant once must take `reduce`: here its gradient would be counted by every rank, and
    nothing in the value shows it.

    Args:
        x: any shape, P over `axis`.
        axis: the axis.

    Returns:
        The sum, R over `axis`.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: all_reduce(x, groups.tp), Mesh(tp=2))
        >>> run(torch.tensor([1.0, 2.0])).tolist()
        [3.0, 3.0]

    Proof: proofs/Collectives.v, all_reduce_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("all_reduce", x, axis)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Concatenate the ranks' pieces along `dim`; its backward is `reduce_scatter`.

    y = [x_0; x_1; ..];   dx_r = piece r of sum_s dy_s.

    Megatron-LM's gather_from_sequence_parallel_region.

    Args:
        x: rank-local piece, V over `axis`.
        axis: the axis.
        dim: tensor dim the pieces are cut along.

    Returns:
        The whole, R over `axis` (each rank uses it for its own part of the work).

    Raises:
        ValueError: `dim` is out of range.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: gather(x, groups.tp, 0), Mesh(tp=2))
        >>> run(torch.tensor([[1.0], [2.0]])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), g-bar's pair.
    Proof: proofs/Collectives.v, gather_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("gather", x, axis, _dim(x, dim, axis, "gather", divide=False))


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sum over the ranks, each keeping its own piece along `dim`; its backward is `gather`.

    y_r = piece r of sum_s x_s;   dx = [dy_0; dy_1; ..].

    Megatron-LM's reduce_scatter_to_sequence_parallel_region.

    Args:
        x: whole-sized summand, P over `axis`; `x.shape[dim]` divides by its size.
        axis: the axis.
        dim: tensor dim to cut.

    Returns:
        This rank's piece of the sum, V over `axis`.

    Raises:
        ValueError: `dim` is out of range or does not divide.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: reduce_scatter(x, groups.tp, 0), Mesh(tp=2))
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[4.0], [6.0]]

    Source: Korthikanti et al. 2022 (arXiv 2205.05198).
    Proof: proofs/Collectives.v, reduce_scatter_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("reduce_scatter", x, axis, _dim(x, dim, axis, "reduce_scatter", divide=True))


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Keep this rank's piece along `dim` of an invariant value; its backward is `unsplit`.

    y_r = piece r of x;   dx = [dy_0; dy_1; ..].

    Megatron-LM's scatter_to_sequence_parallel_region.

    Args:
        x: the whole, I over `axis`; `x.shape[dim]` divides by its size.
        axis: the axis.
        dim: tensor dim to cut.

    Returns:
        This rank's piece, V over `axis`.

    Raises:
        ValueError: `dim` is out of range or does not divide.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: split(x, groups.tp, 0), Mesh(tp=2))
        >>> run(torch.tensor([[1.0, 2.0], [1.0, 2.0]])).tolist()
        [[1.0], [2.0]]

    Proof: proofs/Collectives.v, split_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("split", x, axis, _dim(x, dim, axis, "split", divide=True))


def unsplit(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Concatenate the pieces into one invariant value; its backward is `split`.

    y = [x_0; x_1; ..];   dx_r = piece r of dy.

    Megatron-LM's gather_from_tensor_model_parallel_region.

    Args:
        x: rank-local piece, V over `axis`.
        axis: the axis.
        dim: tensor dim the pieces are cut along.

    Returns:
        The whole, I over `axis`: all ranks go on alike.

    Raises:
        ValueError: `dim` is out of range.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: unsplit(x, groups.tp, 0), Mesh(tp=2))
        >>> run(torch.tensor([[1.0], [2.0]])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]

    Proof: proofs/Collectives.v, unsplit_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("unsplit", x, axis, _dim(x, dim, axis, "unsplit", divide=False))


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Cut along one dim, exchange, concatenate along another; its backward is the reverse.

    y_s = [piece s of x_0; piece s of x_1; ..];   dx is the same with the dims swapped.

    Args:
        x: rank-local, V over `axis`; `x.shape[split_dim]` divides by its size.
        axis: the axis.
        split_dim: dim that becomes 1/size as long.
        concat_dim: dim that becomes size times as long.

    Returns:
        The exchanged pieces, V over `axis`.

    Raises:
        ValueError: a dim is out of range or `split_dim` does not divide.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: all_to_all(x, groups.tp, 0, 0), Mesh(tp=2))
        >>> run(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[1.0, 3.0], [2.0, 4.0]]

    Source: Jacobs et al. 2023 (arXiv 2309.14509).
    Proof: proofs/Collectives.v, all_to_all_transpose; on all small meshes, proofs/duals.py.
    """
    cut = _dim(x, split_dim, axis, "all_to_all", divide=True)
    return _apply("all_to_all", x, axis, cut, _dim(x, concat_dim, axis, "all_to_all", divide=False))


def shift(x: Tensor, axis: Axis, offset: int) -> Tensor:
    """Pass to the rank `offset` further round the ring; its backward passes back.

    y_r = x_{r - offset};   dx_r = dy_{r + offset}, around the ring.

    Args:
        x: rank-local, V over `axis`, the same shape on all its ranks.
        axis: the axis.
        offset: how many ranks further, any integer.

    Returns:
        What the rank `offset` before this one held, V over `axis`.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: shift(x, groups.tp, 1), Mesh(tp=2))
        >>> run(torch.tensor([1.0, 2.0])).tolist()
        [2.0, 1.0]

    Proof: proofs/Collectives.v, shift_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("shift", x, axis, offset)


def broadcast(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """The root's value on all ranks; its backward is `collect`, the sum at the root.

    y_r = x_root;   dx_root = sum_s dy_s, and 0 elsewhere.

    Args:
        x: rank-local, V over `axis`; only the root's value matters.
        axis: the axis.
        root: position on the axis.

    Returns:
        The root's x, R over `axis`.

    Raises:
        ValueError: no such root.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: broadcast(x, groups.tp, 1), Mesh(tp=2))
        >>> run(torch.tensor([1.0, 2.0])).tolist()
        [2.0, 2.0]

    Proof: proofs/Collectives.v, broadcast_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("broadcast", x, axis, _root(axis, root))


def collect(x: Tensor, axis: Axis, root: int = 0) -> Tensor:
    """The sum at the root, zero elsewhere; its backward is `broadcast`.

    y_root = sum_s x_s, and 0 elsewhere;   dx_r = dy_root.

    Args:
        x: a summand, P over `axis`.
        axis: the axis.
        root: position on the axis.

    Returns:
        The sum on the root, zeros on the others: V over `axis`.

    Raises:
        ValueError: no such root.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: collect(x, groups.tp, 1), Mesh(tp=2))
        >>> run(torch.tensor([1.0, 2.0])).tolist()
        [0.0, 3.0]

    Proof: proofs/Collectives.v, collect_transpose; on all small meshes, proofs/duals.py.
    """
    return _apply("collect", x, axis, _root(axis, root))


def max(x: Tensor, axis: Axis) -> Tensor:
    """Largest value over the ranks, elementwise, with the gradient stopped.

    y = max_r x_r;   dx_r = 0.

    Args:
        x: rank-local, any type over `axis`.
        axis: the axis.

    Returns:
        The maximum, equal on all ranks and a constant to every derivative.

    Example:
        >>> from mfun.comm import map_ranks
        >>> from mfun.mesh import Mesh
        >>> run = map_ranks(lambda groups, x: max(x, groups.tp), Mesh(tp=2))
        >>> run(torch.tensor([1.0, 2.0])).tolist()
        [2.0, 2.0]
    """
    x = x.detach()
    return x if axis.size == 1 else Max.apply(x, axis.index, axis)


def _root(axis: Axis, root: int) -> int:
    if not 0 <= root < axis.size:
        raise ValueError(
            f"root {root} is not on axis {axis.name!r} of size {axis.size}; give 0 to "
            f"{axis.size - 1}"
        )
    return root
