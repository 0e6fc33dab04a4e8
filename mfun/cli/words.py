"""The words of a command line that say which configuration is meant."""

from __future__ import annotations

import click

from mfun.config.load import assignments
from mfun.config.options import find


class Settings(click.Command):
    """A command that takes settings as words; an option that is none is shown as a setting."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments, or an error that says how to write the setting."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name
            meant, known = assignments(name), find(name)
            if not meant and not known and "." not in name:
                told = "Settings are section.key=VALUE, without dashes."
                raise click.UsageError(f"{error.format_message()} {told}", ctx) from error
            told = known.hint if known else "settings are section.key=VALUE, without dashes"
            fix = f"write {meant}" if meant else told
            raise click.UsageError(f"no option {name!r}: {fix}", ctx) from error


def split_words(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The configuration's name, if the first word is one, and the settings.

    Example:
        >>> split_words(("gpt2", "optim.lr=1e-3")), split_words(("optim.lr=1e-3",))
        (('gpt2', ('optim.lr=1e-3',)), (None, ('optim.lr=1e-3',)))
    """
    named = bool(words) and "=" not in words[0]
    return (words[0], words[1:]) if named else (None, words)
