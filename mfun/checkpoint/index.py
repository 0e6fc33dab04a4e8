"""`index.json`: what a checkpoint holds, in which files, for which layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs
import cattrs

from mfun.checkpoint.format import TYPES, CheckpointError, strict_json
from mfun.checkpoint.pieces import Piece, problem_of

FORMAT = 2
"""Version of the folder's form; a reader refuses another one."""
INDEX = "index.json"
INDEX_LIMIT = 1 << 32
"""Bytes of an index beyond which it is not read."""

_FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")


def file_name(rank: int) -> str:
    """The file with a rank's tensors.

    Example:
        >>> file_name(3)
        'rank-00003.safetensors'
    """
    return f"rank-{rank:05d}.safetensors"


@attrs.frozen(kw_only=True)
class Entry(Piece):
    """One stored piece of a tensor: the file it is in, its type, and its hash."""

    file: str
    dtype: str
    hash: str

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return TYPES[self.dtype][1]

    @property
    def bytes(self) -> int:
        """What it takes in its file."""
        return self.count * self.item


@attrs.frozen(kw_only=True)
class File:
    """Size in bytes of one file, and blake2b of its header; tensors have hashes of their own."""

    bytes: int
    header: str


@attrs.frozen(kw_only=True)
class Index:
    """Contents of `index.json`.

    Args:
        format: version of the form.
        step: updates done.
        consumed: samples used for training so far, the position in the data.
        key: words of the random key of the next step.
        world: number of ranks.
        layout: sizes of the mesh's axes and whatever else decided who held what; for information.
        config: the resolved configuration's text, learning-rate schedule and seed included.
        scalars: numbers of the optimizer and the loss scale, equal on all ranks.
        files: by name.
        tensors: by name, an entry for each stored piece, by file.
    """

    format: int
    step: int
    consumed: int
    key: tuple[int, ...]
    world: int
    layout: dict[str, Any]
    config: str
    scalars: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, tuple[Entry, ...]]


def index_text(index: Index) -> bytes:
    """An index as JSON, a line a file and a line a tensor, with a hash of its contents."""
    contents = attrs.asdict(index)
    contents["blake2b"] = _hash(contents)
    lines = []
    for key, value in contents.items():
        if key in ("files", "tensors") and value:
            rows = (f"  {json.dumps(name)}: {_dump(row)}" for name, row in value.items())
            lines.append(f"{json.dumps(key)}: {{\n" + ",\n".join(rows) + "\n}")
        else:
            lines.append(f"{json.dumps(key)}: {_dump(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}").encode()


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def read_index(folder: Path) -> Index:
    """The index of a checkpoint folder.

    Raises:
        CheckpointError: it is missing, cut short, altered or of another form, names a file outside
            the folder, or its pieces are not whole tensors, each element once.
    """
    path = folder / INDEX
    try:
        if path.stat().st_size > INDEX_LIMIT:
            raise ValueError(f"it has {path.stat().st_size} bytes")
        contents = strict_json(path.read_bytes(), path)
        written = contents.pop("blake2b")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint's index ({error}): resume from another checkpoint"
        ) from error
    if written != _hash(contents):
        raise CheckpointError(f"{path} was altered after it was written: resume from another one")
    index = _structure(contents, path)
    _check_files(index, path)
    for name, entries in index.tensors.items():
        if problem := _problem(entries):
            raise CheckpointError(f"{path} does not make sense: {name}: {problem}")
    return index


def _exact(value: Any, kind: type) -> Any:
    """A value of exactly this type, never one that could be converted to it."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


_converter = cattrs.Converter(forbid_extra_keys=True)
_converter.register_structure_hook(int, _exact)
_converter.register_structure_hook(str, _exact)


def _structure(contents: dict[str, Any], path: Path) -> Index:
    if contents.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {contents.get('format')!r} and this version of mfun reads "
            f"{FORMAT}: load it with the version that wrote it"
        )
    try:
        return _converter.structure(contents, Index)
    except Exception as error:
        raise CheckpointError(
            f"{path} has unknown or misshapen fields: {'; '.join(cattrs.transform_error(error))}"
        ) from error


def _check_files(index: Index, path: Path) -> None:
    """Files have a checkpoint's names, and room for what should be in them."""
    used = dict.fromkeys(index.files, 0)
    for entries in index.tensors.values():
        for entry in entries:
            if entry.file not in used or entry.dtype not in TYPES:
                raise CheckpointError(
                    f"{path} names the file {entry.file!r} or the type {entry.dtype!r}, which is "
                    "none of a checkpoint's"
                )
            used[entry.file] += max(entry.bytes, 0)
    for name, file in index.files.items():
        if not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{path} names the file {name!r}, which is none of a checkpoint's"
            )
        if used[name] > file.bytes:
            raise CheckpointError(
                f"{path} says that {name} holds {used[name]} bytes of tensors and has {file.bytes}"
            )


def _problem(entries: tuple[Entry, ...]) -> str | None:
    if not entries:
        return "it has no pieces"
    if len({entry.dtype for entry in entries}) > 1:
        return "its pieces are of several types"
    if len({entry.file for entry in entries}) < len(entries):
        return "a file holds two of its pieces"
    return problem_of(entries)


def _hash(contents: Mapping[str, Any]) -> str:
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def check_scalars(scalars: Mapping[str, Any], what: str) -> None:
    """Refuse values that JSON would give back changed (tuples, numpy numbers, NaN, integer keys).

    Raises: CheckpointError naming the key.

    Example:
        >>> check_scalars({"opt.count": 3, "opt.lr": 0.1}, "scalars")
        >>> check_scalars({"opt.betas": (0.9, 0.95)}, "scalars")
        Traceback (most recent call last):
        mfun.checkpoint.format.CheckpointError: scalars: 'opt.betas' ... use lists, not tuples
    """
    for key, value in scalars.items():
        try:
            same = _equal(json.loads(json.dumps(value, allow_nan=False)), value)
        except (TypeError, ValueError):
            same = False
        if not same or not isinstance(key, str):
            raise CheckpointError(
                f"{what}: {key!r} is {value!r}, which JSON does not give back as it is: use text, "
                "finite numbers, booleans, None, and lists and dicts of them; use lists, not tuples"
            )


def _equal(a: Any, b: Any) -> bool:
    """Equal in value and type, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return a == b
