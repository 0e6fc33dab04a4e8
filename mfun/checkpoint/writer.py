"""Saving: every rank writes what it owns into a temporary folder, rank 0 gives it its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from mfun.checkpoint.disk import Disk
from mfun.checkpoint.folder import clean, put, retain, step_folder, temporary
from mfun.checkpoint.format import CheckpointError, header
from mfun.checkpoint.hashing import CHUNK, Hash
from mfun.checkpoint.index import (
    FORMAT,
    INDEX,
    Entry,
    File,
    Index,
    check_scalars,
    file_name,
    index_text,
)
from mfun.checkpoint.pieces import Piece, whole
from mfun.checkpoint.room import empty, memory

Agree = Callable[[bool], bool]
"""Whether any rank says yes; every rank calls it, and none returns before all have."""


def alone(flag: bool) -> bool:
    """`Agree` of one rank."""
    return flag


@attrs.frozen(kw_only=True, eq=False)
class Order:
    """What one rank is to save.

    Args:
        run_dir: the checkpoint is `run_dir/checkpoints/step-XXXXXXXX`.
        step: updates done.
        consumed: samples used so far.
        key: words of the random key of the next step.
        tensors: those that this rank owns, by name (`params.<path>`, `opt.<name>.<path>`). Of all
            ranks' together, each element of a tensor is there once.
        pieces: places in the whole tensors; a name that is missing is a whole tensor itself.
        scalars: JSON values by name, equal on all ranks; rank 0's are written.
        layout: what decided who holds what, for people; JSON values.
        config: the resolved configuration as text.
        rank, world: this process and how many there are.
        keep: checkpoints to keep, 0 for all.
        disk: file operations; tests give their own.
    """

    run_dir: Path
    step: int
    consumed: int = 0
    key: tuple[int, ...] = ()
    tensors: Mapping[str, Tensor]
    pieces: Mapping[str, Piece] = attrs.field(factory=dict)
    scalars: Mapping[str, Any] = attrs.field(factory=dict)
    layout: Mapping[str, Any] = attrs.field(factory=dict)
    config: str = ""
    rank: int = 0
    world: int = 1
    keep: int = 0
    disk: Disk = attrs.field(factory=Disk)

    @property
    def folder(self) -> Path:
        """Where the checkpoint will be."""
        return step_folder(self.run_dir, self.step)

    @property
    def draft(self) -> Path:
        """Where it is while it is written."""
        return temporary(self.folder)

    def snapshot(self) -> Order:
        """The same with values of its own, on the CPU: later steps do not change them."""
        return attrs.evolve(self, tensors={name: _copy(x) for name, x in self.tensors.items()})

    def prepare(self) -> None:
        """Rank 0: away with what broken-off saves left, and make room for this one."""
        if self.rank == 0:
            check_scalars(self.scalars, "scalars")
            check_scalars(self.layout, "layout")
            clean(self.run_dir, self.disk)
            new = not self.draft.parent.exists()
            self.disk.make_folder(self.draft)
            if new:
                self.disk.sync(self.run_dir)

    def write(self) -> None:
        """Every rank: its tensors, if it owns any, and then its report for rank 0."""
        report: dict[str, Any] = {"files": {}, "tensors": {}}
        if self.tensors:
            name = file_name(self.rank)
            size, digest, hashes = _write_file(self.draft / name, self.tensors, self.disk)
            report["files"][name] = {"bytes": size, "header": digest}
            for key, x in self.tensors.items():
                piece = self.pieces.get(key) or whole(tuple(x.shape))
                _check_shape(key, x, piece)
                row = attrs.asdict(piece) | {"file": name, "dtype": _dtype(x), "hash": hashes[key]}
                report["tensors"][key] = row
        self.disk.write(_report(self.draft, self.rank), [json.dumps(report).encode()])

    def commit(self) -> None:
        """Rank 0: the index; the checkpoint's name; the pointer to it; what is no longer kept."""
        if self.rank != 0:
            return
        files, entries = _collect(self.draft, self.world, self.disk)
        index = Index(
            format=FORMAT,
            step=self.step,
            consumed=self.consumed,
            key=tuple(self.key),
            world=self.world,
            layout=dict(self.layout),
            config=self.config,
            scalars=dict(self.scalars),
            files=files,
            tensors=entries,
        )
        self.disk.write(self.draft / INDEX, [index_text(index)])
        self.disk.sync(self.draft)
        put(self.draft, self.folder, self.disk)
        retain(self.run_dir, self.keep, self.step, self.disk)

    def discard(self) -> None:
        """Rank 0: give back the room that a failed save has taken, if that is possible."""
        if self.rank == 0 and self.draft.exists():
            try:
                self.disk.remove(self.draft)
            except OSError:
                pass  # the next save tries again


def save(order: Order, agree: Agree = alone) -> Path:
    """Write a checkpoint, all of it or nothing; every rank calls this with an order of its own.

    Stopped at any moment, the last whole checkpoint is still there.

    Args:
        order: what this rank owns, and what all ranks know.
        agree: tells all ranks whether one has failed.

    Returns: the checkpoint's folder.

    Raises:
        CheckpointError: on every rank if on one, with nothing kept of this checkpoint unless it
            was complete already.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as run:
        ...     folder = save(Order(run_dir=Path(run), step=3, tensors={"w": torch.ones(2)}))
        ...     sorted(file.name for file in folder.iterdir())
        ['index.json', 'rank-00000.safetensors']
    """
    together(order, [order.prepare, order.write, order.commit], agree)
    return order.folder


def together(order: Order, phases: Sequence[Callable[[], None]], agree: Agree) -> None:
    """Do the phases in step with all ranks; where one fails, all stop and raise."""
    for phase in phases:
        failure: Exception | None = None
        try:
            phase()
        except Exception as error:
            failure = error
        if agree(failure is not None):
            order.discard()
            raise _told(order, failure) from failure


def _told(order: Order, failure: Exception | None) -> Exception:
    """What a rank says of a failed save: its own failure, a disk's with the way out, or another's.

    Example:
        >>> full = OSError(28, "No space left on device", "a/rank-00000.safetensors")
        >>> str(_told(Order(run_dir=Path("run"), step=2, tensors={}), full))[:87]
        'run/checkpoints/step-00000002 was not saved: a/rank-00000.safetensors: No space left on'
    """
    if isinstance(failure, OSError):
        where = f"{failure.filename}: " if failure.filename else ""
        return CheckpointError(
            f"{order.folder} was not saved: {where}{failure.strerror or failure}; make room, or "
            "let the folder be written to, and resume: what was saved before is whole"
        )
    return failure or CheckpointError(
        f"{order.folder} was not saved: another rank failed, see its error"
    )


def _copy(x: Tensor) -> Tensor:
    """The same values on the CPU in memory of their own."""
    return empty(x.shape, x.dtype).copy_(x.detach())


def _dtype(x: Tensor) -> str:
    return dtype_name(x.dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as text: `float32`."""
    return str(dtype).removeprefix("torch.")


def _check_shape(name: str, x: Tensor, piece: Piece) -> None:
    if tuple(x.shape) != piece.shape:
        raise CheckpointError(
            f"{name} has shape {tuple(x.shape)}, but its piece of the whole has {piece.shape}"
        )


def _write_file(
    path: Path, tensors: Mapping[str, Tensor], disk: Disk
) -> tuple[int, str, dict[str, str]]:
    """One file: its size, the hash of its header, and that of each tensor."""
    for name, x in tensors.items():
        if x.layout != torch.strided or x.is_quantized:
            raise CheckpointError(f"{name} is not a dense tensor, and only those can be saved")
    start, order = header({name: (_dtype(x), tuple(x.shape)) for name, x in tensors.items()})
    hashes: dict[str, str] = {}

    def parts() -> Iterator[Any]:
        yield start
        for name in order:
            one = Hash()
            for chunk in _chunks(tensors[name]):
                one.add(chunk)
                yield chunk
            hashes[name] = one.text

    disk.write(path, parts())
    return path.stat().st_size, blake2b(start, digest_size=16).hexdigest(), hashes


def _chunks(x: Tensor) -> Iterator[Any]:
    """A tensor's bytes, row-major, copied only where they do not lie so."""
    data = memory(x.detach().cpu().contiguous())
    for at in range(0, len(data), CHUNK):
        yield data[at : at + CHUNK]


def _report(draft: Path, rank: int) -> Path:
    return draft / f"rank-{rank:05d}.json"


def _collect(
    draft: Path, world: int, disk: Disk
) -> tuple[dict[str, File], dict[str, tuple[Entry, ...]]]:
    """Join the reports of all ranks, and remove them."""
    missing = [rank for rank in range(world) if not _report(draft, rank).is_file()]
    if missing:
        raise CheckpointError(
            f"rank(s) {', '.join(map(str, missing))} did not write their part into {draft}: their "
            "node does not see this folder (it must be shared by all nodes)"
        )
    files: dict[str, File] = {}
    tensors: dict[str, tuple[Entry, ...]] = {}
    for rank in range(world):
        report = json.loads(_report(draft, rank).read_text(encoding="utf-8"))
        files.update({name: File(**value) for name, value in report["files"].items()})
        for key, value in report["tensors"].items():
            tensors[key] = (*tensors.get(key, ()), _entry(value))
        disk.remove(_report(draft, rank))
    return files, dict(sorted(tensors.items()))


def _entry(row: dict[str, Any]) -> Entry:
    fields: dict[str, Any] = {k: tuple(x) if isinstance(x, list) else x for k, x in row.items()}
    return Entry(**fields)
