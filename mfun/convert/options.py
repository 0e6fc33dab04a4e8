"""The options of `config.json`, as tables: our field for each, defaults, and what says nothing."""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]

SHARED: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab", 32000),
    "hidden_size": ("hidden", 4096),
    "num_hidden_layers": ("layers", 32),
    "num_attention_heads": ("heads", 32),
    "num_key_value_heads": ("kv_heads", None),
    "head_dim": ("head_dim", None),
    "intermediate_size": ("ffn", 11008),
    "max_position_embeddings": ("seq_len", 2048),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tied", False),
}
"""Option -> our field and Llama's default; None is "work it out"."""

_QWEN: Options = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
DEFAULTS: dict[str, Options] = {
    "llama": {},
    "mistral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "sliding_window": 4096,
    },
    "qwen2": {**_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
}
"""Where a family's defaults are not Llama's."""

GPT2: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab", 50257),
    "n_embd": ("hidden", 768),
    "n_layer": ("layers", 12),
    "n_head": ("heads", 12),
    "n_inner": ("ffn", None),
    "n_positions": ("seq_len", 1024),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tied", True),
}
GPT2_DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2_GELUS = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python": "gelu",
}

EVERYWHERE: Options = {
    "is_encoder_decoder": False,
    "is_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
}
"""Options of every family of which mfun has one value, which is also their default."""
ONLY: dict[str, Options] = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    "llama": {"hidden_act": "silu", "attention_dropout": 0.0},
    "mistral": {"hidden_act": "silu", "attention_dropout": 0.0},
    "qwen2": {"hidden_act": "silu", "attention_dropout": 0.0},
    "qwen3": {"hidden_act": "silu", "attention_dropout": 0.0, "attention_bias": False},
    "mixtral": {"hidden_act": "silu", "attention_dropout": 0.0},
}
"""Such options of a family."""

OPTIONAL = {"num_key_value_heads", "head_dim", "n_inner", "sliding_window"}
"""Options that may be null, whatever their default."""

IGNORED = {
    *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache"),
    *("_name_or_path", "_commit_hash", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("sep_token_id", "decoder_start_token_id", "task_specific_params", "pretraining_tp"),
    *("_attn_implementation_autoset", "attn_implementation", "gradient_checkpointing"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_bfloat16"),
    *("id2label", "label2id", "finetuning_task", "problem_type", "tokenizer_class", "prefix"),
    *("chunk_size_feed_forward", "return_dict_in_generate", "remove_invalid_values"),
    *("output_scores", "unsloth_version", "unsloth_fixed", "keys_to_ignore_at_inference"),
    # of one family
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "reorder_and_upcast_attn", "n_ctx"),
    *("num_experts_per_tok", "num_local_experts", "num_experts"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}
"""Options that say nothing about the values a dense model computes."""

ROPE: dict[str, dict[str, tuple[str, Any]]] = {
    "none": {},
    "linear": {"factor": ("rope_factor", None)},
    "llama3": {
        "factor": ("rope_factor", None),
        "low_freq_factor": ("rope_low", None),
        "high_freq_factor": ("rope_high", None),
        "original_max_position_embeddings": ("rope_original", None),
    },
    "yarn": {
        "factor": ("rope_factor", None),
        "original_max_position_embeddings": ("rope_original", None),
        "beta_fast": ("rope_beta_fast", 32.0),
        "beta_slow": ("rope_beta_slow", 1.0),
    },
}
"""How rotary angles are stretched: the options of each way, our fields, defaults."""
