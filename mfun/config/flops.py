"""Floating-point operations of a model, by its matrix shapes.

A multiply and its add count as two. Only matrix products count: not norms, softmax, activations
or the embedding's lookup. The layout, microbatches and recomputation do not enter: these are the
model's operations, the numerator of a utilisation.
"""

from __future__ import annotations

import attrs

from mfun.config.sections import ModelConfig


@attrs.frozen(kw_only=True)
class ModelFlops:
    """Operations of one token's forward pass, by part.

    Args:
      projections: query, key, value and output matrices of all blocks.
      attention: scores and weighted sums of all blocks.
      mlp: feed-forward matrices of all blocks.
      head: logits, over the vocabulary without padding.
    """

    projections: float
    attention: float
    mlp: float
    head: float

    @property
    def forward(self) -> float:
        """All parts of a forward pass."""
        return self.projections + self.attention + self.mlp + self.head

    @property
    def backward(self) -> float:
        """Two products, one for each operand's gradient, where the forward pass has one."""
        return 2 * self.forward

    @property
    def total(self) -> float:
        """Forward and backward."""
        return 3 * self.forward


def flops_per_token(
    model: ModelConfig, seq_len: int | None = None, *, causal: bool = True
) -> ModelFlops:
    """Operations that one token of training costs, averaged over a sequence.

    With n blocks, width d, h query and g key heads of k, feed-forward width f in m matrices
    (3 with a gate, else 2), vocabulary v and c keys a query sees on average::

        projections = n * 2 * d * k * (2 h + 2 g)      attention = n * 4 * h * k * c
        mlp         = n * 2 * d * f * m                head      = 2 * d * v

    Args:
      model: the shapes.
      seq_len: tokens of a sequence; by default the model's.
      causal: count the keys that the causal mask and the sliding window let a query see,
        c = sum_i min(i + 1, window) / seq_len. Without it c = seq_len, which is what a dense
        kernel computes and what ``torch.utils.flop_counter`` reports.

    Example:
      >>> from mfun.config import ModelConfig
      >>> flops_per_token(ModelConfig(layers=1, hidden=4, heads=2, vocab=10, seq_len=3)).forward
      496.0

    Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix, for the form of the sum; the terms
    here follow each matrix instead of assuming a width of 4 d.
    """
    seq = model.seq_len if seq_len is None else seq_len
    d, k, h, g = model.hidden, model.head_size, model.heads, model.kv
    keys = _causal_pairs(seq, model.sliding_window) / seq if causal else float(seq)
    matrices = 3 if model.gated else 2
    return ModelFlops(
        projections=float(model.layers * 2 * d * k * (2 * h + 2 * g)),
        attention=model.layers * 4 * h * k * keys,
        mlp=float(model.layers * 2 * d * model.ffn_size * matrices),
        head=float(2 * d * model.vocab),
    )


def _causal_pairs(seq: int, window: int) -> int:
    """Query and key pairs that a causal mask keeps: sum_i min(i + 1, window)."""
    width = min(seq, window or seq)
    return width * (width + 1) // 2 + (seq - width) * width
