"""Loading into the layout that saved, bitwise, or a refusal that names everything that differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mfun.checkpoint.disk import hash_file
from mfun.checkpoint.index import CheckpointError, Entry, File, Index, file_name, read_index
from mfun.checkpoint.writer import dtype_name


class Loaded(NamedTuple):
    """What `load` returns.

    Args:
        tensors: by name, as expected.
        scalars: as saved.
        step: updates done.
        consumed: samples used.
        config: the resolved configuration's text.
    """

    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    step: int
    consumed: int
    config: str


def load(
    folder: Path,
    *,
    rank: int,
    world: int,
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    layout: Mapping[str, Any],
    owners: Mapping[str, int] | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """Read one rank's part of a checkpoint.

    Args:
        folder: `.../checkpoints/step-XXXXXXXX`, e.g. from `latest`.
        rank, world: this process and how many there are.
        expected: rank-local shape and dtype of every tensor this rank needs.
        layout: this run's, as given to `save`.
        owners: the rank whose file holds this rank's copy of a tensor; this rank where missing.
        device: where the tensors go.

    Returns: Loaded; every tensor bitwise as saved, in memory of its own, requires_grad False.

    Raises: CheckpointError for another layout or world, for tensors that are missing, unexpected,
        or of another shape or dtype (each named), and for files that were cut short or altered.
    """
    index = read_index(folder)
    _check_layout(folder, index, world, layout)
    entries = _match(folder, index, rank, expected, owners or {})
    check_files(folder, index, {entry.file for entry in entries.values()})
    tensors = _read(folder, entries, device)
    return Loaded(tensors, index.scalars, index.step, index.consumed, index.config)


def _check_layout(folder: Path, index: Index, world: int, layout: Mapping[str, Any]) -> None:
    saved, here = {"world": index.world, **index.layout}, {"world": world, **layout}
    if saved == here:
        return
    differing = [k for k in {**saved, **here} if saved.get(k) != here.get(k)]
    raise CheckpointError(
        f"{folder} was saved with {_show(saved)} and this run has {_show(here)} (they differ in "
        f"{', '.join(differing)}): loading into another layout is not built yet, so use that one"
    )


def _show(layout: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in layout.items())


def _match(
    folder: Path,
    index: Index,
    rank: int,
    expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    owners: Mapping[str, int],
) -> dict[str, Entry]:
    """The stored piece for each expected tensor."""
    stored = {(key, e.file): e for key, entries in index.tensors.items() for e in entries}
    wrong, found = [], {}
    for key, (shape, dtype) in expected.items():
        file = file_name(owners.get(key, rank))
        entry = stored.get((key, file))
        if entry is None:
            wrong.append(f"{key} is missing from {file}")
            continue
        found[key] = entry
        if entry.shape != tuple(shape):
            wrong.append(f"{key} has shape {entry.shape}, expected {tuple(shape)}")
        if entry.dtype != dtype_name(dtype):
            wrong.append(f"{key} is {entry.dtype}, expected {dtype_name(dtype)}")
    own = file_name(rank)
    wrong += [
        f"{k} is in {f} but not expected" for k, f in stored if f == own and k not in expected
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} does not fit this model on rank {rank}: {'; '.join(wrong)}. Resume with the "
            "configuration that saved it (config.toml of the run)"
        )
    return found


def check_files(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Refuse files of a checkpoint that are not, byte for byte, those that were written.

    Raises: CheckpointError naming the first.
    """
    for name in sorted(names):
        _check_file(folder / name, index.files[name])


def _check_file(path: Path, file: File) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size is None:
        problem = "is not there"
    elif size != file.bytes:
        problem = f"has {size} bytes instead of {file.bytes}"
    elif hash_file(path) != file.blake2b:
        problem = "was altered after it was written (its hash differs)"
    else:
        return
    raise CheckpointError(
        f"{path} {problem}: delete {path.parent} to resume from another checkpoint"
    )


def _read(
    folder: Path, entries: Mapping[str, Entry], device: torch.device | str
) -> dict[str, Tensor]:
    """Copy the tensors out of their files, and see that these hold what the index says."""
    out: dict[str, Tensor] = {}
    for name in sorted({entry.file for entry in entries.values()}):
        try:
            with safe_open(folder / name, framework="pt") as file:
                keys = [key for key, entry in entries.items() if entry.file == name]
                out |= {key: file.get_tensor(key).to(device, copy=True) for key in keys}
        except SafetensorError as error:
            raise CheckpointError(f"{folder / name} cannot be read: {error}") from error
    for key, entry in entries.items():
        if (tuple(out[key].shape), dtype_name(out[key].dtype)) != (entry.shape, entry.dtype):
            raise CheckpointError(f"{folder}: {key} in {entry.file} is not what index.json says")
    return {key: out[key] for key in entries}
