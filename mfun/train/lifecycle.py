"""A run's folder: made, written, found again, and what may change when a run is resumed.

runs/tiny-20250131-120000/
    config.toml       resolved, with the hash of the data
    metrics.jsonl     one object a step
    validation.jsonl  one object a validation loss
    checkpoints/      step-XXXXXXXX/, safetensors and a JSON index
    loss.png          at the end
    .lock             held by the run that writes
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from mfun import config as cfg
from mfun.config import Config
from mfun.train.feed import with_hash

RUNS = Path("runs")
"""Where run folders are made, below the current folder."""
LOCK = ".lock"
FREE = {
    *("data.path", "data.hash", "data.cache", "data.read"),
    *(f"train.{key}" for key in ("steps", "eval_every", "eval_batches", "checkpoint_every")),
    *(f"train.{key}" for key in ("keep", "log_every", "malloc_tuning", "timeout_s")),
    *(f"train.{key}" for key in ("check_gradients", "large_gradient")),
    *(f"train.{key}" for key in ("microbatches", "async_save")),
    *(f"parallel.{field.name}" for field in attrs.fields(cfg.ParallelConfig)),
}
"""Keys that may change when a run is resumed: they do not touch what was computed so far.

The layout may, since a checkpoint holds parameters and moments by name, and each sample's place in
a batch does not depend on it: only the rounding of sums does.
"""
BY_MICROBATCH = {"train.microbatches", "parallel.dp"}
"""Keys that must not change where the loss is a mean of microbatches' means."""


class RunError(RuntimeError):
    """A run folder that cannot be used as asked; the message says what to do instead."""


@attrs.frozen(kw_only=True)
class Request:
    """What `mfun train` was asked for.

    Args:
        source: preset or TOML file, None for the default.
        overrides: `section.key=value` texts.
        run_dir: the run's folder, None for a new one below `runs/`.
        resume: go on where the folder's newest checkpoint stands.
    """

    source: str | None = None
    overrides: tuple[str, ...] = ()
    run_dir: Path | None = None
    resume: bool = False

    @property
    def name(self) -> str:
        """What a new run is called: its preset, or its TOML file without the ending.

        Example:
            >>> Request(source="llama3.1-8b").name, Request(source="more/mine.toml").name
            ('llama3.1-8b', 'mine')
        """
        source = self.source or cfg.DEFAULT
        return source if source in cfg.PRESETS else Path(source).stem


def configure(request: Request, world: int | None) -> Config:
    """The resolved configuration, checked; nothing is made or started.

    Args:
        request: what was asked for.
        world: ranks that there are, None where they are still to be started.

    Raises:
        ConfigError: sizes that do not fit, each named.
        RunError: the folder holds something else, or a run with another model, layout or data.
    """
    stored = _stored(request)
    if stored is None:
        return cfg.resolve(cfg.load(request.source, request.overrides), world)
    base = stored if request.source is None else cfg.load(request.source)
    asked = cfg.resolve(cfg.override(base, request.overrides), world)
    ordered = asked.data.samples or stored.data.samples
    asked = attrs.evolve(asked, data=attrs.evolve(asked.data, samples=ordered))
    _refuse_changes(stored, asked, request)
    return attrs.evolve(asked, data=attrs.evolve(asked.data, hash=stored.data.hash))


def _stored(request: Request) -> Config | None:
    """The configuration of the run to resume, None for a new run."""
    if request.run_dir is None:
        if request.resume:
            raise RunError(f"--resume needs --run-dir with the run's folder{_newest()}")
        return None
    file = request.run_dir / "config.toml"
    if not request.resume:
        _refuse_used(request.run_dir)
        return None
    if file.is_file():
        return cfg.from_file(file)
    _refuse_used(request.run_dir)
    return None


def _newest() -> str:
    files = sorted(RUNS.glob("*/config.toml"), key=lambda file: file.stat().st_mtime)
    return f"; the newest is {files[-1].parent}" if files else ""


def _refuse_used(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--run-dir {folder} is a file; name a folder")
    if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        known = (folder / "config.toml").is_file()
        hint = "add --resume to go on with that run, or " if known else ""
        raise RunError(f"--run-dir {folder} is not empty; {hint}name another folder")


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Key path -> (before, after) of every field that differs.

    Example:
        >>> from mfun.config import load
        >>> changes(load("tiny"), load("tiny", ["train.seed=3"]))
        {'train.seed': (0, 3)}
    """
    return {
        f"{section}.{key}": (old, getattr(getattr(after, section), key))
        for section in cfg.SECTIONS
        for key, old in attrs.asdict(getattr(before, section), recurse=False).items()
        if old != getattr(getattr(after, section), key)
    }


def _refuse_changes(stored: Config, asked: Config, request: Request) -> None:
    free = FREE - (BY_MICROBATCH if asked.train.loss_norm == "microbatch" else set())
    wrong = {k: v for k, v in changes(stored, asked).items() if k not in free}
    if wrong:
        listed = "; ".join(
            f"{key} is {old!r} there and {new!r} now" for key, (old, new) in wrong.items()
        )
        raise RunError(
            f"{request.run_dir} holds a run with other settings: {listed}. Resume with its own "
            "(leave the configuration out), or start a new run in another folder"
        )


def open_run(request: Request, config: Config) -> tuple[Config, Path]:
    """Make the folder and write the configuration with the data's hash; only one process does.

    Returns: the configuration as written, and the folder.

    Raises:
        DataError: the data is not what the configuration says; nothing was written.
        RunError: the folder cannot be written, is in use, or is part of the data.
    """
    folder, file = request.run_dir or RUNS, "config.toml"
    if config.data.hash and (folder / file).is_file() and cfg.from_file(folder / file) == config:
        return config, folder
    _refuse_in_data(folder, config)
    config = with_hash(config)
    try:
        folder = request.run_dir or _new_folder(request.name)
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder):
            if not request.resume:
                _refuse_used(folder)
            draft = folder / f".{file}.tmp"
            draft.write_text(cfg.to_toml(config), encoding="utf-8")
            draft.replace(folder / file)
    except OSError as error:
        raise _unwritable(folder, error) from error
    return config, folder


def _unwritable(folder: Path, error: OSError) -> RunError:
    return RunError(
        f"the run's folder {folder} cannot be written ({error.strerror}); make room or set its "
        "permissions, or name another by --run-dir"
    )


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the only run that writes in a folder, until the end of this or of the process.

    Raises: RunError if another run is, or if the folder cannot be written.
    """
    try:
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"another run is writing in {folder}; wait for its end, or name another folder by "
                "--run-dir"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield


def _refuse_in_data(folder: Path, config: Config) -> None:
    """What a run writes must not be part of what it learns from."""
    for given in map(Path, config.data.path):
        root, inner = given.expanduser().resolve(), folder.resolve()
        if not inner.is_relative_to(root):
            continue
        if not any(part.startswith(".") for part in inner.relative_to(root).parts):
            raise RunError(
                f"the run's folder {folder} is inside data.path {given}, so that what it writes "
                "would become data; name a folder elsewhere by --run-dir"
            )


def _new_folder(name: str) -> Path:
    """`runs/<name>-<time>`, with a number behind it if another run has just taken that name."""
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        folder = RUNS / (stamp if number == 0 else f"{stamp}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise RunError(f"no free name for {RUNS / stamp}; give --run-dir")


def find_run(folder: Path) -> Config:
    """The configuration of a finished or running run.

    Raises: RunError if the folder holds none.
    """
    file = folder / "config.toml"
    if not file.is_file():
        raise RunError(f"{folder} is not a run's folder: it has no config.toml{_newest()}")
    return cfg.from_file(file)
