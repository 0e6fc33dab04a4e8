"""An mfun checkpoint as a Hugging Face folder, tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun.checkpoint import CheckpointError, Disk
from mfun.checkpoint.format import header
from mfun.config import ModelConfig, from_toml
from mfun.convert.families import Family, HFError, sizes_of
from mfun.convert.folder import draft, keep_beside, origins, refuse_used, tensor_bytes
from mfun.convert.importing import Converted, Told, _nothing
from mfun.convert.matching import specs_of
from mfun.convert.read_config import canonical, differences, read_config
from mfun.convert.write_config import family_of, write_config
from mfun.inspect.source import Source, Whole, open_source
from mfun.inspect.weights import MANY, ONE, read_json, some

SHARD = 5_000_000_000
"""Bytes of tensors in a file, beyond which the next one is begun."""


@attrs.frozen
class Theirs:
    """One tensor to be written.

    Args:
        path: of the leaf that holds it.
        part: which of the leaf's tensors it is.
        dtype: by torch's name.
        shape: of the tensor.
    """

    path: str
    part: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def to_hf(
    run: Path,
    out: Path,
    *,
    like: Path | None = None,
    dtype: str | None = None,
    shard: int = SHARD,
    told: Told = _nothing,
) -> Converted:
    """Write a folder that `transformers` reads.

    No more than two parameters are in memory at a time. The folder gets its name when all of it is
    on the disk.

    Args:
        run: a run's folder (its newest checkpoint), a converted one, or one checkpoint.
        out: to be made.
        like: a Hugging Face folder whose config.json and tokenizer it gets; by default those that
            the model was converted from, if it was.
        dtype: torch's name of the tensors' type; by default each keeps its own.
        shard: most bytes of tensors in a file, unless one tensor alone is larger.
        told: called with each tensor and its bytes when it is written.

    Returns: what was written.

    Raises:
        HFError: no family has such a model, or `like` is another model; each field is named.
        CheckpointError: `run` holds no whole checkpoint of it.
    """
    refuse_used(out)
    source, model = _model_at(run)
    like = like or _origin(run, source)
    family, settings = _settings(model, like)
    leaves = _leaves(source, model)
    theirs = _theirs(family, model, leaves, dtype)
    settings["torch_dtype"] = theirs[family.names("embed.tokens")[0]].dtype
    settings.pop("dtype", None)
    with draft(out) as made:
        if like is not None:
            keep_beside(like, made)
        text = json.dumps(settings, indent=2, sort_keys=True) + "\n"
        (made / "config.json").write_text(text, encoding="utf-8")
        _write(made, theirs, _reader(family, model, leaves, theirs), shard, told)
    return Converted(family.name, model, len(theirs), sum(one.nbytes for one in theirs.values()))


def _model_at(run: Path) -> tuple[Source, ModelConfig]:
    source = open_source(run)
    if source.index is None:
        raise CheckpointError(
            f"{run} is no checkpoint of mfun (it is {source.kind}); name a run's folder"
        )
    return source, canonical(from_toml(source.index.config, str(source.path)).model)


def _origin(run: Path, source: Source) -> Path | None:
    """What stood beside the weights that the model was converted from, or trained on from."""
    assert source.index is not None
    places = origins(run, from_toml(source.index.config))
    return next((place for place in places if (place / "config.json").is_file()), None)


def _settings(model: ModelConfig, like: Path | None) -> tuple[Family, dict[str, Any]]:
    """The family, and the contents of config.json."""
    if like is None:
        family = family_of(model)
        return family, write_config(family, model, "float32")
    given = read_json(like / "config.json")
    family, theirs = read_config(given)
    apart = differences(model, theirs)
    if apart:
        listed = "; ".join(f"{key} is {a!r}, and there {b!r}" for key, (a, b) in apart.items())
        raise HFError(f"{like} is another model: {listed}; name one that fits by --like")
    return family, given


def _leaves(source: Source, model: ModelConfig) -> dict[str, Whole]:
    """The parameters of a checkpoint."""
    specs = specs_of(model)
    found = {p: source.tensors[f"params.{p}"] for p in specs if f"params.{p}" in source.tensors}
    wrong = [path for path in specs if path not in found or found[path].shape != specs[path].shape]
    if wrong:
        raise CheckpointError(f"{source.path} does not hold {some(wrong)} as the model has them")
    return found


def _theirs(
    family: Family, model: ModelConfig, leaves: Mapping[str, Whole], dtype: str | None
) -> dict[str, Theirs]:
    """What is written, by name."""
    out, sizes = {}, sizes_of(model)
    for path, leaf in leaves.items():
        row = family.row(path)
        assert row is not None, path
        for part, name in enumerate(family.names(path)):
            out[name] = Theirs(path, part, dtype or leaf.dtype, row.their_shape(sizes))
    return out


def _reader(
    family: Family,
    model: ModelConfig,
    leaves: Mapping[str, Whole],
    theirs: Mapping[str, Theirs],
) -> Callable[[str], Tensor]:
    """name -> tensor; a leaf is read once for its parts, which stand near to each other."""
    sizes = sizes_of(model)

    @lru_cache(maxsize=2)
    def parts(path: str) -> list[Tensor]:
        row = family.row(path)
        assert row is not None, path
        return row.split(leaves[path].read(), sizes)

    def read(name: str) -> Tensor:
        one = theirs[name]
        return parts(one.path)[one.part].to(getattr(torch, one.dtype))

    return read


def files_of(theirs: Mapping[str, Theirs], shard: int) -> dict[str, list[str]]:
    """Names of the tensors of each file; there is a list of files where there are several.

    Example:
        >>> one = Theirs("p", 0, "float32", (10,))
        >>> [*files_of({"a": one, "b": one, "c": one}, 80)]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    groups: list[list[str]] = [[]]
    room = shard
    for name, one in theirs.items():
        if one.nbytes > room and groups[-1]:
            groups.append([])
            room = shard
        groups[-1].append(name)
        room -= one.nbytes
    if len(groups) == 1:
        return {ONE: groups[0]}
    many = len(groups)
    return {f"model-{i:05d}-of-{many:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _write(
    made: Path,
    theirs: Mapping[str, Theirs],
    read: Callable[[str], Tensor],
    shard: int,
    told: Told,
) -> None:
    """The files, and the list of them where there are several."""
    disk, files = Disk(), files_of(theirs, shard)
    for file, names in files.items():
        shapes = {name: (theirs[name].dtype, theirs[name].shape) for name in names}
        start, order = header(shapes, {"format": "pt"})

        def parts(start: bytes = start, order: list[str] = order) -> Iterator[Any]:
            yield start
            for name in order:
                told(name, theirs[name].nbytes)
                yield tensor_bytes(read(name))

        disk.write(made / file, parts())
    if len(files) > 1:
        size = sum(one.nbytes for one in theirs.values())
        listed = {name: file for file, names in files.items() for name in names}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": listed}, indent=2)
        (made / MANY).write_text(text + "\n", encoding="utf-8")
