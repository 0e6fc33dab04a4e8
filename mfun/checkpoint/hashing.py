"""A hash of a tensor's bytes that is as fast as memory.

Every page of 8 KiB is added up as 64-bit words, and the sums are hashed by blake2b. It tells bits
that flipped and blocks that were lost, exchanged or left over from before. It does not tell a
forgery: whoever can write into the folder can write the index, too.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

WORDS = 1024
"""64-bit words of a page."""
CHUNK = 1 << 20
"""Bytes that are worked on at a time; they stay in the second-level cache."""


class Hash:
    """The hash of bytes that come in chunks; all but the last have `CHUNK` bytes.

    Example:
        >>> one = Hash()
        >>> one.add(bytes(CHUNK))
        >>> one.add(b"end")
        >>> one.text == hash_of(bytes(CHUNK) + b"end"), len(one.text)
        (True, 32)
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)

    def add(self, chunk: Any) -> None:
        """The next bytes, of any object that has a buffer."""
        chunk = as_bytes(chunk)
        pages = len(chunk) // (8 * WORDS)
        words = np.frombuffer(chunk, dtype="<i8", count=pages * WORDS)
        if pages:
            self._hash.update(words.reshape(pages, WORDS).sum(1).data)
        self._hash.update(chunk[8 * WORDS * pages :])

    @property
    def text(self) -> str:
        """32 hexadecimal digits."""
        return self._hash.hexdigest()


def hash_of(data: Any) -> str:
    """The hash of a buffer.

    Example:
        >>> data = bytearray(3 * 8 * WORDS)
        >>> before = hash_of(data)
        >>> data[20000] ^= 1
        >>> hash_of(data) == before
        False
    """
    one, view = Hash(), as_bytes(data)
    for at in range(0, len(view), CHUNK):
        one.add(view[at : at + CHUNK])
    return one.text


def as_bytes(data: Any) -> memoryview:
    """A buffer as bytes; one without elements has a form that cannot be cast."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")
