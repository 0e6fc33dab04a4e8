"""The folder of checkpoints: names, which are whole, what a broken-off save left, how many to keep.

checkpoints/step-00000100/        whole: it got this name after all of it was on the disk
checkpoints/.tmp-step-00000200/   being written or deleted: ignored, removed by the next save
checkpoints/.old-step-00000100/   being replaced by a new save of its step: counts until then
checkpoints/latest                the name of the newest, for people and other tools
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from mfun.checkpoint.disk import Disk
from mfun.checkpoint.format import CheckpointError
from mfun.checkpoint.index import read_index

POINTER = "latest"
_NAME = re.compile(r"(?:\.old-)?step-(\d{8,})")


def step_folder(run_dir: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step.

    Example:
        >>> step_folder(Path("run"), 12).as_posix()
        'run/checkpoints/step-00000012'
    """
    return Path(run_dir) / "checkpoints" / f"step-{step:08d}"


def temporary(folder: Path) -> Path:
    """The name under which a checkpoint is written, or taken away."""
    return folder.with_name(f".tmp-{folder.name}")


def replaced(folder: Path) -> Path:
    """The name a checkpoint keeps while a new one of the same step takes its place."""
    return folder.with_name(f".old-{folder.name}")


def is_whole(folder: Path) -> bool:
    """Whether the index is intact and every file has its size; the hashes are read at loading."""
    try:
        files = read_index(folder).files
        return all((folder / name).stat().st_size == file.bytes for name, file in files.items())
    except (CheckpointError, OSError):
        return False


def saved(run_dir: Path) -> dict[int, Path]:
    """All whole checkpoints of a run by step, ascending."""
    return dict(reversed([*_whole(run_dir)]))


def latest(run_dir: Path) -> Path | None:
    """The newest whole checkpoint of a run, None if it has none.

    The pointer is not asked: a save that was killed just before it wrote it is whole all the same.
    """
    return next((folder for _, folder in _whole(run_dir)), None)


def _whole(run_dir: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of whole checkpoints, newest first; one that is being replaced only if need
    be."""
    root = Path(run_dir) / "checkpoints"
    named: dict[int, list[Path]] = {}
    for folder in sorted(root.iterdir(), reverse=True) if root.is_dir() else ():
        match = _NAME.fullmatch(folder.name)  # step-* sorts after .old-*, so it comes first here
        if match:
            named.setdefault(int(match[1]), []).append(folder)
    for step in sorted(named, reverse=True):
        found = next(filter(is_whole, named[step]), None)
        if found is not None:
            yield step, found


def damaged(run_dir: Path) -> dict[int, Path]:
    """Checkpoints of a run that have their name and are not whole, by step, ascending."""
    named = {p: _NAME.fullmatch(p.name) for p in sorted(Path(run_dir).glob("checkpoints/step-*"))}
    return {int(match[1]): p for p, match in named.items() if match and not is_whole(p)}


def clean(run_dir: Path, disk: Disk) -> None:
    """Remove what broken-off saves left; put back a checkpoint that was about to be replaced."""
    root = Path(run_dir) / "checkpoints"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if folder.name.startswith(".tmp-"):
            disk.remove(folder)
        elif folder.name.startswith(".old-step-"):
            _restore(folder, folder.with_name(folder.name.removeprefix(".old-")), disk)


def _restore(old: Path, folder: Path, disk: Disk) -> None:
    if is_whole(folder):
        disk.remove(old)
        return
    if folder.exists():
        disk.remove(folder)
    disk.rename(old, folder)


def put(written: Path, folder: Path, disk: Disk) -> None:
    """Give a fully written folder its name, and point to it; one of this name is replaced."""
    if folder.exists():
        disk.rename(folder, replaced(folder))
    disk.rename(written, folder)
    draft = folder.with_name(f".tmp-{POINTER}")
    disk.write(draft, [f"{folder.name}\n".encode()])
    disk.rename(draft, folder.with_name(POINTER))
    if replaced(folder).exists():
        disk.remove(replaced(folder))


def retain(run_dir: Path, keep: int, just_saved: int, disk: Disk) -> None:
    """Delete all but the `keep` newest checkpoints (0: none); the one just saved always stays."""
    for step, folder in list(saved(run_dir).items())[:-keep] if keep else ():
        if step != just_saved:
            disk.rename(folder, temporary(folder))
            disk.remove(temporary(folder))
