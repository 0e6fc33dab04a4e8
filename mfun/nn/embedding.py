"""Token embedding with rows cut over the tensor-parallel axis, and learned positions.

Shape letters: b batch, s sequence (this rank's part of it under sequence parallelism), d model,
v vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mfun.comm import Axis
from mfun.nn.dropout import coordinates
from mfun.nn.linear import SEQUENCE, leave
from mfun.nn.weight_grads import WeightGrads


class Rows(torch.autograd.Function):
    """The rows of a table by index; their gradients are added where `weight_grads` says.

    First order; without `weight_grads` it is `F.embedding`.
    """

    @staticmethod
    def forward(ctx: Any, index_bs: Tensor, w_vd: Tensor, weight_grads: WeightGrads) -> Tensor:
        """Look up, and keep the index."""
        ctx.save_for_backward(index_bs, w_vd)
        ctx.sink = weight_grads
        return F.embedding(index_bs, w_vd)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Add dy to the rows that were looked up."""
        index_n, dy_nd = ctx.saved_tensors[0].flatten(), grads[0].flatten(0, -2)
        w_vd = ctx.saved_tensors[1]
        if ctx.sink.rows(w_vd, index_n, dy_nd):
            return None, None, None
        return None, torch.zeros_like(w_vd).index_put((index_n,), dy_nd, accumulate=True), None


def lookup(index_bs: Tensor, w_vd: Tensor, weight_grads: WeightGrads | None) -> Tensor:
    """Rows of a table: `F.embedding`, or `Rows` where its gradient is not autograd's."""
    if weight_grads is None:
        return F.embedding(index_bs, w_vd)
    return Rows.apply(index_bs, w_vd, weight_grads)


def vocab_embedding(
    tokens_bs: Tensor,
    w_vd: Tensor,
    axis: Axis,
    *,
    sequence_parallel: bool = False,
    weight_grads: WeightGrads | None = None,
) -> Tensor:
    """Look up rows of a table that is cut by rows; a rank gives zero for rows of others.

    y = sum_r (row of w_r if rank r holds the token, else 0).

    Rows added to make the vocabulary divide come last and no token names them, so they add nothing
    and their gradient is zero.

    Args:
        tokens_bs: (b, s) int64, the whole sequence, equal over `axis`.
        w_vd: (ceil(v/n), d), V over `axis`.
        axis: the tensor-parallel axis, of size n.
        sequence_parallel: the result is scattered to shards of the sequence.
        weight_grads: takes the gradient of w in autograd's place.

    Returns:
        (b, s, d), I over `axis`; under sequence parallelism (b, s/n, d), V.

    Raises:
        ValueError: the sequence does not divide over the axis.

    Example:
        >>> import torch
        >>> from mfun.comm import simulate
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import P
        >>> f = lambda groups, t, w: vocab_embedding(t, w, groups.tp)
        >>> run = simulate(f, Mesh(tp=2), (P(), P("tp")), P())
        >>> run(torch.tensor([[3, 0]]), torch.tensor([[0.0], [1.0], [2.0], [3.0]])).tolist()
        [[[3.0], [0.0]]]

    Source: Megatron-LM's VocabParallelEmbedding.
    Proof: proofs/Linear.v, vocab_embedding, vocab_embedding_backward.
    """
    if axis.size == 1:
        return lookup(tokens_bs, w_vd, weight_grads)
    local_bs = tokens_bs - axis.index * w_vd.shape[0]
    foreign_bs = (local_bs < 0) | (local_bs >= w_vd.shape[0])
    rows_bsd = lookup(local_bs.masked_fill(foreign_bs, 0), w_vd, weight_grads)
    return leave(rows_bsd.masked_fill(foreign_bs.unsqueeze(-1), 0.0), axis, sequence_parallel)


def position_embedding(
    w_sd: Tensor,
    length: int,
    axis: Axis,
    *,
    positions_bs: Tensor | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Rows of a learned position table for this rank's tokens.

    Args:
        w_sd: (table length, d), replicated. Under sequence parallelism each rank reads the rows of
            its own tokens, and its gradient is a summand; otherwise gradients are equal.
        length: of the whole sequence.
        axis: the tensor-parallel axis, of size n.
        positions_bs: (b, s) int64 of the whole sequence, where documents restart them; by default
            0, 1, 2, ..
        sequence_parallel: only this rank's part of the sequence is wanted.

    Returns:
        (s, d), or (b, s, d) with `positions_bs`.

    Raises:
        ValueError: the sequence is longer than the table.
    """
    if length > w_sd.shape[0]:
        raise ValueError(
            f"position_embedding: a sequence of {length} tokens for a table of {w_sd.shape[0]}; "
            f"shorten the sequence or set model.seq_len to at least {length}"
        )
    if not sequence_parallel or axis.size == 1:
        return w_sd[:length] if positions_bs is None else F.embedding(positions_bs, w_sd)
    rows = coordinates(length // axis.size, axis)
    assert isinstance(rows, Tensor)
    rows = rows.to(w_sd.device)
    if positions_bs is not None:
        rows = positions_bs.index_select(SEQUENCE, rows)
    return F.embedding(rows, w_sd)
