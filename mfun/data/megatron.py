"""Megatron's GPT samples: which tokens sample n of a dataset has, by three indices.

Documents are shuffled over all epochs together and laid end to end; sample j is tokens j*S ..
(j+1)*S of that stream (S + 1 of them: neighbours share one); a shuffle of j gives the order. All is
drawn from `RandomState(seed)` in Megatron's order, so that the indices equal Megatron's.
"""

from __future__ import annotations

from typing import Protocol

import attrs
import numpy as np

from mfun.data.corpus import DataError
from mfun.data.indexed import CHUNK, chunks

SEPARATE = 0.80
"""A last epoch used to less than this part is shuffled apart, so that no document comes early."""


class Sequences(Protocol):
    """What samples are made of: an `Indexed` dataset, or `Mock`."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, (s,) int32."""
        ...

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens start .. stop - 1 of a sequence."""
        ...


@attrs.frozen(eq=False)
class Index:
    """The order of samples.

    Args:
        document: (epochs * documents,) sequence numbers in the order of the stream.
        sample: (n + 1, 2) entry of `document` and offset in it where sample j begins.
        shuffle: (n,) j of the n-th sample.
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.shuffle)


def index_dtype(largest: int) -> np.dtype:
    """The type of an index whose entries go up to `largest`: int32, or int64 where it must be.

    Example:
        >>> index_dtype(2**31 - 1).name, index_dtype(2**31).name
        ('int32', 'int64')
    """
    return np.dtype(np.int32 if largest <= np.iinfo(np.int32).max else np.int64)


def epochs_of(tokens: int, samples: int | None, seq_len: int) -> int:
    """The fewest epochs E with E * tokens >= samples * S + 1; one if no number is asked for.

    Example:
        >>> epochs_of(9, 4, 2), epochs_of(9, 5, 2), epochs_of(9, None, 2)
        (1, 2, 1)
    """
    return 1 if samples is None else max(1, -(-(samples * seq_len + 1) // tokens))


def separate_last(tokens: int, epochs: int, samples: int | None, seq_len: int) -> int | None:
    """Samples before a last epoch that is shuffled apart, None if it is not.

    It is if fewer than int(0.80 * samples of an epoch) are asked of it.

    Example:
        >>> separate_last(9, 2, 5, 2), separate_last(9, 2, 8, 2)
        (4, None)
    """
    if samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens - 1) // seq_len
    return before if samples - before < int(SEPARATE * ((tokens - 1) // seq_len)) else None


def build_index(
    lengths: np.ndarray,
    documents: np.ndarray,
    *,
    seq_len: int,
    samples: int | None,
    seed: int,
    keep_partial: bool = False,
) -> Index:
    """The order of at least `samples` samples of some sequences.

    Args:
        lengths: (s,) tokens of every sequence of the dataset.
        documents: numbers of the sequences to use.
        seq_len: S.
        samples: how many are needed; None is one epoch.
        seed: 0 .. 2^32 - 1.
        keep_partial: the stream's end, shorter than a sample, is one too.

    Returns: an Index of (E * tokens - 1) // S samples, E epochs; one more for `keep_partial`.

    Raises: DataError if there are not S + 1 tokens.

    Example:
        >>> index = build_index(np.array([3, 2, 4]), np.arange(3), seq_len=2, samples=4, seed=1234)
        >>> len(index), sorted(index.document.tolist()), sorted(index.shuffle.tolist())
        (4, [0, 1, 2], [0, 1, 2, 3])

    Source: Megatron-Core 0.16.1, `GPTDataset`. Two differences: a count that 32 bits do not hold
        gets 64, and `keep_partial` counts in whole numbers, not in float32.
    """
    tokens = count_tokens(lengths, documents)
    if tokens < seq_len + 1:
        raise DataError(
            f"data: {len(documents)} documents have {tokens} tokens and one sample needs "
            f"model.seq_len + 1 = {seq_len + 1}: lower model.seq_len or use more data"
        )
    random = np.random.RandomState(seed)
    epochs = epochs_of(tokens, samples, seq_len)
    before = separate_last(tokens, epochs, samples, seq_len)
    document = document_index(documents, epochs, random, separate=before is not None)
    count = -(-(epochs * tokens - 1) // seq_len) if keep_partial else None
    sample = sample_index(lengths, document, seq_len, epochs * tokens, count)
    total = len(sample) - 1
    shuffle = shuffle_index(total if before is None else before, total, random)
    return Index(document, sample, shuffle)


def count_tokens(lengths: np.ndarray, documents: np.ndarray) -> int:
    """Tokens of some sequences, summed in 64 bits without a copy of all of them."""
    return sum(int(lengths[documents[part]].sum(dtype=np.int64)) for part in chunks(len(documents)))


def document_index(
    documents: np.ndarray, epochs: int, random: np.random.RandomState, *, separate: bool
) -> np.ndarray:
    """The documents of all epochs shuffled together, or the last epoch's apart behind the others'.

    Returns: (epochs * documents,) int32, int64 for numbers that need it.
    """
    if separate:
        first = document_index(documents, epochs - 1, random, separate=False)
        last = document_index(documents, 1, random, separate=False)
        return np.concatenate([first, last])
    out = np.tile(documents.astype(index_dtype(int(documents.max(initial=0)))), epochs)
    random.shuffle(out)
    return out


def sample_index(
    lengths: np.ndarray,
    document: np.ndarray,
    seq_len: int,
    tokens: int,
    samples: int | None = None,
    *,
    chunk: int = CHUNK,
) -> np.ndarray:
    """Where each sample begins: sample j at token j*S of the documents laid end to end.

    Args:
        lengths: of every sequence.
        document: (n,) sequences in the order of the stream.
        seq_len: S.
        tokens: of the stream.
        samples: how many; None is as many as are whole, (tokens - 1) // S.
        chunk: documents, and samples, that are worked on together.

    Returns: (samples + 1, 2) entry of `document`, offset in it; int32, or int64 where one needs it.

    Example:
        >>> sample_index(np.array([3, 2, 4]), np.arange(3), 2, 9).tolist()
        [[0, 0], [0, 2], [1, 1], [2, 1], [2, 3]]
    """
    whole = (tokens - 1) // seq_len
    count = whole if samples is None else samples
    longest = max((int(lengths[part].max()) for part in chunks(len(lengths), chunk)), default=0)
    out = np.empty((count + 1, 2), index_dtype(max(len(document), longest)))
    out[0] = 0
    before, done = 0, 1
    for part in chunks(len(document), chunk):
        own = lengths[document[part]].astype(np.int64)
        ends = before + np.cumsum(own)
        stop = min(count, (int(ends[-1]) - 1) // seq_len) + 1
        for piece in chunks(max(stop - done, 0), chunk):
            place = np.arange(done + piece.start, done + piece.stop) * seq_len
            at = np.searchsorted(ends, place, side="right")
            rows = out[done + piece.start : done + piece.stop]
            rows[:, 0] = part.start + at
            rows[:, 1] = place - (ends[at] - own[at])
        before, done = int(ends[-1]), max(done, stop)
    if count > whole:  # the stream's end
        out[count] = len(document) - 1, lengths[document[-1]] - 1
    return out


def shuffle_index(first: int, total: int, random: np.random.RandomState) -> np.ndarray:
    """0 .. first - 1 shuffled, then first .. total - 1 shuffled; uint32, or int64 where needed."""
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    out = np.arange(total, dtype=dtype)
    random.shuffle(out[:first])
    if first < total:
        random.shuffle(out[first:])
    return out


def read_sample(data: Sequences, index: Index, number: int, seq_len: int) -> list[np.ndarray]:
    """The tokens of sample `number`, a piece for each document it meets, S + 1 of them in all.

    Fewer only for the stream's end, see `keep_partial`.

    Raises: DataError if the index does not fit the dataset.
    """
    j = int(index.shuffle[number])
    (first, start), (last, end) = index.sample[j : j + 2].tolist()
    pieces = []
    try:
        for i in range(first, last + 1):
            stop = end + 1 if i == last else None
            pieces.append(data.read(int(index.document[i]), start if i == first else 0, stop))
    except IndexError as error:
        raise DataError(
            f"data.cache: an index does not fit its dataset ({error}): remove the folder of caches"
        ) from error
    return [piece for piece in pieces if piece.size]
