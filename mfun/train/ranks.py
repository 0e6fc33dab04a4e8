"""This process among the ranks: found in torchrun's or SLURM's environment, or alone.

`place` reads the environment, `joined` makes the process group and ends it in an orderly way, and
the few things that ranks tell each other outside a step are methods of `Peers`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from mfun.config import ConfigError


@attrs.frozen(kw_only=True)
class Place:
    """Which rank a process is.

    Args:
        rank: 0 .. world - 1.
        world: how many there are.
        local_rank: among the ranks of this machine.
        local_world: ranks of this machine.
        by: who started it: alone, torchrun or slurm.
        address: (host, port) to meet at, None where torchrun says.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    by: str = "alone"
    address: tuple[str, int] | None = None


def place(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun or SLURM gave this process; None if it was started by itself.

    Raises:
        ConfigError: the variables are incomplete or do not fit together.

    Example:
        >>> slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[07-08]"}
        >>> place(slurm).address
        ('n07', 20000)
    """
    if "RANK" in environ:
        return _torchrun(environ)
    if int(environ.get("SLURM_NTASKS", 1)) > 1 and "SLURM_PROCID" in environ:
        return _slurm(environ)
    return None


def _torchrun(environ: Mapping[str, str]) -> Place:
    missing = [k for k in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if k not in environ]
    if missing:
        raise ConfigError(
            f"RANK is set in the environment but {', '.join(missing)} is not; start mfun with "
            "torchrun, or unset RANK to let it start its own ranks."
        )
    world = int(environ["WORLD_SIZE"])
    return Place(
        rank=int(environ["RANK"]),
        world=world,
        local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
        local_world=int(environ.get("LOCAL_WORLD_SIZE", world)),
        by="torchrun",
    )


def _slurm(environ: Mapping[str, str]) -> Place:
    world = int(environ["SLURM_NTASKS"])
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    host = environ.get("MASTER_ADDR") or first_node(nodes)
    if not host:
        raise ConfigError(
            "SLURM_PROCID is set but neither MASTER_ADDR nor SLURM_JOB_NODELIST says where rank 0 "
            "is; set MASTER_ADDR to its host."
        )
    port = environ.get("MASTER_PORT") or 20000 + int(environ.get("SLURM_JOB_ID", 0)) % 20000
    return Place(
        rank=int(environ["SLURM_PROCID"]),
        world=world,
        local_rank=int(environ.get("SLURM_LOCALID", 0)),
        local_world=_tasks_here(environ, world),
        by="slurm",
        address=(host, int(port)),
    )


def _tasks_here(environ: Mapping[str, str], world: int) -> int:
    """Tasks on this node: from `4(x2),3`, the entry of SLURM_NODEID."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else world


def first_node(nodes: str) -> str:
    """The first host of a SLURM node list.

    Example:
        >>> first_node("gpu[003-007,012],login1"), first_node("a1,a2"), first_node("r[1-2]n[01-04]")
        ('gpu003', 'a1', 'r1n01')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def device_of(place: Place, wanted: str = "auto") -> torch.device:
    """Where a rank computes: its own GPU if every rank of the machine has one, else the CPU.

    Raises:
        ConfigError: cuda is asked for and there are too few devices.
    """
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if count >= place.local_world:
        return torch.device("cuda", place.local_rank)
    if wanted == "cuda":
        raise ConfigError(
            f"--device cuda: {place.local_world} ranks on this machine but {count} CUDA devices; "
            "use fewer ranks, or --device cpu."
        )
    return torch.device("cpu")


def cores() -> int:
    """Processor cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def threads(local_world: int) -> int:
    """Threads a rank computes with: OMP_NUM_THREADS, or its share of the machine's cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else max(1, cores() // local_world)


def tune_malloc() -> bool:
    """Let glibc keep freed memory: a step then takes no page faults for what the last one had.

    Sets M_TRIM_THRESHOLD to 2^31 - 1 and M_MMAP_THRESHOLD to 2^30, for the whole process.

    Returns: whether the C library is glibc and took both.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(library.mallopt(trim_threshold, 2**31 - 1)) & bool(
        library.mallopt(mmap_threshold, 2**30)
    )


class Peers:
    """What ranks tell each other outside a training step; alone it is what this rank says.

    Args:
        place: this rank's.
        device: where its collectives run.
    """

    def __init__(self, place: Place, device: torch.device | str = "cpu") -> None:
        self.place, self.device = place, torch.device(device)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes and prints."""
        return self.place.rank == 0

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self.place.world > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        if self.place.world == 1:
            return flag
        x = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return bool(x.item())

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.place.world == 1:
            return text
        contents = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        size = torch.tensor([len(text.encode())], device=self.device)
        dist.broadcast(size, 0)
        if not self.first:
            contents = torch.empty(max(int(size), 1), dtype=torch.uint8)
        contents = contents.to(self.device)
        dist.broadcast(contents, 0)
        return bytes(contents.cpu().numpy())[: int(size)].decode()


@contextmanager
def joined(place: Place, device: torch.device, timeout_s: float) -> Iterator[Peers]:
    """Be one of the ranks: a process group before, an orderly end after.

    A rank alone makes no group. After an error nothing is closed: the process should end at once,
    and its peers notice.

    Args:
        place: this process's.
        device: cpu means gloo, cuda NCCL.
        timeout_s: after which a collective that does not finish is an error.

    Raises:
        ConfigError: the ranks did not all come, or the port they were to meet at is in use.
    """
    torch.set_num_threads(threads(place.local_world))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if place.world == 1:
        yield Peers(place, device)
        return
    _init(place, device, timeout_s)
    yield Peers(place, device)
    dist.barrier()
    dist.destroy_process_group()


def _init(place: Place, device: torch.device, timeout_s: float) -> None:
    where = f"tcp://{place.address[0]}:{place.address[1]}" if place.address else "env://"
    cuda, timeout = device.type == "cuda", timedelta(seconds=timeout_s)
    try:
        store, rank, world = next(rendezvous(where, place.rank, place.world, timeout=timeout))
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=PrefixStore(_attempt(os.environ, world), store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    except dist.DistNetworkError as error:
        taken = "EADDRINUSE" in str(error)
        hint = "its port is in use: set MASTER_PORT to a free one" if taken else "is it reachable?"
        raise ConfigError(
            f"rank {place.rank} cannot meet the others at {_meeting(place)}; {hint}. ({error})"
        ) from error
    except dist.DistStoreError as error:
        raise ConfigError(
            f"rank {place.rank} waited {timeout_s:g} s (train.timeout_s) at {_meeting(place)} but "
            f"not all {place.world} ranks came; under SLURM start every rank with srun. ({error})"
        ) from error


def _attempt(environ: Mapping[str, str], world: int) -> str:
    """What the ranks of one start call themselves.

    torchrun's store outlives its ranks and still holds the addresses of those that were killed, so
    ranks that it starts again must not read what these wrote.
    """
    return f"attempt-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-of-{world}"


def _meeting(place: Place) -> str:
    host, port = place.address or (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    return f"{host}:{port}"
