"""A file of a checkpoint, read exactly where it is asked for and compared with its hashes.

Bytes go from the system straight into the memory they are for. Nothing is mapped: a slice is no
larger than it is, and a file that is cut while it is read is an error, no signal.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mfun.checkpoint.format import CheckpointError, read_header
from mfun.checkpoint.hashing import CHUNK, Hash
from mfun.checkpoint.index import Entry, File
from mfun.checkpoint.pieces import Copy
from mfun.checkpoint.room import memory

GAP = 512
"""Bytes between two slices below which both are read at once: a sector of a disk."""


class Source:
    """A file of a checkpoint, open while it is read.

    Args:
        path: of the file.
        file: what the index says of it.

    Raises:
        CheckpointError: its size or header is another.
    """

    def __init__(self, path: Path, file: File) -> None:
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            raise damaged(path, "is not there")
        if size != file.bytes:
            raise damaged(path, f"has {size} bytes instead of {file.bytes}")
        self.path = path
        self.stored, start = read_header(path)
        if blake2b(start, digest_size=16).hexdigest() != file.header:
            raise damaged(path, "was altered after it was written (its hash differs)")
        self._file = path.open("rb", buffering=0)
        _advise(self._file.fileno(), "RANDOM")  # no reading ahead: what is wanted is announced

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check(self, name: str, entry: Entry, target: Tensor | None = None) -> None:
        """Read a stored tensor, and compare it with its hash while a chunk of it is at hand.

        Args:
            name: in the file.
            entry: what the index says of it.
            target: where it goes, dense and on the CPU; nowhere if not given.

        Raises: CheckpointError if it is another.
        """
        begin = self._begin(name, entry)
        end = begin + entry.bytes
        if not (self._at_hand(begin) and self._at_hand(end - 1)):
            self._announce(begin, end)  # which looks for every page, so not where all are there
        one, view = Hash(), memoryview(bytearray(CHUNK)) if target is None else memory(target)
        for at in range(0, entry.bytes, CHUNK):
            count = min(CHUNK, entry.bytes - at)
            part = view[:count] if target is None else view[at : at + count]
            self._fetch(begin + at, part)
            one.add(part)
        if one.text != entry.hash:
            raise damaged(self.path, f"was altered after it was written (the hash of {name})")

    def take(self, name: str, entry: Entry, copy: Copy, target: Tensor) -> None:
        """Read the box of a stored tensor that a copy wants, and no more.

        Args:
            name: in the file.
            entry: what the index says of it.
            copy: whose source is wanted.
            target: of the box's shape, dense, on the CPU.
        """
        slices = _slices(copy, target.element_size())
        begin, (length, inner) = self._begin(name, entry), slices[1:]
        places = [begin + at for at in slices.places]
        for low, high in _near(places, length):
            self._announce(low, high)
        if inner is None:
            view = memory(target)
            for number, at in enumerate(places):
                self._fetch(at, view[number * length : (number + 1) * length])
            return
        rows = target.view(len(places), *inner.sizes)
        read = torch.empty(length // target.element_size(), dtype=target.dtype)
        view = memory(read)
        for row, at in zip(rows, places, strict=True):
            self._fetch(at, view)
            row.copy_(read.as_strided(inner.sizes, inner.strides))

    def _begin(self, name: str, entry: Entry) -> int:
        """Where a tensor begins, if the header says what the index says."""
        found = self.stored.get(name)
        if found is None or found[:2] != (entry.dtype, entry.shape):
            raise CheckpointError(f"{self.path}: {name} in it is not what index.json says")
        return found.begin

    def _fetch(self, at: int, view: memoryview) -> None:
        """Fill memory with the bytes from `at` on; a system call may read less than it should."""
        while view:
            count = os.preadv(self._file.fileno(), [view], at)
            if not count:
                raise damaged(self.path, f"ends at byte {at}; it was cut short while it was read")
            view, at = view[count:], at + count

    def _announce(self, low: int, high: int) -> None:
        """Begin to read these bytes from the disk, beside other work."""
        _advise(self._file.fileno(), "WILLNEED", low, high - low)

    def _at_hand(self, at: int) -> bool:
        """Whether a byte can be read without waiting for the disk, as far as a system can say."""
        try:
            return os.preadv(self._file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT) == 1
        except (AttributeError, OSError):
            return False


def damaged(path: Path, problem: str) -> CheckpointError:
    """The error of a file that is not what was written."""
    return CheckpointError(
        f"{path} {problem}: delete {path.parent} to resume from another checkpoint"
    )


def _advise(handle: int, what: str, at: int = 0, count: int = 0) -> None:
    """Tell the system what will be read, where it listens; a wish."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, at, count, getattr(os, f"POSIX_FADV_{what}"))


class Inner(NamedTuple):
    """Sizes and strides, in elements, of what is wanted of a slice that has gaps."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Slices(NamedTuple):
    """The bytes of a stored tensor that a copy reads, in the order of its box.

    Args:
        places: where each slice begins.
        length: bytes of a slice.
        inner: what of it is wanted, None for all.
    """

    places: list[int]
    length: int
    inner: Inner | None


def _slices(copy: Copy, item: int) -> Slices:
    """What a copy reads, joined over gaps that are smaller than a read costs.

    Args:
        copy: reads `source_box` of `source_shape`.
        item: bytes of an element.

    Example: 2 of 4 columns of 3 rows
        >>> box = (slice(0, 3), slice(2, 4))
        >>> copy = Copy(0, (3, 4), box, 0, (3, 2), box, 6)
        >>> _slices(copy, 4)
        Slices(places=[8], length=40, inner=Inner(sizes=(3, 2), strides=(4, 1)))
        >>> _slices(copy, 512)
        Slices(places=[1024, 3072, 5120], length=1024, inner=None)
    """
    sizes = tuple(part.stop - part.start for part in copy.source_box)
    strides = tuple(prod(copy.source_shape[dim + 1 :]) for dim in range(len(sizes)))
    starts = (part.start for part in copy.source_box)
    low = copy.source_at + sum(a * n for a, n in zip(starts, strides, strict=True))
    outer, reach = len(sizes), 1
    while outer and (sizes[outer - 1] == 1 or (strides[outer - 1] - reach) * item < GAP):
        outer -= 1
        reach += (sizes[outer] - 1) * strides[outer]
    places = [low * item]
    for size, stride in zip(sizes[:outer], strides[:outer], strict=True):
        places = [at + i * stride * item for at in places for i in range(size)]
    dense = reach == prod(sizes[outer:])
    return Slices(places, reach * item, None if dense else Inner(sizes[outer:], strides[outer:]))


def _near(places: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """Ranges of slices with less than a page between them, which the system reads at once.

    Example:
        >>> [*_near([0, 2048, 65536], 1024)]
        [(0, 3072), (65536, 66560)]
    """
    start = end = places[0]
    for at in places:
        if at - end >= mmap.PAGESIZE:
            yield start, end
            start = at
        end = at + length
    yield start, end
