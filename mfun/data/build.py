"""Text files to an indexed dataset: read in pieces, tokenised by several processes, kept in order.

What is written does not depend on how many processes there are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cache
from pathlib import Path

import attrs
import numpy as np

from mfun.data.corpus import DataError
from mfun.data.indexed import file_of, prefix_of
from mfun.data.opening import About, write_about
from mfun.data.tokenizer import BYTES, Tokenizer, open_tokenizer, train_bpe
from mfun.data.writer import Writer, token_dtype

PIECE = 1 << 20
"""Bytes of a JSONL file that go to a process together."""
ALONE = 1 << 23
"""Bytes of input up to which starting processes would take longer than the work."""
TOKENIZER = ".tokenizer.json"
"""What the vocabulary's file is called behind X."""
LEARN = 1 << 28
"""Bytes of text that a vocabulary is learned from, evenly spaced where there are more."""


@attrs.frozen(kw_only=True)
class Job:
    """What to build.

    Args:
        inputs: .jsonl files, a document a line; other files are each one document.
        out: X of X.bin and X.idx.
        tokenizer: `bytes`, a tokenizer.json, or `bpe:SIZE` to learn one from the inputs.
        key: of a line's object that holds the text.
        end: token that ends a document; None finds it, "" has none.
        workers: processes; 0 is one for each core, or one alone for bytes and for little text.
        overwrite: an older dataset of that name may go.
    """

    inputs: tuple[Path, ...]
    out: Path
    tokenizer: str = BYTES
    key: str = "text"
    end: str | None = None
    workers: int = 0
    overwrite: bool = False


@attrs.frozen(kw_only=True)
class Done:
    """What was built: documents and tokens written, texts left out because they were empty."""

    documents: int
    tokens: int
    empty: int
    about: About


@attrs.frozen
class Piece:
    """Some lines of a file, or a whole file.

    Args:
        file: where they are from.
        line: number of the first; 0 for a whole file.
        raw: their bytes.
    """

    file: Path
    line: int
    raw: bytes


def build(job: Job, progress: Callable[[int], None] = lambda size: None) -> Done:
    """Write a dataset from text files.

    Args:
        job: what to build.
        progress: is told the bytes of each piece that is done.

    Raises: DataError naming file, line and fix; no dataset is left behind.
    """
    total = sum(size_of(path) for path in job.inputs)
    prefix = _free(job)
    name = _vocabulary(job, prefix, total)
    tokenizer = open_tokenizer(name, job.end)
    dtype, empty = token_dtype(tokenizer.vocab), 0
    worker = Worker(name=name, end=job.end, key=job.key, dtype=dtype.str)
    with Writer(prefix, dtype) as writer:
        for size, tokens, lengths, left_out in _encoded(job, worker, total):
            writer.add_all(tokens, lengths)
            empty += left_out
            progress(size)
        if not writer.tokens:
            raise DataError(f"no text in {', '.join(map(str, job.inputs))}: nothing was written")
        about = About(
            tokenizer=name if name == BYTES else file_of(prefix, TOKENIZER).name,
            vocab=tokenizer.vocab,
            eod=tokenizer.eod,
            largest=writer.largest,
        )
        write_about(prefix, about)
    documents = len(writer.documents) - 1
    return Done(documents=documents, tokens=writer.tokens, empty=empty, about=about)


def size_of(path: Path) -> int:
    """Bytes of an input.

    Raises: DataError for a folder, or what cannot be read.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder: name its files, as {path}/*.jsonl")
    try:
        return path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): correct its name") from error


def _free(job: Job) -> Path:
    """X of the dataset, whose place is free."""
    prefix = prefix_of(job.out)
    if file_of(prefix, ".idx").exists() and not job.overwrite:
        raise DataError(
            f"{file_of(prefix, '.idx')} exists: name another dataset, or replace it by --overwrite"
        )
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return prefix


def _vocabulary(job: Job, prefix: Path, total: int) -> str:
    """`bytes`, or the tokenizer's file beside the dataset, copied or learned."""
    if job.tokenizer == BYTES:
        return BYTES
    kept = file_of(prefix, TOKENIZER)
    kind, colon, size = job.tokenizer.partition(":")
    if kind == "bpe" and colon:
        if not (size.isascii() and size.isdigit()):
            raise DataError(f"--tokenizer {job.tokenizer}: give a number of tokens, as bpe:8000")
        train_bpe(_texts(job, total), int(size), kept)
    else:
        open_tokenizer(job.tokenizer, job.end)  # before anything is written
        given = Path(job.tokenizer).expanduser()
        if not (kept.exists() and kept.samefile(given)):
            kept.write_bytes(given.read_bytes())
    return str(kept)


def _texts(job: Job, total: int) -> Iterator[str]:
    """Texts to learn a vocabulary from: of every piece, or of evenly spaced ones."""
    every = -(-total // LEARN)
    for number, piece in enumerate(pieces(job.inputs)):
        if number % every == 0:
            yield from texts_of(piece, job.key)


def pieces(inputs: Sequence[Path], size: int = PIECE) -> Iterator[Piece]:
    """The inputs in order: a .jsonl file in whole lines of about `size` bytes, others whole."""
    for path in inputs:
        try:
            with path.open("rb") as file:
                if path.suffix != ".jsonl":
                    yield Piece(path, 0, file.read())
                    continue
                line = 1
                while lines := file.readlines(size):
                    yield Piece(path, line, b"".join(lines))
                    line += len(lines)
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): mend it") from error


def texts_of(piece: Piece, key: str) -> list[str]:
    r"""The texts of a piece, empty ones too.

    Raises: DataError naming file and line.

    Example:
        >>> texts_of(Piece(Path("a.jsonl"), 1, b'{"text": "one"}\n\n{"text": "two"}\n'), "text")
        ['one', 'two']
    """
    if not piece.line:
        return [_text(piece.raw, str(piece.file))]
    out = []
    for number, raw in enumerate(piece.raw.split(b"\n"), piece.line):
        where = f"{piece.file} line {number}"
        if not (line := _text(raw, where).strip()):
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is no JSON ({error}): mend it, or name it .txt") from error
        if not isinstance(value, dict) or not isinstance(value.get(key), str):
            found = f"has {', '.join(value)}" if isinstance(value, dict) else "is no object"
            raise DataError(f"{where} {found}, and no text {key!r}: name its key by --key")
        out.append(value[key])
    return out


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error}): convert it") from error


Encoded = tuple[int, np.ndarray, np.ndarray, int]


@attrs.frozen
class Worker:
    """What a process does with a piece.

    Args:
        name, end: of the tokenizer, as `open_tokenizer` takes them.
        key: of the text in a line's object.
        dtype: of a token.
    """

    name: str
    end: str | None
    key: str
    dtype: str

    def __call__(self, piece: Piece) -> Encoded:
        """Bytes of the piece, tokens of its documents end to end, their lengths, empty texts."""
        found = texts_of(piece, self.key)
        texts = [text for text in found if text]
        tokenizer = _opened(self.name, self.end)
        try:
            ids = tokenizer.encode(texts)
        except DataError as error:
            raise DataError(f"{piece.file} from line {max(piece.line, 1)} on: {error}") from error
        last = np.array([tokenizer.eod] if tokenizer.eod >= 0 else [], self.dtype)
        parts = [part.astype(self.dtype) for one in ids for part in (one, last)]
        tokens = np.concatenate([np.empty(0, self.dtype), *parts])
        lengths = np.array([one.size + last.size for one in ids], np.int64)
        return len(piece.raw), tokens, lengths, len(found) - len(texts)


@cache
def _opened(name: str, end: str | None) -> Tokenizer:
    """Opened once in a process."""
    return open_tokenizer(name, end)


def _encoded(job: Job, worker: Worker, total: int) -> Iterator[Encoded]:
    """The pieces tokenised, in order; only some are on their way at any time."""
    count = job.workers or len(os.sched_getaffinity(0))
    if count == 1 or (not job.workers and (total <= ALONE or worker.name == BYTES)):
        yield from map(worker, pieces(job.inputs))
        return
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        waiting: deque[Future[Encoded]] = deque()
        try:
            for piece in pieces(job.inputs):
                waiting.append(pool.submit(worker, piece))
                if len(waiting) > 4 * count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
