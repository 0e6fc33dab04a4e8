"""`config.json` of a Hugging Face folder as a `ModelConfig`; what does not fit is named.

Nothing is guessed: an option is one that mfun has, one that changes nothing, or a refusal. An
option that is left out has the default that transformers gives it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from mfun.config import ConfigError, ModelConfig
from mfun.config.fields import did_you_mean
from mfun.convert.families import FAMILIES, Family, HFError
from mfun.convert.options import (
    DEFAULTS,
    EVERYWHERE,
    GPT2,
    GPT2_DROPS,
    GPT2_GELUS,
    IGNORED,
    ONLY,
    OPTIONAL,
    ROPE,
    SHARED,
    Options,
)


def read_config(config: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """The family and the model of a `config.json`.

    Args:
        config: as in the file.

    Returns:
        The family; the model with no field left to be worked out.

    Raises:
        HFError: an architecture or an option that mfun does not have, each named.

    Example:
        >>> family, model = read_config({"model_type": "gpt2", "n_embd": 24, "n_head": 6})
        >>> family.name, model.hidden, model.ffn, model.activation
        ('gpt2', 24, 96, 'gelu_tanh')
    """
    family = _family(config)
    if family.unbuilt:
        what = " and ".join(family.unbuilt.values())
        raise HFError(
            f"a {family.name} model has {what}, which mfun does not build yet (num_local_experts = "
            f"{config.get('num_local_experts', 8)}); only dense models can be converted"
        )
    return family, read_model(family, config)


def _family(config: Mapping[str, Any]) -> Family:
    name = config.get("model_type")
    if name not in FAMILIES:
        hint = did_you_mean(str(name), FAMILIES)
        raise HFError(f"model_type is {name!r}, and mfun knows {', '.join(FAMILIES)}: {hint}")
    family = FAMILIES[name]
    for given in config.get("architectures") or ():
        if given not in (family.model, family.bare):
            raise HFError(f"architectures names {given}; of {name}, mfun has {family.model} only")
    return family


def read_model(family: Family, config: Mapping[str, Any]) -> ModelConfig:
    """The model of a `config.json`; of a family with parts that are not built, its dense parts.

    Raises: HFError naming every option that does not fit.
    """
    options = _Options(family.name, config)
    fields = _gpt2(options) if family.name == "gpt2" else _dense(options)
    for key, value in (EVERYWHERE | ONLY[family.name]).items():
        options.only(key, value)
    options.finish()
    try:
        model = canonical(ModelConfig(**fields))
    except ConfigError as error:
        raise HFError(f"config.json does not make a model: {error}") from error
    if family.name in ("gpt2", "llama") and model.hidden % model.heads:
        raise HFError(
            f"the width {model.hidden} of a {family.name} model is no multiple of its "
            f"{model.heads} heads"
        )
    return model


class _Options:
    """The options of a file, each taken once; what is left or wrong is collected for one error."""

    def __init__(self, family: str, config: Mapping[str, Any]) -> None:
        self.family, self.config = family, config
        self.taken: set[str] = set()
        self.wrong: list[str] = []

    def take(self, key: str, default: Any, kind: type = int) -> Any:
        """The value of an option, of its default's kind; where that is None, of `kind` or None."""
        self.taken.add(key)
        value = self.config.get(key, default)
        kind = kind if default is None or key in OPTIONAL else type(default)
        if value is None and (default is None or key in OPTIONAL):
            return None
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        self.wrong.append(f"{key} is {value!r}, which is no {kind.__name__}")
        return default

    def only(self, key: str, value: Any) -> None:
        """An option that mfun has in one way."""
        self.taken.add(key)
        given = self.config.get(key)
        if given is not None and given != value:
            self.wrong.append(f"{key} is {given!r}, and mfun has {value!r} only")

    def finish(self) -> None:
        """Refuse what was wrong, and what nobody asked for."""
        self.wrong += [
            f"{key} is {value!r}, which mfun does not know"
            for key, value in self.config.items()
            if key not in self.taken and key not in IGNORED and value is not None
        ]
        if self.wrong:
            raise HFError(
                f"config.json of a {self.family} model: {'; '.join(self.wrong)}. If an option "
                "changes no value of the model, take it out of a copy of the folder"
            )


def _gpt2(options: _Options) -> Options:
    fields = {ours: options.take(key, default) for key, (ours, default) in GPT2.items()}
    drops = {key: options.take(key, 0.1) for key in GPT2_DROPS}
    if len(set(drops.values())) > 1:
        options.wrong.append(f"{drops} differ, and mfun drops everywhere at one rate")
    gelu = options.take("activation_function", "gelu_new")
    if gelu not in GPT2_GELUS:
        options.wrong.append(f"activation_function is {gelu!r}; use one of {[*GPT2_GELUS]}")
    how = {"position": "learned", "norm": "layernorm", "bias": "all"}
    gelu = GPT2_GELUS.get(gelu, "gelu")
    fields["ffn"] = fields["ffn"] or 0
    return {**fields, **how, "dropout": drops["embd_pdrop"], "activation": gelu}


def _dense(options: _Options) -> Options:
    """Llama and its relatives."""
    special = DEFAULTS[options.family]
    fields = {
        ours: options.take(key, special.get(key, default))
        for key, (ours, default) in SHARED.items()
    }
    fields["kv_heads"] = fields["kv_heads"] or 0
    fields["head_dim"] = fields["head_dim"] or 0
    fields |= _rope(options, special.get("rope_theta", 10000.0), fields["seq_len"])
    fields["sliding_window"] = _window(options, fields["layers"])
    fields["bias"] = _bias(options)
    fields["qk_norm"] = options.family == "qwen3"
    how = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
    return {**fields, **how}


def _bias(options: _Options) -> str:
    if options.family == "qwen2":
        return "qkv"
    if options.family != "llama":
        return "none"
    attention, mlp = (options.take(f"{part}_bias", False) for part in ("attention", "mlp"))
    if attention != mlp:
        options.wrong.append(
            f"attention_bias is {attention} and mlp_bias is {mlp}; mfun's biases are everywhere or "
            "nowhere"
        )
    return "all" if attention else "none"


def _window(options: _Options, layers: int) -> int:
    """Keys that a query sees in every block; 0 is all."""
    if options.family == "llama":
        return 0
    size = options.take("sliding_window", DEFAULTS[options.family].get("sliding_window", 4096))
    if options.family in ("mistral", "mixtral"):
        return size or 0
    asked = options.take("use_sliding_window", False)
    first = options.take("max_window_layers", 28)
    windowed = range(first, layers) if asked and size else range(0)
    kinds = options.take("layer_types", None, list)
    kinds = (
        ["sliding" if i in windowed else "full" for i in range(layers)]
        if kinds is None
        else [str(kind).removesuffix("_attention") for kind in kinds]
    )
    if (
        len({*kinds}) > 1
        or not {*kinds} <= {"sliding", "full"}
        or ("sliding" in kinds and not size)
    ):
        options.wrong.append(
            f"blocks have attention {kinds} (layer_types, use_sliding_window, max_window_layers) "
            f"with sliding_window = {size}; mfun has one window in all blocks, or none"
        )
    return size if "sliding" in kinds else 0


def _rope(options: _Options, theta: float, longest: int) -> Options:
    """Base of the rotary angles, and how they are stretched; in the old form or the new."""
    old, new = (options.take(f"rope_{key}", None, dict) for key in ("scaling", "parameters"))
    rope = dict(old or new or {})
    theta = rope.pop("rope_theta", options.take("rope_theta", theta))
    kind = rope.pop("rope_type", None) or rope.get("type") or "default"
    rope.pop("type", None)
    kind = "none" if kind == "default" else kind
    if kind not in ROPE:
        options.wrong.append(f"rope_type is {kind!r}; mfun has {', '.join(ROPE)}")
        return {}
    fields: Options = {"rope_theta": theta, "rope_scaling": kind}
    for key, (ours, default) in ROPE[kind].items():
        default = longest if ours == "rope_original" else default
        value = rope.pop(key, default) or default
        if type(value) not in (int, float):
            options.wrong.append(f"{kind} rope scaling has {key} = {value!r}, which is no number")
            value = 1
        fields[ours] = value
    options.only("partial_rotary_factor", 1.0)
    neutral = {"partial_rotary_factor": 1.0, "truncate": True}
    if kind == "yarn":
        factor = fields["rope_factor"]
        neutral["attention_factor"] = 1.0 + 0.1 * math.log(max(factor, 1.0))
    options.wrong += [
        f"rope option {key} is {value!r}, which mfun does not have"
        for key, value in rope.items()
        if value is not None and value != neutral.get(key)
    ]
    return fields


def canonical(model: ModelConfig) -> ModelConfig:
    """The same model with every field worked out; those that say nothing have their defaults.

    Example:
        >>> canonical(ModelConfig(hidden=24, heads=6, rope_factor=8.0)).head_dim
        4
    """
    default = ModelConfig()
    used = {ours for ours, _ in ROPE[model.rope_scaling].values()}
    used |= {"rope_theta"} if model.position == "rotary" else set()
    idle = {key for key in attrs.fields_dict(ModelConfig) if key.startswith("rope_")} - used
    fields = {key: getattr(default, key) for key in idle - {"rope_scaling"}}
    if "rope_original" in used:
        fields["rope_original"] = model.rope_original or model.seq_len
    return attrs.evolve(
        model, kv_heads=model.kv, head_dim=model.head_size, ffn=model.ffn_size, **fields
    )


def differences(asked: ModelConfig, had: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Fields in which two models differ that have one set of weights: field -> (asked, had).

    Dropout, the spread of initial weights, and how long sequences are in training unless positions
    are learned, change nothing that the weights mean.

    Example:
        >>> differences(ModelConfig(layers=2, dropout=0.1), ModelConfig())
        {'layers': (2, 4)}
    """
    free = {"init_std", "dropout", *(() if asked.position == "learned" else ("seq_len",))}
    a, b = (attrs.asdict(canonical(model)) for model in (asked, had))
    return {key: (a[key], b[key]) for key in a if a[key] != b[key] and key not in free}
