"""The command `mfun`. Each of its commands is a module here that defines `command`."""

from __future__ import annotations

import importlib

import click

import mfun
from mfun.config.fields import did_you_mean

COMMANDS = ("train", "sample", "data", "inspect", "convert", "verify", "schedule", "plan")
"""In the order of the help."""


class Commands(click.Group):
    """Imports a command's module when it is asked for, so that help comes at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All of them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a module."""
        if cmd_name not in COMMANDS:
            return None
        return importlib.import_module(f"mfun.cli.{cmd_name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of the arguments; a misspelt one gets the nearest name."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command {args[0]!r}: {did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mfun.__version__, prog_name="mfun")
def main() -> None:
    """Megatron-style distributed training as pure functions, on torch.func.

    \b
    mfun train                          trains a small GPT on 4 local ranks
    mfun train --help                   presets, settings, examples
    mfun train llama3-8b --dry          shows a layout without running it
    mfun sample runs/... --prompt TEXT  shows what a run has learned
    mfun data build a.jsonl data/mine   makes a dataset of text to train on
    mfun inspect runs/...               what a checkpoint holds, or how two differ
    mfun convert from-hf FOLDER OUT     starts from a Hugging Face model
    mfun schedule --compare             pipeline schedules side by side
    mfun plan llama3-8b parallel.dp=8   memory of a rank by sharding strategy
    """
