"""Made-up documents, as Megatron's: for measuring speed, where no data is wanted."""

from __future__ import annotations

import attrs
import numpy as np

DOCUMENTS, LONGEST = 100_000, 4096


def _lengths() -> np.ndarray:
    return np.random.default_rng(0).integers(1, LONGEST, DOCUMENTS, dtype=np.int32)


@attrs.frozen(eq=False, repr=False)
class Mock:
    """100,000 documents of 1 to 4095 tokens that count 1, 2, 3 ... and end in `eod`.

    Args:
        eod: the last token of each, and the largest: what counts higher starts again at 1.
        lengths: tokens of each.

    Example:
        >>> Mock(5000).read(7, 0, 3).tolist(), Mock(3).read(7, 0, 5).tolist()
        ([1, 2, 3], [1, 2, 1, 2, 1])

    Source: Megatron-Core 0.16.1, `MockGPTLowLevelDataset`, whose counting needs a vocabulary of
        4096 and more.
    """

    eod: int
    lengths: np.ndarray = attrs.field(factory=_lengths, init=False)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """How many in all."""
        return int(self.lengths.sum(dtype=np.int64))

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens start .. stop - 1 of a document.

        Raises: IndexError outside of it.
        """
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"no tokens {start}..{stop} of {length} in document {sequence}")
        place = np.arange(start, stop)
        return np.where(place == length - 1, self.eod, place % max(self.eod - 1, 1) + 1)
