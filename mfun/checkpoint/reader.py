"""Loading: from any layout into any other, only the bytes that are needed, or a refusal that names
everything that does not fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import NamedTuple

import attrs
import torch
from torch import Tensor

from mfun.checkpoint.format import CheckpointError
from mfun.checkpoint.index import Entry, Index, read_index
from mfun.checkpoint.pieces import Copy, Piece, common, whole
from mfun.checkpoint.room import empty
from mfun.checkpoint.source import Source, damaged
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
        dtype = getattr(torch, opened.index.tensors[stored][0].dtype)
        if target.dtype != dtype or not target.is_contiguous():  # read as stored, then converted
            later.append((target, torch.empty(target.shape, dtype=dtype)))
            target = later[-1][1]
        for entry in opened.index.tensors[stored]:
            if copies := [*common(entry, piece)]:
                work.setdefault(entry.file, []).append((stored, entry, copies, target))
    for file, rows in sorted(work.items()):
        with Source(opened.folder / file, opened.index.files[file]) as source:
            for stored, entry, copies, target in rows:
                _read(source, stored, entry, copies, target.view(-1))
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
        held = {
            stored: entry
            for stored, entries in index.tensors.items()
            for entry in entries
            if entry.file == name
        }
        with Source(folder / name, index.files[name]) as source:
            if extra := [stored for stored in source.stored if stored not in held]:
                raise damaged(source.path, f"holds {extra[0]}, of which index.json knows nothing")
            for stored, entry in held.items():
                source.check(stored, entry)


def _read(source: Source, name: str, entry: Entry, copies: Sequence[Copy], target: Tensor) -> None:
    """Bring to a flat target what it has in common with a stored piece."""
    if _count(copies) < entry.count:
        for copy in copies:
            _read_part(source, name, entry, copy, _place(copy, target))
        return
    first = copies[0]
    straight = first.count == entry.count == prod(first.target_shape) and _near(target)
    low = first.target_at
    part = target[low : low + entry.count] if straight else empty((entry.count,), target.dtype)
    source.check(name, entry, part)
    for copy in () if straight else copies:
        at, shape = copy.source_at, copy.source_shape
        piece = part[at : at + prod(shape)].view(shape)[copy.source_box]
        _place(copy, target).copy_(piece)


def _read_part(source: Source, name: str, entry: Entry, copy: Copy, place: Tensor) -> None:
    """Into its place, or by way of memory that is dense and on the CPU."""
    straight = place.is_contiguous() and _near(place)
    read = place if straight else torch.empty(place.shape, dtype=place.dtype)
    source.take(name, entry, copy, read)
    if not straight:
        place.copy_(read)


def _place(copy: Copy, target: Tensor) -> Tensor:
    """Where a copy goes in a flat target."""
    at, shape, box = copy.target_at, copy.target_shape, copy.target_box
    return target[at : at + prod(shape)].view(shape)[box]


def _near(x: Tensor) -> bool:
    """Whether the system can read into it."""
    return x.device.type == "cpu"


def _count(copies: Sequence[Copy]) -> int:
    return sum(copy.count for copy in copies)
