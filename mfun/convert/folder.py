"""Folders that are made whole or not at all, and what stands beside a model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mfun.checkpoint import Disk
from mfun.checkpoint.folder import temporary
from mfun.config import Config
from mfun.convert.families import HFError
from mfun.inspect.weights import MANY

BESIDE = "hf"
"""Within a converted folder, what stood beside the weights: config.json and the tokenizer."""
KEPT = (".json", ".txt", ".model", ".jinja")
"""Endings of the files that are kept there; no code is."""
LARGEST = 1 << 28
"""Bytes beyond which a file is not kept."""


def refuse_used(out: Path) -> None:
    """Refuse to write where something is.

    Raises: HFError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise HFError(f"{out} exists already; name a new folder")


@contextmanager
def draft(out: Path) -> Iterator[Path]:
    """A folder under a temporary name, which takes its own when all of it is there."""
    made, disk = temporary(out.absolute()), Disk()
    if made.exists():
        disk.remove(made)
    disk.make_folder(made)
    try:
        yield made
    except BaseException:
        disk.remove(made)
        raise
    disk.sync(made)
    disk.rename(made, out.absolute())


def keep_beside(source: Path, target: Path) -> None:
    """Copy configuration and tokenizer of a Hugging Face folder; weights and code stay behind."""
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.suffix in KEPT and path.name != MANY and path.stat().st_size <= LARGEST:
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def tensor_bytes(x: Tensor) -> memoryview:
    """The bytes of a tensor, row-major."""
    data: Any = x.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(data)


def origins(run: Path, config: Config) -> list[Path]:
    """Where what stood beside the weights may be: in a run's folder, or in that it began from."""
    start = config.train.init_from
    return [run / BESIDE, *([Path(start) / BESIDE] if start else [])]


def tokenizer_file(run: Path, config: Config) -> Path | None:
    """The tokenizer of the Hugging Face model that a run has, or began from."""
    files = (origin / "tokenizer.json" for origin in origins(run, config))
    return next((file for file in files if file.is_file()), None)
