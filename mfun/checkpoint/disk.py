"""The few operations on files that saving is made of; a test can cut in before each.

Large files pass the system's cache by, where it lets them: nobody is about to read a checkpoint,
and the copy into the cache costs as much as the disk. Bytes are gathered in aligned blocks, and a
thread writes them while others are filled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from mfun.checkpoint.hashing import as_bytes

BLOCK = 1 << 22
"""Bytes that go to the disk at once."""
BLOCKS = 3
"""One is written, one waits to be, and one is filled."""
DIRECT = getattr(os, "O_DIRECT", 0)
"""The flag of a file whose bytes pass the cache by; 0 where a system has none."""


def _go_on(operation: str, path: Path) -> None:
    """Nothing happens before an operation."""


@attrs.frozen
class Disk:
    """Writing that survives a power cut: what was synced is there, a rename is all or nothing.

    Args:
        before: called with an operation's name and path before it; a test raises in it to stop a
            save at any point, as a kill would.
        block: bytes that are written at once, of whole pages.
    """

    before: Callable[[str, Path], None] = _go_on
    block: int = BLOCK

    def make_folder(self, path: Path) -> None:
        """Create a folder that does not exist, and those above it."""
        self.before("make", path)
        path.mkdir(parents=True)

    def write(self, path: Path, parts: Iterable[Any]) -> None:
        """Write a file of some parts, bytes or other buffers, then bring it to the disk."""
        try:
            with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
                self._write(file.fileno(), path, parts, beside)
                self.before("sync", path)
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(path)  # a full disk does not say which
            raise

    def _write(
        self, handle: int, path: Path, parts: Iterable[Any], beside: ThreadPoolExecutor
    ) -> None:
        """Full blocks in the thread, directly; what is left after them as any file's bytes."""
        going: deque[Future[None]] = deque()
        blocks = [memoryview(mmap.mmap(-1, self.block)) for _ in range(BLOCKS)]  # at a page
        used = 0
        _direct(handle, True)
        for part in parts:
            rest = as_bytes(part)
            while rest:
                count = min(len(rest), self.block - used)
                blocks[0][used : used + count] = rest[:count]
                rest, used = rest[count:], used + count
                if used == self.block:
                    self.before("write", path)
                    going.append(beside.submit(_write_all, handle, blocks[0]))
                    blocks, used = [*blocks[1:], blocks[0]], 0
                    if len(going) == BLOCKS:
                        going.popleft().result()  # whose block comes next
        for one in going:
            one.result()
        _direct(handle, False)
        if used:
            self.before("write", path)
            _write_all(handle, blocks[0][:used])

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


def _direct(handle: int, on: bool) -> None:
    """Let what is written pass the cache by, or not; a wish that not every file system grants."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL) & ~DIRECT
    with contextlib.suppress(OSError):
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | (DIRECT if on else 0))


def _write_all(handle: int, view: memoryview) -> None:
    """A system call may write less than it was given, or refuse places that are no block's."""
    while view:
        try:
            view = view[os.write(handle, view) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(handle, fcntl.F_GETFL) & DIRECT:
                raise
            _direct(handle, False)
