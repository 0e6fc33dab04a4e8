"""`mfun plan`: what a layout costs, before anything runs; and Megatron's options and ours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import attrs
import click

from mfun import config as cfg
from mfun.cli.text import ranks_text, size
from mfun.cli.words import Settings, split_words
from mfun.config import Config, ConfigError
from mfun.config.options import OPTIONS
from mfun.config.sections import Sharding

if TYPE_CHECKING:
    from mfun.plan.memory import Account

COLUMNS = ("params", "grads", "masters", "moments", "held", "temporary", "activations", "total")
KEY = """\
held: between steps, padding included; temporary: gathered parameters, gradients not yet reduced and
scratch, at the worst moment of a step; total: the most at once, activations included. By formula
(mfun/plan/memory.py); the allocator's slack and each layer's own temporaries come on top."""


@click.command(
    cls=Settings,
    short_help="Show what a layout costs, without running it.",
    options_metavar="[--options]",
)
@click.argument("words", nargs=-1, metavar="[CONFIG.toml | PRESET] [section.key=value ...]")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cuda",
    show_default=True,
    help="Where it would run: a reduce-scatter on CPU needs more.",
)
@click.option("--options", is_flag=True, help="Megatron's data-parallel options, and ours.")
def command(words: tuple[str, ...], device: str, options: bool) -> None:
    """Memory of a rank by sharding strategy, for the layout of a configuration.

    The configuration is named as for `mfun train`; its own strategy has a star. Of the pipeline's
    stages the fullest is shown.
    """
    if options:
        lines = option_lines()
    else:
        source, settings = split_words(words)
        try:
            lines = memory_lines(cfg.resolve(cfg.load(source, settings), None), device)
        except ConfigError as error:
            raise click.ClickException(str(error)) from error
    for line in lines:
        click.echo(line)


def memory_lines(config: Config, device: str) -> Iterator[str]:
    """A table with a row for each strategy."""
    yield f"{ranks_text(config)}, precision {config.precision.policy}; bytes of a rank"
    columns = (*COLUMNS, "host") if config.parallel.offload_optimizer else COLUMNS
    yield " ".join([f"{'sharding':<20}", *(f"{name:>11}" for name in columns)])
    for sharding in get_args(Sharding):
        own = "*" if sharding == config.parallel.sharding else ""
        ahead = config.parallel.gather_ahead and sharding in ("optim", "optim_grads")
        parallel = attrs.evolve(config.parallel, sharding=sharding, gather_ahead=ahead)
        try:
            a = fullest(cfg.resolve(attrs.evolve(config, parallel=parallel), None), device)
        except ConfigError as error:
            yield f"{sharding + own:<20} refused: {error}"
            continue
        yield " ".join(
            [f"{sharding + own:<20}", *(f"{size(getattr(a, name)):>11}" for name in columns)]
        )
    yield ""
    yield KEY
    if config.parallel.offload_optimizer:
        yield "host: masters and moments in the host's memory; on CPU they count among those held."


def fullest(config: Config, device: str) -> Account:
    """The account of the stage that needs most."""
    from mfun.plan.memory import account
    from mfun.train.plan import plan

    layout = plan(config)
    accounts = (account(layout, s, device=device) for s in range(layout.mesh.pp))  # type: ignore[arg-type]
    return max(accounts, key=lambda a: a.total)


def option_lines() -> Iterator[str]:
    """Each option of Megatron's, what it is here and why."""
    width = max(map(len, OPTIONS)) + 2
    for option in OPTIONS.values():
        keys = ", ".join(option.keys)
        here = keys if option.verdict == "option" else option.verdict
        nearest = f" (see {keys})" if keys and option.verdict != "option" else ""
        text = f"{here}: {option.why}{nearest}"
        yield from textwrap.wrap(
            text, 100, initial_indent=f"{option.name:<{width}}", subsequent_indent=" " * width
        )
