"""Saving: every rank writes what it owns into a temporary folder, rank 0 gives it its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mfun.checkpoint.disk import Disk, hash_file
from mfun.checkpoint.folder import clean, put, retain, step_folder, temporary
from mfun.checkpoint.index import (
    FORMAT,
    CheckpointError,
    Entry,
    File,
    Index,
    Piece,
    check_scalars,
    file_name,
    write_index,
)

HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header beyond which the official reader refuses a file."""


def save(
    run_dir: Path,
    *,
    step: int,
    consumed: int,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    layout: Mapping[str, Any],
    config: str,
    rank: int,
    world: int,
    barrier: Callable[[], None],
    pieces: Mapping[str, Piece] | None = None,
    owners: Mapping[str, int] | None = None,
    keep: int = 0,
    disk: Disk | None = None,
) -> Path:
    """Write `run_dir/checkpoints/step-XXXXXXXX`, all of it or nothing; every rank calls this.

    Stopped at any moment, the last whole checkpoint is still there. A rank that fails meets the
    others at every barrier first and raises then, and so does everyone else.

    Args:
        step: updates done.
        consumed: samples used so far.
        tensors: this rank's, by name (`params.<path>`, `opt.<name>.<path>`).
        scalars: JSON values by name, equal on all ranks; rank 0's are written.
        layout: what decides who holds what (mesh, order, layers of each stage), JSON values.
        config: the resolved configuration as text.
        rank, world: this process and how many there are.
        barrier: returns once every rank called it.
        pieces: places in the whole tensors; a name that is missing is a whole tensor itself.
        owners: the rank that writes this rank's copy of a tensor; this rank where missing.
        keep: checkpoints to keep, 0 for all.
        disk: file operations; tests give their own.

    Returns: the checkpoint's folder.

    Raises: CheckpointError or OSError, on every rank, with nothing kept of this checkpoint.
    """
    disk = disk or Disk()
    folder = step_folder(run_dir, step)
    draft = temporary(folder)
    owned = {n: t for n, t in tensors.items() if (owners or {}).get(n, rank) == rank}
    head = {"format": FORMAT, "step": step, "consumed": consumed, "world": world}
    rest = {"layout": dict(layout), "config": config, "scalars": dict(scalars)}

    def prepare() -> None:
        check_scalars(scalars, "scalars")
        check_scalars(layout, "layout")
        clean(run_dir, disk)
        disk.make_folder(draft)

    def write() -> None:
        _write_rank(draft, rank, owned, pieces or {}, disk)

    def commit() -> None:
        files, entries = _collect(draft, world, disk)
        index = Index(**head, **rest, files=files, tensors=entries)
        disk.write(draft / "index.json", lambda path: write_index(index, path))
        disk.sync(draft)
        put(draft, folder, disk)
        retain(run_dir, keep, step, disk)

    def confirm() -> None:
        if draft.exists():
            raise CheckpointError(f"{folder} was not saved: another rank failed, see its error")

    phases = [prepare, write, commit, confirm] if rank == 0 else [None, write, None, confirm]
    _together(phases, barrier)
    return folder


def _together(phases: Sequence[Callable[[], None] | None], barrier: Callable[[], None]) -> None:
    """Do the phases in step with all ranks; an error ends this rank's work, not its waiting."""
    failure: Exception | None = None
    for phase in phases:
        if phase is not None and failure is None:
            try:
                phase()
            except Exception as error:
                failure = error
        barrier()
    if failure is not None:
        raise failure


def _write_rank(
    draft: Path, rank: int, owned: dict[str, Tensor], pieces: Mapping[str, Piece], disk: Disk
) -> None:
    """One rank's tensors, if it owns any, and then its report for rank 0."""
    name = file_name(rank)
    report: dict[str, Any] = {"files": {}, "tensors": {}}
    if owned:
        path = draft / name
        disk.write(path, lambda p: _write_tensors(p, owned))
        _check_header(path)
        report["files"][name] = {"bytes": path.stat().st_size, "blake2b": hash_file(path)}
    for key, value in owned.items():
        report["tensors"][key] = attrs.asdict(_entry(name, value, pieces.get(key)))
    text = json.dumps(report)
    disk.write(_report(draft, rank), lambda p: p.write_text(text, encoding="utf-8"))


def _report(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank:05d}.json"


def _entry(file: str, value: Tensor, piece: Piece | None) -> Entry:
    shape = tuple(value.shape)
    piece = piece or Piece(global_shape=shape, start=(0,) * len(shape))
    return Entry(file=file, dtype=dtype_name(value.dtype), shape=shape, **attrs.asdict(piece))


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text: `float32`."""
    return str(dtype).removeprefix("torch.")


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized:
            raise CheckpointError(f"{name} is not a dense tensor, and only those can be saved")
    try:
        save_file({name: _dense(value) for name, value in tensors.items()}, path)
        path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets only the owner read
    except SafetensorError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _dense(value: Tensor) -> Tensor:
    """The same values on the CPU in storage of exactly their size, shared with nothing."""
    return torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())


def _check_header(path: Path) -> None:
    """Refuse to leave a file that was written but that the official reader will not open."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > HEADER_LIMIT:
        raise CheckpointError(
            f"{path} has a header of {size} bytes and readers accept {HEADER_LIMIT}: "
            "give the rank fewer or shorter tensor names"
        )


def _collect(
    draft: Path, world: int, disk: Disk
) -> tuple[dict[str, File], dict[str, tuple[Entry, ...]]]:
    """Join the reports of all ranks, and remove them."""
    missing = [rank for rank in range(world) if not _report(draft, rank).is_file()]
    if missing:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, missing))} did not write their part into {draft}: they "
            "failed, or their node does not see this folder (it must be shared by all nodes)"
        )
    files: dict[str, File] = {}
    tensors: dict[str, tuple[Entry, ...]] = {}
    for rank in range(world):
        report = json.loads(_report(draft, rank).read_text(encoding="utf-8"))
        files.update({name: File(**value) for name, value in report["files"].items()})
        for key, value in report["tensors"].items():
            tensors[key] = (*tensors.get(key, ()), Entry(**value))
        disk.remove(_report(draft, rank))
    return files, dict(sorted(tensors.items()))
