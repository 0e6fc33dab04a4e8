"""What is stored at a path, whatever wrote it: whole tensors by name, and the pieces they are in.

A path is a run's folder (its newest checkpoint), one checkpoint, a Hugging Face folder, a folder of
safetensors files or one such file. Reading is by file and place: nothing is run, and no more is in
memory than what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor

from mfun import checkpoint
from mfun.checkpoint import CheckpointError, Index
from mfun.checkpoint.pieces import Block, Piece, blocks, whole
from mfun.inspect.weights import MANY, ONE, SourceError, Weight, in_file, in_files, in_folder

READABLE = "a run, one of its checkpoints, a Hugging Face folder or a .safetensors file"


@attrs.frozen
class Whole:
    """A tensor, in one piece or several.

    Args:
        dtype: by torch's name.
        shape: of the whole.
        spec: how it was cut, as text.
        parts: where each piece lies in the whole, and in which file.
    """

    dtype: str
    shape: tuple[int, ...]
    spec: str
    parts: tuple[tuple[Piece, Weight], ...]

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return sum(weight.nbytes for _, weight in self.parts)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type."""
        return getattr(torch, self.dtype)

    def read(self) -> Tensor:
        """The whole tensor."""
        (first, weight), *more = self.parts
        if not more and first.whole_box:
            return weight.read().view(self.shape)
        out = torch.empty(self.shape, dtype=self.torch_dtype)
        for piece, weight in self.parts:
            flat = weight.run(0, weight.numel)
            for block in blocks(piece):
                out[_box(block)] = flat[block.at : block.at + math.prod(block.shape)].view(
                    block.shape
                )
        return out

    def boxes(self) -> Iterator[tuple[Block, Weight]]:
        """All of it as boxes, each consecutive in its file from `at` on."""
        for piece, weight in self.parts:
            for block in blocks(piece):
                yield block, weight


def _box(block: Block) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(block.start, block.shape, strict=True))


@attrs.frozen
class Source:
    """What a path holds.

    Args:
        path: the folder or file that is read.
        kind: `mfun`, `hugging face` or `safetensors`.
        tensors: by name.
        index: of an mfun checkpoint.
    """

    path: Path
    kind: str
    tensors: Mapping[str, Whole]
    index: Index | None = None


def open_source(path: Path) -> Source:
    """Find out what a path holds; of tensors, headers are read only.

    Raises:
        SourceError: nothing that is known.
        CheckpointError: something known, but damaged.
    """
    if path.is_file():
        return Source(path, "safetensors", _single(_alone(path)))
    if not path.is_dir():
        raise SourceError(f"{path} does not exist: name {READABLE}")
    if (path / "index.json").is_file():
        return open_checkpoint(path)
    if newest := checkpoint.latest(path):
        return open_checkpoint(newest)
    if (path / ONE).is_file() or (path / MANY).is_file():
        return Source(path, "hugging face", _single(in_folder(path)))
    if files := sorted(path.glob("*.safetensors")):
        return Source(path, "safetensors", _single(in_files(files)))
    raise SourceError(
        f"{path} holds no tensors: neither checkpoints/step-*/ of a run, nor index.json of a "
        f"checkpoint, nor {ONE} of a Hugging Face model, nor other .safetensors files"
    )


def _alone(path: Path) -> dict[str, Weight]:
    """What one file holds, whose name may not say what it is."""
    try:
        return in_file(path)
    except CheckpointError as error:
        if path.suffix == ".safetensors":
            raise
        raise SourceError(f"{path} cannot be read as safetensors: name {READABLE}") from error


def open_checkpoint(folder: Path) -> Source:
    """An mfun checkpoint.

    Raises: CheckpointError if its index or the header of a file is damaged, or they differ.
    """
    index = checkpoint.read_index(folder)
    files = {name: in_file(folder / name) for name in index.files}
    tensors = {}
    for name, entries in index.tensors.items():
        parts = []
        for entry in entries:
            weight = files[entry.file].get(name)
            if weight is None or (weight.dtype, weight.shape) != (entry.dtype, entry.shape):
                raise CheckpointError(
                    f"{folder / entry.file} does not hold {name} as index.json says"
                )
            parts.append((entry, weight))
        one = entries[0]
        tensors[name] = Whole(one.dtype, one.global_shape, one.spec, tuple(parts))
    return Source(folder, "mfun", tensors, index)


def _single(weights: Mapping[str, Weight]) -> dict[str, Whole]:
    """Tensors that are each in one piece."""
    return {
        name: Whole(weight.dtype, weight.shape, "", ((whole(weight.shape), weight),))
        for name, weight in weights.items()
    }
