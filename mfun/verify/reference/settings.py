"""The fields of a configuration that the reference understands, as a plain nested dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Mapping[str, Any]]

DEFAULTS: dict[str, dict[str, Any]] = {
    "model": {
        "layers": 4,
        "hidden": 128,
        "heads": 4,
        "kv_heads": 0,
        "head_dim": 0,
        "ffn": 0,
        "vocab": 256,
        "seq_len": 128,
        "dropout": 0.0,
        "tied": True,
        "position": "learned",
        "rope_theta": 10000.0,
        "rope_scaling": "none",
        "rope_factor": 1.0,
        "rope_low": 1.0,
        "rope_high": 4.0,
        "rope_original": 0,
        "rope_beta_fast": 32.0,
        "rope_beta_slow": 1.0,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "activation": "gelu",
        "bias": "none",
        "qk_norm": False,
        "sliding_window": 0,
        "init_std": 0.02,
    },
    "train": {
        "steps": 200,
        "seed": 0,
        "loss_norm": "tokens",
        "label_smoothing": 0.0,
        "z_loss": 0.0,
    },
    "optim": {
        "name": "adamw",
        "lr": 1e-3,
        "min_lr": 0.0,
        "schedule": "constant",
        "warmup": 0,
        "decay_steps": 0,
        "wsd_decay": 0.1,
        "b1": 0.9,
        "b2": 0.95,
        "eps": 1e-8,
        "momentum": 0.9,
        "ns_steps": 5,
        "muon_scale": "match_rms",
        "weight_decay": 0.1,
        "clip": 1.0,
        "clip_value": 0.0,
        "count_zeros": False,
        "overrides": {},
    },
}
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {
        "position": ("learned", "rotary", "none"),
        "rope_scaling": ("none", "linear", "llama3", "yarn"),
        "norm": ("layernorm", "rmsnorm"),
        "activation": ("gelu", "gelu_tanh", "swiglu"),
        "bias": ("none", "qkv", "all"),
    },
    "train": {"loss_norm": ("tokens", "microbatch")},
    "optim": {
        "name": ("adamw", "sgd", "lion", "muon"),
        "muon_scale": ("match_rms", "original"),
        "schedule": ("constant", "linear", "cosine", "inverse_sqrt", "wsd"),
    },
}
# `train` also holds fields that change no number (how often to log, and so on).
STRICT = ("model", "optim")


def complete(settings: Settings) -> dict[str, dict[str, Any]]:
    """Fill in what is left out or 0, and refuse what the reference would silently ignore.

    Sections other than model, train and optim are dropped: a layout changes no value.

    Raises:
        ValueError: a model or optim field that the reference does not know, or a choice that it
            does not have.

    Example:
        >>> complete({"model": {"hidden": 24, "heads": 6}})["model"]["head_dim"]
        4
    """
    full = {name: {**fields, **settings.get(name, {})} for name, fields in DEFAULTS.items()}
    for section in STRICT:
        for field in full[section].keys() - DEFAULTS[section].keys():
            raise ValueError(f"{section}.{field} is not a field the reference knows")
    for section, fields in CHOICES.items():
        for field, allowed in fields.items():
            if full[section][field] not in allowed:
                raise ValueError(
                    f"{section}.{field} is {full[section][field]!r}; the reference has "
                    + ", ".join(allowed)
                )
    model, optim = full["model"], full["optim"]
    model["kv_heads"] = model["kv_heads"] or model["heads"]
    model["head_dim"] = model["head_dim"] or model["hidden"] // model["heads"]
    model["ffn"] = model["ffn"] or 4 * model["hidden"]
    model["rope_original"] = model["rope_original"] or model["seq_len"]
    optim["decay_steps"] = optim["decay_steps"] or full["train"]["steps"]
    return full
