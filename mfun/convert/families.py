"""The families of Hugging Face models that mfun knows, as tables: which tensors make up which leaf.

A leaf of mfun is one tensor of theirs, or several stacked along a first dim (gate and up of a gated
MLP; queries, keys and values), with its dims taken apart. The form is written as einops writes it,
from their dims to ours; read backwards it is the export. mfun's rotary embedding turns the same
pairs as theirs (j and j + k/2 of a head), so no row is permuted.

Dim letters: v vocabulary, s sequence, d model, h query heads, g key and value heads, k head dim,
f feed-forward, n how many are stacked (in one tensor: queries, keys and values).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from einops import rearrange
from torch import Tensor

from mfun.checkpoint import CheckpointError
from mfun.config import ModelConfig


class HFError(CheckpointError):
    """A Hugging Face folder that cannot be read or made; the message names what and why."""


@attrs.frozen
class Row:
    """What stands for one leaf of mfun.

    Args:
        names: of their tensors, `{i}` being the block's number.
        form: dims of each of them, an arrow, dims of the leaf; of one part of it, where several
            are stacked.

    Example:
        >>> Row(("k", "v"), "(g k) d -> g k d").their_shape({"g": 2, "k": 4, "d": 3})
        (8, 3)
    """

    names: tuple[str, ...]
    form: str

    def named(self, block: str) -> tuple[str, ...]:
        """The tensors' names in a block."""
        return tuple(name.replace("{i}", block) for name in self.names)

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of each of their tensors."""
        shape = []
        for group in re.findall(r"\(.*?\)|\w+", self.form.partition(" -> ")[0]):
            size = 1
            for letter in re.findall(r"\w+", group):
                size *= sizes[letter]
            shape.append(size)
        return tuple(shape)

    def join(self, tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """The leaf of their tensors.

        Example:
            >>> import torch
            >>> row = Row(("gate", "up"), "f d -> f d")
            >>> row.join([torch.zeros(3, 2), torch.ones(3, 2)], {"f": 3, "d": 2}).shape
            torch.Size([2, 3, 2])
        """
        theirs, _, ours = self.form.partition(" -> ")
        if len(self.names) == 1:
            return rearrange(tensors[0], self.form, **self._used(sizes))
        return rearrange([*tensors], f"n {theirs} -> n {ours}", **self._used(sizes))

    def split(self, leaf: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
        """Their tensors of the leaf: the inverse of `join`."""
        theirs, _, ours = self.form.partition(" -> ")
        if len(self.names) == 1:
            return [rearrange(leaf, f"{ours} -> {theirs}", **self._used(sizes))]
        stacked = rearrange(leaf, f"n {ours} -> n {theirs}", **self._used(sizes))
        return [*stacked.unbind(0)]

    def _used(self, sizes: Mapping[str, int]) -> dict[str, int]:
        return {letter: n for letter, n in sizes.items() if re.search(rf"\b{letter}\b", self.form)}


@attrs.frozen(kw_only=True)
class Family:
    """A kind of model.

    Args:
        name: its `model_type`.
        model: its class in transformers, with a head.
        bare: the class without.
        prefix: of its tensors' names, which a folder of the model without its head leaves out.
        rows: by path of the leaf.
        skipped: patterns of names that old folders hold and that are no parameters.
        unbuilt: patterns of names of parameters that mfun has no layer for yet, and what they are.
    """

    name: str
    model: str
    bare: str
    prefix: str
    rows: Mapping[str, Row]
    skipped: tuple[str, ...] = ()
    unbuilt: Mapping[str, str] = attrs.field(factory=dict)

    def row(self, path: str) -> Row | None:
        """The row of a leaf."""
        return self.rows.get(_any_block(path))

    def names(self, path: str) -> tuple[str, ...]:
        """The names of a leaf's tensors.

        Example:
            >>> FAMILIES["llama"].names("blocks.3.mlp.up")
            ('model.layers.3.mlp.gate_proj.weight', 'model.layers.3.mlp.up_proj.weight')

        Raises:
            HFError: the family has no such parameter.
        """
        row, block = self.row(path), _BLOCK.match(path)
        if row is None:
            raise HFError(f"a {self.name} model has nothing like {path}")
        return row.named(block[1] if block else "")


_BLOCK = re.compile(r"blocks\.(\d+)\.")


def _any_block(path: str) -> str:
    return _BLOCK.sub("blocks.{i}.", path)


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Sizes of the dim letters."""
    return {
        "v": model.vocab,
        "s": model.seq_len,
        "d": model.hidden,
        "h": model.heads,
        "g": model.kv,
        "k": model.head_size,
        "f": model.ffn_size,
        "n": 3,
    }


_GPT2 = "transformer.h.{i}."
_GPT2_ROWS = {
    "embed.tokens": Row(("transformer.wte.weight",), "v d -> v d"),
    "embed.positions": Row(("transformer.wpe.weight",), "s d -> s d"),
    "blocks.{i}.norm1.weight": Row((f"{_GPT2}ln_1.weight",), "d -> d"),
    "blocks.{i}.norm1.bias": Row((f"{_GPT2}ln_1.bias",), "d -> d"),
    # Their matrices are stored as (in, out); the columns of c_attn are q, then k, then v, by head.
    "blocks.{i}.attn.qkv": Row((f"{_GPT2}attn.c_attn.weight",), "d (n h k) -> n h k d"),
    "blocks.{i}.attn.qkv_bias": Row((f"{_GPT2}attn.c_attn.bias",), "(n h k) -> n h k"),
    "blocks.{i}.attn.out": Row((f"{_GPT2}attn.c_proj.weight",), "(h k) d -> d h k"),
    "blocks.{i}.attn.out_bias": Row((f"{_GPT2}attn.c_proj.bias",), "d -> d"),
    "blocks.{i}.norm2.weight": Row((f"{_GPT2}ln_2.weight",), "d -> d"),
    "blocks.{i}.norm2.bias": Row((f"{_GPT2}ln_2.bias",), "d -> d"),
    "blocks.{i}.mlp.up": Row((f"{_GPT2}mlp.c_fc.weight",), "d f -> f d"),
    "blocks.{i}.mlp.up_bias": Row((f"{_GPT2}mlp.c_fc.bias",), "f -> f"),
    "blocks.{i}.mlp.down": Row((f"{_GPT2}mlp.c_proj.weight",), "f d -> d f"),
    "blocks.{i}.mlp.down_bias": Row((f"{_GPT2}mlp.c_proj.bias",), "d -> d"),
    "final_norm.weight": Row(("transformer.ln_f.weight",), "d -> d"),
    "final_norm.bias": Row(("transformer.ln_f.bias",), "d -> d"),
    "head.weight": Row(("lm_head.weight",), "v d -> v d"),
}

_LLAMA = "model.layers.{i}."
_ATTN = f"{_LLAMA}self_attn."
_Q, _K, _V, _O = (f"{_ATTN}{x}_proj" for x in "qkvo")
_GATE, _UP, _DOWN = (f"{_LLAMA}mlp.{x}_proj" for x in ("gate", "up", "down"))
_DENSE_ROWS = {
    "embed.tokens": Row(("model.embed_tokens.weight",), "v d -> v d"),
    "blocks.{i}.norm1.weight": Row((f"{_LLAMA}input_layernorm.weight",), "d -> d"),
    "blocks.{i}.attn.qkv": Row(
        (f"{_Q}.weight", f"{_K}.weight", f"{_V}.weight"), "(h k) d -> h k d"
    ),
    "blocks.{i}.attn.qkv_bias": Row((f"{_Q}.bias", f"{_K}.bias", f"{_V}.bias"), "(h k) -> h k"),
    "blocks.{i}.attn.q": Row((f"{_Q}.weight",), "(h k) d -> h k d"),
    "blocks.{i}.attn.q_bias": Row((f"{_Q}.bias",), "(h k) -> h k"),
    "blocks.{i}.attn.kv": Row((f"{_K}.weight", f"{_V}.weight"), "(g k) d -> g k d"),
    "blocks.{i}.attn.kv_bias": Row((f"{_K}.bias", f"{_V}.bias"), "(g k) -> g k"),
    "blocks.{i}.attn.q_norm": Row((f"{_ATTN}q_norm.weight",), "k -> k"),
    "blocks.{i}.attn.k_norm": Row((f"{_ATTN}k_norm.weight",), "k -> k"),
    "blocks.{i}.attn.out": Row((f"{_O}.weight",), "d (h k) -> d h k"),
    "blocks.{i}.attn.out_bias": Row((f"{_O}.bias",), "d -> d"),
    "blocks.{i}.norm2.weight": Row((f"{_LLAMA}post_attention_layernorm.weight",), "d -> d"),
    "final_norm.weight": Row(("model.norm.weight",), "d -> d"),
    "head.weight": Row(("lm_head.weight",), "v d -> v d"),
}
_LLAMA_ROWS = _DENSE_ROWS | {
    "blocks.{i}.mlp.up": Row((f"{_GATE}.weight", f"{_UP}.weight"), "f d -> f d"),
    "blocks.{i}.mlp.up_bias": Row((f"{_GATE}.bias", f"{_UP}.bias"), "f -> f"),
    "blocks.{i}.mlp.down": Row((f"{_DOWN}.weight",), "d f -> d f"),
    "blocks.{i}.mlp.down_bias": Row((f"{_DOWN}.bias",), "d -> d"),
}
_ANGLES = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _llama_like(name: str, start: str, **more: Any) -> Family:
    return Family(
        **{
            "name": name,
            "model": f"{start}ForCausalLM",
            "bare": f"{start}Model",
            "prefix": "model.",
            "rows": _LLAMA_ROWS,
            "skipped": _ANGLES,
            **more,
        }
    )


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="gpt2",
            model="GPT2LMHeadModel",
            bare="GPT2Model",
            prefix="transformer.",
            rows=_GPT2_ROWS,
            skipped=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        ),
        _llama_like("llama", "Llama"),
        _llama_like("mistral", "Mistral"),
        _llama_like("qwen2", "Qwen2"),
        _llama_like("qwen3", "Qwen3"),
        _llama_like(
            "mixtral",
            "Mixtral",
            rows=_DENSE_ROWS,
            unbuilt={r"model\.layers\.\d+\.(block_sparse_moe|mlp)\.": "experts and their router"},
        ),
    )
}
"""By `model_type`, in the order in which an export tries them."""
