"""Which of a folder's tensors make up each parameter; a tensor that is missing, unexpected or of
another shape is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from mfun import tree
from mfun.config import Config, ModelConfig
from mfun.convert.families import Family, HFError, sizes_of
from mfun.inspect.weights import Weight, some
from mfun.models.specs import block_specs, embedding_specs, head_specs
from mfun.spec import ParamSpec

CHUNK = 1 << 24
"""Elements that are compared at a time."""


@attrs.frozen
class Leaf:
    """A parameter and what it is made of.

    Args:
        path: of the parameter.
        family: whose table says how.
        sizes: of the dim letters.
        weights: its tensors.
    """

    path: str
    family: Family
    sizes: Mapping[str, int]
    weights: tuple[Weight, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Its type."""
        return self.weights[0].torch_dtype

    def read(self) -> Tensor:
        """The parameter."""
        row = self.family.row(self.path)
        assert row is not None, self.path
        return row.join([weight.read() for weight in self.weights], self.sizes)


def specs_of(model: ModelConfig) -> dict[str, ParamSpec]:
    """Every parameter of a model by path, in its order."""
    config = Config(model=model)
    blocks = (block_specs(config, i) for i in range(model.layers))
    return tree.flatten(tree.merge(embedding_specs(config), *blocks, head_specs(config)))


def match(family: Family, model: ModelConfig, weights: Mapping[str, Weight]) -> dict[str, Leaf]:
    """The leaves of a model in the tensors of a folder.

    Args:
        family: of the folder.
        model: by its `config.json`.
        weights: its tensors by name.

    Raises:
        HFError: naming tensors that are missing, that nothing asks for, of a shape or type that
            does not fit; a second table where the embedding is the head, if the two differ.
    """
    left, wrong, sizes = dict(_full_names(family, weights)), [], sizes_of(model)
    out = {}
    for path in specs_of(model):
        names = family.names(path)
        wrong += _misfits(family, path, names, left, sizes)
        if all(name in left for name in names):
            out[path] = Leaf(path, family, sizes, tuple(left[name] for name in names))
    for path in out:
        for name in family.names(path):
            left.pop(name, None)
    if model.tied and "embed.tokens" in out:
        wrong += _second_table(left, out["embed.tokens"].weights[0])
    wrong += [_unexpected(family, name) for name in left]
    if wrong:
        raise HFError(f"the tensors are not those of its config.json: {some(wrong)}")
    return out


def _full_names(family: Family, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """By the names of a model with its head, without what is no parameter."""
    start = "" if any(name.startswith(family.prefix) for name in weights) else family.prefix
    named = {start + n if not n.startswith("lm_head.") else n: w for n, w in weights.items()}
    skipped = re.compile("|".join(family.skipped))
    return {name: w for name, w in named.items() if not skipped.fullmatch(name)}


def _misfits(
    family: Family,
    path: str,
    names: tuple[str, ...],
    weights: Mapping[str, Weight],
    sizes: Mapping[str, int],
) -> list[str]:
    """What is wrong with the tensors of one leaf."""
    row = family.row(path)
    assert row is not None, path
    shape, found = row.their_shape(sizes), [weights[name] for name in names if name in weights]
    wrong = [f"{name} is missing" for name in names if name not in weights]
    wrong += [
        f"{name} has shape {[*weights[name].shape]} and the model needs {[*shape]}"
        for name in names
        if name in weights and weights[name].shape != shape
    ]
    kinds = {weight.dtype for weight in found}
    if len(kinds) > 1 or not all(kind.startswith(("float", "bfloat")) for kind in kinds):
        wrong.append(f"{' and '.join(names)} are of type {' and '.join(sorted(kinds))}")
    return wrong


def _second_table(left: dict[str, Weight], tokens: Weight) -> list[str]:
    """A head that some writers store beside the embedding that it is; taken out if it is that."""
    head = left.get("lm_head.weight")
    if head is None:
        return []
    del left["lm_head.weight"]
    same = (head.dtype, head.shape) == (tokens.dtype, tokens.shape) and all(
        torch.equal(_bits(head, at), _bits(tokens, at)) for at in range(0, head.numel, CHUNK)
    )
    return [] if same else ["lm_head.weight is not the embedding, though tie_word_embeddings is on"]


def _bits(weight: Weight, at: int) -> Tensor:
    return weight.run(at, min(CHUNK, weight.numel - at)).view(torch.uint8)


def _unexpected(family: Family, name: str) -> str:
    for pattern, what in family.unbuilt.items():
        if re.match(pattern, name):
            return f"{name} belongs to {what}, which mfun does not build yet"
    return f"{name} is not expected"
