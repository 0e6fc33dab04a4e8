"""`Built`: one part (training or validation) of some indexed datasets, as numbered samples.

Shape suffixes: b batch, w window (= seq_len + 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from mfun.data.blend import SURPLUS, blend_index, exhaustive_index, normalise, sizes_of
from mfun.data.cache import cached, key_of
from mfun.data.corpus import DataError
from mfun.data.indexed import chunks
from mfun.data.megatron import Index, Sequences, build_index, count_tokens, read_sample

PAD = -1
"""Stands for a token that there is not, behind the end of the last sample."""


@attrs.frozen(eq=False)
class Share:
    """Some consecutive sequences of a dataset.

    Args:
        data: the dataset.
        sequences: which.
        name: for messages.
        tokens: how many in all.
    """

    data: Sequences
    sequences: range
    name: str
    tokens: int = attrs.field(
        init=False,
        default=attrs.Factory(lambda s: count_tokens(s.data.lengths, s._numbers()), True),
    )

    def samples(self, seq_len: int) -> int:
        """Whole samples of one epoch."""
        return max(self.tokens - 1, 0) // seq_len

    def _numbers(self) -> np.ndarray:
        return np.arange(self.sequences.start, self.sequences.stop)

    def index(
        self, folder: Path | None, *, seq_len: int, samples: int | None, seed: int, partial: bool
    ) -> Index:
        """The order of its samples, from the cache if it is there.

        The key is what the order depends on: the lengths of these sequences and the arguments.
        """
        first, end = self.sequences.start, self.sequences.stop
        values: dict[str, Any] = {"kind": "gpt", "form": 1, "first": first, "seq_len": seq_len}
        values |= {"samples": samples, "seed": seed, "partial": partial}

        def build() -> dict[str, np.ndarray]:
            lengths = self.data.lengths
            how: Any = {"seq_len": seq_len, "samples": samples, "seed": seed}
            return attrs.asdict(
                build_index(lengths, self._numbers(), keep_partial=partial, **how), recurse=False
            )

        key = key_of(values, {"lengths": self.data.lengths[first:end]}) if folder else ""
        return Index(**cached(folder, key, build))


@attrs.frozen(eq=False)
class Order:
    """The samples of one round: of which share, and which of its samples.

    Args:
        indices: of the shares.
        share: (n,) int16, None for a single share.
        sample: (n,) int64, None likewise.
    """

    indices: tuple[Index, ...]
    share: np.ndarray | None = None
    sample: np.ndarray | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices[0]) if self.sample is None else len(self.sample)

    def place(self, number: int) -> tuple[int, int]:
        """Share and sample of it."""
        if self.share is None or self.sample is None:
            return 0, number
        return int(self.share[number]), int(self.sample[number])


@attrs.frozen(eq=False, kw_only=True)
class Built:
    """A part of some datasets; sample n depends on (seed, n) and on nothing that came before.

    Samples are ordered for a round of at least `samples`; the next round is ordered by the next
    seed, so there is no last sample.

    Args:
        shares: its sequences, one of each dataset.
        weights: of the shares; empty gives each its size.
        samples: to order together.
        hash: of all datasets that were opened together, as `Corpus.hash`.
        largest: the greatest token as far as it is known, else -1; reading looks at each.
        eod: tokens that end a document; empty takes each sequence for one.
        partial: the end of the stream, shorter than a sample, is a sample.
        cache: folder of the indices; None keeps them in memory.
    """

    shares: tuple[Share, ...]
    weights: tuple[float, ...] = ()
    samples: int | None = None
    hash: str = ""
    largest: int = -1
    eod: tuple[int, ...] = ()
    partial: bool = False
    cache: Path | None = None
    _orders: dict[tuple[int, int], Order] = attrs.field(factory=dict, init=False, repr=False)

    @property
    def size(self) -> int:
        """Tokens in all."""
        return sum(share.tokens for share in self.shares)

    def windows(self, seq_len: int) -> int:
        """Whole samples of one epoch of every share."""
        return sum(share.samples(seq_len) for share in self.shares)

    def without_zeros(self) -> Built:
        """The same without shares of weight 0, to which Megatron's rule gives a sample."""
        kept = [i for i, weight in enumerate(self.weights) if weight > 0]
        if len(kept) == len(self.weights):
            return self
        shares, weights = self.shares, self.weights
        return attrs.evolve(
            self,
            shares=tuple(shares[i] for i in kept),
            weights=tuple(weights[i] for i in kept),
        )

    def order(self, seed: int, seq_len: int) -> Order:
        """The order of a round; the two used last are kept.

        Raises: DataError for a share without a sample.
        """
        key = seed % 2**32, seq_len
        if key not in self._orders:
            made = self._make(*key)
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = made
        return self._orders[key]

    def _make(self, seed: int, seq_len: int) -> Order:
        how: Any = {"seq_len": seq_len, "seed": seed, "partial": self.partial}
        if len(self.shares) == 1:
            return Order((self.shares[0].index(self.cache, samples=self.samples, **how),))
        if not self.weights:
            indices = [share.index(self.cache, samples=None, **how) for share in self.shares]
            total = sum(map(len, indices))
            size = total if self.samples is None else min(self.samples, total)
            return Order(tuple(indices), *self._blend([len(i) for i in indices], size, total))
        weights, samples = normalise(self.weights), self.samples or self.windows(seq_len)
        size = sum(sizes_of(weights, samples))
        share, sample = self._blend(weights, size, math.inf)
        asked = np.array(sizes_of(weights, samples, SURPLUS))
        for part in chunks(size):  # a rounding may take one more than was planned for
            np.maximum.at(asked, share[part], sample[part] + 1)
        indices = [
            one.index(self.cache, samples=n, **how)
            for one, n in zip(self.shares, asked.tolist(), strict=True)
        ]
        return Order(tuple(indices), share, sample)

    def _blend(
        self, weights: Sequence[float], size: int, all_: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cached `blend_index`, or where every sample is wanted, `exhaustive_index`."""

        def build() -> dict[str, np.ndarray]:
            whole = size == all_
            made = exhaustive_index([*map(int, weights)]) if whole else blend_index(weights, size)
            return dict(zip(("share", "sample"), made, strict=True))

        key = key_of({"kind": "blend", "form": 1, "weights": [*weights], "size": size}, {})
        made = cached(self.cache, key, build)
        return made["share"], made["sample"]

    def draw(self, sample_b: np.ndarray, seed: int | None, seq_len: int) -> list[np.ndarray]:
        """The tokens and the documents of some samples.

        Args:
            sample_b: their numbers.
            seed: of the run; None is the fixed validation order, that of seed 0.
            seq_len: tokens of a sample, less one.

        Returns: (b, w) int64 tokens, `PAD` where there are none; (b, w) int64 numbers that change
            where a document ends.
        """
        token_bw = np.full((len(sample_b), seq_len + 1), PAD, np.int64)
        document_bw = np.zeros(token_bw.shape, np.int64)
        for row, number in enumerate(sample_b.tolist()):
            pieces, at = self._pieces(number, seed or 0, seq_len), 0
            for document, piece in enumerate(pieces):
                token_bw[row, at : at + piece.size] = piece
                document_bw[row, at : at + piece.size] = document
                at += piece.size
        if self.eod:
            ends_bw = np.isin(token_bw, self.eod)
            document_bw = ends_bw.cumsum(1) - ends_bw
        return [token_bw, document_bw]

    def _pieces(self, number: int, seed: int, seq_len: int) -> list[np.ndarray]:
        round_, within = divmod(number, len(self.order(seed, seq_len)))
        order = self.order(seed + round_, seq_len)
        share, sample = order.place(within)
        return read_sample(self.shares[share].data, order.indices[share], sample, seq_len)

    def refuse_beyond(self, vocab: int, token_bw: np.ndarray) -> None:
        """Refuse a token that the model has no row for.

        Raises: DataError naming it.
        """
        low, high = int(token_bw.min()), int(token_bw.max())
        if high >= vocab or low < PAD:
            names = ", ".join(share.name for share in self.shares)
            raise DataError(
                f"data: token id {high if high >= vocab else low} in {names}, and model.vocab is "
                f"{vocab}: set model.vocab to at least {high + 1}, or use data built for it"
            )
