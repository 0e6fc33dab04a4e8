"""Is a checkpoint saved and loaded as fast as by what it replaces?

A training state of 1 GB (parameters and two moments in float32) on two ranks of tp2: by mfun, by
torch.distributed.checkpoint as DTensors of the same layout, and, by one process that holds all of
it, as one file of the safetensors package. Everybody ends with the files on the disk: where a side
does not sync its files itself, its time includes that. A load goes into the state that is there, as
torch.distributed.checkpoint's does; where a library would map a file or make tensors, these are
copied to it. So no side is charged for getting memory, which takes a virtual machine longer than
reading (0.3 to 1.1 s for the same state, from one run to the next). It is timed twice: `load` with
all of every side's files in the system's cache, `cold` with nothing of them. Sides take turns, and
a ratio is the median of those of neighbouring runs.

Bare writing is no library: two ranks write as many bytes as the state has, directly, from one block
of memory, and sync: what the disk alone takes of a save. With `--folder /dev/shm` the disk is
memory, and what is left is everybody's own work.

And how many bytes are read for one tp shard of a checkpoint that was saved whole, its index and
header included, beside the shard's own bytes: those that the loader asks the system for, and, for
information, those that the system then reads from the disk. It reads pages of 4 KiB, and half a
row of the matrix after attention is half a page at the hidden size of 1024.

Run:    python -m research.bench.checkpoints [--megabytes 1000] [--repeats 5] [--folder DIR]
Expect: save, load and cold load at most 0.70 of the time of torch.distributed.checkpoint and at
        least 0.80 of the speed of safetensors; at most 1.05 of a shard's bytes read.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import Tensor

from mfun import checkpoint
from mfun.checkpoint import Order
from mfun.checkpoint.disk import BLOCK, DIRECT
from mfun.comm import ProcessWorld, distribute
from mfun.config import Config, load, resolve
from mfun.grads import needed_groups
from mfun.mesh import Mesh
from mfun.train import saving
from mfun.train.plan import plan
from mfun.train.ranks import Peers, Place
from mfun.train.replicas import owner, state_leaves
from mfun.train.step import State, Trainer

TO_DCP, OF_SAFETENSORS, OF_SHARD = 0.70, 0.80, 1.05
SIDES = ("mfun", "dcp", "safetensors")
BARE = "bare"
WHAT = ("save", "load", "cold")
Times = dict[str, dict[str, list[float]]]


def config_of(megabytes: int, tp: int) -> Config:
    """A GPT whose state is about so large."""
    hidden, vocab = (1024, 8192) if megabytes >= 200 else (128, 512)
    block, table = 12 * hidden * hidden, vocab * hidden
    layers = max(1, round((megabytes * 1e6 / 12 - table) / block))
    keys = {"layers": layers, "hidden": hidden, "heads": 8, "vocab": vocab, "seq_len": 64}
    settings = [f"model.{key}={value}" for key, value in keys.items()]
    settings += ["model.ffn=0", "model.kv_heads=0", "model.position=rotary", "model.tied=true"]
    return resolve(load("tiny", [*settings, f"parallel.tp={tp}", "parallel.pp=1"]), tp)


def trained(trainer: Trainer) -> State:
    """A state with something in its moments."""
    state = trainer.init()
    for name, x in state_leaves(state).items():
        if name.startswith("opt.") and x.ndim:
            x.uniform_()
    return state


def as_dtensors(trainer: Trainer, state: State) -> dict[str, Any]:
    """The same tensors as torch.distributed knows them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    specs, mesh = trainer.plan.specs, init_device_mesh("cpu", (dist.get_world_size(),))
    out: dict[str, Any] = {}
    for name, x in state_leaves(state).items():
        path = owner(name, trainer.plan.table)
        if path is None:
            out[name] = x
            continue
        cut = [dim for dim in range(x.ndim) if specs[path].p.cuts(dim)]
        how = Shard(cut[0]) if cut else Replicate()
        out[name] = DTensor.from_local(x, mesh, [how], run_check=False)
    return out


def whole(config: Config) -> dict[str, Tensor]:
    """All tensors of the state, whole."""
    specs = plan(config).specs
    kinds = ("params", "opt.adamw.mu", "opt.adamw.nu")
    return {f"{kind}.{p}": torch.rand(s.shape) for kind in kinds for p, s in specs.items()}


def sync(folder: Path) -> None:
    """Bring all files of a folder to the disk."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


class Side:
    """One of the three: how it saves into a folder and loads from it, on this rank."""

    def __init__(self, name: str, config: Config, peers: Peers) -> None:
        self.name, self.peers, layout = name, peers, plan(config)
        groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
        self.trainer = Trainer(layout, ProcessWorld(groups))
        self.first = peers.first
        if name != "safetensors":
            self.state = trained(self.trainer)
            self.tensors = as_dtensors(self.trainer, self.state) if name == "dcp" else {}
        elif self.first:
            self.tensors = whole(config)

    def save(self, folder: Path) -> None:
        """To the disk."""
        match self.name:
            case "mfun":
                saving.save(self.trainer, self.state, folder, self.peers)
            case "dcp":
                from torch.distributed.checkpoint.state_dict_saver import save

                save(self.tensors, checkpoint_id=folder)
            case _ if self.first:
                from safetensors.torch import save_file

                folder.mkdir(parents=True)
                save_file(self.tensors, folder / "all.safetensors")
                sync(folder)

    def load(self, folder: Path) -> Any:
        """Into the state that is there."""
        match self.name:
            case "mfun":
                found = checkpoint.step_folder(folder, self.state.step)
                return saving.load(self.trainer, found, self.peers, into=self.state)
            case "dcp":
                from torch.distributed.checkpoint import state_dict_loader

                state_dict_loader.load(self.tensors, checkpoint_id=folder)
            case _ if self.first:
                from safetensors.torch import load_file

                for name, x in load_file(folder / "all.safetensors").items():
                    self.tensors[name].copy_(x)


def write_bare(path: Path, size: int) -> None:
    """So many bytes of one block, written and synced as directly as a process can."""
    with mmap.mmap(-1, BLOCK) as block:
        block.write(os.urandom(BLOCK))
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | DIRECT, 0o600)
        for _ in range(size // BLOCK):
            os.write(handle, block)
        os.fsync(handle)
        os.close(handle)


def timed(peers: Peers, work: Callable[[], Any]) -> float:
    """Seconds until all ranks are done."""
    peers.barrier()
    start = time.perf_counter()
    kept = work()
    peers.barrier()
    spent = time.perf_counter() - start
    del kept
    return spent


def worker(megabytes: int, repeats: int, folder: Path) -> Times:
    """The sides in turns, on one of two ranks."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    peers = Peers(Place(rank=dist.get_rank(), world=dist.get_world_size()))
    config = config_of(megabytes, dist.get_world_size())
    times: Times = {name: {what: [] for what in WHAT} for name in SIDES} | {BARE: {"save": []}}
    half = bytes_of(megabytes) // 2
    sides = {name: Side(name, config, peers) for name in SIDES}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            place = folder / f"{name}-{turn}"
            spent = [timed(peers, lambda side=side, place=place: side.save(place))]
            for cached in (True, False):
                if peers.first:
                    cache(place, cached)
                peers.barrier()
                spent.append(timed(peers, lambda side=side, place=place: side.load(place)))
            for what, seconds in (
                zip(WHAT, spent, strict=True) if turn else ()
            ):  # the first warms up
                times[name][what].append(seconds)
            if peers.first:
                shutil.rmtree(place)
                os.sync()
        path = folder / f"{BARE}-{peers.place.rank}"
        spent = timed(peers, lambda path=path: write_bare(path, half))
        times[BARE]["save"].extend([spent] if turn else [])
        path.unlink()
    peers.barrier()
    dist.destroy_process_group()
    return times


def cache(folder: Path, wanted: bool) -> None:
    """Let the system have all of a folder's files in its cache, or nothing of them."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while wanted and file.read(1 << 20):
                pass


class Read(NamedTuple):
    """Bytes: of a shard, those asked of the system for it, and those that came from the disk."""

    own: int
    asked: int
    disk: int


def read_so_far() -> tuple[int, int]:
    """What this process has asked the system for, and what came from the disk."""
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"]), int(rows["read_bytes"])


def shard_bytes(megabytes: int, folder: Path) -> Read:
    """What is read for one of two tp shards from one file, nothing of it being cached."""
    config = config_of(megabytes, 2)
    layout, mesh = plan(config), Mesh(tp=2)
    tensors = whole(config_of(megabytes, 1))
    run = folder / "whole"
    at = checkpoint.save(Order(run_dir=run, step=0, tensors=tensors))
    expected = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    pieces = {}
    for name in tensors:
        path = owner(name, layout.table)
        assert path is not None
        pieces[name] = saving.box_of(layout.specs[path], mesh, {"tp": 1})
    cache(at, False)
    before = read_so_far()
    found = checkpoint.load(at, expected, pieces=pieces)
    asked, disk = (b - a for a, b in zip(before, read_so_far(), strict=True))
    for name, x in found.items():
        box = tuple(
            slice(a, a + n) for a, n in zip(pieces[name].start, pieces[name].box, strict=True)
        )
        assert torch.equal(x, tensors[name][box]), name
    shutil.rmtree(run)
    return Read(sum(x.nbytes for x in found.values()), asked, disk)


def launch(megabytes: int, repeats: int, folder: Path) -> Times:
    """Two ranks in fresh processes; what the first of them measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "research.bench.checkpoints", "--worker", "--megabytes", str(megabytes)]
    command += ["--repeats", str(repeats), "--folder", str(folder)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if run.returncode:
        raise RuntimeError(f"the ranks failed ({run.returncode}):\n{run.stderr[-3000:]}")
    return json.loads((folder / "times.json").read_text())


def ratio(times: Times, what: str, peer: str, side: str = "mfun") -> float:
    """A side's time over a peer's, the median of those of the same turn."""
    pairs = zip(times[side][what], times[peer][what], strict=True)
    return statistics.median(a / b for a, b in pairs)


def bytes_of(megabytes: int) -> int:
    """Of the state."""
    return sum(12 * spec.numel for spec in plan(config_of(megabytes, 1)).specs.values())


def report(times: Times, size: int, shard: Read) -> bool:
    """Print the figures; whether they are as expected."""
    held = True
    print(f"a state of {size / 1e9:.2f} GB, on two ranks of tp2")
    for what in WHAT:
        for name in SIDES:
            spent = statistics.median(times[name][what])
            print(f"{what} {name:<12} {spent:6.2f} s  {size / spent / 1e9:5.2f} GB/s")
        to_dcp, speed = ratio(times, what, "dcp"), 1 / ratio(times, what, "safetensors")
        held &= to_dcp <= TO_DCP and speed >= OF_SAFETENSORS
        print(
            f"{what}: {to_dcp:.2f} of the time of torch.distributed.checkpoint (expected <= "
            f"{TO_DCP:.2f}), {speed:.2f} of the speed of safetensors (expected >= "
            f"{OF_SAFETENSORS:.2f})"
        )
    print(
        f"bare writing of as many bytes: {ratio(times, 'save', 'dcp', BARE):.2f} of the time of "
        f"torch.distributed.checkpoint; a save takes {ratio(times, 'save', BARE):.2f} of it"
    )
    own, asked, pages = shard
    held &= asked <= OF_SHARD * own
    print(
        f"one tp shard of {own / 1e6:.1f} MB: {asked / 1e6:.1f} MB read, {asked / own:.3f} of it "
        f"(expected <= {OF_SHARD:.2f}); in pages from the disk {pages / own:.3f}"
    )
    return held


@click.command(help=__doc__)
@click.option("--megabytes", default=1000, help="Size of the state.")
@click.option("--repeats", default=5, help="Turns of the three sides.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; a new one below.")
@click.option("--worker", "worker_", is_flag=True, hidden=True)
def main(megabytes: int, repeats: int, folder: Path | None, worker_: bool) -> None:
    """Command line."""
    if worker_:
        assert folder is not None
        times = worker(megabytes, repeats, folder)
        if os.environ["RANK"] == "0":
            (folder / "times.json").write_text(json.dumps(times))
        return
    with tempfile.TemporaryDirectory(dir=folder) as made:
        shard = shard_bytes(megabytes, Path(made))
        times = launch(megabytes, repeats, Path(made))
    held = report(times, bytes_of(megabytes), shard)
    if megabytes < 200:
        return  # nothing is expected of toy sizes
    print(f"expectation {'held' if held else 'FAILED'}")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
