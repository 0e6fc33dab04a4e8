"""Reading text as bytes: the standard library's sources, or what `data.path` names."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from mfun.data.corpus import Corpus, DataError, join

if TYPE_CHECKING:
    from torch import Tensor

_NOT_SOURCES = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_GENERATED = ("_sysconfigdata", "config-")  # made when Python was built: differ by machine


def load(paths: Sequence[str] = ()) -> Corpus:
    """The corpus of `data.path`; without paths, the Python standard library's source files.

    A folder gives every file below it that is UTF-8 and not hidden, named by its path relative to
    the folder; a file gives itself under its own name. Links are followed. A file that two paths
    share is read once, under the name it has by the first in alphabetical order.
    Nothing is downloaded, written or cached: any number of jobs and ranks may read at once.

    Args:
        paths: text files or folders; their order does not matter.

    Returns: a Corpus of at least one token.

    Raises: DataError for a path that is missing, unreadable, not text or without any text.

    Example:
        >>> "this.py" in load().names
        True
    """
    corpus = join(_given(paths) if paths else _standard_library())
    if not len(corpus):
        where = ", ".join(paths) or "the standard library's folder"
        raise DataError(f"data.path: no text in {where}: name a file or folder that has some")
    return corpus


def _standard_library() -> Iterator[tuple[str, bytes]]:
    """Every source file of the standard library, without its tests and what is installed in it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in _files(root, _is_source):
        if path.suffix == ".py":
            yield path.relative_to(root).as_posix(), _read(path)


def _is_source(name: str) -> bool:
    return name not in _NOT_SOURCES and not name.startswith(_GENERATED)


def _given(paths: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Text of the paths the user named."""
    seen: set[Path] = set()
    for path in map(Path, sorted(paths)):
        path = path.expanduser()
        if not path.exists():
            raise DataError(
                f"data.path: {path} does not exist: name a text file, a folder or a dataset"
            )
        for name, file in _named(path):
            real = file.resolve()
            if real in seen:
                continue
            seen.add(real)
            text = _read(file)
            if _is_text(text):
                yield name, text
            elif file == path:
                raise DataError(f"data.path: {path} is not UTF-8 text: convert it, or leave it out")


def _named(path: Path) -> Iterator[tuple[str, Path]]:
    """The files of one path, each with the name its document gets."""
    if not path.is_dir():
        yield path.name, path
        return
    for file in _files(path, lambda name: not name.startswith(".")):
        yield file.relative_to(path).as_posix(), file


def _files(root: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Regular files below a folder in order, by paths each part of which is wanted."""
    seen: set[str] = set()  # a link may lead back to a folder above it
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(filter(wanted, folders))
        paths = (Path(folder, name) for name in sorted(filter(wanted, names)))
        yield from (path for path in paths if path.is_file())


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _refuse(error)


def _refuse(error: OSError) -> NoReturn:
    raise DataError(
        f"data.path: {error.filename} cannot be read ({error.strerror}): mend it, or leave it out"
    ) from error


def _is_text(contents: bytes) -> bool:
    try:
        contents.decode()
    except UnicodeDecodeError:
        return False
    return True


def encode(text: str) -> Tensor:
    """Token ids of a text: its UTF-8 bytes, (n,) int64.

    Example:
        >>> encode("hé").tolist()
        [104, 195, 169]
    """
    import torch

    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: bytes | Sequence[int] | np.ndarray | Tensor) -> str:
    """The text of token ids; bytes that are not UTF-8 show as U+FFFD.

    Example:
        >>> decode([104, 195, 169])
        'hé'
    """
    ids = tokens if isinstance(tokens, Sequence) else tokens.tolist()
    return bytes(ids).decode(errors="replace")
