"""Is communication hidden behind the backward? The time that is left to wait, as a part of it all.

Two data-parallel gloo ranks train the model of `research.bench.peers`. Measured in each step:

    summed    seconds of the gradients' collectives, each by itself: of each from its start until it
              is there, and the next is started then; added up
    exposed   seconds that `finalize` waits for them, once both ranks have ended their backward

With `parallel.overlap = false` all of the sum is exposed, with `true` what is left of it. On these
links:

    gloo      as in training. It runs several collectives side by side, and sends part of a message
              in the call that starts it, so that even without overlap less than the sum is waited
              for; what a rank adds up itself, where the optimizer is sharded, is no wait either.
              `finalize` in all is printed beside it
    queue     one at a time in the order of their starts, as on a network card's stream
    slow      such a queue, late: each takes a fixed time, and nobody computes for it. All of them
              together take less than the backward: a slower link cannot be hidden behind it

Run:    python -m research.bench.overlap [--steps 3] [--delay-ms 600] [--links slow]
Expect: exposed at most 20 % of the sum with overlap on every link, and without at least 90 % on
        both queues.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import Tensor

from mfun.comm import ProcessWorld, distribute, finish, overlap
from mfun.comm.world import Reduce, Waits, World
from mfun.config import load, resolve
from mfun.grads import GradBuffers, needed_groups
from mfun.mesh import AxisLike
from mfun.train import step as step_module
from mfun.train.plan import plan
from mfun.train.step import Batch, Trainer
from research.bench.peers import RESULTS, SIZES, TINY

COUNTS = torch.float64
"""Type of what is reduced besides gradients: counts and norms."""
SHARDINGS = ("no_shard", "optim")
LINKS = {"gloo": ("gloo", 0), "queue": ("queue", 0), "slow": ("queue", 1)}
"""Each link's way, and whether it is late."""
MOST, LEAST = 0.20, 0.90
"""Of the summed time: exposed with overlap, and without on a queue."""


class Link(ProcessWorld):
    """A world whose reductions are seen to.

    Attributes:
        way: "alone" (each is there before its call returns), "queue" (one at a time in the order of
            the calls, beside what is computed) or "gloo" (as it comes).
        delay: seconds that each of gradients takes at least; not of gloo.
        seconds: that gradients' have taken since the last `finalize` began.
        waited: seconds for which the training has waited for them since then.
    """

    way: str = "gloo"
    delay: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self._line = ThreadPoolExecutor(max_workers=1)

    def all_reduce(
        self,
        x: Tensor,
        axes: Sequence[AxisLike],
        stages: Sequence[int] | None = None,
        op: Reduce = "sum",
    ) -> Waits[Tensor]:
        """As of processes, on this link."""
        going = self._sent(x, partial(super().all_reduce, x, axes, stages, op))
        return self._timed(going) if self.way == "gloo" else going

    def reduce_scatter(
        self, x: Tensor, axes: Sequence[AxisLike], op: Reduce = "sum", *, wide: bool = False
    ) -> Waits[Tensor]:
        """As of processes, on this link."""
        return self._sent(x, partial(super().reduce_scatter, x, axes, op, wide=wide))

    def _sent(self, x: Tensor, start: Callable[[], Waits[Tensor]]) -> Waits[Tensor]:
        if self.way == "gloo":
            return start()
        job = self._line.submit(self._carry, start, x.dtype != COUNTS)
        if self.way == "alone":
            job.result()
        return self._timed(_there(job))

    def _timed(self, going: Waits[Tensor]) -> Waits[Tensor]:
        with self.waiting():
            return (yield from going)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time that counts as waited."""
        begin = time.perf_counter()
        yield
        self.waited += time.perf_counter() - begin

    def _carry(self, start: Callable[[], Waits[Tensor]], bucket: bool) -> Tensor:
        begin = time.perf_counter()
        out = finish(start())
        if bucket:
            time.sleep(max(0.0, begin + self.delay - time.perf_counter()))
            self.seconds += time.perf_counter() - begin
        return out


def _there(job: Future[Tensor]) -> Waits[Tensor]:
    return job.result()
    yield ""


class Times(NamedTuple):
    """Seconds of one `finalize`: in all, for which it waited, and of the collectives alone."""

    whole: float
    waited: float
    alone: float


@contextmanager
def timed_finalize() -> Iterator[list[Times]]:
    """Of every step meanwhile, from when all ranks have come to `finalize`."""
    original, times, wait = step_module.finalize_steps, list[Times](), overlap.wait

    def finalize(world: World, grads: GradBuffers) -> Waits[None]:
        assert isinstance(world, Link)

        def waits(works: Sequence[Any]) -> None:  # of an exchange, before what came is added up
            with world.waiting() if world.way == "gloo" else nullcontext():
                wait(works)

        dist.barrier()
        start, world.seconds, world.waited, overlap.wait = time.perf_counter(), 0.0, 0.0, waits
        yield from original(world, grads)
        times.append(Times(time.perf_counter() - start, world.waited, world.seconds))

    step_module.finalize_steps = finalize
    try:
        yield times
    finally:
        step_module.finalize_steps, overlap.wait = original, wait


class Run:
    """A rank's training, that is measured on one link after the other."""

    def __init__(self, trainer: Trainer, batches: list[Batch]) -> None:
        self.trainer, self.batches, self.state = trainer, batches, trainer.init()
        self.measure(1, "gloo")

    def measure(self, steps: int, way: str, delay: float = 0.0) -> list[Times]:
        """Those of each of some steps."""
        world = self.trainer.world
        assert isinstance(world, Link)
        world.way, world.delay = way, delay
        with timed_finalize() as times:
            for _ in range(steps):
                self.state, _ = finish(self.trainer.step(self.state, self.batches))
        return times


def run_of(sizes: dict[str, int], settings: Sequence[str]) -> Run:
    """This rank's, after a first step."""
    keys = {f"model.{k}": sizes[k] for k in ("layers", "hidden", "heads", "vocab")}
    keys |= {"model.seq_len": sizes["seq"], "model.tied": "false", "parallel.dp": 2}
    keys |= {"parallel.tp": 1, "parallel.pp": 1, "train.global_batch": sizes["batch"]}
    keys |= {"train.microbatches": 1}
    config = resolve(load("tiny", [*(f"{k}={v}" for k, v in keys.items()), *settings]), 2)
    layout = plan(config)
    groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    text = torch.randint(sizes["vocab"], (sizes["batch"] // 2, sizes["seq"] + 1))
    batch = {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "mask": torch.ones(sizes["batch"] // 2, sizes["seq"]),
        "sample": torch.arange(sizes["batch"] // 2),
    }
    return Run(Trainer(layout, Link(groups)), [batch])


def worker(
    sharding: str, steps: int, delay: float, links: Sequence[str], sizes: dict[str, int]
) -> Any:
    """{link: {"summed", "off", "on": seconds of each step}} of this rank."""
    torch.manual_seed(0)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    dist.init_process_group("gloo")
    few = [f"parallel.sharding={sharding}", f"parallel.bucket_size={_bucket(sizes)}"]
    off = run_of(sizes, [*few, "parallel.overlap=false"])
    on = run_of(sizes, [*few, "parallel.overlap=true"])

    buckets, out = len(on.trainer.plan.buckets(0)), {}
    for link in links:
        way, late = LINKS[link][0], delay * LINKS[link][1] / buckets
        alone = off.measure(steps, "alone", late)
        bare, beside = off.measure(steps, way, late), on.measure(steps, way, late)
        out[link] = {
            "summed": [times.alone for times in alone],
            "off": [times.waited for times in bare],
            "on": [times.waited for times in beside],
            "whole off": [times.whole for times in bare],
            "whole on": [times.whole for times in beside],
        }
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": out, "buckets": buckets}


def _bucket(sizes: dict[str, int]) -> int:
    """Elements of a block's matrices: a bucket each, and the embedding the last."""
    return 12 * sizes["hidden"] ** 2


def launch(
    sharding: str, steps: int, delay: float, links: Sequence[str] = tuple(LINKS), *, tiny: bool
) -> dict[str, Any]:
    """Both ranks in fresh processes; of each step the slower one's time, of these the median."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "research.bench.overlap"]
    command += ["--worker", f"{sharding}:{steps}:{delay}:{','.join(links)}:{int(tiny)}"]
    env = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    with tempfile.TemporaryDirectory() as folder:
        env[RESULTS] = folder
        run = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        rows = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    if run.returncode or len(rows) != 2:
        raise RuntimeError(f"failed ({run.returncode}):\n{run.stderr[-3000:]}")
    first, second = (row["seconds"] for row in rows)
    middle = {
        at: {
            kind: statistics.median(map(max, zip(first[at][kind], second[at][kind], strict=True)))
            for kind in first[at]
        }
        for at in first
    }
    return {"seconds": middle, "buckets": rows[0]["buckets"]}


def report(
    sharding: str, steps: int, delay: float, links: Sequence[str], *, tiny: bool = False
) -> bool:
    """Print every link's figures; whether they are as expected."""
    found, held = launch(sharding, steps, delay, links, tiny=tiny), True
    for link, each in found["seconds"].items():
        summed = each["summed"]
        off, on = each["off"] / summed, each["on"] / summed
        held &= on <= MOST and (link == "gloo" or off >= LEAST)
        print(
            f"{sharding:<9} {link:<6} {found['buckets']} buckets, {1e3 * summed:7.1f} ms summed;  "
            f"exposed: overlap off {off:6.1%}, on {on:6.1%} "
            f"(finalize in all {1e3 * each['whole off']:.1f} and {1e3 * each['whole on']:.1f} ms)",
            flush=True,
        )
    return held


@click.command(help=__doc__)
@click.option("--steps", default=3, help="Measured steps of each kind.")
@click.option("--delay-ms", default=600.0, help="Of the slow queue, for all collectives.")
@click.option("--sharding", default=",".join(SHARDINGS), help="Strategies, comma-separated.")
@click.option("--links", default=",".join(LINKS), help="Links, comma-separated.")
@click.option("--tiny", is_flag=True, help="Toy sizes, to try the script itself.")
@click.option("--worker", "worker_", default="", hidden=True)
def main(steps: int, delay_ms: float, sharding: str, links: str, tiny: bool, worker_: str) -> None:
    """Command line."""
    if worker_:
        name, count, delay, links, small = worker_.split(":")
        sizes = TINY if int(small) else SIZES
        result = worker(name, int(count), float(delay), links.split(","), sizes)
        path = Path(os.environ[RESULTS]) / f"rank-{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(result))
        return
    chosen, late = links.split(","), delay_ms / 1e3
    rows = [report(name, steps, late, chosen, tiny=tiny) for name in sharding.split(",")]
    if tiny:
        return  # nothing is expected of toy sizes
    print(f"expectation {'held' if all(rows) else 'FAILED'}")
    raise SystemExit(0 if all(rows) else 1)


if __name__ == "__main__":
    main()
