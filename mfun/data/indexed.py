"""Megatron's indexed datasets, read: `X.bin` holds tokens back to back, `X.idx` says where.

`X.idx`, all little-endian, s sequences and d + 1 bounds of documents:

    9 bytes   MMIDIDX\\0\\0
    u64       version, 1
    u8        code of the tokens' type, see `CODES`
    u64 u64   s, d + 1
    i32 (s)   tokens of each sequence
    i64 (s)   where each sequence begins in X.bin, in bytes
    i64 (d+1) number of the first sequence of each document, then s
    i8  (s)   mode of each sequence; only in files of several modes (text, image)

An index is checked as a whole when it is opened, and before anything of its size is allocated.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import attrs
import numpy as np

from mfun.data.corpus import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
CODES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Megatron's code of a type -> numpy's name of it."""
CHUNK = 1 << 20
"""Elements that are looked at together, so that memory stays bounded."""


def prefix_of(path: str | Path) -> Path:
    """X of X, X.idx and X.bin.

    Example:
        >>> prefix_of("a/wiki.v2.idx").name, prefix_of("a/wiki.v2").name
        ('wiki.v2', 'wiki.v2')
    """
    text = str(path)
    return Path(text[:-4] if text.endswith((".idx", ".bin")) else text).expanduser()


def file_of(prefix: Path, ending: str) -> Path:
    """X.idx of X; a dot inside X is part of its name."""
    return Path(f"{prefix}{ending}")


def is_indexed(path: str | Path) -> bool:
    """Whether a path names an indexed dataset: the X, X.idx or X.bin of an X.idx that exists."""
    return file_of(prefix_of(path), ".idx").is_file()


@attrs.frozen(eq=False, repr=False)
class Indexed:
    """An open dataset; sequence i has `lengths[i]` tokens.

    Args:
        prefix: X of X.idx and X.bin.
        dtype: of a token.
        lengths: (s,) int32.
        pointers: (s,) int64, bytes.
        documents: (d + 1,) int64; document j is sequences `documents[j]` to `documents[j + 1]`.
        modes: (s,) int8, or None.
        tokens: how many in all.
        descriptor: of X.bin, open as long as this value lives.
    """

    prefix: Path
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    modes: np.ndarray | None
    tokens: int
    descriptor: int

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def __repr__(self) -> str:
        """Counts, never contents."""
        return f"Indexed({str(self.prefix)!r}, sequences={len(self)}, tokens={self.tokens})"

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Tokens start .. stop - 1 of a sequence; a file that shrank meanwhile is an error.

        Raises: DataError if X.bin ends before the tokens do; IndexError outside the sequence.
        """
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(f"{self.prefix}: no tokens {start}..{stop} of {length} in {sequence}")
        offset = int(self.pointers[sequence]) + start * self.dtype.itemsize
        raw = _read(self.descriptor, (stop - start) * self.dtype.itemsize, offset)
        if len(raw) < (stop - start) * self.dtype.itemsize:
            raise DataError(
                f"{file_of(self.prefix, '.bin')} was cut while it was in use: sequence {sequence} "
                f"is at byte {offset}; restore the file"
            )
        return np.frombuffer(raw, dtype=self.dtype)

    def document(self, number: int) -> np.ndarray:
        """All tokens of a document."""
        first, end = (int(x) for x in self.documents[number : number + 2])
        pieces = [self.read(i) for i in range(first, end)]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


def _read(descriptor: int, count: int, offset: int) -> bytes:
    """Bytes of a file; fewer only at its end. Other threads go on meanwhile."""
    pieces = []
    while count and (piece := os.pread(descriptor, count, offset)):
        pieces.append(piece)
        count, offset = count - len(piece), offset + len(piece)
    return b"".join(pieces)


def open_indexed(path: str | Path) -> Indexed:
    """Open X.idx and X.bin.

    Args:
        path: X, X.idx or X.bin.

    Returns: an Indexed whose every sequence and document lies inside its files.

    Raises: DataError naming the file, the field, its value and what to do.

    Source: Megatron-Core 0.16.1, `megatron.core.datasets.indexed_dataset`.
    """
    prefix = prefix_of(path)
    index, contents = file_of(prefix, ".idx"), file_of(prefix, ".bin")
    size, bin_size = _size(index), _size(contents)
    dtype, sequences, bounds, modes = _header(index, size)
    at, arrays = HEADER.size, []
    for name, count in (("<i4", sequences), ("<i8", sequences), ("<i8", bounds), ("i1", modes)):
        arrays.append(_mapped(index, np.dtype(name), at, count))
        at += count * np.dtype(name).itemsize
    lengths, pointers, documents, mode = arrays
    tokens = _check_sequences(index, lengths, pointers, dtype, bin_size)
    _check_documents(index, documents, sequences)
    descriptor = os.open(contents, os.O_RDONLY)
    kept = mode if modes else None
    out = Indexed(prefix, dtype, lengths, pointers, documents, kept, tokens, descriptor)
    weakref.finalize(out, os.close, descriptor)
    return out


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): a dataset is an .idx and a .bin of one "
            "name; build it with `mfun data build`, or correct data.path"
        ) from error


def _bad(path: Path, what: str) -> DataError:
    return DataError(f"{path} {what}: restore it, or build it again with `mfun data build`")


def _header(path: Path, size: int) -> tuple[np.dtype, int, int, int]:
    """Token type, sequences, document bounds, modes; the counts fit the file's size exactly."""
    with path.open("rb") as file:
        raw = file.read(HEADER.size)
    if raw[: len(MAGIC)] != MAGIC:
        raise _bad(path, f"is no index: it begins with {raw[: len(MAGIC)]!r}, not {MAGIC!r}")
    if len(raw) < HEADER.size:
        raise _bad(path, f"ends inside its header, after {len(raw)} of {HEADER.size} bytes")
    _, version, code, sequences, bounds = HEADER.unpack(raw)
    if version != 1:
        raise _bad(path, f"is of version {version}, and only version 1 is known")
    if code not in CODES:
        raise _bad(path, f"has token type {code}, which is none of {[*CODES]}")
    dtype = np.dtype(CODES[code])
    if dtype.kind == "f":
        raise DataError(f"{path} holds {dtype.name} numbers, which are no tokens: name another")
    plain = HEADER.size + 12 * sequences + 8 * bounds
    if size not in (plain, plain + sequences):
        raise _bad(
            path,
            f"has {size} bytes, but {sequences} sequences and {bounds} bounds of documents take "
            f"{plain} ({plain + sequences} with modes)",
        )
    return dtype, sequences, bounds, size - plain


def _mapped(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    """Part of a file as an array that is read when used."""
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", offset, (count,))


def chunks(count: int, size: int = CHUNK) -> Iterator[slice]:
    """Consecutive slices of so many elements."""
    return (slice(i, min(i + size, count)) for i in range(0, count, size))


def _check_sequences(
    path: Path, lengths: np.ndarray, pointers: np.ndarray, dtype: np.dtype, bin_size: int
) -> int:
    """Each sequence lies inside X.bin; the number of tokens."""
    tokens = 0
    for part in chunks(len(lengths)):
        n, begin = lengths[part].astype(np.int64), pointers[part]
        for bad, what in (
            (n < 0, "a negative length"),
            (begin < 0, "a negative place"),
            (begin > bin_size - n * dtype.itemsize, "an end"),
        ):
            if bad.any():
                i = int(bad.argmax())
                where = f"{int(n[i])} tokens of {dtype.itemsize} bytes at byte {int(begin[i])}"
                raise _bad(
                    path,
                    f"gives sequence {part.start + i} {what} that {path.stem}.bin of {bin_size} "
                    f"bytes cannot have ({where})",
                )
        tokens += int(n.sum())
    return tokens


def _check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    """Bounds ascend from 0 to the number of sequences."""
    if not len(documents) or documents[0] != 0 or documents[-1] != sequences:
        found = [int(x) for x in (documents[:1].tolist() + documents[-1:].tolist())]
        raise _bad(path, f"bounds its documents by {found}, not 0 and {sequences}")
    for part in chunks(len(documents) - 1):
        falls = np.diff(documents[part.start : part.stop + 1]) < 0
        if falls.any():
            raise _bad(path, f"ends document {part.start + int(falls.argmax())} before it begins")


SAMPLED = 64
BLOCK = 1 << 16


def content_hash(data: Indexed) -> str:
    """What identifies a dataset wherever it lies: `digest-documents-tokens`.

    The digest is blake2b of the whole index, the size of X.bin, and all of X.bin up to 4 MiB or 64
    evenly spaced blocks of 64 KiB of a larger one, whose other bytes are not looked at.
    """
    state = blake2b(digest_size=16)
    with file_of(data.prefix, ".idx").open("rb") as file:
        while block := file.read(1 << 24):
            state.update(block)
    size = os.fstat(data.descriptor).st_size
    state.update(size.to_bytes(8, "little"))
    for i in range(SAMPLED):
        at = i * BLOCK if size <= SAMPLED * BLOCK else i * (size - BLOCK) // (SAMPLED - 1)
        state.update(_read(data.descriptor, BLOCK, at))
    return f"{state.hexdigest()}-{len(data.documents) - 1}-{data.tokens}"
