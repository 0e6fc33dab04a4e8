"""A `ModelConfig` as the `config.json` of a family that can express it."""

from __future__ import annotations

from mfun.config import ModelConfig
from mfun.convert.families import FAMILIES, Family, HFError
from mfun.convert.options import GPT2, GPT2_DROPS, GPT2_GELUS, ONLY, ROPE, SHARED, Options
from mfun.convert.read_config import canonical, differences, read_model


def write_config(family: Family, model: ModelConfig, dtype: str) -> Options:
    """The contents of `config.json`; what the family cannot express is lost (`differences`).

    Args:
        family: to write for.
        model: to write.
        dtype: of the tensors, by torch's name.

    Example:
        >>> write_config(FAMILIES["gpt2"], ModelConfig(hidden=24, heads=6), "float32")["n_embd"]
        24
    """
    model = canonical(model)
    table, special = (GPT2, _gpt2) if family.name == "gpt2" else (SHARED, _dense)
    return {
        "architectures": [family.model],
        "model_type": family.name,
        **{key: getattr(model, ours) for key, (ours, _) in table.items()},
        **special(family.name, model),
        **ONLY[family.name],
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
    }


def _gpt2(name: str, model: ModelConfig) -> Options:
    gelu = next((theirs for theirs, ours in GPT2_GELUS.items() if ours == model.activation), "gelu")
    return {"activation_function": gelu, **dict.fromkeys(GPT2_DROPS, model.dropout)}


def _dense(name: str, model: ModelConfig) -> Options:
    """In the form that transformers before and after version 5 reads."""
    out: Options = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if model.rope_scaling != "none":
        names = {key: getattr(model, ours) for key, (ours, _) in ROPE[model.rope_scaling].items()}
        out["rope_scaling"] = {"rope_type": model.rope_scaling, **names}
    if name == "llama":
        return {**out, **dict.fromkeys(("attention_bias", "mlp_bias"), model.bias == "all")}
    window = model.sliding_window or None
    if name.startswith("qwen"):
        return {
            **out,
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": 0 if window else model.layers,
        }
    return {**out, "sliding_window": window}


def family_of(model: ModelConfig) -> Family:
    """The first family that can express a model.

    Raises: HFError naming what is in the way of the one that comes nearest.

    Example:
        >>> family_of(ModelConfig(bias="all")).name
        'gpt2'
    """
    nearest: tuple[int, str] | None = None
    for family in FAMILIES.values():
        if family.unbuilt:
            continue
        problems = _problems(family, model)
        if not problems:
            return family
        if nearest is None or len(problems) < nearest[0]:
            nearest = len(problems), f"{family.name}: {'; '.join(problems)}"
    assert nearest is not None
    raise HFError(
        f"no Hugging Face family that mfun knows has this model; the nearest is {nearest[1]}"
    )


def _problems(family: Family, model: ModelConfig) -> list[str]:
    try:
        back = read_model(family, write_config(family, model, "float32"))
    except HFError as error:
        return [str(error)]
    return [
        f"model.{key} is {asked!r}, and there {had!r}"
        for key, (asked, had) in differences(model, back).items()
    ]
