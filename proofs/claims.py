"""A claim and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple


class Claim(NamedTuple):
    """One line of the report.

    Args:
        says: the claim in words.
        problem: why it does not hold; None if it does.
    """

    says: str
    problem: str | None = None


Tier = Callable[[], Iterator[Claim]]


def claim(says: str, problems: Iterable[str]) -> Claim:
    """A claim that holds if there is no problem; an error while looking is one.

    Example:
        >>> claim("all is well", iter([]))
        Claim(says='all is well', problem=None)
        >>> claim("one divides", (str(1 // n) for n in [0])).problem
        'ZeroDivisionError: integer division or modulo by zero'
    """
    try:
        return Claim(says, next(iter(problems), None))
    except Exception as error:
        return Claim(says, f"{type(error).__name__}: {error}")
