"""Samples of a part of the data as batches, each a pure function of (seed, sample numbers).

Shape suffixes: b batch, s sequence (= seq_len), w window (= s + 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mfun.data.corpus import VOCAB, DataError

if TYPE_CHECKING:
    from torch import Tensor

Batch = dict[str, "Tensor"]
Rows = dict[str, np.ndarray]
RESETS = ("positions", "attention", "loss")
"""What may start anew at each document."""


class Source(Protocol):
    """One part of the data: a `Corpus` or a `Built`."""

    @property
    def largest(self) -> int:
        """The greatest token as far as it is known, else -1."""
        ...

    @property
    def hash(self) -> str:
        """Of all that was opened together."""
        ...

    @property
    def size(self) -> int:
        """Tokens in all."""
        ...

    def windows(self, seq_len: int) -> int:
        """Samples of seq_len + 1 tokens in an epoch."""
        ...

    def draw(self, sample_b: np.ndarray, seed: int | None, seq_len: int) -> list[np.ndarray]:
        """Tokens, -1 where there are none, and document numbers of some samples, (b, w) int64."""
        ...

    def refuse_beyond(self, vocab: int, token_bw: np.ndarray) -> None:
        """Refuse tokens that were not looked at before."""
        ...


def windows(source: Source, seq_len: int) -> int:
    """How many windows of seq_len + 1 tokens; neighbours share one, so each token is a label once.

    windows = (tokens - 1) // seq_len. The first token is never a label, and the last
    (tokens - 1) % seq_len ones, less than a window, are in none.

    Example:
        >>> from mfun.data import join
        >>> windows(join([("a", b"0123456789")]), 4)
        2
    """
    return source.windows(seq_len)


def check_corpus(
    source: Source, *, seq_len: int, vocab: int = VOCAB, part: str = "training"
) -> None:
    """Refuse a part that has no window, or a token the model has no row for.

    Raises: DataError naming both numbers and the fix.
    """
    if windows(source, seq_len) < 1:
        raise DataError(
            f"data: the {part} part has {source.size} tokens and one window needs "
            f"model.seq_len + 1 = {seq_len + 1}: lower model.seq_len or give more text in data.path"
        )
    if source.largest >= vocab:
        raise DataError(
            f"data: the {part} part has token id {source.largest} and model.vocab is {vocab}: "
            f"set model.vocab to at least {source.largest + 1} ({VOCAB} holds any bytes)"
        )


def batch(
    source: Source,
    *,
    seed: int | None,
    first: int,
    count: int,
    seq_len: int,
    vocab: int = VOCAB,
    packed: bool = False,
    resets: Sequence[str] = (),
) -> Batch:
    """The samples first .. first + count - 1, a pure function of its arguments.

    Args:
        source: one part of the data.
        seed: of the run; None is the fixed validation order.
        first: number of the first sample, i.e. how many were consumed before.
        count: b, >= 1.
        seq_len: s.
        vocab: rows of the model's vocabulary.
        packed: documents do not see each other: all of `resets`.
        resets: some of `RESETS`: `positions` start at 0 in each document; `attention` does not
            cross from one to another (adds `documents`); `loss` leaves out every label that is the
            first token of another document.

    Returns: tokens, labels (b, s) int64, mask (b, s) float32 with 1 for a label that counts,
        sample (b,) int64; with resets of positions or attention: positions (b, s) int64 from 0 at
        the window's and each document's start; of attention: documents (b, s) int64 numbers.

    Raises: DataError as check_corpus; ValueError for a negative first or a count below 1.

    Example:
        >>> from mfun.data import join
        >>> b = batch(join([("a", b"0123")]), seed=0, first=0, count=1, seq_len=3)
        >>> b["tokens"].tolist(), b["labels"].tolist(), b["sample"].tolist()
        ([[48, 49, 50]], [[49, 50, 51]], [0])
    """
    resets = RESETS if packed else resets
    sample_b = np.arange(first, first + max(count, 0), dtype=np.int64)
    return tensors(rows(source, sample_b, seed=seed, seq_len=seq_len, vocab=vocab, resets=resets))


def tensors(rows: Mapping[str, np.ndarray]) -> Batch:
    """Arrays as tensors, without a copy."""
    import torch  # here only: what builds and shows datasets starts without it

    return {name: torch.from_numpy(value) for name, value in rows.items()}


def rows(
    source: Source,
    sample_b: np.ndarray,
    *,
    seed: int | None,
    seq_len: int,
    vocab: int = VOCAB,
    resets: Sequence[str] = (),
) -> Rows:
    """What `batch` returns, as arrays: a thread that reads ahead makes no tensors."""
    if not sample_b.size or sample_b[0] < 0:
        first = sample_b[:1].tolist()
        raise ValueError(
            f"batch: first {first[0] if first else 0} must be at least 0 and count "
            f"{sample_b.size} at least 1"
        )
    part = "validation" if seed is None else "training"
    check_corpus(source, seq_len=seq_len, vocab=vocab, part=part)
    token_bw, document_bw = source.draw(sample_b, seed, seq_len)
    source.refuse_beyond(vocab, token_bw)
    there_bw = token_bw >= 0
    token_bw = np.maximum(token_bw, 0)
    out = {
        "tokens": token_bw[:, :-1].copy(),
        "labels": token_bw[:, 1:].copy(),
        "mask": there_bw[:, 1:].astype(np.float32),
        "sample": sample_b,
    }
    return out | restarted(out["mask"], document_bw, resets)


def restarted(mask_bs: np.ndarray, document_bw: np.ndarray, resets: Sequence[str]) -> Rows:
    """What resets replace or add, from the document number of each token.

    Example:
        >>> restarted(np.ones((1, 3)), np.array([[4, 4, 5, 5]]), ["positions"])["positions"]
        array([[0, 1, 0]])
    """
    out: Rows = {}
    same_bs = document_bw[:, 1:] == document_bw[:, :-1]
    if "loss" in resets:
        out["mask"] = mask_bs * same_bs.astype(np.float32)
    if "positions" in resets or "attention" in resets:
        place_bs = np.broadcast_to(np.arange(same_bs.shape[1]), same_bs.shape)
        begin_bs = np.zeros(same_bs.shape, np.int64)
        if "positions" in resets:
            begin_bs[:, 1:] = np.where(same_bs, 0, place_bs + 1)[:, :-1]
        out["positions"] = place_bs - np.maximum.accumulate(begin_bs, axis=1)
    if "attention" in resets:
        out["documents"] = document_bw[:, :-1].copy()
    return out


def rank_batch(
    source: Source,
    *,
    seed: int | None,
    consumed: int,
    dp_index: int,
    dp: int,
    global_batch: int,
    microbatch_sizes: Sequence[int],
    seq_len: int,
    vocab: int = VOCAB,
    packed: bool = False,
    resets: Sequence[str] = (),
) -> list[Batch]:
    """One rank's microbatches of the global batch that follows `consumed` samples.

    Global batch: samples consumed .. consumed + B - 1. Rank i of dp takes the contiguous rows
    i*B/dp .. (i+1)*B/dp - 1, cut into microbatches in order. Only the dp index matters: ranks that
    differ in tp or pp get equal batches, dp ranks get disjoint ones that cover B, and another dp
    cuts the same rows otherwise.

    Args:
        consumed: samples used before this step; step * global_batch while B is constant.
        dp_index: 0..dp - 1.
        global_batch: B, a multiple of dp.
        microbatch_sizes: rows of each microbatch, each >= 1, sum B/dp.
        (others): as batch.

    Returns: a batch for each microbatch.

    Raises: ValueError naming the sizes that do not fit; DataError as check_corpus.
    """
    _check_cut(dp_index, dp, global_batch, microbatch_sizes)
    sample_b = rank_samples(consumed, dp_index, dp, global_batch)
    resets = RESETS if packed else resets
    mine = rows(source, sample_b, seed=seed, seq_len=seq_len, vocab=vocab, resets=resets)
    return cut(tensors(mine), microbatch_sizes)


def rank_samples(consumed: int, dp_index: int, dp: int, global_batch: int) -> np.ndarray:
    """The numbers of one rank's samples, (B/dp,) int64.

    Example:
        >>> rank_samples(8, dp_index=1, dp=2, global_batch=4).tolist()
        [10, 11]
    """
    count = global_batch // dp
    return consumed + np.arange(dp_index * count, (dp_index + 1) * count, dtype=np.int64)


def cut(whole: Batch, microbatch_sizes: Sequence[int]) -> list[Batch]:
    """A rank's rows as its microbatches."""
    pieces = {name: value.split(list(microbatch_sizes)) for name, value in whole.items()}
    return [{name: p[i] for name, p in pieces.items()} for i in range(len(microbatch_sizes))]


def _check_cut(dp_index: int, dp: int, global_batch: int, sizes: Sequence[int]) -> None:
    if not 0 <= dp_index < dp:
        raise ValueError(f"rank_batch: dp_index {dp_index} is outside 0..{dp - 1}")
    if global_batch % dp:
        raise ValueError(
            f"train.global_batch {global_batch} is not a multiple of dp {dp}: change one of them"
        )
    if sum(sizes) != global_batch // dp or min(sizes, default=0) < 1:
        raise ValueError(
            f"rank_batch: microbatch sizes {tuple(sizes)} must each be at least 1 and sum to "
            f"train.global_batch / dp = {global_batch // dp}"
        )
