"""How a fault is planted: a function of mfun is recompiled with one place of its text changed.

`edit` swaps the code object of the function itself, so every name it was imported under is broken
alike, and the fault reads as a one-line difference. If the text is no longer there, planting fails:
a fault that has gone stale is an error, not a survivor or a kill.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import pytest


class Plant(NamedTuple):
    """What a fault breaks, as "module:name" or "module:table[row]", and how."""

    where: str
    do: Callable[[pytest.MonkeyPatch], Any]

    def __call__(self, patch: pytest.MonkeyPatch) -> None:
        """Break it."""
        self.do(patch)


class Stale(Exception):
    """A fault whose text is no longer in mfun."""


def find(where: str) -> tuple[Any, str]:
    """The owner and name of "grads.buffers:GradBuffers.add", in mfun."""
    module, _, path = where.partition(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(f"mfun.{module}")
    for step in owners:
        owner = getattr(owner, step)
    return owner, name


def function(where: str) -> FunctionType:
    """The plain function under decorators, properties and static methods."""
    found = getattr(*find(where))
    found = inspect.unwrap(getattr(found, "fget", found))
    assert isinstance(found, FunctionType), found
    return found


def source(fn: FunctionType) -> str:
    """The text of a function without its docstring."""
    text = textwrap.dedent(inspect.getsource(fn))
    body = ast.parse(text).body[0].body  # type: ignore[attr-defined]
    lines = text.splitlines()
    if fn.__doc__:
        lines[body[0].lineno - 1 : body[0].end_lineno] = ["    0"]
    return "\n".join(lines)


def edited(fn: FunctionType, *changes: tuple[str, str]) -> CodeType:
    """The code of a function with each text replaced, which must stand there exactly once."""
    text = source(fn)
    for old, new in changes:
        if text.count(old) != 1:
            raise Stale(f"{fn.__qualname__} has {old!r} {text.count(old)} times, not once")
        text = text.replace(old, new)
    flags = fn.__code__.co_flags & __future__.annotations.compiler_flag
    module = compile(text, fn.__code__.co_filename, "exec", flags, dont_inherit=True)
    return next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == fn.__name__)


def edit(where: str, *changes: tuple[str, str]) -> Plant:
    """Recompile a function, method or property with texts replaced."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        fn = function(where)
        patch.setattr(fn, "__code__", edited(fn, *changes))

    return Plant(where, plant)


def all_of(*plants: Plant) -> Plant:
    """Several at once, for one fault in two places."""
    return Plant(" ".join(p.where for p in plants), lambda patch: [p.do(patch) for p in plants])


def put(where: str, value: Any) -> Plant:
    """Set a name of a module or class."""
    return Plant(where, lambda patch: patch.setattr(*find(where), value))


def row(where: str, key: Any, value: Any) -> Plant:
    """Change one row of a table, read-only or not."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        rows: Mapping[Any, Any] = getattr(*find(where))
        assert key in rows, f"{where} has no row {key!r}"
        if isinstance(rows, dict):
            patch.setitem(rows, key, value)
        else:
            patch.setattr(*find(where), MappingProxyType({**rows, key: value}))

    return Plant(f"{where}[{key}]", plant)
