"""Indexed datasets, written: Megatron's bytes, whole or not at all."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from mfun.data.corpus import DataError
from mfun.data.indexed import CODES, HEADER, MAGIC, Indexed, chunks, file_of, prefix_of

LONGEST = 2**31 - 1
"""Tokens of a sequence: its length is an int32."""


def token_dtype(vocab: int | None) -> np.dtype:
    """The type Megatron stores tokens of a vocabulary in; one it has no type for gets int64.

    Example:
        >>> [token_dtype(n).name for n in (65499, 65500, 2**31 + 1)]
        ['uint16', 'int32', 'int64']
    """
    if vocab is not None and vocab < 65500:
        return np.dtype("<u2")
    return np.dtype("<i8" if vocab is not None and vocab > 2**31 else "<i4")


def index_bytes(
    lengths: np.ndarray, documents: np.ndarray, dtype: np.dtype, modes: np.ndarray | None = None
) -> list[bytes]:
    """The contents of X.idx, in pieces, for sequences that lie back to back.

    Args:
        lengths: (s,) tokens of each sequence.
        documents: (d + 1,) first sequence of each document, then s.
        dtype: of a token.
        modes: (s,) or None.

    Example:
        >>> len(b"".join(index_bytes(np.array([3, 2, 4]), np.arange(4), np.dtype("<u2"))))
        102
    """
    code = next(code for code, name in CODES.items() if np.dtype(name) == dtype)
    begins = np.cumsum(lengths, dtype=np.int64)  # in 64 bits: 32 would wrap at 2 GiB
    begins = np.concatenate([np.zeros(1, np.int64), begins])[:-1] * dtype.itemsize
    header = HEADER.pack(MAGIC, 1, code, len(lengths), len(documents))
    pieces = [lengths.astype("<i4"), begins.astype("<i8", copy=False), documents.astype("<i8")]
    pieces += [] if modes is None else [modes.astype("i1")]
    return [header, *(piece.tobytes() for piece in pieces)]


class Writer:
    """Writes a dataset document by document; leaving it without an error gives it its names.

    Until then there are only hidden files, which an error removes. An older dataset of the same
    name loses its index first, so no moment pairs one's index with the other's tokens.

    Args:
        path: X, X.idx or X.bin.
        dtype: of a token, `token_dtype(vocab)`.
        modes: whether sequences have modes.

    Example:
        >>> import tempfile
        >>> from mfun.data.indexed import open_indexed
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Writer(f"{folder}/x", token_dtype(100)) as writer:
        ...         writer.add([1, 2, 3])
        ...         writer.add([4, 5])
        ...     open_indexed(f"{folder}/x").document(1).tolist()
        [4, 5]

    Source: Megatron-Core 0.16.1, `IndexedDatasetBuilder`.
    """

    def __init__(self, path: str | Path, dtype: np.dtype, *, modes: bool = False) -> None:
        self.prefix, self.dtype = prefix_of(path), np.dtype(dtype)
        if self.prefix.name in ("", "..") or self.prefix.is_dir():
            raise DataError(f"{path} is a folder: name a dataset in it, as {self.prefix / 'mine'}")
        self.lengths, self.documents = array("i"), array("q", [0])
        self.modes = array("b") if modes else None
        self.tokens, self.largest = 0, -1
        self._drafts = {
            ending: self.prefix.with_name(f".{self.prefix.name}{ending}.{os.getpid()}.tmp")
            for ending in (".bin", ".idx")
        }
        self._bin: BinaryIO | None = None

    def __enter__(self) -> Writer:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._bin = self._drafts[".bin"].open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            if self._bin is not None:
                self._bin.close()
            for draft in self._drafts.values():
                draft.unlink(missing_ok=True)

    def add(
        self,
        tokens: Sequence[int] | np.ndarray,
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
    ) -> None:
        """One document.

        Args:
            tokens: of all its sequences.
            lengths: of each sequence, with this sum; None makes it one sequence.
            modes: of each sequence, 0 if left out.

        Raises: DataError for a token that the type has no room for, or lengths that do not fit.
        """
        values = np.asarray(tokens)
        values = values.astype(np.int64) if not values.size else values
        lengths = [values.size] if lengths is None else lengths
        if sum(lengths) != values.size or min(lengths, default=0) < 0:
            raise DataError(
                f"a document of {values.size} tokens cannot be cut into sequences of {[*lengths]}"
            )
        self._check(values, max(lengths, default=0))
        self._append(values.astype(self.dtype).tobytes(), values.size)
        self.lengths.extend(lengths)
        self.documents.append(len(self.lengths))
        if self.modes is not None:
            self.modes.extend(modes if modes is not None else [0] * len(lengths))

    def add_all(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Many documents of one sequence each.

        Args:
            tokens: of all of them.
            lengths: (n,) of each.
        """
        assert self.modes is None and int(lengths.sum(dtype=np.int64)) == tokens.size
        self._check(tokens, int(lengths.max(initial=0)))
        self._append(tokens.astype(self.dtype).tobytes(), tokens.size)
        before = len(self.lengths)
        self.lengths.frombytes(lengths.astype(np.int32).tobytes())
        numbers = np.arange(before + 1, before + 1 + len(lengths), dtype=np.int64)
        self.documents.frombytes(numbers.tobytes())

    def _check(self, values: np.ndarray, longest: int) -> None:
        if longest > LONGEST:
            raise DataError(f"a sequence of {longest} tokens is longer than {LONGEST}: cut it")
        if not values.size:
            return
        low, high, room = int(values.min()), int(values.max()), np.iinfo(self.dtype)
        if values.dtype.kind not in "iu" or low < room.min or high > room.max:
            raise DataError(
                f"token {low if low < room.min else high} ({values.dtype.name}) does not fit into "
                f"{self.dtype.name}, the type of {self.prefix}: build it for its vocabulary's size"
            )
        self.largest = max(self.largest, high)

    def _append(self, raw: bytes, tokens: int) -> None:
        assert self._bin is not None, "write inside a `with`"
        self._bin.write(raw)
        self.tokens += tokens

    def extend(self, other: Indexed) -> None:
        """All documents of another dataset behind those so far.

        Raises: DataError if its type or its having modes differs.
        """
        if other.dtype != self.dtype or (other.modes is None) != (self.modes is None):
            raise DataError(
                f"{other.prefix} holds {other.dtype.name} tokens "
                f"{'without' if other.modes is None else 'with'} modes and {self.prefix} takes "
                f"{self.dtype.name} {'without' if self.modes is None else 'with'}: build both alike"
            )
        before = len(self.lengths)
        for i in range(len(other)):
            values = other.read(i)
            self.largest = max(self.largest, int(values.max()) if values.size else -1)
            self._append(values.tobytes(), values.size)
        for part in chunks(len(other)):
            self.lengths.frombytes(other.lengths[part].astype("=i4").tobytes())
            if self.modes is not None and other.modes is not None:
                self.modes.frombytes(other.modes[part].tobytes())
        for part in chunks(len(other.documents) - 1):
            bounds = other.documents[part.start + 1 : part.stop + 1] + before
            self.documents.frombytes(bounds.astype("=i8").tobytes())

    def _finish(self) -> None:
        """Both files on the disk under their names, the index last."""
        assert self._bin is not None
        modes = None if self.modes is None else np.frombuffer(self.modes, np.int8)
        lengths = np.frombuffer(self.lengths, np.int32) if self.lengths else np.empty(0, np.int32)
        with self._drafts[".idx"].open("wb") as file:
            documents = np.frombuffer(self.documents, np.int64)
            for piece in index_bytes(lengths, documents, self.dtype, modes):
                file.write(piece)
            _sync(file)
        _sync(self._bin)
        file_of(self.prefix, ".idx").unlink(missing_ok=True)
        for ending in (".bin", ".idx"):
            self._drafts[ending].replace(file_of(self.prefix, ending))
        sync_folder(self.prefix.parent)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
