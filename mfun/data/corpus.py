"""A corpus: documents joined into one array of bytes, its hash, and its split."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Protocol

import attrs
import numpy as np

from mfun.data.shuffle import order

VOCAB = 256
"""Token ids of byte-level text are 0..255."""


class DataError(ValueError):
    """Text that cannot be trained on; the message names the setting, the numbers and the fix."""


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Corpus:
    """Documents laid end to end; document i is `tokens[bounds[i]:bounds[i + 1]]`.

    Args:
        tokens: (n,) uint8, read-only.
        bounds: (documents + 1,) int64, strictly increasing, from 0 to n: no document is empty.
        names: one a document, ascending.
        hash: of names and contents, with both counts: `digest-documents-bytes`.
        largest: the greatest token id, -1 when there is none.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    names: tuple[str, ...]
    hash: str
    largest: int

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.names)

    def __repr__(self) -> str:
        """Counts and hash, never the contents."""
        return f"Corpus(documents={len(self)}, tokens={self.tokens.size}, hash={self.hash!r})"

    def document(self, index: int) -> bytes:
        """Contents of one document."""
        return self.tokens[self.bounds[index] : self.bounds[index + 1]].tobytes()

    @property
    def size(self) -> int:
        """Tokens in all."""
        return self.tokens.size

    def windows(self, seq_len: int) -> int:
        """Windows of seq_len + 1 tokens, see `samples.windows`."""
        return max(self.size - 1, 0) // seq_len

    def draw(self, sample_b: np.ndarray, seed: int | None, seq_len: int) -> list[np.ndarray]:
        """The tokens and the document numbers of some samples, each (b, seq_len + 1) int64."""
        start_b = order(sample_b, self.windows(seq_len), seed) * seq_len
        place_bw = start_b[:, None] + np.arange(seq_len + 1)
        document_bw = np.searchsorted(self.bounds, place_bw, side="right") - 1
        return [self.tokens[place_bw].astype(np.int64), document_bw.astype(np.int64)]

    def refuse_beyond(self, vocab: int, token_bw: np.ndarray) -> None:
        """Nothing: `largest` is known."""


def join(documents: Iterable[tuple[str, bytes]]) -> Corpus:
    """The corpus of some (name, contents); their order does not matter, empty ones are left out.

    Example:
        >>> c = join([("b.txt", b"two"), ("a.txt", b"one"), ("empty.txt", b"")])
        >>> c.names, c.bounds.tolist(), c.tokens.tobytes()
        (('a.txt', 'b.txt'), [0, 3, 6], b'onetwo')
    """
    kept = sorted((name, text) for name, text in documents if text)
    tokens = np.frombuffer(b"".join(text for _, text in kept), dtype=np.uint8)
    bounds = np.cumsum([0, *(len(text) for _, text in kept)], dtype=np.int64)
    return Corpus(
        tokens=tokens,
        bounds=bounds,
        names=tuple(name for name, _ in kept),
        hash=f"{_digest(kept)}-{len(kept)}-{tokens.size}",
        largest=int(tokens.max()) if tokens.size else -1,
    )


def _digest(documents: list[tuple[str, bytes]]) -> str:
    """blake2b over every name and contents, each preceded by its length so that none can shift."""
    state = blake2b(digest_size=16)
    for name, text in documents:
        for part in (name.encode("utf-8", "surrogateescape"), text):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()


class Hashed(Protocol):
    """What has a hash: a `Corpus`, or a part of some datasets."""

    @property
    def hash(self) -> str:
        """`digest-documents-tokens`."""
        ...


def check_hash(corpus: Hashed, expected: str) -> None:
    """Refuse a corpus that is not the one a run was started with.

    Args:
        expected: `data.hash` of the resolved configuration; empty accepts any data.

    Raises: DataError naming both hashes and what differs as far as the hashes tell.
    """
    if not expected or corpus.hash == expected:
        return
    raise DataError(
        f"data.hash: this run was started on data {expected} and data.path now holds "
        f"{corpus.hash} ({_difference(expected, corpus)}): restore the files it was started "
        "on, or start a new run in another folder"
    )


def _difference(before: str, after: Hashed) -> str:
    """What the counts inside two hashes say about a change."""
    old, new = before.split("-")[1:], after.hash.split("-")[1:]
    unit = "bytes" if isinstance(after, Corpus) else "tokens"
    if len(old) != len(new):
        return "the stored hash is of another form"
    changed = [
        f"{what} {a} -> {b}"
        for what, a, b in zip(("documents", unit), old, new, strict=True)
        if a != b
    ]
    return ", ".join(changed) or f"as many documents and {unit}, but names or contents differ"


def split(corpus: Corpus, fraction: float, *, at_least: int = 1) -> tuple[Corpus, Corpus]:
    """Training and validation parts: whole documents, each chosen by a hash of its own name.

    A document is in the validation part if u(name) < fraction, u uniform on [0, 1), so a document
    that is added or removed moves no other. Documents of the smallest u are added while the part
    has fewer than `at_least` tokens; the training part keeps at least one document. A single
    document is cut instead: its tail is the validation part.

    Args:
        fraction: 0 <= fraction < 1; 0 makes the validation part empty.
        at_least: tokens the validation part should have, e.g. one window.

    Raises: DataError if the fraction is outside [0, 1).

    Example:
        >>> train, val = split(join([("a", b"0123456789")]), 0.2)
        >>> train.tokens.tobytes(), val.tokens.tobytes()
        (b'01234567', b'89')
    """
    if not 0 <= fraction < 1:
        raise DataError(f"data.val_fraction is {fraction}: it must be at least 0 and below 1")
    if fraction == 0 or len(corpus) == 0:
        return corpus, join([])
    if len(corpus) == 1:
        return _cut(corpus, fraction, at_least)
    chosen = _choose(corpus, fraction, at_least)
    parts: tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]] = ([], [])
    for i, name in enumerate(corpus.names):
        parts[i in chosen].append((name, corpus.document(i)))
    return join(parts[0]), join(parts[1])


def _choose(corpus: Corpus, fraction: float, at_least: int) -> set[int]:
    """Indices of the validation documents."""
    uniform = [_uniform(name) for name in corpus.names]
    ranked = sorted(range(len(corpus)), key=lambda i: (uniform[i], i))
    lengths = np.diff(corpus.bounds)
    chosen: set[int] = set()
    tokens = 0
    for i in ranked[:-1]:
        if uniform[i] >= fraction and tokens >= max(at_least, 1):
            break
        chosen.add(i)
        tokens += int(lengths[i])
    return chosen


def _uniform(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    word = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(word, "little") / 2**64


def _cut(corpus: Corpus, fraction: float, at_least: int) -> tuple[Corpus, Corpus]:
    """One document: the last `fraction` of it, at least `at_least` tokens, never all of it."""
    text, name = corpus.document(0), corpus.names[0]
    tail = max(round(len(text) * fraction), at_least, 1)
    cut = max(len(text) - tail, min(1, len(text)))
    return join([(name, text[:cut])]), join([(name, text[cut:])])
