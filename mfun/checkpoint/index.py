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

FORMAT = 1
"""Version of the folder's form; a reader refuses a later one."""

_FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")


def file_name(rank: int) -> str:
    """The file with a rank's tensors.

    Example:
        >>> file_name(3)
        'rank-00003.safetensors'
    """
    return f"rank-{rank:05d}.safetensors"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or loaded; the message says why and what to do."""


@attrs.frozen(kw_only=True)
class Piece:
    """Where a rank's tensor lies in the whole one.

    Args:
        global_shape: shape of the whole tensor, without padding.
        start: index of the piece's first element along each dim.
        spec: the `P` that cut it, as text.
    """

    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    spec: str = "P()"


@attrs.frozen(kw_only=True)
class Entry:
    """One stored tensor: the file it is in, its type, and its place in the whole."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    spec: str


@attrs.frozen(kw_only=True)
class File:
    """Size in bytes and blake2b of one file."""

    bytes: int
    blake2b: str


@attrs.frozen(kw_only=True)
class Index:
    """Contents of `index.json`.

    Args:
        format: version of the form.
        step: updates done.
        consumed: samples used for training so far.
        world: number of ranks.
        layout: sizes of the mesh's axes and whatever else decides who holds what.
        config: the resolved configuration's text.
        scalars: optimizer and scaler values that are not tensors, equal on all ranks.
        files: by name.
        tensors: by name, an entry for each stored piece, by file.
    """

    format: int
    step: int
    consumed: int
    world: int
    layout: dict[str, Any]
    config: str
    scalars: dict[str, Any]
    files: dict[str, File]
    tensors: dict[str, tuple[Entry, ...]]


def write_index(index: Index, path: Path) -> None:
    """Write an index with a hash of its own contents."""
    contents = attrs.asdict(index)
    contents["blake2b"] = _hash(contents)
    path.write_text(json.dumps(contents, indent=1, allow_nan=False), encoding="utf-8")


def read_index(folder: Path) -> Index:
    """The index of a checkpoint folder.

    Raises: CheckpointError if it is missing, cut short, altered, of a later form, or names a file
        outside the folder.
    """
    path = folder / "index.json"
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
        written = contents.pop("blake2b")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a checkpoint's index ({error}): resume from another checkpoint"
        ) from error
    if written != _hash(contents):
        raise CheckpointError(f"{path} was altered after it was written: resume from another one")
    return _structure(contents, path)


def _structure(contents: dict[str, Any], path: Path) -> Index:
    if contents.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is of format {contents.get('format')!r} and this version of mfun reads "
            f"{FORMAT}: load it with the version that wrote it"
        )
    try:
        index = cattrs.Converter(forbid_extra_keys=True).structure(contents, Index)
    except Exception as error:
        raise CheckpointError(f"{path} has unknown or misshapen fields: {error}") from error
    names = [*index.files, *(e.file for entries in index.tensors.values() for e in entries)]
    for name in names:
        if not _FILE_NAME.fullmatch(name) or name not in index.files:
            raise CheckpointError(
                f"{path} names the file {name!r}, which is none of a checkpoint's"
            )
    return index


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
        mfun.checkpoint.index.CheckpointError: scalars: 'opt.betas' ... use lists, not tuples
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
