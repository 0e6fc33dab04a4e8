"""Configurations from presets, TOML and ``section.key=value`` texts, and back to TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
import tomli_w
from cattrs.errors import ForbiddenExtraKeysError

from mfun.config.checks import check
from mfun.config.fields import ConfigError, did_you_mean
from mfun.config.layout import mesh
from mfun.config.options import find
from mfun.config.presets import DEFAULT, PRESETS
from mfun.config.sections import SECTIONS, Config


def load(source: str | None, overrides: Sequence[str] = ()) -> Config:
    """A checked configuration from a preset or a TOML file, changed by overrides.

    Args:
      source: name of a preset, path of a TOML file, or None for the preset ``DEFAULT``.
      overrides: texts such as ``parallel.tp=2``; later ones win.

    Raises:
      ConfigError: an unknown name (with the nearest known one), a value of a wrong type or out of
        range, or parts that do not fit each other.

    Example:
      >>> load("gpt2", ["model.tied=false", "parallel.tp=2"]).model.tied
      False
    """
    config = override(_source(DEFAULT if source is None else source), overrides)
    check(config)
    mesh(config)
    return config


def override(config: Config, overrides: Sequence[str]) -> Config:
    """The configuration with ``section.key=value`` texts applied in order; not yet checked.

    Example:
      >>> override(Config(), ["parallel.layers_per_stage=1,3"]).parallel.layers_per_stage
      (1, 3)
    """
    values = cattrs.unstructure(config)
    for given in overrides:
        section, key, value = _assignment(given)
        values[section][key] = value
    return _structure(values, "the command line")


def to_toml(config: Config) -> str:
    """All fields as TOML, always in the same order, so that two runs can be compared by diff.

    Example:
      >>> to_toml(Config()).splitlines()[:2]
      ['[model]', 'layers = 4']
    """
    return tomli_w.dumps(cattrs.unstructure(config))


def from_toml(content: str, name: str = "TOML") -> Config:
    """The configuration of a TOML text; what it leaves out has its default.

    Args:
      content: the text.
      name: what to call it in an error.

    Raises:
      ConfigError: text that is no TOML, an unknown section or key, a wrong value.

    Example:
      >>> from_toml(to_toml(Config())) == Config()
      True
    """
    try:
        values = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not valid TOML: {error}") from error
    return _structure(values, name)


def from_file(path: Path) -> Config:
    """The configuration of a TOML file, in UTF-8 with or without a byte order mark.

    Raises:
      ConfigError: as ``from_toml``, or a file that cannot be read or is not text.
    """
    try:
        return from_toml(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _source(source: str) -> Config:
    if source in PRESETS:
        return PRESETS[source]
    path = Path(source)
    if path.is_file():
        return from_file(path)
    if keys_called(source):
        raise ConfigError(f"{source!r} is a setting: write {assignments(source)}")
    if path.suffix == ".toml":
        raise ConfigError(
            f"{source} does not exist: name a TOML file or a preset: {', '.join(PRESETS)}"
        )
    raise ConfigError(f"{source!r} is neither a preset nor a file: {did_you_mean(source, PRESETS)}")


def _assignment(given: str) -> tuple[str, str, Any]:
    """Section, key and typed value of one override."""
    path, equals, value = given.partition("=")
    section, dot, key = path.partition(".")
    if not equals and (given in PRESETS or given.endswith(".toml")):
        raise ConfigError(f"{given!r} is no setting: name the preset or file first")
    if not equals and keys_called(given):
        raise ConfigError(f"{given!r} is a setting: write {assignments(given)}")
    if not equals or not dot:
        hint = f" {_hint(path, SECTIONS)}" if equals else ""
        raise ConfigError(f"override {given!r} is not of the form section.key=value.{hint}")
    if section not in SECTIONS:
        raise ConfigError(
            f"unknown section {section!r} in {given!r}: {did_you_mean(section, SECTIONS)}"
        )
    fields = attrs.fields_dict(SECTIONS[section])
    if key not in fields:
        raise ConfigError(f"unknown key {path} in {given!r}: {_hint(key, fields)}")
    return section, key, _parsed(path, value, fields[key].metadata["parse"])


def _parsed(path: str, value: str, parse: Callable[[str], Any]) -> Any:
    """The typed value; a text that does not parse is left to its field to refuse."""
    try:
        return parse(value)
    except (ValueError, tomllib.TOMLDecodeError):
        return value


def _structure(values: dict[str, Any], name: str) -> Config:
    """Values as a Config, by cattrs; every field checks its own value."""
    for section, content in values.items():
        if section in SECTIONS and not isinstance(content, dict):
            raise ConfigError(f"{name}: {section} is {content!r}; give a table, [{section}].")
    try:
        return _converter().structure(values, Config)
    except ForbiddenExtraKeysError as error:
        section = getattr(error.cl, "section", None)
        raise ConfigError(f"{name}: " + _unknown(section, sorted(error.extra_fields))) from error
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _converter() -> cattrs.Converter:
    """Builds the classes; values go through as they are."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    for plain in (int, float, bool, str):
        converter.register_structure_hook(plain, lambda value, kind: value)
    converter.register_structure_hook_func(
        lambda kind: not attrs.has(kind), lambda value, kind: value
    )
    return converter


def _unknown(section: str | None, keys: list[str]) -> str:
    if section is None:
        return "; ".join(f"unknown section {key!r}: {_hint(key, SECTIONS)}" for key in keys)
    known = attrs.fields_dict(SECTIONS[section])
    return "; ".join(f"unknown key {section}.{key}: {_hint(key, known)}" for key in keys)


def keys_called(name: str) -> list[str]:
    """The settings that a name may mean, with or without its section and an option's dashes.

    Example:
      >>> keys_called("--global-batch"), keys_called("optim.schedule"), keys_called("schedule")
      (['train.global_batch'], ['optim.schedule'], ['parallel.schedule', 'optim.schedule'])
    """
    plain = name.lstrip("-").replace("-", "_")
    paths = [f"{home}.{key}" for home, kind in SECTIONS.items() for key in attrs.fields_dict(kind)]
    return [path for path in paths if plain in (path, path.partition(".")[2])]


def assignments(name: str) -> str:
    """How to write the settings that a name may mean: `optim.lr=VALUE`."""
    return " or ".join(f"{path}=VALUE" for path in keys_called(name))


def _hint(name: str, known: Iterable[str]) -> str:
    """Where an unknown name does exist, what Megatron's is here, or what is spelt like it."""
    if homes := keys_called(name):
        return f"did you mean {' or '.join(homes)}?"
    option = find(name)
    return option.hint if option else did_you_mean(name, known)
