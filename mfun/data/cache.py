"""Arrays on the disk, computed once by whoever comes first: named by content, whole or not there.

folder/<key>/ has a file `NAME.npy` for each array and `contents.json` with their types and shapes.
It is filled under another name and renamed, so a reader meets a whole folder or none, on any file
system; a lock only saves the others the work. Nothing is unpickled.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mfun.data.corpus import DataError
from mfun.data.indexed import chunks
from mfun.data.writer import sync_folder

Arrays = dict[str, np.ndarray]
LIST = "contents.json"


def key_of(values: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """A name for what is computed from some values and arrays, and from nothing else.

    Example:
        >>> key_of({"seed": 0}, {}) == key_of({"seed": 1}, {})
        False
    """
    state = blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16)
    for name, array in sorted(arrays.items()):
        state.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        for part in chunks(len(array)):
            state.update(np.ascontiguousarray(array[part]).data)
    return state.hexdigest()


def cached(folder: Path | None, key: str, build: Callable[[], Mapping[str, np.ndarray]]) -> Arrays:
    """The arrays named by a key: from the folder, or built and left there for others.

    Args:
        folder: of all cached arrays; None keeps them in memory.
        key: from `key_of`, of everything that `build` uses.
        build: makes the arrays.

    Returns: the arrays, read-only; from a folder they are read when used.

    Raises: DataError if the folder cannot be written.
    """
    if folder is None:
        return dict(build())
    if (found := _load(folder / key)) is not None:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{key}.lock"):
            if _load(folder / key) is None:
                _store(folder, key, build())
    except OSError as error:
        raise DataError(
            f"data.cache: {folder} cannot be written ({error.strerror}): make room or set its "
            "permissions, or name another folder by data.cache"
        ) from error
    found = _load(folder / key)
    if found is None:
        raise DataError(f"data.cache: {folder / key} vanished as it was made: start again")
    return found


def _load(folder: Path) -> Arrays | None:
    """The arrays of a folder; None where one is missing or is not what the list says."""
    try:
        listed = json.loads((folder / LIST).read_text(encoding="utf-8"))
        out = {name: np.load(folder / f"{name}.npy", "r", allow_pickle=False) for name in listed}
        same = all([x.dtype.str, [*x.shape]] == listed[name] for name, x in out.items())
    except (OSError, ValueError, TypeError, AttributeError, EOFError):
        return None
    return out if same else None


def _store(folder: Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a folder under another name, then give it its own, unless somebody did."""
    draft = Path(tempfile.mkdtemp(prefix=f".{key}.", dir=folder))
    try:
        for name, array in arrays.items():
            with (draft / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        listed = {name: [x.dtype.str, [*x.shape]] for name, x in arrays.items()}
        with (draft / LIST).open("w", encoding="utf-8") as file:
            json.dump(listed, file)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(0o755)
        if (folder / key).exists() and _load(folder / key) is None:  # torn by something else
            shutil.rmtree(folder / key, ignore_errors=True)
        try:
            draft.rename(folder / key)
        except OSError:
            if _load(folder / key) is None:
                raise
        sync_folder(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One at a time, where the file system has locks; the file stays, as others may wait on it."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
