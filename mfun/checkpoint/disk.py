"""The few operations on files that saving is made of; a test can cut in before each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs

from mfun.checkpoint.hashing import as_bytes


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
                for part in parts:
                    self.before("write", path)
                    _write_all(file.fileno(), as_bytes(part))
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


def _write_all(handle: int, view: memoryview) -> None:
    """A system call may write less than it was given."""
    while view:
        view = view[os.write(handle, view) :]
