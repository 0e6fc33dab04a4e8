"""Hugging Face models as an outside oracle: random tiny ones, run in float64, nothing downloaded.

`hf_case(name)` gives a case: mfun's settings, written by hand, the parameters as mfun's leaves, and
the model. Its `logits` and `grads` come from Hugging Face's own code; only its casts to float32
(norms, softmax, rotary angles) are turned into casts to float64, so that 1e-10 can be asked for.
Which tensors make up a leaf is what `mfun convert` says (`mfun.convert.families`): were it wrong,
the logits would be.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import attrs
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from mfun.config import ModelConfig
from mfun.convert.families import FAMILIES, sizes_of
from mfun.convert.matching import specs_of

VOCAB, HIDDEN, LAYERS = 37, 24, 2


class DoubleTorch(types.ModuleType):
    """torch, except that it calls float64 float32."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(family: str) -> Iterator[None]:
    """Let one family's modelling code, and the rotary helpers, compute in float64 throughout."""
    double = DoubleTorch("torch")
    names = [f"transformers.models.{family}.modeling_{family}", "transformers.modeling_rope_utils"]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(importlib.import_module(name), "torch", double))
        yield


def leaves_of(family: str, model: ModelConfig, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by Hugging Face's names as mfun's leaves."""
    table, sizes = FAMILIES[family], sizes_of(model)
    rows = {path: table.row(path) for path in specs_of(model)}
    return {
        path: row.join([named[name] for name in table.names(path)], sizes)
        for path, row in rows.items()
        if row is not None
    }


@attrs.frozen
class HFCase:
    """A Hugging Face model and what it is called in mfun."""

    family: str
    settings: dict[str, dict[str, Any]]
    model: Any

    def leaves(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by Hugging Face's names as mfun's leaves."""
        return leaves_of(self.family, ModelConfig(**self.settings["model"]), named)

    @property
    def params(self) -> dict[str, Tensor]:
        """The weights as mfun's leaves."""
        named = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return self.leaves(named)

    def logits(self, tokens_bs: Tensor) -> Tensor:
        """Logits (b, s, v) by Hugging Face's code."""
        with in_double(self.family):
            return self.model(input_ids=tokens_bs, use_cache=False).logits

    def grads(self, tokens_bs: Tensor, labels_bs: Tensor) -> dict[str, Tensor]:
        """Gradients, as mfun's leaves, of the mean cross entropy over labels that are not -100."""
        loss = F.cross_entropy(self.logits(tokens_bs).flatten(0, 1), labels_bs.flatten())
        named = dict(self.model.named_parameters())
        found = torch.autograd.grad(loss, list(named.values()))
        return self.leaves(dict(zip(named, found, strict=True)))


def _gpt2(activation: str, tied: bool = True, dropout: float = 0.0, eps: float = 1e-5) -> HFCase:
    settings = {
        "vocab": VOCAB, "hidden": HIDDEN, "layers": LAYERS, "heads": 6, "ffn": 40, "seq_len": 16,
        "position": "learned", "norm": "layernorm", "bias": "all", "tied": tied,
        "activation": {"gelu_new": "gelu_tanh", "gelu": "gelu"}[activation], "dropout": dropout,
        "norm_eps": eps,
    }  # fmt: skip
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=6, n_inner=40, n_positions=16,
        activation_function=activation, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0,
        layer_norm_epsilon=eps,
    )  # fmt: skip

    return _build("gpt2", transformers.GPT2LMHeadModel, config, {"model": settings})


def _llama_like(
    family: str,
    config_class: Any,
    model_class: Any,
    *,
    heads: int = 6,
    kv: int = 2,
    size: int = 4,
    tied: bool = False,
    rope: dict[str, Any] | None = None,
    seq_len: int = 16,
    eps: float = 1e-6,
    settings: dict[str, Any] | None = None,
    **more: Any,
) -> HFCase:
    """Llama and its relatives: RMSNorm, rotary positions, SwiGLU; `more` goes to their config."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, **(rope or {})}
    ours = {
        "vocab": VOCAB, "hidden": HIDDEN, "layers": LAYERS, "heads": heads, "kv_heads": kv,
        "head_dim": size, "ffn": 40, "seq_len": seq_len, "position": "rotary", "norm": "rmsnorm",
        "norm_eps": eps, "activation": "swiglu", "bias": "none", "tied": tied,
        "rope_theta": rope["rope_theta"], **_rope_settings(rope), **(settings or {}),
    }  # fmt: skip
    config = config_class(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=kv, head_dim=size, rms_norm_eps=eps,
        max_position_embeddings=seq_len, rope_parameters=rope, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip

    return _build(family, model_class, config, {"model": ours})


def _rope_settings(rope: dict[str, Any]) -> dict[str, Any]:
    names = {
        "factor": "rope_factor",
        "low_freq_factor": "rope_low",
        "high_freq_factor": "rope_high",
        "original_max_position_embeddings": "rope_original",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
    }
    kind = rope["rope_type"]
    found = {ours: rope[theirs] for theirs, ours in names.items() if theirs in rope}
    return {"rope_scaling": "none" if kind == "default" else kind, **found}


def _build(family: str, model_class: Any, config: Any, settings: Any) -> HFCase:
    """Make the model in float64 with every weight random, biases and norms too."""
    config._attn_implementation = "eager"
    with in_double(family), torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).double().eval()
        with torch.no_grad():
            for name, p in model.named_parameters():
                centre = 1.0 if "norm" in name or ".ln_" in name else 0.0
                p.copy_(torch.randn(p.shape, dtype=torch.float64) * 0.25 + centre)
    return HFCase(family, settings, model)


def _llama(**more: Any) -> HFCase:
    return _llama_like("llama", transformers.LlamaConfig, transformers.LlamaForCausalLM, **more)


def _scaled(original: int, size: int, **rope: Any) -> HFCase:
    """Llama over 128 positions with a stretched rotary embedding."""
    rope["original_max_position_embeddings"] = original
    return _llama(size=size, seq_len=128, rope=rope)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}

CASES: dict[str, Callable[[], HFCase]] = {
    "gpt2_gelu_new": lambda: _gpt2("gelu_new"),
    "gpt2_gelu": lambda: _gpt2("gelu"),
    "gpt2_untied": lambda: _gpt2("gelu", tied=False),
    "gpt2_eps": lambda: _gpt2("gelu", eps=1e-2),
    "gpt2_dropout": lambda: _gpt2("gelu", dropout=0.25),
    "llama": lambda: _llama(),
    "llama_eps": lambda: _llama(eps=1e-2),
    "llama_tied": lambda: _llama(tied=True),
    "llama_mha": lambda: _llama(kv=6),
    "llama_mqa": lambda: _llama(kv=1),
    "llama_biases": lambda: _llama(attention_bias=True, mlp_bias=True, settings={"bias": "all"}),
    "llama_theta": lambda: _llama(size=8, rope={"rope_theta": 500000.0}),
    "llama_linear": lambda: _llama(seq_len=128, rope={"rope_type": "linear", "factor": 4.0}),
    "llama_llama3": lambda: _scaled(16, 4, **LLAMA3),
    "llama_llama3_wide": lambda: _scaled(64, 16, **LLAMA3),
    "llama_yarn": lambda: _scaled(64, 16, **YARN, factor=2.0),
    "llama_yarn_betas": lambda: _scaled(64, 16, **YARN, factor=2.0, beta_fast=2.0, beta_slow=0.25),
    "llama_yarn_clamped": lambda: _scaled(
        64, 4, **YARN, factor=2.0, rope_theta=10.0, beta_slow=0.25
    ),
    "llama_yarn_flat": lambda: _scaled(16, 4, **YARN, factor=8.0, beta_fast=64.0, beta_slow=32.0),
    "qwen2": lambda: _llama_like(
        "qwen2", transformers.Qwen2Config, transformers.Qwen2ForCausalLM, settings={"bias": "qkv"}
    ),
    "qwen3": lambda: _llama_like(
        "qwen3",
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        size=8,
        eps=1e-2,
        settings={"qk_norm": True},
    ),
    "mistral": lambda: _llama_like(
        "mistral",
        transformers.MistralConfig,
        transformers.MistralForCausalLM,
        sliding_window=5,
        settings={"sliding_window": 5},
    ),
}


def hf_case(name: str) -> HFCase:
    """The case of that name; the same weights on every call."""
    return CASES[name]()
