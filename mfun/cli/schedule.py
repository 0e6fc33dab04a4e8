"""`mfun schedule`: a pipeline schedule planned, checked, timed and drawn, without a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import attrs
import click

from mfun.cli import schedule_text as text
from mfun.cli.schedule_extras import Inserted, RecomputeParam, dressed
from mfun.cli.schedule_plan import MOST_TIME, CostsParam, Planned, planned, read
from mfun.config.fields import did_you_mean
from mfun.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    ScheduleError,
    Sizes,
    to_csv,
    to_svg,
    to_trace,
)

LARGEST = 300_000
"""Forwards of a step at most: half a minute to plan."""

EPILOG = """
\b
NUMBERS
  F is a forward, I a backward to the inputs, W its weights' part, B = I + W
  the whole; F3.1 is microbatch 3 on the stage's chunk 1. Of each stage:
    busy      time spent in ops, those that run again included
    bubble    makespan - busy
    span      bubble between its own first and last op
    exposed   of it, waited only because a message or a bucket travels
    peak      most chunks whose activations it keeps
  In pictures R is a forward that runs again, and F3[0] one of layer 0. What
  travels beside (reductions, gathers, copies) is in --svg and --trace.

\b
EXAMPLES
  mfun schedule --list
  mfun schedule 1f1b --stages 4 --microbatches 8
  mfun schedule interleaved --stages 4 --microbatches 8 --chunks 2 --json
  mfun schedule 1f1b --costs 1,1.2,0.8,0.1 --svg 1f1b.svg
  mfun schedule gpipe --stages 2 --costs 2:1,1,1   (slice 0 is twice as slow)
  mfun schedule --compare --stages 8 --microbatches 32
  mfun schedule 1f1b --layers 4 --reduce 0.5 --recompute 2 --svg layers.svg
  mfun schedule zbv --csv mine.csv; edit it; mfun schedule mine.csv
"""


@attrs.frozen
class Asked:
    """What the command line says."""

    name: str | None
    stages: int
    microbatches: int
    chunks: int | None
    group: int
    memory: int
    costs: Costs
    overlap: bool
    inserted: Inserted
    compare: bool
    list_all: bool
    as_json: bool
    svg: Path | None
    trace: Path | None
    csv: Path | None
    force: bool

    @property
    def files(self) -> dict[str, Path]:
        """Option -> where to write."""
        named = {"--svg": self.svg, "--trace": self.trace, "--csv": self.csv}
        return {option: path for option, path in named.items() if path}

    def sizes(self, row: Schedule, costs: Costs) -> Sizes:
        """For one schedule; it decides the chunks where the command line does not."""
        return Sizes(
            self.stages,
            self.microbatches,
            self.chunks or row.chunks or 2,
            self.group,
            costs,
            self.memory,
        )


_path = click.Path(path_type=Path, dir_okay=False, allow_dash=True)
_at_least_1, _at_least_0 = click.IntRange(1), click.IntRange(0)
_time = click.FloatRange(0, MOST_TIME)
INSERTED = tuple(attrs.fields_dict(Inserted))


@click.command(
    short_help="Print, check, time and draw a pipeline schedule.",
    epilog=EPILOG,
    options_metavar="--stages P --microbatches M [--json | --svg FILE ...]",
)
@click.argument("name", required=False, metavar="[NAME | FILE.csv]")
@click.option("--stages", default=4, show_default=True, type=_at_least_1, help="Of the pipeline.")
@click.option("--microbatches", default=8, show_default=True, type=_at_least_1, help="Of a step.")
@click.option("--chunks", type=_at_least_1, help="Of a stage; by default the schedule's own, or 2.")
@click.option(
    "--group",
    default=0,
    type=_at_least_0,
    help="Microbatches through one chunk before the next; 0 is as many as stages.",
)
@click.option(
    "--memory",
    default=0,
    type=_at_least_0,
    help="Most chunks in flight, for cost-driven schedules; 0 is the schedule's own limit.",
)
@click.option(
    "--costs",
    default="1,1,1,0",
    show_default=True,
    type=CostsParam(),
    metavar="F,I,W,comm",
    help="Time of forward, backward to inputs, weights, and message; F, I, W of one chunk, "
    "or one number a slice of the model: 1:2:1:1.",
)
@click.option("--overlap/--no-overlap", default=True, help="Messages travel beside ops.")
@click.option("--layers", default=1, show_default=True, type=_at_least_1, help="Of each chunk.")
@click.option(
    "--recompute",
    type=RecomputeParam(),
    metavar="full|K",
    help="Forwards that run again for their backward: all, or the first K layers of each chunk.",
)
@click.option(
    "--offload",
    type=_at_least_1,
    metavar="K",
    help="Most chunks whose activations stay on the device; others go to the host.",
)
@click.option("--reduce", type=_time, metavar="TIME", help="Sum each layer's gradients meanwhile.")
@click.option("--gather", type=_time, metavar="TIME", help="Fetch each layer's parameters to use.")
@click.option("--copy", type=_time, metavar="TIME", help="Of what a chunk keeps, with --offload.")
@click.option("--compare", is_flag=True, help="Every schedule, side by side.")
@click.option("--list", "list_all", is_flag=True, help="The schedules there are.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--svg", type=_path, metavar="FILE", help="Write a picture; - is standard output.")
@click.option("--trace", type=_path, metavar="FILE", help="Write a trace for ui.perfetto.dev.")
@click.option("--csv", type=_path, metavar="FILE", help="Write torch.distributed.pipelining's CSV.")
@click.option("--force", is_flag=True, help="Write over a file that exists.")
def command(**words: object) -> None:
    """Plan the schedule NAME, check that it is complete and cannot get stuck, time it and draw it.

    FILE.csv is one as torch.distributed.pipelining writes it, and --csv does.
    """
    inserted = Inserted(**{name: words.pop(name) for name in INSERTED})  # type: ignore[arg-type]
    asked = Asked(**words, inserted=inserted)  # type: ignore[arg-type]
    try:
        asked = attrs.evolve(asked, costs=attrs.evolve(asked.costs, overlap=asked.overlap))
        _act(asked)
    except ScheduleError as error:
        raise click.UsageError(_with_options(str(error))) from error


def _with_options(message: str) -> str:
    """A refusal of numbers, by the names that they have here.

    Example:
        >>> _with_options("group is 1, but chunks is 2"), _with_options("cost F has 2 numbers")
        ('--group is 1, but --chunks is 2', '--costs: F has 2 numbers')
    """
    message = re.sub(r"\b(stages|microbatches|chunks|group|memory) is\b", r"--\1 is", message)
    message = re.sub(r"^depth is\b", "--offload is", message)
    return re.sub(r"\bcost ([FBIW])\b", r"--costs: \1", message)


def _act(asked: Asked) -> None:
    """Do what was asked for."""
    if asked.list_all:
        click.echo("\n".join(text.list_lines()))
    elif asked.compare:
        _compare(asked)
    elif asked.name is None:
        raise click.UsageError("name a schedule, or give --compare or --list")
    else:
        _one(asked, asked.name)


def _row(asked: Asked, name: str) -> Schedule:
    """The schedule of a name, which must be able to have the chunks asked for."""
    if name not in SCHEDULES:
        raise click.UsageError(f"no schedule {name!r}: {did_you_mean(name, SCHEDULES)}")
    row = SCHEDULES[name]
    if asked.chunks and row.chunks and asked.chunks != row.chunks:
        raise click.UsageError(
            f"--chunks is {asked.chunks}, but {name} has {row.chunks} a stage: leave --chunks out"
        )
    return row


def _refuse_large(asked: Asked, chunks: int) -> None:
    """Refuse what would take minutes and gigabytes, and show nothing new."""
    if (forwards := asked.stages * asked.microbatches * chunks) > LARGEST:
        raise click.UsageError(
            f"--stages {asked.stages} x --microbatches {asked.microbatches} x {chunks} chunks are "
            f"{forwards} forwards, more than {LARGEST}: give fewer --microbatches (past a few "
            "times --stages, a schedule repeats itself)"
        )


def _one(asked: Asked, name: str) -> None:
    """One schedule, in the ways asked for."""
    for option, path in asked.files.items():
        _refuse_existing(option, path, asked.force)
    if asked.inserted.copy is not None and asked.inserted.offload is None:
        raise click.UsageError("--copy is of --offload: give that too, or leave it out")
    result = _read(asked, Path(name)) if name.endswith(".csv") else _planned(asked, name)
    _refuse_large(asked, result.sizes.chunks * asked.inserted.layers)
    result = dressed(result, asked.inserted)
    makers: dict[str, Callable[[], str]] = {
        "--svg": lambda: to_svg(result.timing, result.title),
        "--trace": lambda: to_trace(result.timing, result.title, result.place),
        "--csv": lambda: to_csv(result.streams, result.place),
    }
    contents = {option: makers[option]() for option in asked.files}
    for option, path in asked.files.items():
        _write(option, path, contents[option])
    if asked.as_json:
        click.echo(json.dumps(text.as_object(result)))
    elif not asked.files:
        click.echo("\n".join(text.lines(result)))


def _planned(asked: Asked, name: str) -> Planned:
    """The schedule of a name."""
    row = _row(asked, name)
    sizes = asked.sizes(row, asked.costs)
    _refuse_large(asked, sizes.chunks)
    result = planned(row, sizes)
    for option in ("group", "memory"):
        if value := getattr(sizes, option):
            without = planned(row, attrs.evolve(sizes, **{option: 0}))
            if without.streams == result.streams:
                click.echo(f"note: --{option} {value} changes nothing in this schedule", err=True)
    return result


def _read(asked: Asked, path: Path) -> Planned:
    """The schedule of a file, which has sizes of its own."""
    context = click.get_current_context()
    for option in ("stages", "microbatches", "chunks", "group", "memory"):
        if context.get_parameter_source(option) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{path} decides it: leave --{option} out")
    return read(path, asked.costs)


def _compare(asked: Asked) -> None:
    """Every schedule of the table at the same cost of a stage."""
    if asked.name or asked.files:
        given = f"NAME {asked.name}" if asked.name else next(iter(asked.files))
        raise click.UsageError(f"--compare shows every schedule: leave {given} out")
    if asked.inserted:
        raise click.UsageError(
            "--compare is of the schedules alone: leave --layers, --recompute, --offload, --reduce "
            "and --gather out"
        )
    _refuse_large(asked, asked.chunks or 2)
    results: dict[str, Planned | str] = {}
    for name, row in SCHEDULES.items():
        try:
            chunks = row.chunks or asked.chunks or 2
            share = text.share(chunks, row.replicas)
            sizes = attrs.evolve(asked, chunks=chunks).sizes(row, asked.costs.of_share(share))
            results[name] = planned(row, sizes)
        except ScheduleError as error:
            results[name] = str(error).splitlines()[0]
    if asked.as_json:
        click.echo(json.dumps(text.compared_object(results)))
    else:
        click.echo("\n".join(text.compared_lines(results)))


def _refuse_existing(option: str, path: Path, force: bool) -> None:
    """Refuse before the work is done what could not be written after it."""
    if str(path) == "-":
        return
    try:
        exists, folder = path.exists(), path.parent.is_dir()
    except OSError as error:
        raise _unwritable(option, path, error) from error
    if exists and not force:
        raise click.UsageError(f"{option} {path} exists: give another name, or --force")
    if not folder:
        raise click.UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")


def _write(option: str, path: Path, content: str) -> None:
    """Write a file, or to standard output."""
    if str(path) == "-":
        click.echo(content, nl=False)
        return
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _unwritable(option, path, error) from error
    click.echo(f"wrote {path}", err=True)


def _unwritable(option: str, path: Path, error: OSError) -> click.UsageError:
    return click.UsageError(f"{option} {path} cannot be written ({error.strerror}): give another")
