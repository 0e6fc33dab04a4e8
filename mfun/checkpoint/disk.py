"""The few operations on files that saving is made of; a test can cut in before each."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from mfun.checkpoint.hashing import as_bytes

AHEAD = 8 << 20
"""Bytes after which the disk begins to write."""


def _go_on(operation: str, path: Path) -> None:
    """Nothing happens before an operation."""


@attrs.frozen
class Disk:
    """Writing that survives a power cut: what was synced is there, a rename is all or nothing.

    Args:
        before: called with an operation's name and path before it; a test raises in it to stop a
            save at any point, as a kill would.
    """

    before: Callable[[str, Path], None] = _go_on

    def make_folder(self, path: Path) -> None:
        """Create a folder that does not exist, and those above it."""
        self.before("make", path)
        path.mkdir(parents=True)

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        """Write a file of some parts, bytes or other buffers, then bring it to the disk."""
        try:
            with path.open("wb", buffering=0) as file:
                written = begun = 0
                for part in parts:
                    self.before("write", path)
                    written += _write_all(file.fileno(), as_bytes(part))
                    if written - begun >= AHEAD:
                        _begin_sync(file.fileno(), begun, written - begun)
                        begun = written
                self.before("sync", path)
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk does not say which
            raise

    def sync(self, path: Path) -> None:
        """Wait until a folder's list of names is on the disk."""
        self.before("sync", path)
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        """Move within one folder: at any moment exactly one of the two names exists."""
        self.before("rename", old)
        old.replace(new)
        self.sync(new.parent)

    def remove(self, path: Path) -> None:
        """Delete a file, or a folder with all in it."""
        self.before("remove", path)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _write_all(handle: int, view: memoryview) -> int:
    """A system call may write less than it was given."""
    count = len(view)
    while view:
        view = view[os.write(handle, view) :]
    return count


def _begin_sync(handle: int, start: int, count: int) -> None:
    """Let the disk begin with these bytes while the next ones are written, where Linux can."""
    library = ctypes.CDLL(None)
    if hasattr(library, "sync_file_range"):
        begin = 2  # SYNC_FILE_RANGE_WRITE: start and do not wait
        library.sync_file_range(handle, ctypes.c_int64(start), ctypes.c_int64(count), begin)
