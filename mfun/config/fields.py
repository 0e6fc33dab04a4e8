"""Kinds of configuration fields: default, check, and how a command-line text becomes a value.

Every kind refuses a value of another type rather than converting it, and names the key path.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable
from typing import Any, get_args

import attrs


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names keys, values and the fix."""


def key_path(instance: object, attribute: attrs.Attribute[Any]) -> str:
    """Dotted name of a field, such as ``model.heads``."""
    return f"{getattr(type(instance), 'section', type(instance).__name__)}.{attribute.name}"


def _field(default: Any, check: Callable[[Any], str | None], parse: Callable[[str], Any]) -> Any:
    """A field whose ``check`` returns what was wanted, or None where the value will do."""

    def validate(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        wanted = check(value)
        if wanted is not None:
            raise ConfigError(f"{key_path(instance, attribute)} is {value!r}; give {wanted}.")

    return attrs.field(default=default, validator=validate, metadata={"parse": parse})


def whole(default: int, least: int = 0) -> Any:
    """A whole number of at least ``least``."""
    wanted = f"a whole number of at least {least}"
    return _field(default, lambda v: None if type(v) is int and v >= least else wanted, int)


def real(
    default: float, least: float = 0.0, below: float = math.inf, *, open_: bool = False
) -> Any:
    """A finite number from ``least`` (left out where ``open_``) and below ``below``."""
    wanted = f"a finite number {'above' if open_ else 'of at least'} {least:g}"
    wanted += f" and below {below:g}" if below < math.inf else ""

    def check(v: Any) -> str | None:
        good = type(v) in (int, float) and math.isfinite(v)
        return None if good and least <= v < below and not (open_ and v == least) else wanted

    return _number(_field(default, check, float))


def _number(field: Any) -> Any:
    """Store a whole number given for a real one as a float, so that equal configs are equal."""
    field.converter = lambda v: float(v) if type(v) is int else v
    return field


def flag(default: bool) -> Any:
    """True or false."""
    return _field(default, lambda v: None if type(v) is bool else "true or false", _parse_flag)


def choice(default: str, literal: Any) -> Any:
    """One of the strings of a Literal type."""
    names = get_args(literal)
    wanted = "one of " + ", ".join(names)
    return _field(default, lambda v: None if type(v) is str and v in names else wanted, str)


def text(default: str) -> Any:
    """Any string."""
    return _field(default, lambda v: None if type(v) is str else "a string", str)


def wholes(least: int = 0) -> Any:
    """A tuple of whole numbers; written ``2,3`` on the command line, a list in TOML."""
    wanted = f"whole numbers of at least {least}"

    def good(v: Any) -> bool:
        return type(v) is int and v >= least

    return _many(wanted, good, int)


def texts() -> Any:
    """A tuple of strings; written ``a,b`` on the command line, a list in TOML."""
    return _many("strings", lambda v: type(v) is str and v != "", str)


def reals() -> Any:
    """A tuple of finite numbers of at least 0, as floats; written ``0.3,0.7`` or as a list."""

    def good(v: Any) -> bool:
        return type(v) is float and 0 <= v < math.inf

    field = _many("finite numbers of at least 0", good, float)
    field.converter = lambda v: (
        tuple(float(x) if type(x) is int else x for x in v) if type(v) in (list, tuple) else v
    )
    return field


def choices(literal: Any) -> Any:
    """A tuple of some of the strings of a Literal type, none twice."""
    names = get_args(literal)
    field = _many(f"some of {', '.join(names)}", lambda v: type(v) is str and v in names, str)

    def twice(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if len({*value}) < len(value):
            raise ConfigError(f"{key_path(instance, attribute)} is {value!r}; give each once.")

    field.validator(twice)
    return field


def tables(*keys: str) -> Any:
    """A table of tables with some of these keys, each a number of at least 0; written as in TOML.

    On the command line: ``{"embed.*" = {lr = 0.1}}``. Stored as a `Table`.
    """
    wanted = f'a table such as {{"embed.*" = {{{keys[0]} = 0.5}}}}, of {" and ".join(keys)} only'

    def good(v: Any) -> bool:
        numbers = isinstance(v, dict) and v and all(type(x) in (int, float) for x in v.values())
        return bool(numbers) and v.keys() <= {*keys} and all(0 <= x < math.inf for x in v.values())

    def check(v: Any) -> str | None:
        return None if isinstance(v, dict) and all(map(good, v.values())) else wanted

    field = _field({}, check, lambda given: tomllib.loads(f"value = {given}")["value"])
    field.converter = _copied
    return field


class Table(dict[str, Any]):
    """A dict that cannot be changed, and so has a hash.

    Example:
      >>> hash(Table(a=1.0)) == hash(Table(a=1.0)), Table(a=1.0) == {"a": 1.0}
      (True, True)
    """

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> Any:
        return Table, (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a table of a configuration is frozen; make another with attrs.evolve")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = _refuse
    setdefault = update = _refuse  # pyright: ignore[reportAssignmentType]


def _copied(v: Any) -> Any:
    """Tables of one's own, whole numbers in them as floats."""
    if type(v) is int:
        return float(v)
    return Table({k: _copied(x) for k, x in v.items()}) if isinstance(v, dict) else v


def _many(wanted: str, good: Callable[[Any], bool], parse: Callable[[str], Any]) -> Any:
    def check(v: Any) -> str | None:
        return None if type(v) is tuple and all(map(good, v)) else f"a list of {wanted}"

    field = _field((), check, lambda given: _parse_many(given, parse))
    field.converter = lambda v: tuple(v) if type(v) is list else v
    return field


def _parse_flag(given: str) -> bool:
    if given not in ("true", "false"):
        raise ValueError(given)
    return given == "true"


def _parse_many(given: str, parse: Callable[[str], Any]) -> tuple[Any, ...]:
    if given.startswith("["):
        return tuple(tomllib.loads(f"value = {given}")["value"])
    return tuple(parse(part) for part in given.split(",") if part)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A sentence with the known names nearest to a wrong one, or all of them if none is near.

    Example:
      >>> did_you_mean("layer", ["layers", "hidden"])
      "did you mean 'layers'?"
    """
    names = list(known)
    distances = {name: _distance(given, name) for name in names}
    best = min(distances.values())
    near = [name for name in names if distances[name] == best]
    if best > max(2, len(given) // 3):
        return f"the known names are {', '.join(names)}."
    return f"did you mean {' or '.join(map(repr, near))}?"


def _distance(a: str, b: str) -> int:
    """Levenshtein distance: inserted, dropped and changed letters."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]
