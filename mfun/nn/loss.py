"""Cross entropy over a vocabulary that is cut over the tensor-parallel axis.

Shape letters: b batch, s sequence, v vocabulary (this rank's columns).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from mfun import comm
from mfun.comm import Axis
from mfun.nn.norm import at_least_fp32


@attrs.frozen(kw_only=True)
class TokenLoss:
    """The loss of one token, given logits z and label y.

    lse(z) - (1 - smoothing) z_y - smoothing mean(z) + z_loss lse(z)^2

    Args:
        vocab: number of classes, the same in every layout; padding is no class.
        label_smoothing: weight of the uniform distribution over all `vocab` classes (torch's
            definition).
        z_loss: weight of lse^2, which keeps logits from drifting.
    """

    vocab: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __call__(self, lse: Tensor, picked: Tensor, total: Tensor) -> Tensor:
        """From lse(z), z_y and the sum of z."""
        loss = lse - (1.0 - self.label_smoothing) * picked
        if self.label_smoothing:
            loss = loss - self.label_smoothing / self.vocab * total
        return loss + self.z_loss * lse.square() if self.z_loss else loss


class Columns(NamedTuple):
    """How labels fall on this rank's columns of the vocabulary.

    Args:
        label: each token's label as a local column, 0 where another rank has it.
        owned: whether this rank has it.
        real: which columns are not padding; None for all.
    """

    label: Tensor
    owned: Tensor
    real: Tensor | None


def columns_of(labels: Tensor, width: int, axis: Axis, rule: TokenLoss) -> Columns:
    """Where each label falls among this rank's `width` columns."""
    start = axis.index * width
    local = labels - start
    owned = (local >= 0) & (local < width)
    real = None
    if width * axis.size != rule.vocab:
        real = start + torch.arange(width, device=labels.device) < rule.vocab
    return Columns(local.masked_fill(~owned, 0), owned, real)


def vocab_cross_entropy(
    logits_bsv: Tensor,
    labels_bs: Tensor,
    axis: Axis | None,
    *,
    vocab: int,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss of every token, from logits whose columns are cut over the axis.

    See `TokenLoss`; lse is computed from the global maximum and the sum over ranks, in at least
    float32. Columns that pad the vocabulary take no part.

    Args:
        logits_bsv: (b, s, ceil(v/n)), V over `axis`.
        labels_bs: (b, s) int64 in [0, vocab), equal over `axis`. Where a label is not (a masked
            token), the loss is finite and meaningless.
        axis: the axis the columns are cut over, of size n; None for whole logits.
        vocab: v, without padding.
        label_smoothing: see `TokenLoss`.
        z_loss: see `TokenLoss`.

    Returns:
        (b, s), I over `axis`.

    Raises:
        ValueError: the number of columns is not this rank's share of the vocabulary.

    Example:
        >>> from mfun.comm import simulate
        >>> from mfun.mesh import Mesh
        >>> from mfun.spec import P
        >>> label = torch.tensor([2])
        >>> f = lambda groups, z: vocab_cross_entropy(
        ...     z, label, groups.tp, vocab=4, label_smoothing=0.1)
        >>> run = simulate(f, Mesh(tp=2), (P(None, "tp"),), P())
        >>> run(torch.tensor([[0.3, -1.0, 2.0, 0.5]]))
        tensor([0.5304])

    Source: Megatron-LM's vocab_parallel_cross_entropy, with smoothing over the global vocabulary.
    Proof: proofs/Softmax.v, vocab_cross_entropy.
    """
    axis = Axis("whole", 1, torch.zeros((), dtype=torch.int64)) if axis is None else axis
    rule = TokenLoss(vocab=vocab, label_smoothing=label_smoothing, z_loss=z_loss)
    check_width("vocab_cross_entropy", logits_bsv.shape[-1], axis, vocab)
    columns = columns_of(labels_bs, logits_bsv.shape[-1], axis, rule)
    z = on_real(at_least_fp32(logits_bsv), columns, -math.inf)
    return rule(*statistics(z, columns, axis, rule))


def check_width(name: str, width: int, axis: Axis, vocab: int) -> None:
    """Refuse columns that are not this rank's share of the vocabulary.

    Raises:
        ValueError: naming both numbers.
    """
    if width != -(-vocab // axis.size):
        whole = "; they look gathered already, then pass axis=None" if width == vocab else ""
        raise ValueError(
            f"{name}: {width} columns on each of {axis.size} ranks of axis {axis.name!r} for a "
            f"vocabulary of {vocab}; each rank holds ceil({vocab} / {axis.size}) = "
            f"{-(-vocab // axis.size)}{whole}"
        )


def on_real(z: Tensor, columns: Columns, otherwise: float) -> Tensor:
    """z with `otherwise` in the columns that are padding."""
    return z if columns.real is None else z.masked_fill(~columns.real, otherwise)


def statistics(
    z: Tensor, columns: Columns, axis: Axis, rule: TokenLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """lse, the label's logit and the sum of logits over the global vocabulary, by one reduction.

    The sum of logits is only taken where label smoothing asks for it.
    """
    top = comm.max(z.detach().amax(-1), axis)
    exponentials = (z - top.unsqueeze(-1)).exp().sum(-1)
    picked = z.gather(-1, columns.label.unsqueeze(-1)).squeeze(-1).where(columns.owned, 0.0)
    smoothed = rule.label_smoothing > 0.0
    total = on_real(z, columns, 0.0).sum(-1) if smoothed else torch.zeros_like(picked)
    local = torch.stack([exponentials, picked, total])
    exponentials, picked, total = comm.reduce(local, axis).unbind(0)
    return top + exponentials.log(), picked, total
