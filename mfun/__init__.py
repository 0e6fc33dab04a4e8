"""Megatron-style distributed training as pure functions.

Seven rules hold in every file:

1. A function is given what it needs and returns what it made. Nothing is kept in module globals,
   hung on a model, or done behind the caller's back by a hook.
2. Code is written from one rank's point of view, on that rank's shapes. Cutting a whole tensor
   into pieces and gluing the pieces together happens at the door, from a declared spec.
3. One notion, one interface: a transform is ``(init, update)``, a layer is specs and ``apply``,
   a schedule is a stream of ops. A new feature is a new row of a table.
4. Whatever crosses ranks does so through a named collective, and each collective names the one
   that carries its gradients back.
5. Integers come first. Ranks, slices, buckets and schedules are worked out by code that never
   imports torch, so they can be enumerated, printed and proved before anything runs.
6. One device is no special case: it runs the same code on axes of size one. An independent
   reference, which shares no code with it, says what the right values are.
7. An error that has to be guessed at is a bug. A message names the argument, the key path, the
   axis, the value and what to change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mfun.comm import (
        DUALS,
        Axis,
        Groups,
        ProcessWorld,
        all_reduce,
        all_to_all,
        broadcast,
        collect,
        copy,
        distribute,
        finish,
        gather,
        max,
        reduce,
        reduce_scatter,
        shift,
        simulate,
        split,
        unsplit,
    )
    from mfun.config import Config, ConfigError, load, resolve
    from mfun.grads import GradBuffers, explain, finalize, reductions
    from mfun.mesh import Factor, Mesh
    from mfun.models.gpt import gpt
    from mfun.nn.layer import Ctx, Layer
    from mfun.optim import (
        Transform,
        adamw,
        dynamic_scale,
        lion,
        muon,
        named_chain,
        sgd,
        with_loss_scale,
        with_masters,
    )
    from mfun.rng import Key, key
    from mfun.schedule import SCHEDULES, check, timeline
    from mfun.spec import Init, P, ParamSpec, init_params, shard
    from mfun.train.plan import Plan
    from mfun.train.step import Metrics, State, Trainer
    from mfun.tree import show

__version__ = "0.1.0"

_COMM = (
    "DUALS Axis Groups ProcessWorld all_reduce all_to_all broadcast collect copy distribute finish "
    "gather max reduce reduce_scatter shift simulate split unsplit"
)
_HOMES: dict[str, str] = {
    "mfun.comm": _COMM,
    "mfun.config": "Config ConfigError load resolve",
    "mfun.grads": "GradBuffers explain finalize reductions",
    "mfun.mesh": "Factor Mesh",
    "mfun.models.gpt": "gpt",
    "mfun.nn.layer": "Ctx Layer",
    "mfun.optim": (
        "Transform adamw dynamic_scale lion muon named_chain sgd with_loss_scale with_masters"
    ),
    "mfun.rng": "Key key",
    "mfun.schedule": "SCHEDULES check timeline",
    "mfun.spec": "Init P ParamSpec init_params shard",
    "mfun.train.plan": "Plan",
    "mfun.train.step": "Metrics State Trainer",
    "mfun.tree": "show",
}
"""Where each public name lives; imported when first asked for, so that `import mfun` is quick."""

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]  # it reads the imports above
    ["__version__", *(name for names in _HOMES.values() for name in names.split())]
)


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"mfun has no public name {name!r}; there are {', '.join(__all__)}")
