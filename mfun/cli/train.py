"""`mfun train`: resolve the configuration, then show it, start ranks, or be one of them."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console

from mfun import config as cfg
from mfun.cli.text import presets_text
from mfun.cli.words import Settings, split_words
from mfun.config import Config

if TYPE_CHECKING:
    from mfun.train.failure import Failure
    from mfun.train.lifecycle import Request
    from mfun.train.ranks import Peers, Place
    from mfun.train.stop import Stop

EPILOG = f"""
\b
WHAT TO TRAIN
  A preset's name or a TOML file, then section.key=value settings; the last one
  of a key wins. Without either, the preset tiny: tp 2 x pp 2, a minute or two
  on two cores, on the Python standard library's own sources.

\b
PRESETS
{presets_text()}

\b
MOST USED SETTINGS (--dry shows them all)
  model.layers= hidden= heads= kv_heads= ffn= vocab= seq_len= dropout= tied=
  parallel.tp= pp= dp=     ranks of each axis; dp=0 fills the world
  parallel.sequence_parallel=true   parallel.schedule=1f1b|gpipe
  parallel.layers_per_stage=1,3     blocks of each pipeline stage
  train.steps= seed= global_batch= microbatches= eval_every= checkpoint_every=
  optim.lr= min_lr= warmup= schedule=constant|linear|cosine|inverse_sqrt|wsd
  precision.policy=fp32|fp64|bf16|fp16
  data.path=a.txt,folder   text files and folders; empty: the standard library
  data.path=x,y weights=2,1 reset=   datasets of `mfun data build` or Megatron

\b
EXAMPLES
  mfun train
  mfun train model.layers=8 parallel.tp=4 parallel.pp=1 train.steps=500
  mfun train my.toml optim.lr=1e-3 --run-dir runs/second
  mfun train --run-dir runs/second --resume train.steps=1000
  mfun train --run-dir runs/second --resume parallel.tp=1 parallel.dp=4
  mfun train llama3-8b parallel.tp=8 parallel.pp=4 parallel.dp=2 --dry
  torchrun --nproc-per-node 4 -m mfun train
  srun --ntasks 16 mfun train my.toml --run-dir /shared/run --resume

\b
WHAT IT LEAVES, in the run's folder
  config.toml, metrics.jsonl, validation.jsonl, loss.png and
  checkpoints/step-XXXXXXXX/ (safetensors, index.json). Ctrl-C and SIGTERM save
  a checkpoint and end the run, a second one ends it unsaved; --resume goes on
  from the newest whole checkpoint: in the same layout to the bit, in any other
  (parallel.*, train.microbatches) to rounding.

\b
ENVIRONMENT
  MFUN_TRACEBACK=1  whole tracebacks      MASTER_PORT  port the ranks meet at
"""


@click.command(
    cls=Settings,
    short_help="Train a model on local ranks, under torchrun or under SLURM.",
    epilog=EPILOG,
    options_metavar="[--run-dir DIR] [--resume] [--dry]",
)
@click.argument("words", nargs=-1, metavar="[CONFIG.toml | PRESET] [section.key=value ...]")
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    help="Folder of the run; by default a new one, runs/<name>-<date>-<time>.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest checkpoint in --run-dir; an empty folder starts from nothing.",
)
@click.option(
    "--dry",
    is_flag=True,
    help="Show configuration, mesh, parameters and their reductions, timeline and memory; "
    "run nothing.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to compute; auto takes CUDA if every local rank has a device.",
)
def command(
    words: tuple[str, ...], run_dir: Path | None, resume: bool, dry: bool, device: str
) -> None:
    """Train a GPT over tensor, pipeline and data parallel ranks.

    Alone, it starts the ranks that the layout needs on this machine. Inside torchrun or SLURM it
    joins as one rank of many.
    """
    from mfun.train.failure import EXPECTED
    from mfun.train.lifecycle import Request, configure
    from mfun.train.ranks import place

    source, settings = split_words(words)
    request = Request(source=source, overrides=settings, run_dir=run_dir, resume=resume)
    try:
        here = place(os.environ)
        config = configure(request, here.world if here else None)
    except EXPECTED as error:
        raise click.ClickException(str(error)) from error
    if dry:
        _show(config, here)
    elif here is None and cfg.mesh(config).world > 1:
        _start_ranks(request, config, device)
    else:
        _be_rank(request, config, here, device)


def _show(config: Config, here: Place | None) -> None:
    from mfun.cli.dry import show

    if here is None or here.rank == 0:
        show(config, Console(soft_wrap=True, highlight=False))


def _start_ranks(request: Request, config: Config, device: str) -> None:
    """Make the run's folder, once the devices are there, and let each rank resume it."""
    from mfun.train import launch
    from mfun.train.failure import EXPECTED
    from mfun.train.lifecycle import open_run
    from mfun.train.ranks import Place, device_of

    mesh = cfg.mesh(config)
    try:
        device_of(Place(world=mesh.world, local_world=mesh.world), device)
        config, folder = open_run(request, config)
        arguments = ["train", "--run-dir", str(folder), "--resume", "--device", device]
        launch.start(mesh, arguments)
    except launch.Interrupted as error:
        click.echo(f"mfun: {error}", err=True)
        sys.exit(130)
    except (*EXPECTED, launch.RanksFailed) as error:
        click.echo(f"mfun: {error}", err=True)
        sys.exit(1)


def _be_rank(request: Request, config: Config, here: Place | None, device_name: str) -> None:
    """Train as one rank; an error ends the process, with its report where the others look."""
    from mfun.train import failure
    from mfun.train.launch import LAUNCHED
    from mfun.train.ranks import Place, device_of, joined, tune_malloc
    from mfun.train.stop import Stop

    here = here or Place()
    if config.train.malloc_tuning:
        tune_malloc()
    by_other = LAUNCHED in os.environ or here.by == "torchrun"
    try:
        device = device_of(here, device_name)
        timeout_s = config.train.timeout_s
        with Stop(parent=by_other) as stop, joined(here, device, timeout_s) as peers:
            _train(request, config, peers, stop)
        failure.report_end(here.rank)
    except Exception as error:
        where = failure.place_text(cfg.mesh(config).coords(here.rank))
        _end(failure.describe(error, here.rank, where), alone=here.world == 1)


def _train(request: Request, config: Config, peers: Peers, stop: Stop) -> None:
    """The run, with its progress on rank 0."""
    from mfun.cli.progress import Screen, follow
    from mfun.train import loop
    from mfun.train.lifecycle import held

    config, folder = _agree(request, config, peers)
    with held(folder) if peers.first else nullcontext():
        job = loop.job(config, peers, folder, stop)
        state = loop.begin(job)
        follow(job, state, Screen(soft_wrap=True, highlight=False, quiet=not peers.first))


def _agree(request: Request, config: Config, peers: Peers) -> tuple[Config, Path]:
    """Rank 0 makes the folder; all go by its configuration."""
    from mfun.train.lifecycle import open_run

    text, folder = "", ""
    if peers.first:
        opened, path = open_run(request, config)
        text, folder = cfg.to_toml(opened), str(path.resolve())
    return cfg.from_toml(peers.share(text)), Path(peers.share(folder))


def _end(failed: Failure, *, alone: bool) -> NoReturn:
    """With nobody to tell, the error is the command's own."""
    from mfun.train.failure import leave

    if alone:
        click.echo(f"mfun: {failed.block()}", err=True)
        sys.exit(1)
    leave(failed)
