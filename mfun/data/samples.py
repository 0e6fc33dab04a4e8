"""Windows of a corpus as batches, each a pure function of (seed, sample numbers).

Shape suffixes: b batch, s sequence (= seq_len), w window (= s + 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mfun.data.corpus import VOCAB, Corpus, DataError
from mfun.data.shuffle import order

Batch = dict[str, Tensor]


def windows(corpus: Corpus, seq_len: int) -> int:
    """How many windows of seq_len + 1 tokens; neighbours share one, so each token is a label once.

    windows = (tokens - 1) // seq_len. The first token is never a label, and the last
    (tokens - 1) % seq_len ones, less than a window, are in none.

    Example:
        >>> from mfun.data import join
        >>> windows(join([("a", b"0123456789")]), 4)
        2
    """
    return max(corpus.tokens.size - 1, 0) // seq_len


def check_corpus(
    corpus: Corpus, *, seq_len: int, vocab: int = VOCAB, part: str = "training"
) -> None:
    """Refuse a part that has no window, or a token the model has no row for.

    Raises: DataError naming both numbers and the fix.
    """
    if windows(corpus, seq_len) < 1:
        raise DataError(
            f"data: the {part} part has {corpus.tokens.size} tokens and one window needs "
            f"model.seq_len + 1 = {seq_len + 1}: lower model.seq_len or give more text in data.path"
        )
    if corpus.largest >= vocab:
        raise DataError(
            f"data: the {part} part has token id {corpus.largest} and model.vocab is {vocab}: "
            f"set model.vocab to at least {corpus.largest + 1} ({VOCAB} holds any bytes)"
        )


def batch(
    corpus: Corpus,
    *,
    seed: int | None,
    first: int,
    count: int,
    seq_len: int,
    vocab: int = VOCAB,
    packed: bool = False,
) -> Batch:
    """The samples first .. first + count - 1, a pure function of its arguments.

    Args:
        corpus: one part of the data.
        seed: of the run; None is the fixed validation order.
        first: number of the first sample, i.e. how many were consumed before.
        count: b, >= 1.
        seq_len: s.
        vocab: rows of the model's vocabulary.
        packed: documents do not see each other: adds `positions` and `documents`, and masks every
            label that is the first token of another document.

    Returns: tokens, labels (b, s) int64, mask (b, s) float32 with 1 for a label that counts,
        sample (b,) int64; packed: positions (b, s) int64 from 0 at the window's and each document's
        start, documents (b, s) int64 numbers.

    Raises: DataError as check_corpus; ValueError for a negative first or a count below 1.

    Example:
        >>> from mfun.data import join
        >>> b = batch(join([("a", b"0123")]), seed=0, first=0, count=1, seq_len=3)
        >>> b["tokens"].tolist(), b["labels"].tolist(), b["sample"].tolist()
        ([[48, 49, 50]], [[49, 50, 51]], [0])
    """
    if first < 0 or count < 1:
        raise ValueError(f"batch: first {first} must be at least 0 and count {count} at least 1")
    part = "validation" if seed is None else "training"
    check_corpus(corpus, seq_len=seq_len, vocab=vocab, part=part)
    sample_b = np.arange(first, first + count, dtype=np.int64)
    start_b = order(sample_b, windows(corpus, seq_len), seed) * seq_len
    place_bw = start_b[:, None] + np.arange(seq_len + 1)
    token_bw = torch.from_numpy(corpus.tokens[place_bw].astype(np.int64))
    out = {
        "tokens": token_bw[:, :-1].contiguous(),
        "labels": token_bw[:, 1:].contiguous(),
        "mask": torch.ones(count, seq_len),
        "sample": torch.from_numpy(sample_b),
    }
    return out | _documents(corpus, place_bw) if packed else out


def _documents(corpus: Corpus, place_bw: np.ndarray) -> Batch:
    """What packing adds or replaces, from each token's place in the corpus."""
    document_bw = np.searchsorted(corpus.bounds, place_bw, side="right") - 1
    begin_bw = np.maximum(corpus.bounds[document_bw], place_bw[:, :1])
    same_bs = document_bw[:, 1:] == document_bw[:, :-1]
    return {
        "mask": torch.from_numpy(same_bs.astype(np.float32)),
        "positions": torch.from_numpy((place_bw - begin_bw)[:, :-1].copy()),
        "documents": torch.from_numpy(document_bw[:, :-1].astype(np.int64)),
    }


def rank_batch(
    corpus: Corpus,
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
    rows = global_batch // dp
    mine = batch(
        corpus,
        seed=seed,
        first=consumed + dp_index * rows,
        count=rows,
        seq_len=seq_len,
        vocab=vocab,
        packed=packed,
    )
    pieces = {name: torch.split(value, list(microbatch_sizes)) for name, value in mine.items()}
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
