"""`mfun convert`: Hugging Face folders in and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from mfun.convert import Converted

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

FOLDER = click.Path(path_type=Path)


@click.group(
    short_help="Read and write Hugging Face folders.",
    epilog="""
\b
FAMILIES
  GPT-2, Llama (2, 3, 3.1 and yarn scaling), Mistral, Qwen2, Qwen3: dense models.

\b
FROM A DOWNLOADED MODEL TO A TUNED ONE
  mfun convert from-hf Llama-3.2-1B llama
  mfun inspect llama --stats
  mfun data build mine.jsonl data/mine --tokenizer llama/hf/tokenizer.json
  mfun train llama/config.toml parallel.tp=2 parallel.pp=2 model.seq_len=2048 \\
      data.path=data/mine optim.lr=1e-5 --run-dir runs/tuned
  mfun sample runs/tuned --prompt "def "
  mfun convert to-hf runs/tuned Llama-tuned
""",
)
def command() -> None:
    """Convert between Hugging Face folders and mfun's, to the bit, tensor by tensor."""


@command.command("from-hf", short_help="Hugging Face to mfun.")
@click.argument("folder", type=FOLDER)
@click.argument("out", type=FOLDER)
def from_hf(folder: Path, out: Path) -> None:
    """Make OUT of the Hugging Face model in FOLDER.

    OUT holds config.toml and a checkpoint of step 0. `mfun train OUT/config.toml` starts a run from
    its weights in any layout; `mfun sample`, `inspect` and `convert to-hf` read it too.
    """
    from mfun import convert

    with _refusals(), _progress() as told:
        done = convert.from_hf(folder, out, told=told)
    _report(done, out)


@command.command("to-hf", short_help="mfun to Hugging Face.")
@click.argument("run", type=FOLDER)
@click.argument("out", type=FOLDER)
@click.option(
    "--like",
    type=FOLDER,
    help="Hugging Face folder whose config.json and tokenizer OUT gets; by default those that the "
    "model came from, if it did.",
)
@click.option(
    "--dtype", type=click.Choice([*DTYPES]), help="Of the tensors; by default as they are stored."
)
@click.option(
    "--shard-gb",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Most gigabytes in a file.",
)
def to_hf(run: Path, out: Path, like: Path | None, dtype: str | None, shard_gb: float) -> None:
    """Make the Hugging Face folder OUT of the newest checkpoint of RUN, or of one checkpoint."""
    from mfun import convert

    kind, shard = DTYPES[dtype] if dtype else None, int(shard_gb * 1e9)
    with _refusals(), _progress() as told:
        done = convert.to_hf(run, out, like=like, dtype=kind, shard=shard, told=told)
    _report(done, out)


@contextmanager
def _refusals() -> Iterator[None]:
    from mfun.train.failure import EXPECTED

    try:
        yield
    except EXPECTED as error:
        raise click.ClickException(str(error)) from error


@contextmanager
def _progress() -> Iterator[Callable[[str, int], None]]:
    """A line that says which tensor is being written, on a terminal."""
    from rich.console import Console

    from mfun.cli.text import size

    console, written = Console(stderr=True), 0
    with console.status("reading headers") as status:

        def told(name: str, nbytes: int) -> None:
            nonlocal written
            written += nbytes
            status.update(f"{size(written)}  {name}")

        yield told


def _report(done: Converted, out: Path) -> None:
    from mfun.cli.text import count, size

    model = done.model
    click.echo(
        f"{out}: {done.family}, {model.layers} blocks of {model.hidden}, vocabulary "
        f"{count(model.vocab)}; {done.tensors} tensors, {size(done.nbytes)}"
    )
