"""Linear layers cut by columns and by rows over a tensor-parallel axis.

Each is one autograd Function, so that it can keep the sequence shard instead of the gathered
input and send the input's gradient while the weight's is computed. Its derivatives are written with
the collectives themselves, which makes them right to any order.

Shape letters: b batch, s sequence (this rank's part of it under sequence parallelism), i inputs,
o outputs, of which a rank holds its part of whichever is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from mfun import comm
from mfun.comm import Axis, overlap
from mfun.comm.signed import signed
from mfun.nn.weight_grads import WeightGrads

SEQUENCE = 1  # the dim of (b, s, ...) that sequence parallelism cuts

HALVES = 1 << 17
"""Elements from which a row-cut product is summed in halves: below, a message costs its latency."""

Grads = tuple[Tensor | None, ...]


def enter(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Into the tensor-parallel region: `copy` (I -> R), or `gather` of sequence shards (V -> R)."""
    return comm.gather(x, axis, SEQUENCE) if sequence_parallel else comm.copy(x, axis)


def leave(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """Out of it, the dual: `reduce` (P -> I), or `reduce_scatter` to sequence shards (P -> V)."""
    return comm.reduce_scatter(x, axis, SEQUENCE) if sequence_parallel else comm.reduce(x, axis)


def leave_fresh(x: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """As `leave`, of a product nobody else holds: summed in place where ranks are processes."""
    if sequence_parallel or not overlap.can_overlap(x, axis):
        return leave(x, axis, sequence_parallel)
    return overlap.start_all_reduce(x, axis).wait()


# Inside a jvp rule torch turns forward mode off, and an outer jvp would silently get no tangent of
# this one: turn it on again, and take the saved tensors without the tangents of this level.
forward_mode = partial(forward_ad._set_fwd_grad_enabled, True)


def primal(x: Tensor) -> Tensor:
    """x without its tangent at the current level of forward mode."""
    return forward_ad.unpack_dual(x).primal


class ColumnLinear(torch.autograd.Function):
    """y = enter(x) w^T + b, keeping x as it came: under sequence parallelism, the shard."""

    @staticmethod
    @signed
    def forward(
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        index: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        weight_grads: WeightGrads | None,
    ) -> Tensor:
        """The product over the whole sequence."""
        return F.linear(enter(x, _at(axis, index), sequence_parallel), w, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the tensors, with the index, which carries the level of the ranks."""
        _keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx = leave(dy w), dw = dy^T enter(x), db = sum of dy."""
        (dy,) = grads
        x, w, axis, sequence_parallel, sink = _kept(ctx)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if need_x and need_w and overlap.can_overlap(dy, axis):
            dx, dw = _overlapped(x, w, dy, axis, sequence_parallel, sink)
        else:
            dx = leave(dy @ w, axis, sequence_parallel) if need_x else None
            dw = _weight_grad(w, dy, enter(x, axis, sequence_parallel), sink) if need_w else None
        return dx, dw, _bias_grad(dy) if need_b else None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """enter(dx) w^T + enter(x) dw^T + db."""
        dx, dw, db = tangents[:3]
        with forward_mode():
            x, w, axis, sequence_parallel, _ = _kept(ctx, primal)
            terms = [] if dx is None else [F.linear(enter(dx, axis, sequence_parallel), w)]
            terms += [] if dw is None else [F.linear(enter(x, axis, sequence_parallel), dw)]
            return _total(terms if db is None else [*terms, db])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """The forward, which is a composition; the ranks are where the index is batched."""
        return torch.func.vmap(ColumnLinear.forward, in_dims)(*args), 0


class RowLinear(torch.autograd.Function):
    """y = leave(x w^T) + b: the bias is added once, to the sum."""

    @staticmethod
    @signed
    def forward(
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        index: Tensor,
        axis: Axis,
        sequence_parallel: bool,
        weight_grads: WeightGrads | None,
    ) -> Tensor:
        """This rank's summand, the sum, the bias."""
        y = _summed_product(x, w, _at(axis, index), sequence_parallel)
        return y if b is None else y + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the tensors, with the index, which carries the level of the ranks."""
        _keep(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        """dx = enter(dy) w, dw = enter(dy)^T x, db = sum of dy."""
        (dy,) = grads
        x, w, axis, sequence_parallel, sink = _kept(ctx)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        whole = enter(dy, axis, sequence_parallel)
        dx = whole @ w if need_x else None
        dw = _weight_grad(w, whole, x, sink) if need_w else None
        return dx, dw, _bias_grad(dy) if need_b else None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """leave(dx w^T + x dw^T) + db."""
        dx, dw, db = tangents[:3]
        with forward_mode():
            x, w, axis, sequence_parallel, _ = _kept(ctx, primal)
            terms = [] if dx is None else [F.linear(dx, w)]
            terms += [] if dw is None else [F.linear(x, dw)]
            terms = [leave(_total(terms), axis, sequence_parallel)] if terms else []
            return _total(terms if db is None else [*terms, db])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """The forward, which is a composition; the ranks are where the index is batched."""
        return torch.func.vmap(RowLinear.forward, in_dims)(*args), 0


def _summed_product(x: Tensor, w: Tensor, axis: Axis, sequence_parallel: bool) -> Tensor:
    """leave(x w^T); on processes half of the tokens' sum travels under the other half's product."""
    if sequence_parallel or not overlap.can_overlap(x, axis) or x.numel() < HALVES:
        return leave_fresh(F.linear(x, w), axis, sequence_parallel)
    tokens = x.flatten(0, -2)
    y = tokens.new_empty(len(tokens), len(w))
    sums = []
    for rows, out in zip(tokens.chunk(2), y.chunk(2), strict=True):
        torch.mm(rows, w.T, out=out)
        sums.append(overlap.start_all_reduce(out, axis))
    for pending in sums:
        pending.wait()
    return y.view(*x.shape[:-1], len(w))


def _overlapped(
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    axis: Axis,
    sequence_parallel: bool,
    sink: WeightGrads | None,
) -> tuple[Tensor, Tensor | None]:
    """dx and dw of `ColumnLinear`, each message under a product; first order, on processes."""
    if sequence_parallel:
        gathering = overlap.start_gather(x.detach(), axis, SEQUENCE)
        summand = dy @ w
        x = gathering.wait()
        summing = overlap.start_reduce_scatter(summand, axis, SEQUENCE)
    else:
        summing = overlap.start_all_reduce(dy @ w, axis)
    dw = _weight_grad(w, dy, x, sink)
    return summing.wait(), dw


def _at(axis: Axis, index: Tensor) -> Axis:
    """The axis with the index as this transform level sees it."""
    return axis if index is axis.index else attrs.evolve(axis, index=index)


def _keep(ctx: Any, inputs: tuple[Any, ...]) -> None:
    x, w, _, index, *ctx.static = inputs
    ctx.save_for_backward(x, w, index)
    ctx.save_for_forward(x, w, index)


def _kept(
    ctx: Any, view: Callable[[Tensor], Tensor] = lambda x: x
) -> tuple[Tensor, Tensor, Axis, bool, WeightGrads | None]:
    x, w, index = ctx.saved_tensors
    axis, sequence_parallel, weight_grads = ctx.static
    return view(x), view(w), _at(axis, index), sequence_parallel, weight_grads


def _weight_grad(w: Tensor, dy: Tensor, x: Tensor, sink: WeightGrads | None) -> Tensor | None:
    """dy^T x, or None where the sink took it."""
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    return None if sink is not None and sink.product(w, dy, x) else dy.T @ x


def _bias_grad(dy: Tensor) -> Tensor:
    return dy.flatten(0, -2).sum(0)


def _total(terms: list[Tensor]) -> Tensor:
    return sum(terms[1:], terms[0])


@overload
def column_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool = ...,
    gather_output: bool = ...,
    weight_grads: WeightGrads | None = ...,
    skip_bias_add: Literal[False] = ...,
) -> Tensor: ...


@overload
def column_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool = ...,
    gather_output: bool = ...,
    weight_grads: WeightGrads | None = ...,
    skip_bias_add: Literal[True],
) -> tuple[Tensor, Tensor | None]: ...


def column_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool = False,
    gather_output: bool = False,
    weight_grads: WeightGrads | None = None,
    skip_bias_add: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """A linear layer whose outputs are cut over the axis.

    y_r = x w_r^T + b_r, where w = [w_0; w_1; ..] by rows of the weight (columns of its transpose).

    Args:
        x: (b, s, i), I over `axis`; under sequence parallelism (b, s/n, i), V.
        w: (o/n, i), V over `axis`.
        b: (o/n,), V over `axis`, or None.
        axis: the tensor-parallel axis, of size n.
        sequence_parallel: x is a shard of the sequence (dim 1) and is gathered here, and again in
            the backward.
        gather_output: put the pieces together: the result is (b, s, o), I over `axis`.
        weight_grads: takes the gradient of w in autograd's place.
        skip_bias_add: leave the bias to the caller (to fuse it with what follows).

    Returns:
        (b, s, o/n), V over `axis`; with `skip_bias_add` the pair of it and the bias, which is
        gathered along with it.

    Raises:
        ValueError: x and w do not fit.

    Example:
        >>> from mfun.comm import simulate
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import P
        >>> f = lambda groups, x, w: column_linear(x, w, None, groups.tp)
        >>> run = simulate(f, Mesh(tp=2), (P(), P("tp")), P(None, None, "tp"))
        >>> run(torch.ones(1, 1, 2), torch.arange(8.0).view(4, 2)).tolist()
        [[[1.0, 5.0, 9.0, 13.0]]]

    Source: Shoeybi et al. 2019 (arXiv 1909.08053) section 3; Megatron-LM's ColumnParallelLinear.
    Proof: proofs/Linear.v, column_linear, column_backward_x, column_backward_w, column_backward_b.
    """
    _check("column_linear", x, w)
    added = None if skip_bias_add else b
    if axis.size == 1 and weight_grads is None:
        y = F.linear(x, w, added)
    else:
        args = (x, w, added, axis.index, axis, sequence_parallel, weight_grads)
        y = ColumnLinear.apply(*args)
    if gather_output:
        y = comm.unsplit(y, axis, -1)
        b = comm.unsplit(b, axis, -1) if skip_bias_add and b is not None else b
    return (y, b) if skip_bias_add else y


@overload
def row_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool = ...,
    input_is_parallel: bool = ...,
    weight_grads: WeightGrads | None = ...,
    skip_bias_add: Literal[False] = ...,
) -> Tensor: ...


@overload
def row_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool = ...,
    input_is_parallel: bool = ...,
    weight_grads: WeightGrads | None = ...,
    skip_bias_add: Literal[True],
) -> tuple[Tensor, Tensor | None]: ...


def row_linear(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    axis: Axis,
    *,
    sequence_parallel: bool = False,
    input_is_parallel: bool = True,
    weight_grads: WeightGrads | None = None,
    skip_bias_add: bool = False,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """A linear layer whose inputs are cut over the axis; the bias comes after the sum.

    y = sum_r x_r w_r^T + b, where w = [w_0, w_1, ..] by columns of the weight.

    Args:
        x: (b, s, i/n), V over `axis`; with `input_is_parallel=False` (b, s, i), I, cut here.
        w: (o, i/n), V over `axis`.
        b: (o,), I over `axis`, or None. Its gradient is equal on all ranks, or under sequence
            parallelism a summand: each rank's own tokens'.
        axis: the tensor-parallel axis, of size n.
        sequence_parallel: the result is scattered to shards of the sequence (dim 1).
        input_is_parallel: x is already this rank's piece.
        weight_grads: takes the gradient of w in autograd's place.
        skip_bias_add: leave the bias to the caller.

    Returns:
        (b, s, o), I over `axis`; under sequence parallelism (b, s/n, o), V. With `skip_bias_add`
        the pair of it and the bias.

    Raises:
        ValueError: x and w do not fit, or a dim does not divide over the axis.

    Example:
        >>> from mfun.comm import simulate
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import P
        >>> f = lambda groups, x, w, b: row_linear(x, w, b, groups.tp)
        >>> run = simulate(f, Mesh(tp=2), (P(None, None, "tp"), P(None, "tp"), P()), P())
        >>> run(torch.ones(1, 1, 4), torch.ones(1, 4), torch.ones(1)).tolist()
        [[[5.0]]]

    Source: Shoeybi et al. 2019 (arXiv 1909.08053) section 3; Megatron-LM's RowParallelLinear.
    Proof: proofs/Linear.v, row_linear, row_backward_x, row_backward_w, row_backward_b.
    """
    if not input_is_parallel:
        x = comm.split(x, axis, -1)
    _check("row_linear", x, w)
    added = None if skip_bias_add else b
    if axis.size == 1 and weight_grads is None:
        y = F.linear(x, w, added)
    else:  # on one rank the two differ in when the bias is added: with the product is faster
        one = ColumnLinear if axis.size == 1 else RowLinear
        y = one.apply(x, w, added, axis.index, axis, sequence_parallel, weight_grads)
    return (y, b) if skip_bias_add else y


def _check(name: str, x: Tensor, w: Tensor) -> None:
    if w.ndim != 2 or x.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"{name}: x of shape {[*x.shape]} does not fit w of shape {[*w.shape]}; the last dim "
            "of x must be the last of w's two (both as this rank holds them)"
        )
