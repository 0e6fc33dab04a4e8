"""`mfun inspect`: what a checkpoint or a safetensors file holds, without running or loading it."""

from __future__ import annotations

import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mfun.inspect import Source


@click.command(
    short_help="Show what a checkpoint holds, or how two differ.",
    epilog="""
\b
EXAMPLES
  mfun inspect runs/second                     its newest checkpoint
  mfun inspect runs/second --tensors "*.mlp.*" each tensor, file and span
  mfun inspect Llama-3.2-1B --stats            norms, NaN, dead rows
  mfun inspect runs/second/checkpoints/step-00000100 --diff runs/second
  mfun inspect runs/second --verify            reads all and compares hashes
  mfun inspect model.safetensors --json
""",
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--tensors", default="", help="Only names that this pattern matches, and where each piece lies."
)
@click.option("--stats", is_flag=True, help="Norms, NaN and Inf, rows that are all zero.")
@click.option(
    "--diff",
    "other",
    type=click.Path(path_type=Path),
    help="What differs in another one; ends with exit code 1 if anything does.",
)
@click.option("--verify", is_flag=True, help="Read everything, and compare it with its hashes.")
@click.option("--json", "as_json", is_flag=True, help="The same for programs.")
def command(
    path: Path, tensors: str, stats: bool, other: Path | None, verify: bool, as_json: bool
) -> None:
    """Show what PATH holds: a run, one of its checkpoints, a Hugging Face folder, or a file.

    Headers are read only, unless --stats, --diff or --verify need more; no more than a tensor is in
    memory, and nothing that is read can run code.
    """
    from mfun.inspect import open_source
    from mfun.train.failure import EXPECTED

    try:
        source = open_source(path)
        names = _chosen(source, tensors)
        if other is not None:
            _diff(source, open_source(other), names if tensors else None, as_json)
        elif verify:
            _verify(source, as_json)
        elif as_json:
            click.echo(json.dumps(_as_json(source, names, stats), indent=1))
        else:
            _show(source, names, bool(tensors), stats)
    except EXPECTED as error:
        raise click.ClickException(str(error)) from error


def _chosen(source: Source, pattern: str) -> list[str]:
    """The names that a pattern matches; all without one."""
    names = [name for name in source.tensors if fnmatchcase(name, pattern or "*")]
    if not names and pattern:
        from mfun.inspect.weights import some

        raise click.ClickException(
            f"no name matches {pattern!r}; there are {some([*source.tensors])}"
        )
    return names


def _show(source: Source, names: list[str], each: bool, stats: bool) -> None:
    from mfun.cli import inspect_text as text

    for line in text.head(source):
        click.echo(line)
    click.echo()
    if stats:
        lines = text.stats_lines(source, names)
    elif each:
        lines = text.piece_lines(source, names)
    else:
        lines = text.folded_lines(source, names)
    for line in lines:
        click.echo(line)


def _verify(source: Source, as_json: bool) -> None:
    """Compare hashes, where there are any."""
    from mfun import checkpoint

    if source.index is not None:
        checkpoint.check_files(source.path, source.index, source.index.files)
        many = len(source.index.files)
        told = f"{many} file{'s are' if many > 1 else ' is'} what was written: {source.path}"
    else:
        told = f"headers and sizes are sound, but there are no hashes: {source.path}"
    click.echo(
        json.dumps({"path": str(source.path), "hashed": source.index is not None})
        if as_json
        else told
    )


def _diff(first: Source, second: Source, names: list[str] | None, as_json: bool) -> None:
    """What differs; exit code 1 if anything does."""
    import attrs

    from mfun.cli import inspect_text as text
    from mfun.inspect import compare

    found = compare(first, second, names)
    apart: list[Any] = []
    equal = 0
    for one in found:
        if one.kind == "equal":
            equal += 1
            continue
        apart.append(one)
        if not as_json:
            click.echo(text.difference_line(one))
    about = text.about_differences(first, second)
    if as_json:
        rows = [attrs.asdict(one) for one in apart]
        click.echo(json.dumps({"equal": equal, "differ": rows, "about": about}, indent=1))
    else:
        for key, (a, b) in about.items():
            click.echo(f"{key}: {a} and {b}")
        click.echo(f"{equal} equal to the bit, {len(apart)} not, of {equal + len(apart)} tensors")
    sys.exit(1 if apart else 0)


def _as_json(source: Source, names: list[str], stats: bool) -> dict[str, Any]:
    from mfun.cli import inspect_text as text

    return text.for_programs(source, names, stats)
