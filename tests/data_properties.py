"""Properties of datasets, their order and their reading, for planted faults."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mfun import data
from mfun.data import Built, DataError, Share, Writer, cache, writer
from mfun.train.feed import Ahead
from tests.properties import Broken, equal, named


def rows(name: str, have: object, want: object) -> None:
    """Equal lists, or the name of what differs."""
    if have != want:
        raise Broken(f"{name}: {have}, not {want}")


@contextmanager
def dataset(*documents: list[int]) -> Iterator[Path]:
    """A dataset of these documents."""
    with tempfile.TemporaryDirectory() as folder:
        with Writer(f"{folder}/x", np.dtype("<u2")) as out:
            for document in documents:
                out.add(document)
        yield Path(folder) / "x"


@named
def order_of_samples() -> None:
    """documents, samples and shuffle are Megatron-Core's own for three epochs of 3, 2, 4 tokens."""
    lengths = np.array([3, 2, 4], np.int32)
    index = data.build_index(lengths, np.arange(3), seq_len=2, samples=10, seed=1234)
    rows("the document index", index.document.tolist(), [2, 1, 2, 0, 1, 0, 0, 2, 1])
    starts = [[0, 0], [0, 2], [1, 0], [2, 0], [2, 2], [3, 0], [3, 2]]
    starts += [[4, 1], [5, 1], [6, 0], [6, 2], [7, 1], [7, 3], [8, 1]]
    rows("the sample index", index.sample.tolist(), starts)
    shuffle = [7, 5, 6, 0, 4, 3, 2, 1, 9, 12, 11, 8, 10]
    rows("the shuffle index", index.shuffle.tolist(), shuffle)


@named
def blends() -> None:
    """a blend in blocks is that of one sample after the other, of unequal weights."""
    weights, counts, want = [0.55, 0.01, 0.29, 0.15], [0] * 4, []
    for i in range(8192):
        lags = [w * max(i, 1) - n for w, n in zip(weights, counts, strict=True)]
        best = max(range(4), key=lambda d: (lags[d], -d))
        want.append((best, counts[best]))
        counts[best] += 1
    have = data.blend_index(weights, len(want))
    rows("the blend", [*zip(*(x.tolist() for x in have), strict=True)], want)


@named
def hostile_index() -> None:
    """an index whose sequence ends behind the file, or has a negative length, is refused."""
    for at, value in ((42, 5), (42, -4)):
        with dataset([1, 2, 3], [4, 5], [6, 7, 8, 9]) as prefix:
            path = Path(f"{prefix}.idx")
            raw = bytearray(path.read_bytes())
            raw[at : at + 4] = struct.pack("<i", value)
            path.write_bytes(raw)
            try:
                data.open_indexed(prefix)
            except DataError:
                continue
            raise Broken(f"an index with a length of {value} is opened")


@named
def places_of_large_files() -> None:
    """where a fifth sequence begins behind four of 1.2 GB is told in 64 bits."""
    lengths = np.full(5, 600_000_000, np.int32)
    _, _, begins, _ = writer.index_bytes(lengths, np.arange(6), np.dtype("<u2"))
    rows("the last place", int(np.frombuffer(begins, "<i8")[-1]), 4_800_000_000)


@named
def rounds_and_resets() -> None:
    """each round of a small dataset is another order, and documents restart after their end."""
    with dataset([5, 6, 0], [7, 8, 9, 0], [1, 2, 3, 4, 0], [9, 9, 9, 0]) as prefix:
        share = Share(data.open_indexed(prefix), range(4), "x")
        source = Built(shares=(share,), samples=3, eod=(0,))
        drawn = source.draw(np.arange(60), 0, 4)[0].tolist()
        if len({str(drawn[i : i + 3]) for i in range(0, 60, 3)}) < 10:
            raise Broken("rounds repeat each other")
        got = data.batch(source, seed=0, first=0, count=9, seq_len=4, packed=True)
        for tokens, positions, mask in zip(
            *(got[name].tolist() for name in ("tokens", "positions", "mask")), strict=True
        ):
            begins = [0, *(i + 1 for i, token in enumerate(tokens) if token == 0)]
            want = [i - max(b for b in begins if b <= i) for i in range(4)]
            rows("positions", positions, want)
            rows("the loss mask", mask, [float(token != 0) for token in tokens])


@named
def other_lengths_other_cache() -> None:
    """a dataset that was replaced by one of other lengths gets an order of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for lengths in ([9, 9], [5, 13]):
            made = {"lengths": np.array(lengths)}
            key = cache.key_of({"seq_len": 4}, made)
            found = cache.cached(Path(folder), key, lambda made=made: made)
            rows("the order", found["lengths"].tolist(), lengths)


@named
def batches_read_ahead() -> None:
    """what was read ahead for another step is not taken for this one."""
    ahead = Ahead(lambda step: {"step": np.array([step])}, 10)
    for step in (0, 1, 5, 2, 3):
        equal("the step of a batch", ahead(step)["step"], [step])
