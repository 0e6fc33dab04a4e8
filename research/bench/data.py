"""Does data keep out of the way? Indices of a large dataset, blends, reading, building.

index: the three indices of one epoch of many documents (log-normal lengths, 700 tokens on average,
2048 a sample), part by part, with the peak of resident memory beside what the arrays themselves
take. blend: which of ten datasets gives each of as many samples. wait: how long a step of the
default model waits for its batch, read when asked for and read ahead, from this machine's disk and
from one that takes 200 ms. build: text to tokens with one process and with all.

Run:    python -m research.bench.data [--documents 100000000] [--cases index,blend,wait,build]
Expect: index and blend of 100 M within 60 s each; memory at most 2.5 of the arrays; the wait of a
        step that is read ahead at most 1 % of the step.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from mfun import data
from mfun.data import megatron

SECONDS, MEMORY, WAIT = 60.0, 2.5, 0.01


@contextmanager
def timed(what: str, spent: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    spent[what] = time.perf_counter() - start
    print(f"  {what:<28} {spent[what]:8.2f} s", flush=True)


def _peak() -> int:
    """The most memory this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def index(documents: int) -> list[str]:
    before = _peak()
    random, spent = np.random.default_rng(0), {}
    lengths = np.minimum(random.lognormal(6.0, 1.05, documents), 1e6).astype(np.int32)
    rows, seq_len = np.arange(documents, dtype=np.int32), 2048
    with timed("tokens", spent):
        tokens = megatron.count_tokens(lengths, rows)
    state = np.random.RandomState(1234)
    with timed("document index", spent):
        document = megatron.document_index(rows, 1, state, separate=False)
    with timed("sample index", spent):
        sample = data.sample_index(lengths, document, seq_len, tokens)
    total = len(sample) - 1
    with timed("shuffle index", spent):
        shuffle = megatron.shuffle_index(total, total, state)
    arrays = sum(x.nbytes for x in (lengths, rows, document, sample, shuffle))
    peak = _peak()
    seconds = sum(spent.values())
    print(
        f"  {documents:,} documents, {tokens:,} tokens, {total:,} samples: {seconds:.1f} s, "
        f"peak {peak / 2**30:.2f} GiB of memory, arrays {arrays / 2**30:.2f} GiB"
    )
    found = [] if seconds <= SECONDS * documents / 1e8 else [f"index took {seconds:.1f} s"]
    return found + ([] if peak - before <= MEMORY * arrays + 2**29 else ["index: too much memory"])


def blend(samples: int) -> list[str]:
    weights = np.random.default_rng(1).random(10).tolist()
    spent: dict[str, float] = {}
    with timed("blend of ten", spent):
        dataset, _ = data.blend_index(weights, samples)
    shares = np.bincount(dataset, minlength=10) / samples
    worst = np.abs(shares - np.array(weights) / sum(weights)).max() * samples
    print(f"  {samples:,} samples, the worst share off by {worst:.2f} samples")
    return [] if spent["blend of ten"] <= SECONDS * samples / 1e8 else ["blend too slow"]


def text_file(folder: Path, size: int) -> Path:
    """Lines of the standard library's sources, to so many bytes."""
    corpus, path, written, i = data.load(), folder / "text.jsonl", 0, 0
    with path.open("w") as file:
        while written < size:
            text = corpus.document(i % len(corpus)).decode()
            written += file.write(json.dumps({"text": text}) + "\n")
            i += 1
    return path


def build(folder: Path, size: int) -> list[str]:
    from mfun.data import build

    source = text_file(folder, size)
    bytes_ = source.stat().st_size
    for name in ("bytes", "bpe:8000"):
        for workers in sorted({1, len(os.sched_getaffinity(0))}):
            spent: dict[str, float] = {}
            tokenizer = name
            if name != "bytes":
                tokenizer = str(folder / "bpe.json")
                if workers == 1:
                    some = (data.load().document(i).decode() for i in range(0, 600, 3))
                    data.train_bpe(some, 8000, folder / "bpe.json")
            job = build.Job(
                inputs=(source,),
                out=folder / "out",
                tokenizer=tokenizer,
                workers=workers,
                overwrite=True,
            )
            with timed(f"{name}, {workers} processes", spent):
                done = build.build(job)
            rate = bytes_ / 1e6 / next(iter(spent.values()))
            print(f"    {rate:.1f} MB/s of text, {done.tokens:,} tokens")
    return []


def wait(folder: Path, steps: int) -> list[str]:
    """Seconds in Feed.step and in the whole step, of the default model on one rank."""
    from mfun.comm import finish
    from mfun.config import load, resolve
    from mfun.train import feed, loop

    random = np.random.default_rng(2)
    with data.Writer(folder / "x", np.dtype("<u2")) as out:
        for length in random.lognormal(6.0, 1.0, 20000).astype(int):
            out.add(random.integers(0, 256, length))
    sizes = ["model.seq_len=512", "model.vocab=256", "train.steps=1000", "parallel.tp=1"]
    config = feed.with_hash(
        resolve(load("tiny", [*sizes, "parallel.pp=1", f"data.path={folder}/x"]), 1)
    )
    job = loop.job(config)
    draw, share = data.Built.draw, 0.0

    def slow(self: data.Built, *args: Any) -> list[np.ndarray]:
        time.sleep(0.2)
        return draw(self, *args)

    for name, here, how in (
        ("read when asked for", feed.feed(config, {"dp": 0}), draw),
        ("read ahead", job.feed, draw),
        ("200 ms, when asked for", feed.feed(config, {"dp": 0}), slow),
        ("200 ms, read ahead", job.feed, slow),
    ):
        setattr(data.Built, "draw", how)  # noqa: B010
        state, waits, whole = job.trainer.init(), [], []
        for step in range(steps):
            start = time.perf_counter()
            batches = here.step(step)
            ready = time.perf_counter()
            state, _ = finish(job.trainer.step(state, batches))
            waits.append(ready - start)
            whole.append(time.perf_counter() - start)
        a, b = statistics.median(waits[1:]), statistics.median(whole[1:])
        share = max(share, a / b) if "ahead" in name else share
        print(f"  {name:<22} waits {1e3 * a:.3f} ms of a step of {1e3 * b:.1f} ms: {a / b:.3%}")
    setattr(data.Built, "draw", draw)  # noqa: B010
    return [] if share <= WAIT else ["a step that is read ahead waits"]


@click.command()
@click.option("--documents", default=100_000_000, show_default=True)
@click.option("--cases", default="index,blend,wait,build", show_default=True)
@click.option("--steps", default=12, show_default=True, help="Of each way of reading.")
@click.option("--text", "size", default=64 << 20, show_default=True, help="Bytes to tokenise.")
def main(documents: int, cases: str, steps: int, size: int) -> None:
    """Print what each case takes; ends with 1 if one takes more than expected."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows: dict[str, Callable[[], Any]] = {
            "index": lambda: index(documents),
            "blend": lambda: blend(documents),
            "wait": lambda: wait(folder, steps),
            "build": lambda: build(folder, size),
        }
        for case in cases.split(","):
            print(case, flush=True)
            found += rows[case]()
    for problem in found:
        print(f"MISSED: {problem}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
