"""Is mfun as fast as what it replaces? Step time and peak memory beside each peer, in one run.

Each case runs mfun and the peer in separate processes with the same allocator setting, which take
steps in turn while the others wait, and prints the median ratio of neighbouring steps (below 1:
mfun is faster), which a machine that slows down for both does not move, and the ratio of peak
resident memory. The same process may be some per cent faster or slower for its whole life, so
each round begins with fresh ones.

Cases: one device (eager nn.Module + fused AdamW), dp2 (DistributedDataParallel, which overlaps its
reductions; mfun does not: on CPU a sum takes the cores that compute), zero1 (the optimizer sharded,
against mfun without), zero3 (parameters sharded, against FSDP2), tp2 (DTensor with loss parallel),
pp2 (torch.distributed.pipelining Schedule1F1B), and against the same peer zb4 and zb8 (the
zero-bubble schedule ZBV with 4 and 8 microbatches: the first stage has the first two and the last
two of 8 blocks, and the head, so it does not wait for its first input) and zb8cut (ZB-H2 with 8,
and the blocks cut 5 + 3, because the second stage also has the head).

Run:    python -m research.bench.peers [--cases one,dp2,tp2,pp2] [--rounds 4] [--steps 5]
        (MFUN_BENCH_MALLOC=0: both sides without the allocator setting that `mfun train` makes)
Expect: step-time ratios at most 1.00 (one), 0.99 (dp2), 1.02 (zero1), 0.80 (zero3), 0.86 (tp2),
        0.98 (pp2), 0.88 (zb4), 0.93 (zb8), 0.90 (zb8cut); memory 1.10.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import attrs
import click
import torch
import torch.distributed as dist

RESULTS = "MFUN_BENCH_RESULTS"  # folder in which each rank leaves its numbers
SIZES = {"layers": 8, "hidden": 512, "heads": 8, "vocab": 8192, "seq": 256, "batch": 8}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 96, "seq": 32, "batch": 8}


WARM = 2
"""Steps of each side before those that count."""
MEMORY = 1.10
"""Ratio of peak resident memory expected at most, in every case."""


@attrs.frozen
class Case:
    """One comparison: the ranks, mfun's layout and more, the peer, the ratio expected."""

    ranks: int
    layout: dict[str, int]
    microbatches: int
    peer: str
    expected: float
    changes: dict[str, str] = attrs.field(factory=dict)


CASES = {
    "one": Case(1, {}, 1, "eager nn.Module + fused AdamW", 1.00),
    "dp2": Case(2, {"dp": 2}, 1, "DistributedDataParallel", 0.99),
    "zero1": Case(2, {"dp": 2}, 1, "mfun without sharding", 1.02, {"parallel.sharding": "optim"}),
    "zero3": Case(
        2,
        {"dp": 2},
        1,
        "FSDP2, fully_shard per block",
        0.80,
        {"parallel.sharding": "optim_grads_params"},
    ),
    "tp2": Case(2, {"tp": 2}, 1, "DTensor TP + loss parallel", 0.86),
    "pp2": Case(2, {"pp": 2}, 4, "torch Schedule1F1B", 0.98),
    "zb4": Case(2, {"pp": 2}, 4, "torch Schedule1F1B", 0.88, {"parallel.schedule": "zbv"}),
    "zb8": Case(2, {"pp": 2}, 8, "torch Schedule1F1B", 0.93, {"parallel.schedule": "zbv"}),
    "zb8cut": Case(
        2,
        {"pp": 2},
        8,
        "torch Schedule1F1B",
        0.90,
        {"parallel.schedule": "zb-h2", "parallel.layers_per_stage": "5,3"},
    ),
}


def mfun_step(case: Case, sizes: dict[str, int], tokens: Any, labels: Any) -> Any:
    """mfun's step on this rank, as a function without arguments."""
    from mfun.comm import ProcessWorld, distribute, finish
    from mfun.config import load, mesh, microbatch_sizes, resolve
    from mfun.grads import needed_groups
    from mfun.train.plan import plan
    from mfun.train.step import Trainer

    keys = {f"model.{k}": sizes[k] for k in ("layers", "hidden", "heads", "vocab")}
    keys |= {"model.seq_len": sizes["seq"], "model.tied": "false", "model.bias": "all"}
    keys |= {"model.position": "learned", "model.norm": "layernorm", "model.activation": "gelu"}
    keys |= {"model.kv_heads": 0, "model.ffn": 0, "model.dropout": 0.0, "optim.clip": 0}
    keys |= {"optim.lr": 1e-3, "optim.schedule": "constant", "optim.warmup": 0}
    keys |= {"train.global_batch": sizes["batch"], "train.microbatches": case.microbatches}
    keys |= {f"parallel.{axis}": case.layout.get(axis, 1) for axis in ("tp", "pp", "dp")}
    keys |= case.changes
    config = resolve(load("tiny", [f"{k}={v}" for k, v in keys.items()]), case.ranks)
    layout = plan(config)
    groups = distribute(mesh(config), needed_groups(layout.table, layout.mesh))
    world = ProcessWorld(groups)
    trainer = Trainer(layout, world)
    at, dp = world.coords["dp"], layout.mesh.dp
    mine = [x.chunk(dp)[at].split(microbatch_sizes(config)[0]) for x in (tokens, labels)]
    batches = [
        {
            "tokens": x,
            "labels": y,
            "mask": torch.ones(x.shape),
            "sample": torch.arange(len(x)),
        }
        for x, y in zip(*mine, strict=True)
    ]
    state = trainer.init()

    def step() -> float:
        nonlocal state
        state, metrics = finish(trainer.step(state, batches))
        return metrics.loss

    return step


def peer_step(name: str, case: Case, sizes: dict[str, int], tokens: Any, labels: Any) -> Any:
    """The peer's step on this rank."""
    from research.bench import modules

    match name:
        case "one":
            return modules.one_device(sizes, tokens, labels)
        case "dp2":
            return modules.ddp(sizes, tokens, labels)
        case "zero1":
            return mfun_step(attrs.evolve(case, changes={}), sizes, tokens, labels)
        case "zero3":
            return modules.fsdp2(sizes, tokens, labels)
        case "tp2":
            return modules.dtensor_tp(sizes, tokens, labels)
        case _:
            return modules.pipeline_1f1b(sizes, tokens, labels, case.microbatches)


def turns(port: int) -> Iterator[None]:
    """One item a turn, which rank 0 is told of by the bench and tells the others of."""
    first = int(os.environ.get("RANK", "0")) == 0
    many = dist.is_initialized()
    with socket.create_connection(("127.0.0.1", port)) if first else nullcontext() as bench:
        while True:
            go = torch.zeros(1)
            if bench is not None:
                go += bench.recv(1) == b"g"
            if many:
                dist.broadcast(go, 0)
            if not go:
                return
            yield
            if many:
                dist.barrier()
            if bench is not None:
                bench.sendall(b"d")


def worker(name: str, who: str, port: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Time a step a turn on this rank: {"ms": [...], "rss": bytes, "loss": last}."""
    from mfun.train.ranks import tune_malloc

    case = CASES[name]
    if os.environ.get("MFUN_BENCH_MALLOC", "1") == "1":
        tune_malloc()
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // case.ranks))
    if case.ranks > 1:
        dist.init_process_group("gloo")
    text = torch.randint(sizes["vocab"], (sizes["batch"], sizes["seq"] + 1))
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    if who == "mfun":
        step = mfun_step(case, sizes, tokens, labels)
    else:
        step = peer_step(name, case, sizes, tokens, labels)
    times, cpu, loss = [], [], 0.0
    for _ in turns(port):
        start, used = time.perf_counter(), time.process_time()
        loss = step()
        times.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - used))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if case.ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return {"ms": times[WARM:], "cpu_ms": cpu[WARM:], "rss": rss, "loss": loss}


class Side:
    """One side of a comparison: its processes, which step when it is their turn."""

    def __init__(self, name: str, who: str, tiny: bool) -> None:
        self.name, self.who, self.ranks = name, who, CASES[name].ranks
        self.folder = tempfile.TemporaryDirectory()
        self.server = socket.create_server(("127.0.0.1", 0))
        command = [sys.executable, "-m"]
        if self.ranks > 1:
            launcher = ["torch.distributed.run", "--standalone"]
            command += [*launcher, f"--nproc-per-node={self.ranks}", "-m"]
        port = self.server.getsockname()[1]
        command += ["research.bench.peers", "--worker", f"{name}:{who}:{port}:{int(tiny)}"]
        threads = str(max(1, (os.cpu_count() or 2) // self.ranks))
        env = os.environ | {"OMP_NUM_THREADS": threads, RESULTS: self.folder.name}
        self.said = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=self.said, env=env
        )
        self.server.settimeout(120)
        self.at: socket.socket | None = None

    def turn(self) -> None:
        """Let it take one step."""
        if self.at is None:
            self.at = self._accepted()
        self.at.sendall(b"g")
        if self.at.recv(1) != b"d":
            self.failed()

    def _accepted(self) -> socket.socket:
        try:
            return self.server.accept()[0]
        except TimeoutError:
            self.failed()

    def failed(self) -> NoReturn:
        """Say what its processes said."""
        self.process.kill()
        self.process.wait()
        self.said.seek(0)
        raise RuntimeError(f"{self.name} {self.who} failed:\n{self.said.read()[-3000:]}")

    def result(self) -> dict[str, Any]:
        """End it: slowest rank's times, all processor time, most memory."""
        assert self.at is not None
        self.at.close()
        if self.process.wait():
            self.failed()
        rows = [json.loads(path.read_text()) for path in Path(self.folder.name).iterdir()]
        self.said.close()
        self.server.close()
        self.folder.cleanup()
        return {
            "ms": [max(ms) for ms in zip(*(row["ms"] for row in rows), strict=True)],
            "cpu_ms": [sum(ms) for ms in zip(*(row["cpu_ms"] for row in rows), strict=True)],
            "rss": max(row["rss"] for row in rows),
            "loss": max(row["loss"] for row in rows),
        }


def in_turn(name: str, steps: int, tiny: bool = False) -> dict[str, dict[str, Any]]:
    """Steps of fresh processes of both sides in turn, each side first every other time."""
    sides = {who: Side(name, who, tiny) for who in ("mfun", "peer")}
    for i in range(steps + WARM):
        for who in ("mfun", "peer") if i % 2 == 0 else ("peer", "mfun"):
            sides[who].turn()
    return {who: side.result() for who, side in sides.items()}


def compare(name: str, rounds: int, steps: int, tiny: bool = False) -> dict[str, Any]:
    """The ratio of all pairs of neighbouring steps, its median in all and in each round."""
    found = [in_turn(name, steps, tiny) for _ in range(rounds)]
    ratios = [
        [a / b for a, b in zip(row["mfun"]["ms"], row["peer"]["ms"], strict=True)] for row in found
    ]
    all_of = {
        (who, key): [x for row in found for x in row[who][key]]
        for who in ("mfun", "peer")
        for key in ("ms", "cpu_ms")
    }
    median = {what: statistics.median(values) for what, values in all_of.items()}
    return {
        "case": name,
        "peer": CASES[name].peer,
        "mfun_ms": median["mfun", "ms"],
        "peer_ms": median["peer", "ms"],
        "min_ratio": min(all_of["mfun", "ms"]) / min(all_of["peer", "ms"]),
        "time_ratio": statistics.median(x for row in ratios for x in row),
        "rounds": sorted(statistics.median(row) for row in ratios),
        "cpu_ratio": median["mfun", "cpu_ms"] / median["peer", "cpu_ms"],
        "expected": CASES[name].expected,
        "memory_ratio": max(x["mfun"]["rss"] for x in found) / max(x["peer"]["rss"] for x in found),
        "losses": {who: found[-1][who]["loss"] for who in found[-1]},
    }


@click.command(help=__doc__)
@click.option("--cases", default=",".join(CASES), help="Comma-separated.")
@click.option("--rounds", default=4, help="Fresh processes of both sides, this many times.")
@click.option("--steps", default=5, help="Timed steps of each side in a round.")
@click.option("--tiny", is_flag=True, help="Toy sizes, to try the script itself.")
@click.option("--worker", "worker_", default="", hidden=True)
def main(cases: str, rounds: int, steps: int, tiny: bool, worker_: str) -> None:
    """Command line."""
    if worker_:
        name, who, port, small = worker_.split(":")
        result = worker(name, who, int(port), TINY if int(small) else SIZES)
        path = Path(os.environ[RESULTS]) / f"rank-{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(result))
        return
    held = True
    for name in cases.split(","):
        row = compare(name, rounds, steps, tiny)
        held &= row["time_ratio"] <= row["expected"] and row["memory_ratio"] <= MEMORY
        print(
            f"{name:4} {row['mfun_ms']:8.1f} ms  peer {row['peer_ms']:8.1f} ms  "
            f"ratio {row['time_ratio']:.3f} (rounds {row['rounds'][0]:.3f} to "
            f"{row['rounds'][-1]:.3f}, minima {row['min_ratio']:.3f}, expected <= "
            f"{row['expected']:.2f})  cpu {row['cpu_ratio']:.3f}  memory "
            f"{row['memory_ratio']:.3f}  vs {row['peer']}",
            flush=True,
        )
    if tiny:
        return  # nothing is expected of toy sizes
    print(f"expectation {'held' if held else 'FAILED'}")
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
