"""The optimizer that a configuration asks for."""

from __future__ import annotations

from typing import Any

from mfun.config import OptimConfig
from mfun.optim.adam import adamw
from mfun.optim.clip import clip_by_global_norm, clip_by_value
from mfun.optim.groups import Groups
from mfun.optim.layout import Matrices
from mfun.optim.lion import lion
from mfun.optim.muon import muon
from mfun.optim.schedule import Schedule, constant, cosine, inverse_sqrt, linear, wsd
from mfun.optim.sgd import sgd
from mfun.optim.transform import State, Transform, named_chain, state_scalars


def build(
    config: OptimConfig,
    steps: int,
    groups: Groups | None = None,
    matrices: Matrices | None = None,
) -> Transform:
    """The terminal transform of a configuration: a chain of clipping and the optimizer.

    Args:
      config: the section `optim`.
      steps: updates of the run, the end of the schedule where `optim.decay_steps` is 0.
      groups: leaf -> (lr, decay) multipliers as from `groups_of`, or whether the leaf decays; None
        decays all. A leaf may be any tensor: a parameter, a shard, a flat bucket.
      matrices: the leaves that Muon moves, and how they are made whole; other optimizers take no
        notice.
    Returns: a terminal transform. Its state has the names "clip" and "clip_value" (absent where
      they are 0) and `optim.name`; `learning_rate` reads from it.
    Raises: ValueError for Muon without `matrices`.
    Example:
      >>> import torch
      >>> opt = build(OptimConfig(lr=0.1, warmup=2), steps=10)
      >>> params = {"w": torch.ones(2)}
      >>> state = opt.init(params)
      >>> gradient = {"w": torch.tensor([3.0, 4.0])}
      >>> params, state = opt.update(gradient, state, params, norm=torch.tensor(5.0))
      >>> list(state), learning_rate(state), state["clip"]["coefficient"]
      (['clip', 'adamw'], 0.05, tensor(0.2000))
    """
    blocks: dict[str, Transform] = {}
    if config.clip:
        blocks["clip"] = clip_by_global_norm(config.clip)
    if config.clip_value:
        blocks["clip_value"] = clip_by_value(config.clip_value)
    blocks[config.name] = _optimizer(config, build_schedule(config, steps), groups, matrices)
    return named_chain(**blocks)


def _optimizer(
    config: OptimConfig, rate: Schedule, groups: Groups | None, matrices: Matrices | None
) -> Transform:
    common: dict[str, Any] = {"weight_decay": config.weight_decay, "groups": groups}
    betas = {"b1": config.b1, "b2": config.b2}
    match config.name:
        case "adamw":
            return adamw(rate, **betas, eps=config.eps, **common)
        case "sgd":
            return sgd(rate, momentum=config.momentum, **common)
        case "lion":
            return lion(rate, **betas, **common)
        case "muon":
            if matrices is None:
                raise ValueError("build: optim.name is muon; give `matrices`, the leaves it moves")
            numbers = {"momentum": config.momentum, "steps": config.ns_steps, "eps": config.eps}
            scale = config.muon_scale
            return muon(rate, **matrices._asdict(), **betas, **numbers, scale=scale, **common)


def moments(config: OptimConfig, *, matrix: bool = False) -> int:
    """Tensors of a leaf's shape that the configured optimizer keeps for it.

    Args:
      config: the section `optim`.
      matrix: of a hidden matrix, which Muon keeps less for.
    Example:
      >>> [moments(OptimConfig(name=name)) for name in ("adamw", "lion", "sgd", "muon")]
      [2, 1, 1, 2]
    """
    rows = {"adamw": 2, "lion": 1, "sgd": int(config.momentum > 0), "muon": 1 if matrix else 2}
    return rows[config.name]


def build_schedule(config: OptimConfig, steps: int) -> Schedule:
    """The learning-rate schedule of a configuration.

    Args:
      config: the section `optim`. The wsd schedule falls over the last `optim.wsd_decay` of the
        steps, rounded, and at least one.
      steps: updates of the run, the end of the schedule where `optim.decay_steps` is 0.
    Returns: number of the update, from 1 -> learning rate.
    Example:
      >>> build_schedule(OptimConfig(lr=1.0, schedule="linear", warmup=2), steps=10)(6)
      0.5
    """
    end = config.decay_steps or steps
    floor, warmup = config.min_lr, config.warmup
    match config.schedule:
        case "constant":
            return constant(config.lr, warmup=warmup)
        case "linear":
            return linear(config.lr, end, min_lr=floor, warmup=warmup)
        case "cosine":
            return cosine(config.lr, end, min_lr=floor, warmup=warmup)
        case "inverse_sqrt":
            return inverse_sqrt(config.lr, warmup=warmup, min_lr=floor, decay_steps=end)
        case "wsd":
            fall = max(1, round(config.wsd_decay * end))
            return wsd(config.lr, end, fall, min_lr=floor, warmup=warmup)


def learning_rate(state: State) -> float:
    """The learning rate that the last update used, without multipliers, out of a state.

    Args:
      state: of a transform whose parts use one learning rate.
    Returns: a float; 0.0 before the first update.
    Raises: ValueError if the state holds no learning rate, or several that differ.
    Example:
      >>> learning_rate({"sgd": {"count": 3, "lr": 0.25}})
      0.25
    """
    rates = {p: x for p, x in state_scalars(state).items() if p.split(".")[-1] == "lr"}
    if len({*rates.values()}) != 1:
        raise ValueError(
            f"learning_rate: the state holds {len(rates)} learning rates ({rates}), not one; "
            "read the one you mean by its path"
        )
    return float(next(iter(rates.values())))
