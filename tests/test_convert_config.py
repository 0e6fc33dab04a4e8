"""config.json in and out: options by transformers' own defaults, refusals by name, round trips."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import transformers
from hf import CASES, hf_case
from hypothesis import given
from hypothesis import strategies as st

from mfun.config import PRESETS, ModelConfig
from mfun.convert import FAMILIES, HFError, family_of, read_config, write_config
from mfun.convert.options import DEFAULTS, GPT2, SHARED
from mfun.convert.read_config import canonical, differences

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 64,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen2"}
GPT: dict[str, Any] = {"model_type": "gpt2", "n_embd": 24, "n_head": 6, "n_layer": 2}


@pytest.mark.parametrize("name", CASES)
def test_options_are_those_written_by_hand(name: str) -> None:
    """Every case's config.json gives the settings that its values were compared with."""
    case = hf_case(name)
    _, model = read_config(case.model.config.to_dict())
    settings = case.settings["model"]
    assert {key: getattr(model, key) for key in settings} == settings


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.unbuilt])
def test_options_left_out_have_the_defaults_of_transformers(name: str) -> None:
    """The empty file, and a full one with each option taken out in turn, are what transformers
    makes of it."""
    table = GPT2 if name == "gpt2" else SHARED
    keys = {*table, *DEFAULTS.get(name, {}), "rope_theta"}
    small = {} if name == "gpt2" else {**LLAMA, "hidden_size": 32, "num_attention_heads": 8}
    full = transformers.AutoConfig.for_model(**{**small, "model_type": name}).to_dict()
    full.pop("layer_types", None)  # as many as there are layers
    for taken in ("", *keys):
        given = {k: v for k, v in full.items() if k != taken and (taken or k == "model_type")}
        given["model_type"] = name
        whole = transformers.AutoConfig.for_model(**given).to_dict()
        assert read_config(given)[1] == read_config(whole)[1], taken


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
            {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
                },
            },
            {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e5,
            },
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
        ),
    ],
)  # fmt: skip
def test_both_ways_of_writing_rotary_options(old: dict[str, Any], new: dict[str, Any]) -> None:
    """rope_theta beside rope_scaling, as before version 5, and all in rope_parameters (row 119)."""
    a = read_config({**LLAMA, **old})[1]
    assert a == read_config({**LLAMA, "rope_parameters": new})[1]
    assert a.rope_theta == new["rope_theta"] and a.rope_factor == new.get("factor", 1.0)
    assert a.rope_original == new.get("original_max_position_embeddings", 0)


def rope(**options: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_parameters": {"rope_theta": 1e4, **options}}


YARN = {"rope_type": "yarn", "factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llamma"}, "model_type is 'llamma'.*did you mean 'llama'"),
        ({}, "model_type is None"),
        ({**LLAMA, "model_type": "gemma2"}, "model_type is 'gemma2', and mfun knows gpt2, llama"),
        ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config is"),
        ({**LLAMA, "attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0, which mfun"),
        ({**LLAMA, "hidden_act": "relu"}, "hidden_act is 'relu', and mfun has 'silu' only"),
        ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({**LLAMA, "attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        ({**LLAMA, "mlp_bias": True}, "attention_bias is False and mlp_bias is True"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({**LLAMA, "hidden_size": "24"}, "hidden_size is '24', which is no int"),
        ({**LLAMA, "rms_norm_eps": True}, "rms_norm_eps is True, which is no float"),
        ({**LLAMA, "num_hidden_layers": None}, "num_hidden_layers is None"),
        ({**LLAMA, "num_hidden_layers": 0}, "model.layers is 0"),
        ({**LLAMA, "num_attention_heads": 5}, "24 of a llama model is no multiple of its 5 heads"),
        ({**LLAMA, "rope_scaling": [1]}, r"rope_scaling is \[1\], which is no dict"),
        (rope(rope_type="dynamic", factor=2.0), "rope_type is 'dynamic'"),
        (rope(rope_type="longrope", factor=2.0), "rope_type is 'longrope'"),
        (rope(rope_type="linear"), "linear rope scaling has factor = None"),
        (rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0), "has high_freq_factor = None"),
        (rope(**YARN, attention_factor=2.0), "rope option attention_factor is 2.0"),
        (rope(**YARN, mscale=0.7, mscale_all_dim=0.7), "rope option mscale is 0.7"),
        (rope(**YARN, truncate=False), "rope option truncate is False"),
        (rope(rope_type="default", partial_rotary_factor=0.25), "rope option partial_rotary"),
        ({**QWEN, **WINDOW, "max_window_layers": 1}, "'full', 'sliding'.*sliding_window = 8"),
        ({**QWEN, "layer_types": ["chunked_attention"] * 2}, "chunked"),
        ({**QWEN, "model_type": "qwen3", "attention_bias": True}, "attention_bias is True"),
        ({**LLAMA, "model_type": "mixtral"}, "experts and their router.*num_local_experts = 8"),
        ({**GPT, "attn_pdrop": 0.0}, "attn_pdrop.*differ, and mfun drops everywhere at one rate"),
        ({**GPT, "activation_function": "relu"}, "activation_function is 'relu'"),
        ({**GPT, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is T"),
        ({**GPT, "scale_attn_weights": False}, "scale_attn_weights is False"),
        ({**GPT, "add_cross_attention": True}, "add_cross_attention is True"),
        ({**GPT, "n_head": 5}, "24 of a gpt2 model is no multiple of its 5 heads"),
    ],
)  # fmt: skip
def test_what_mfun_does_not_have_is_named(config: dict[str, Any], says: str) -> None:
    """Architectures and options, each by its name; never passed over."""
    with pytest.raises(HFError, match=says):
        read_config(config)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(HFError, match=r"hidden_act.*new_option"):
        read_config({**LLAMA, "hidden_act": "relu", "new_option": 1})


def test_a_window_in_every_block_is_one_window() -> None:
    """Qwen's window is from a block on: from block 0 it is everywhere, past the last nowhere."""
    asked = {**QWEN, **WINDOW, "max_window_layers": 0}
    assert read_config(asked)[1].sliding_window == 8
    assert read_config({**asked, "max_window_layers": 2})[1].sliding_window == 0
    assert read_config({**asked, "use_sliding_window": False})[1].sliding_window == 0
    types = {"max_window_layers": 2, "layer_types": ["sliding_attention"] * 2}
    assert read_config({**asked, **types})[1].sliding_window == 8
    mistral = {**LLAMA, "model_type": "mistral"}
    assert read_config(mistral)[1].sliding_window == 4096
    assert read_config({**mistral, "sliding_window": None})[1].sliding_window == 0


@st.composite
def expressible(draw: st.DrawFn) -> ModelConfig:
    """A model that some family has."""
    pick = lambda *options: draw(st.sampled_from(options))  # noqa: E731
    heads, size = pick(2, 4), pick(2, 6)
    shared = {
        "layers": draw(st.integers(1, 3)), "hidden": heads * pick(3, 8), "heads": heads,
        "ffn": pick(0, 5), "vocab": draw(st.integers(1, 99)), "seq_len": pick(8, 32),
        "tied": draw(st.booleans()), "norm_eps": pick(1e-6, 1e-2), "init_std": pick(0.02, 0.1),
    }  # fmt: skip
    if draw(st.booleans()):
        gelu = pick("gelu", "gelu_tanh")
        return ModelConfig(**shared, bias="all", activation=gelu, dropout=pick(0.0, 0.1))
    scaling = pick("none", "linear", "llama3", "yarn")
    kind = pick("llama", "biased", "mistral", "qwen2", "qwen3")
    if kind == "biased":
        size = 0
    return ModelConfig(
        **shared,
        head_dim=size,
        kv_heads=pick(0, 1, heads),
        position="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias="all" if kind == "biased" else "qkv" if kind == "qwen2" else "none",
        qk_norm=kind == "qwen3",
        sliding_window=pick(0, 5) if kind in ("mistral", "qwen2", "qwen3") else 0,
        rope_theta=pick(1e4, 5e5),
        rope_scaling=scaling,
        rope_factor=1.0 if scaling == "none" else pick(2.0, 8.0),
        rope_original=pick(0, 4),
        rope_beta_fast=pick(32.0, 4.0),
    )


@given(expressible())
def test_a_model_written_for_its_family_is_read_back(model: ModelConfig) -> None:
    """Field by field, and transformers' own reading of the file says the same."""
    family = family_of(model)
    written = write_config(family, model, "float32")
    again, back = read_config(written)
    assert again is family and back == canonical(model)
    whole = transformers.AutoConfig.for_model(**written)
    assert read_config(whole.to_dict())[1] == back
    assert whole.hidden_size == model.hidden and whole.num_attention_heads == model.heads


PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
        "n_head": 12, "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True,
        "vocab_size": 128256,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_the_presets(name: str) -> None:
    """Files as they are published, with all that is beside the point in them, are read as the
    presets of those models."""
    assert differences(read_config(PUBLISHED[name])[1], PRESETS[name].model) == {}


def test_presets_have_their_families() -> None:
    found = {name: family_of(PRESETS[name].model).name for name in PRESETS if name != "tiny"}
    assert found.pop("megatron-2.8b") == "gpt2"
    assert {*found.values()} == {"gpt2", "llama", "mistral", "qwen2", "qwen3"}
    assert all(name.startswith(family.rstrip("0123456789")) for name, family in found.items())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"position": "none"}, "model.position is 'none', and there"),
        ({"norm": "layernorm"}, "model.norm is 'layernorm', and there 'rmsnorm'"),
        ({"activation": "gelu"}, "model.activation is 'gelu', and there 'swiglu'"),
        ({"qk_norm": True, "bias": "qkv"}, "model.(bias|qk_norm) is"),
        ({"bias": "all", "sliding_window": 4}, "model.(bias|sliding_window) is"),
    ],
)
def test_a_model_that_no_family_has_is_refused(change: dict[str, Any], says: str) -> None:
    """The field that is in the way is named."""
    llama = PRESETS["llama3-8b"].model
    with pytest.raises(HFError, match=says):
        family_of(attrs.evolve(llama, **change))


def test_differences_are_of_what_weights_mean() -> None:
    """Learned positions are weights, so their number counts; rotary ones are not."""
    llama, gpt2 = PRESETS["llama3-8b"].model, PRESETS["gpt2"].model
    assert not differences(attrs.evolve(llama, seq_len=512, dropout=0.1, init_std=0.5), llama)
    assert differences(attrs.evolve(gpt2, seq_len=512), gpt2) == {"seq_len": (512, 1024)}
    scaled = PRESETS["llama3.1-8b"].model
    assert not differences(attrs.evolve(scaled, seq_len=512), scaled)
    unsaid = attrs.evolve(scaled, rope_original=0)
    assert differences(attrs.evolve(unsaid, seq_len=512), unsaid) == {
        "rope_original": (512, 131072)
    }
