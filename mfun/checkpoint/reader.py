"""Loading: from any layout into any other, only the bytes that are needed, or a refusal that names
everything that does not fit.

Files are mapped into memory and copied from, so that what is not needed is not read.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from hashlib import blake2b
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from mfun.checkpoint.format import CheckpointError, read_header
from mfun.checkpoint.hashing import CHUNK, Hash
from mfun.checkpoint.index import Entry, File, Index, read_index
from mfun.checkpoint.pieces import Copy, Piece, common, whole
from mfun.checkpoint.room import empty
from mfun.checkpoint.writer import dtype_name

Expected = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Name -> (shape of the whole tensor, dtype)."""


@attrs.frozen(kw_only=True)
class Rules:
    """What may differ between a checkpoint and what is asked of it; by default nothing.

    Args:
        rename: (pattern, replacement) of regular expressions, applied in turn to the names in the
            checkpoint; a pattern must match the whole name.
        missing: shell patterns of names that may be missing; they keep their values.
        unexpected: shell patterns of names, renamed, that may be there and are not read.

    Example:
        >>> rules = Rules(rename=((r"old\\.(.*)", r"params.\\1"),), unexpected=("opt.*",))
        >>> rules.renamed("old.w"), rules.renamed("opt.old.w")
        ('params.w', 'opt.old.w')
    """

    rename: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def renamed(self, name: str) -> str:
        """A name as this run has it."""
        for pattern, replacement in self.rename:
            if match := re.fullmatch(pattern, name):
                name = match.expand(replacement)
        return name

    def may_miss(self, name: str) -> bool:
        """Whether a name may be missing from the checkpoint."""
        return _any(self.missing, name)

    def may_have(self, name: str) -> bool:
        """Whether a name that nobody asks for may be in the checkpoint."""
        return _any(self.unexpected, name)


STRICT = Rules()


class Opened(NamedTuple):
    """A checkpoint that fits what is expected.

    Args:
        folder: where it is.
        index: its contents.
        names: of this run, each with its name in the checkpoint; those that may be missing and are
            have none.
    """

    folder: Path
    index: Index
    names: dict[str, str]


def open_checkpoint(folder: Path, expected: Expected, rules: Rules = STRICT) -> Opened:
    """Read an index and compare it with all that a run expects; nothing is allocated.

    Args:
        folder: `.../checkpoints/step-XXXXXXXX`, e.g. from `latest`.
        expected: every tensor of all ranks.
        rules: what may differ.

    Raises:
        CheckpointError: naming each tensor that is missing, unexpected, or of another shape or
            dtype; or for an index that is damaged or makes no sense.
    """
    index = read_index(folder)
    names, wrong = _renamed(index, rules)
    for name, (shape, dtype) in expected.items():
        if name not in names:
            if not rules.may_miss(name):
                wrong.append(f"{name} is missing")
            continue
        entry = index.tensors[names[name]][0]
        if entry.global_shape != tuple(shape):
            wrong.append(f"{name} has shape {entry.global_shape}, expected {tuple(shape)}")
        if entry.dtype != dtype_name(dtype):
            wrong.append(f"{name} is {entry.dtype}, expected {dtype_name(dtype)}")
    extra = [name for name in names if name not in expected]
    wrong += [f"{n} is there but not expected" for n in extra if not rules.may_have(n)]
    if wrong:
        raise CheckpointError(
            f"{folder} does not fit this model: {'; '.join(wrong)}. Resume with the configuration "
            "that saved it (config.toml of the run), or say which tensors may differ"
        )
    return Opened(folder, index, {n: names[n] for n in expected if n in names})


def _renamed(index: Index, rules: Rules) -> tuple[dict[str, str], list[str]]:
    """Name here -> name in the checkpoint, and those that two tensors would have."""
    names: dict[str, str] = {}
    twice = []
    for stored in index.tensors:
        name = rules.renamed(stored)
        if name in names:
            twice.append(f"{names[name]} and {stored} would both be {name}")
        names[name] = stored
    return names, twice


def _any(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


Targets = Mapping[str, tuple[Piece, Tensor]]
"""Name -> (what of the whole tensor is wanted, where it goes: of that shape, in any memory)."""


def fill(opened: Opened, targets: Targets) -> bool:
    """Read pieces of tensors into memory that is there. Reads nothing else of the files.

    A stored piece that is read whole is compared with its hash; see `check_files` for the others.

    Args:
        opened: from `open_checkpoint`.
        targets: what this rank wants; names that may be missing and are stay as they are.

    Returns: whether some piece was read in part.

    Raises:
        CheckpointError: a file is not what the index says, naming it.
    """
    work: dict[str, list[tuple[str, Entry, list[Copy], Tensor]]] = {}
    later: list[tuple[Tensor, Tensor]] = []
    for name, (piece, target) in targets.items():
        stored = opened.names.get(name)
        if stored is None:
            continue
        if not target.is_contiguous():
            later.append((target, torch.empty(target.shape, dtype=target.dtype)))
            target = later[-1][1]
        for entry in opened.index.tensors[stored]:
            if copies := [*common(entry, piece)]:
                work.setdefault(entry.file, []).append((stored, entry, copies, target))
    for file, rows in sorted(work.items()):
        mapped = Mapped(opened.folder / file, opened.index.files[file])
        for stored, entry, copies, target in rows:
            _read(mapped, stored, entry, copies, target.view(-1))
    for target, read in later:
        target.copy_(read)
    every = [(entry, copies) for rows in work.values() for _, entry, copies, _ in rows]
    return any(_count(copies) < entry.count for entry, copies in every)


def load(
    folder: Path,
    expected: Expected,
    rules: Rules = STRICT,
    pieces: Mapping[str, Piece] | None = None,
) -> dict[str, Tensor]:
    """Tensors of a checkpoint in new memory on the CPU.

    Args:
        folder: of the checkpoint.
        expected: every tensor of all ranks.
        rules: what may differ; those that are missing are left out.
        pieces: what of them is wanted; whole tensors where it is not given.

    Returns: by name; bitwise as saved, requires_grad False.

    Raises:
        CheckpointError: as `open_checkpoint` and `fill`.

    Example:
        >>> import tempfile
        >>> from mfun.checkpoint import Order, save
        >>> with tempfile.TemporaryDirectory() as run:
        ...     folder = save(Order(run_dir=Path(run), step=3, tensors={"w": torch.arange(6.0)}))
        ...     part = Piece(global_shape=(6,), start=(2,), box=(3,))
        ...     load(folder, {"w": ((6,), torch.float32)}, pieces={"w": part})
        {'w': tensor([2., 3., 4.])}
    """
    opened = open_checkpoint(folder, expected, rules)
    targets = {}
    for name in opened.names:
        piece = (pieces or {}).get(name) or whole(expected[name][0])
        targets[name] = piece, empty(piece.shape, expected[name][1])
    fill(opened, targets)
    return {name: target for name, (_, target) in targets.items()}


def check_files(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Read files of a checkpoint from end to end and compare all hashes.

    Raises: CheckpointError naming the first that is not, byte for byte, what was written.
    """
    for name in sorted(names):
        mapped = Mapped(folder / name, index.files[name])
        held = {
            stored: entry
            for stored, entries in index.tensors.items()
            for entry in entries
            if entry.file == name
        }
        if extra := [stored for stored in mapped.stored if stored not in held]:
            raise damaged(mapped.path, f"holds {extra[0]}, of which index.json knows nothing")
        for stored, entry in held.items():
            mapped.check(stored, entry, mapped.tensor(stored, entry), None)


class Mapped:
    """A file of a checkpoint in memory.

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
        with path.open("rb") as opened:  # private: nothing can be written to the file through it
            self.memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        self.memory.madvise(mmap.MADV_RANDOM)  # no reading ahead: what is wanted is announced

    def tensor(self, name: str, entry: Entry) -> Tensor:
        """A stored tensor, flat; a view of the file.

        Raises: CheckpointError if the header does not say what the index says.
        """
        found = self.stored.get(name)
        if found is None or found[:2] != (entry.dtype, entry.shape):
            raise CheckpointError(f"{self.path}: {name} in it is not what index.json says")
        dtype = getattr(torch, entry.dtype)
        if not entry.count:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, offset=found.begin, count=entry.count)

    def announce(self, name: str, low: int, high: int) -> None:
        """Begin to read these bytes of a tensor from the disk, beside other work."""
        begin = self.stored[name].begin
        start = (begin + low) // mmap.PAGESIZE * mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_WILLNEED, start, begin + high - start)

    def check(self, name: str, entry: Entry, data: Tensor, target: Tensor | None) -> None:
        """Compare a tensor with its hash, and copy it, while a chunk of it is at hand.

        Raises: CheckpointError if it is another.
        """
        self.announce(name, 0, entry.bytes)
        one, step = Hash(), CHUNK // data.element_size()
        for at in range(0, entry.count, step):
            chunk = data[at : at + step]
            one.add(chunk.view(torch.uint8).numpy())
            if target is not None:
                target[at : at + step].copy_(chunk)
        if one.text != entry.hash:
            raise damaged(self.path, f"was altered after it was written (the hash of {name})")


def damaged(path: Path, problem: str) -> CheckpointError:
    """The error of a file that is not what was written."""
    return CheckpointError(
        f"{path} {problem}: delete {path.parent} to resume from another checkpoint"
    )


def _read(mapped: Mapped, name: str, entry: Entry, copies: Sequence[Copy], target: Tensor) -> None:
    """Copy to a flat target what it has in common with a stored piece."""
    data, first = mapped.tensor(name, entry), copies[0]
    if _count(copies) == entry.count:
        straight = first.count == entry.count == prod(first.target_shape)
        low = first.target_at
        mapped.check(name, entry, data, target[low : low + entry.count] if straight else None)
        if straight:
            return
    else:
        for copy in copies:
            for low, high in _ranges(copy, data.element_size()):
                mapped.announce(name, low, high)
    for at, shape, box, to, to_shape, to_box, _ in copies:
        source = data[at : at + prod(shape)].view(shape)[box]
        target[to : to + prod(to_shape)].view(to_shape)[to_box].copy_(source)


def _count(copies: Sequence[Copy]) -> int:
    return sum(copy.count for copy in copies)


def _ranges(copy: Copy, item: int) -> Iterator[tuple[int, int]]:
    """The bytes [low, high) of a stored tensor that a copy reads, joined over gaps below a page.

    Args:
        copy: reads `source_box` of `source_shape`.
        item: bytes of an element.

    Example: 2 of 4 columns of 3 rows
        >>> box = (slice(0, 3), slice(2, 4))
        >>> ranges = lambda item: [*_ranges(Copy(0, (3, 4), box, 0, (3, 2), box, 6), item)]
        >>> ranges(4), ranges(4096)
        ([(8, 48)], [(8192, 16384), (24576, 32768), (40960, 49152)])
    """
    sizes = [part.stop - part.start for part in copy.source_box]
    loops, length, reach, stride, low = 0, 0, item, item, copy.source_at * item
    strides: list[int] = []
    for dim in reversed(range(len(sizes))):
        if sizes[dim] > 1 and stride - reach >= mmap.PAGESIZE and not loops:
            loops, length = dim + 1, reach
        reach += (sizes[dim] - 1) * stride
        low += copy.source_box[dim].start * stride
        strides.insert(0, stride)
        stride *= copy.source_shape[dim]
    for index in product(*map(range, sizes[:loops])):
        at = low + sum(i * s for i, s in zip(index, strides, strict=False))
        yield at, at + (length if loops else reach)
