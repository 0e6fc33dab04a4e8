"""Groups of parameters: multipliers of the learning rate and of weight decay, leaf by leaf."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch

from mfun.config import ConfigError, OptimConfig
from mfun.optim.transform import Leaves

Multipliers = tuple[float, float]
"""Of the learning rate, and of the weight decay."""
Groups = Mapping[str, bool | Multipliers]
"""Leaf -> its multipliers; a bool stands for (1, whether it decays). It may know more leaves than a
stage holds."""


def groups_of(
    paths: Mapping[str, bool] | Iterable[str], config: OptimConfig
) -> dict[str, Multipliers]:
    """Each leaf's multipliers: 1 and whether it decays, changed by `optim.overrides`.

    An override is a glob over whole paths (`*` crosses dots) with `lr`, `decay` or both. Overrides
    are taken in order, and a later one replaces what an earlier one said. The multiplier of the
    learning rate scales the whole schedule, `optim.min_lr` and warm-up included.

    Args:
      paths: of all parameters of the model -> whether they decay by default; names alone decay.
      config: the section `optim`.
    Raises: ConfigError naming an override that matches no parameter, with the paths nearest to it.
    Example:
      >>> config = OptimConfig(overrides={"embed.*": {"lr": 0.1}, "*.bias": {"decay": 2.0}})
      >>> groups_of({"embed.tokens": True, "norm.bias": False, "norm.weight": False}, config)
      {'embed.tokens': (0.1, 1.0), 'norm.bias': (1.0, 2.0), 'norm.weight': (1.0, 0.0)}

    Source: Megatron-LM's lr_mult and wd_mult of parameter groups.
    """
    decay = paths if isinstance(paths, Mapping) else dict.fromkeys(paths, True)
    found: dict[str, Multipliers] = {path: (1.0, float(decay[path])) for path in decay}
    for pattern, change in config.overrides.items():
        matched = [path for path in found if fnmatchcase(path, pattern)]
        if not matched:
            raise ConfigError(_unmatched(pattern, found))
        for path in matched:
            lr, wd = found[path]
            found[path] = (change.get("lr", lr), change.get("decay", wd))
    return found


def _unmatched(pattern: str, paths: Iterable[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, n=5, cutoff=0.0)
    return (
        f"optim.overrides: {pattern!r} matches no parameter; paths near it are {', '.join(near)} "
        "(`*` stands for any text)"
    )


def multipliers(groups: Groups | None, path: str) -> Multipliers:
    """The multipliers of a leaf; both are 1 without groups.

    Example:
      >>> multipliers({"w": True, "b": False, "v": (0.5, 2.0)}, "b"), multipliers(None, "b")
      ((1.0, 0.0), (1.0, 1.0))
    """
    found = (1.0, 1.0) if groups is None else groups[path]
    return (1.0, float(found)) if isinstance(found, bool) else found


def grouped(params: Leaves, groups: Groups | None) -> Iterator[tuple[list[str], Multipliers]]:
    """Paths that one kernel call can take: equal multipliers, dtype and device."""
    found: dict[tuple[Multipliers, torch.dtype, torch.device], list[str]] = {}
    for path, p in params.items():
        found.setdefault((multipliers(groups, path), p.dtype, p.device), []).append(path)
    for (mult, _, _), paths in found.items():
        yield paths, mult


def check_groups(groups: Groups | None, params: Leaves) -> None:
    """Refuse groups that do not know every parameter.

    Raises: ValueError naming the parameters.
    """
    unknown = [path for path in params if groups is not None and path not in groups]
    if unknown:
        raise ValueError(
            f"parameter groups: no entry for {unknown[:5]}; give each (lr, decay) multipliers, or "
            "whether it decays"
        )
