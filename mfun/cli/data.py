"""`mfun data`: build indexed datasets, say what is in them, and look at their samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mfun.cli.text import count, size

if TYPE_CHECKING:
    from mfun.data.indexed import Indexed
    from mfun.data.tokenizer import Tokenizer

FOLDER = click.Path(path_type=Path)


@click.group(
    short_help="Build datasets, and look at them.",
    epilog="""
\b
FROM TEXT TO A RUN
  mfun data build wiki-*.jsonl notes.txt data/mine --tokenizer bpe:8000
  mfun data info data/mine
  mfun data sample data/mine --count 2
  mfun train data.path=data/mine model.vocab=8000
  mfun train data.path=data/mine,data/code data.weights=0.7,0.3 model.vocab=8000

\b
A DATASET X
  X.bin and X.idx are Megatron-LM's, byte for byte, and its own are read too;
  X.json and X.tokenizer.json say how the tokens are to be read.
""",
)
def command() -> None:
    """Build indexed datasets from text, say what is in them, and look at their samples."""


@command.command("build", short_help="Text or JSONL to a dataset.")
@click.argument("inputs", nargs=-1, required=True, type=FOLDER, metavar="INPUT...")
@click.argument("out", type=FOLDER)
@click.option(
    "--tokenizer",
    default="bytes",
    show_default=True,
    help="bytes, a tokenizer.json, or bpe:SIZE to learn one from the inputs.",
)
@click.option("--key", default="text", show_default=True, help="Of the text in a line's object.")
@click.option("--eod", "end", help="Token that ends a document, '' for none; by default found.")
@click.option(
    "--workers",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Processes; 0 is one for each core, or one alone for bytes and for little text.",
)
@click.option("--overwrite", is_flag=True, help="Replace an older dataset OUT.")
def build_command(
    inputs: tuple[Path, ...],
    out: Path,
    tokenizer: str,
    key: str,
    end: str | None,
    workers: int,
    overwrite: bool,
) -> None:
    """Make OUT.bin and OUT.idx of text files.

    A .jsonl file has a document a line, its text under "text" (see --key); any other file is one
    document. What is written does not depend on the number of processes.
    """
    from mfun.data.build import Job, build, size_of

    job = Job(
        inputs=inputs,
        out=out,
        tokenizer=tokenizer,
        key=key,
        end=end,
        workers=workers,
        overwrite=overwrite,
    )
    with _refusals(), _progress(sum(map(size_of, inputs))) as told:
        done = build(job, told)
    left = f", {count(done.empty)} empty texts left out" if done.empty else ""
    click.echo(
        f"{out}: {count(done.documents)} documents, {count(done.tokens)} tokens of a vocabulary of "
        f"{done.about.vocab}{left}"
    )
    click.echo(f"try: mfun train data.path={out} model.vocab={done.about.vocab}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A bar by bytes of input, in a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenising", total=total)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors that a user can mend, as one line."""
    from mfun.data.corpus import DataError

    try:
        yield
    except DataError as error:
        raise click.ClickException(str(error)) from error


@command.command("info", short_help="What is in datasets.")
@click.argument("paths", nargs=-1, required=True, metavar="X...")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a dataset.")
def info(paths: tuple[str, ...], as_json: bool) -> None:
    """Check the datasets X and say what is in them."""
    from mfun.data.indexed import open_indexed

    with _refusals():
        for path in paths:
            facts = facts_of(open_indexed(path))
            if as_json:
                click.echo(json.dumps(facts))
                continue
            click.echo(facts["dataset"])
            for key, value in list(facts.items())[1:]:
                click.echo(f"  {key.replace('_', ' '):<16} {_shown(key, value)}")


def facts_of(data: Indexed) -> dict[str, Any]:
    """What `info` tells."""
    import numpy as np

    from mfun.data.indexed import content_hash, file_of
    from mfun.data.opening import read_about

    about = read_about(data.prefix)
    quarters = np.percentile(data.lengths, [0, 50, 100]) if len(data) else [0, 0, 0]
    return {
        "dataset": str(data.prefix),
        "documents": len(data.documents) - 1,
        "sequences": len(data),
        "tokens": data.tokens,
        "token_type": data.dtype.name,
        "bytes": file_of(data.prefix, ".bin").stat().st_size,
        "shortest": int(quarters[0]),
        "median": float(quarters[1]),
        "longest": int(quarters[2]),
        "modes": data.modes is not None,
        "tokenizer": about.tokenizer,
        "vocab": about.vocab,
        "eod": about.eod,
        "largest": about.largest,
        "hash": content_hash(data),
    }


def _shown(key: str, value: Any) -> str:
    if key == "bytes":
        return size(value)
    unknown = value in ("", -1) or (key == "vocab" and not value)
    return "not known" if unknown else str(value)


@command.command("sample", short_help="Show samples or documents as text.")
@click.argument("path", metavar="X")
@click.option("--count", "number", default=3, show_default=True, type=click.IntRange(1))
@click.option("--first", default=0, show_default=True, type=click.IntRange(0))
@click.option("--seq-len", default=128, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option("--document", type=click.IntRange(0), help="Show this document instead.")
@click.option("--tokenizer", help="bytes or a tokenizer.json, if the dataset does not say.")
def sample(
    path: str,
    number: int,
    first: int,
    seq_len: int,
    seed: int,
    document: int | None,
    tokenizer: str | None,
) -> None:
    """Show samples of dataset X as text, in the order of one epoch with this seed.

    A sample goes on where a line names the next document.
    """
    from mfun.data.indexed import open_indexed
    from mfun.data.opening import tokenizer_of
    from mfun.data.tokenizer import open_tokenizer

    with _refusals():
        data = open_indexed(path)
        words = open_tokenizer(tokenizer, "") if tokenizer else tokenizer_of(path)
        if document is not None:
            _show_document(data, words, document)
        else:
            _show_samples(data, words, range(first, first + number), seq_len, seed)


def _show_document(data: Indexed, words: Tokenizer, document: int) -> None:
    if document >= len(data.documents) - 1:
        raise click.ClickException(
            f"--document {document}: {data.prefix} has {len(data.documents) - 1} documents"
        )
    click.echo(words.decode(data.document(document).tolist()))


def _show_samples(data: Indexed, words: Tokenizer, numbers: range, seq_len: int, seed: int) -> None:
    import numpy as np

    from mfun.data.megatron import build_index, read_sample

    if data.tokens < seq_len + 1:
        raise click.ClickException(
            f"{data.prefix} has {data.tokens} tokens, too few for a sample of {seq_len} + 1: lower "
            "--seq-len"
        )
    index = build_index(
        data.lengths, np.arange(len(data)), seq_len=seq_len, samples=None, seed=seed
    )
    for number in numbers:
        if number >= len(index):
            raise click.ClickException(
                f"--first and --count: an epoch of {data.prefix} has {len(index)} samples of "
                f"{seq_len} + 1 tokens"
            )
        at, start = index.sample[index.shuffle[number]].tolist()
        for piece in read_sample(data, index, number, seq_len):
            while not data.lengths[index.document[at]]:
                at += 1
            head = f"sample {number}: document {index.document[at]} from token {start}"
            click.secho(f"-- {head}, {piece.size} tokens", bold=True)
            click.echo(words.decode(piece.tolist()))
            at, start = at + 1, 0
