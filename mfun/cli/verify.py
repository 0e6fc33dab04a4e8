"""`mfun verify`: is this layout equal to one device? Run both, small, and say."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from mfun import config as cfg
from mfun.cli.text import axes_text
from mfun.cli.words import Settings, split_words
from mfun.config import Config

if TYPE_CHECKING:
    from mfun.verify.compare import Report

EPILOG = """
\b
WHAT IT DOES
  Shrinks the configuration to seconds of work, keeping the mesh, the schedule,
  how stages, heads, vocabulary and sequence divide, and every feature of model,
  loss and optimizer. Trains a few steps of it in float64 on local ranks, and on
  one device with an independent reference in plain torch that shares no code
  with mfun. Compares losses, gradient norms, every gradient of the first step,
  every parameter after the last, and replicas with each other bit by bit.
  Exit status 0 only if all errors are at most 1e-10 and replicas are equal.

\b
EXAMPLES
  mfun verify
  mfun verify llama3-8b parallel.tp=4 parallel.pp=2 parallel.sequence_parallel=true
  mfun verify my.toml model.dropout=0.1 --json

\b
  Layouts of more than 8 ranks run in this process: the ranks of a stage as one
  vmap, the stages by a mailbox (--one-process does so for any layout).
"""


@click.command(
    cls=Settings,
    short_help="Prove on this machine that a layout equals one device.",
    epilog=EPILOG,
    options_metavar="[--json]",
)
@click.argument("words", nargs=-1, metavar="[CONFIG.toml | PRESET] [section.key=value ...]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option(
    "--steps",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Updates to compare.",
)
@click.option("--one-process", is_flag=True, help="Simulate all ranks in this process.")
@click.option(
    "--rank-results", type=click.Path(path_type=Path), hidden=True, help="Be one of the ranks."
)
def command(
    words: tuple[str, ...],
    as_json: bool,
    steps: int,
    one_process: bool,
    rank_results: Path | None,
) -> None:
    """Prove on this machine, in under a minute, that a configuration's layout equals one device."""
    if rank_results is not None:
        _be_rank(words[0], rank_results)
        return
    start = time.perf_counter()
    config = _resolve(words)
    report = _run(config, steps, one_process)
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(_object(config, report, seconds)))
    else:
        _print(config, report, seconds)
    sys.exit(0 if report.ok else 1)


def _resolve(words: tuple[str, ...]) -> Config:
    from mfun.train.ranks import place

    try:
        if place(os.environ) is not None:
            raise cfg.ConfigError(
                "mfun verify starts its own ranks; run it without torchrun or srun."
            )
        return cfg.resolve(cfg.load(*split_words(words)), None)
    except cfg.ConfigError as error:
        raise click.ClickException(str(error)) from error


def _run(config: Config, steps: int, one_process: bool) -> Report:
    from mfun.train.launch import Interrupted, RanksFailed
    from mfun.train.plan import plan
    from mfun.verify.compare import judge
    from mfun.verify.ranks import on_ranks
    from mfun.verify.run import in_mailbox, reference_history
    from mfun.verify.shrink import LOCAL_RANKS, shrink

    try:
        layout = plan(shrink(config, steps))
        if one_process or layout.mesh.world > LOCAL_RANKS:
            results = in_mailbox(layout)
        else:
            results = on_ranks(layout)
    except (RanksFailed, Interrupted, ValueError, RuntimeError) as error:
        click.echo(f"mfun: the layout could not be run: {error}", err=True)
        sys.exit(1)
    return judge(layout, results, reference_history(layout.config))


def _be_rank(source: str, folder: Path) -> None:
    """One started rank; an error ends the process, with its report where the others look."""
    from mfun.train import failure
    from mfun.train.ranks import place
    from mfun.train.stop import Stop
    from mfun.verify.ranks import be_rank

    here = place(os.environ)
    assert here is not None, "--rank-results is for ranks that mfun started"
    config = cfg.load(source, ())
    try:
        with Stop(parent=True):
            be_rank(config, here, folder)
        failure.report_end(here.rank)
    except Exception as error:
        where = failure.place_text(cfg.mesh(config).coords(here.rank))
        failure.leave(failure.describe(error, here.rank, where))


def _layout(config: Config) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "tp": parallel.tp,
        "pp": parallel.pp,
        "dp": parallel.dp,
        "order": parallel.order,
        "schedule": cfg.schedule_name(config),
        "sequence_parallel": parallel.sequence_parallel,
        "layers_per_stage": [len(stage) for stage in cfg.stage_layers(config)],
        "microbatches": config.train.microbatches,
    }


def _object(config: Config, report: Report, seconds: float) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "layout": _layout(config),
        "max_rel_error": dict(report.errors),
        "replicas_bitwise_equal": report.bitwise,
        "seconds": round(seconds, 3),
        "notes": list(report.notes),
    }


def _print(config: Config, report: Report, seconds: float) -> None:
    from mfun.verify.compare import BOUND

    out = Console(highlight=False, soft_wrap=True)
    verdict = "[green]equal to one device[/]" if report.ok else "[red]NOT equal to one device[/]"
    out.print(f"{axes_text(config)}: {verdict} ({seconds:.1f} s, float64, bound {BOUND:g})")
    for kind, error in report.errors.items():
        leaf = f"  worst {report.worst[kind]}" if kind in report.worst else ""
        out.print(f"  {kind:<7} largest relative error {error:.2e}{leaf}")
    out.print(f"  replicas bitwise equal: {'yes' if report.bitwise else 'no'}")
    for note in report.notes:
        out.print(f"  [red]*[/] {note}")
