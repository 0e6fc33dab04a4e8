"""The words of a command line that say which configuration is meant."""

from __future__ import annotations


def split_words(words: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """The configuration's name, if the first word is one, and the settings.

    Example:
        >>> split_words(("gpt2", "optim.lr=1e-3")), split_words(("optim.lr=1e-3",))
        (('gpt2', ('optim.lr=1e-3',)), (None, ('optim.lr=1e-3',)))
    """
    named = bool(words) and "=" not in words[0]
    return (words[0], words[1:]) if named else (None, words)
