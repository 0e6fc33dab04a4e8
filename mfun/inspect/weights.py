"""The tensors of a Hugging Face folder, or of safetensors files: found by name, read one by one.

Headers are checked against their files before anything is read by them (`checkpoint.format`), and
nothing here can run code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun.checkpoint import CheckpointError
from mfun.checkpoint.format import read_header, strict_json

ONE, MANY = "model.safetensors", "model.safetensors.index.json"
"""A folder's only file of weights, or the list of several."""


class SourceError(CheckpointError):
    """A path that does not hold the tensors it should; the message says what was looked for."""


@attrs.frozen
class Weight:
    """A tensor in a file.

    Args:
        path: of the file.
        dtype: by torch's name.
        shape: of the tensor.
        begin: place of its first byte.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type."""
        return getattr(torch, self.dtype)

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        return self.run(0, self.numel).view(self.shape)

    def run(self, first: int, count: int) -> Tensor:
        """So many elements in a row, row-major, from the first on: (count,)."""
        size = self.torch_dtype.itemsize
        out = torch.empty(count * size, dtype=torch.uint8)
        data: Any = out.numpy()
        view = memoryview(data)
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin + first * size)
            while view:
                got = file.readinto(view)
                if not got:
                    raise SourceError(
                        f"{self.path} was cut short while it was read; use another copy"
                    )
                view = view[got:]
        return out.view(self.torch_dtype)


def in_file(path: Path) -> dict[str, Weight]:
    """All tensors of a safetensors file by name, in the order of the file.

    Raises: CheckpointError if it is none, or not a sound one.
    """
    rows, _ = read_header(path)
    places = sorted(rows.items(), key=lambda item: item[1].begin)
    return {name: Weight(path, row.dtype, row.shape, row.begin) for name, row in places}


def in_files(paths: Iterable[Path]) -> dict[str, Weight]:
    """All tensors of some files.

    Raises: SourceError for a name that stands in two.
    """
    out: dict[str, Weight] = {}
    for path in paths:
        for name, weight in in_file(path).items():
            if name in out:
                raise SourceError(f"{name} is in {out[name].path} and in {path.name}; keep one")
            out[name] = weight
    return out


def in_folder(folder: Path) -> dict[str, Weight]:
    """All tensors of a Hugging Face folder.

    Raises:
        SourceError: no weights, weights that could run code, or a list of files that does not say
            what is in them.
    """
    if (folder / MANY).is_file():
        return _listed(folder)
    if (folder / ONE).is_file():
        return in_file(folder / ONE)
    if any(folder.glob("*.bin")):
        raise SourceError(
            f"{folder} holds its weights as .bin files, which can run code and are not read; save "
            "them by model.save_pretrained(FOLDER, safe_serialization=True)"
        )
    raise SourceError(f"{folder} has neither {ONE} nor {MANY}; name the folder of a saved model")


def _listed(folder: Path) -> dict[str, Weight]:
    listed = read_json(folder / MANY).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise SourceError(f"{folder / MANY} has no weight_map; get the file again")
    for name, file in listed.items():
        plain = isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")
        if not plain or not (folder / file).is_file():
            raise SourceError(
                f"{folder / MANY}: {name} is in {file!r}, which is no file of the folder"
            )
    found = in_files(folder / file for file in sorted({*listed.values()}))
    wrong = [name for name in listed if name not in found or found[name].path.name != listed[name]]
    wrong += [name for name in found if name not in listed]
    if wrong:
        raise SourceError(
            f"{folder / MANY} and its files differ about {some(sorted(wrong))}; get the folder "
            "again"
        )
    return found


def some(names: list[str], most: int = 8) -> str:
    """A list of names, of which the first are shown.

    Example:
        >>> some(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises: SourceError if it is not there, CheckpointError if it is something else.
    """
    try:
        found = strict_json(path.read_bytes(), path)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{path} holds no JSON object; get the file again")
    return found
