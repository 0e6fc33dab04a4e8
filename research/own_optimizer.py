"""Must a new optimizer be taught about sharding? No: thirty lines, and every layout runs them.

ADOPT (Taniguchi et al. 2024, arXiv 2411.02853, algorithm 2) as a pair of pure functions of leaves.
The training step gives it whatever leaves a layout has: parameters, or with `parallel.sharding`
this rank's shards of flat buckets, of which it then keeps moments for that part alone.

Its clip matters here. A second moment that has seen one gradient near 0 divides the next ones by
almost nothing; without the clip the last bit of one initial weight, on one device, changes the
loss by 1e-10 after 9 steps and by a percent after 30, and no layout can be told from another.

Run:    python -m research.own_optimizer
Expect: on tp 2, dp 2, pp 2 with each sharding the losses are those of one device to 1e-10, sharded
        moments take half of the memory (padding aside), and the loss falls by 0.1 nats.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import torch

from mfun import optim
from mfun.comm import World
from mfun.config.sections import Sharding
from mfun.optim import Leaves, State, Transform
from mfun.pipeline import mailbox
from mfun.train.plan import Plan, plan
from mfun.train.step import Trainer
from research import common

EXPECTED = (1e-10, 0.55)
LAYOUT = {"model.layers": 2, "parallel.pp": 2, "train.microbatches": 2, "train.global_batch": 8}
ALONE = {**LAYOUT, "parallel.tp": 1, "parallel.dp": 1, "parallel.pp": 1,
         "parallel.sequence_parallel": False}  # fmt: skip


def adopt(lr: float, b1: float = 0.9, b2: float = 0.99, eps: float = 1e-6) -> Transform:
    """ADOPT, a terminal transform: it returns new parameters.

    n = clip(g / max(sqrt(v), eps), t^1/4);  m = b1 m + (1 - b1) n;  p = p - lr m;
    v = b2 v + (1 - b2) g^2

    The gradient is divided by the second moment of those before it; the first, t = 0, only fills v.
    """

    def init(params: Leaves) -> State:
        m, v = ({path: torch.zeros_like(p) for path, p in params.items()} for _ in range(2))
        return {"count": 0, "lr": lr, "m": m, "v": v}

    def update(updates: Leaves, state: State, params: Leaves, **_: Any) -> tuple[Leaves, State]:
        t, new, m, v = state["count"], dict(params), dict(state["m"]), {}
        for path, g in updates.items():
            old = state["v"][path]
            if t == 0:
                v[path] = g * g
                continue
            n = (g / old.sqrt().clamp(min=eps)).clamp(-(t**0.25), t**0.25)
            m[path] = b1 * m[path] + (1 - b1) * n
            new[path] = params[path] - lr * m[path]
            v[path] = b2 * old + (1 - b2) * g * g
        return new, {"count": t + 1, "lr": lr, "m": m, "v": v}

    return Transform(init, update)


class Result(NamedTuple):
    """Losses of every step, and elements of the moments that the fullest rank keeps."""

    losses: list[float]
    kept: int


def program(layout: Plan, world: World, lr: float, steps: int) -> Generator[str, None, Result]:
    """Train one rank's part (in the mailbox, one stage's)."""
    trainer, losses = Trainer(layout, world), []
    trainer.optimizer = adopt(lr)
    state = trainer.init()
    rows = layout.config.train.global_batch // layout.mesh.dp
    count = layout.config.train.microbatches
    for step in range(steps):
        text = common.text(layout.config, step)

        def mine(coords: Any, i: int, t: common.Batch = text) -> common.Batch:
            begin = coords["dp"] * rows + i * (rows // count)
            return {name: x[begin : begin + rows // count] for name, x in t.items()}

        batches = [world.build(lambda c, i=i, f=mine: f(c, i)) for i in range(count)]
        state, metrics = yield from trainer.step(state, batches)
        losses.append(metrics.loss)
    moments = optim.state_tensors(state.opt).values()
    kept = sum(x.numel() for x in moments) // (world.lead[0] if world.lead else 1)
    return Result(losses, kept)


def run(changes: dict[str, Any], lr: float, steps: int) -> Result:
    """All ranks of a layout in this process."""
    layout, office = plan(common.tiny(changes)), mailbox.Office()
    worlds = mailbox.worlds(layout.mesh, office)
    done = mailbox.run([program(layout, world, lr, steps) for world in worlds], office)
    return Result(done[0].losses, max(result.kept for result in done))


def plot(alone: Result, sharded: dict[str, Result]) -> common.Figure:
    """Losses of one device as a line, those of layouts as points on it; memory of the moments."""
    figure, (left, right) = common.panels(2)
    left.plot(alone.losses, color="0.4", linewidth=1.4, label="one device")
    for i, (name, result) in enumerate(sharded.items()):
        at = range(i, len(result.losses), len(sharded))  # in turn, or they would hide each other
        left.plot(at, [result.losses[j] for j in at], "ovs^"[i], markersize=5, label=name)
    left.set(xlabel="step", ylabel="loss, nats a token")
    left.legend(fontsize=8, frameon=False)
    kept = [result.kept for result in sharded.values()]
    right.barh(list(sharded), kept, color=[f"C{i}" for i in range(len(kept))], height=0.5)
    right.set(xlabel="numbers in the moments of the fullest rank")
    right.invert_yaxis()
    return figure


@click.command(help=__doc__)
@click.option("--steps", default=32, show_default=True)
@click.option("--lr", default=0.05, show_default=True)
@click.option("--out", default=common.FIGURES / "own_optimizer.png", show_default=True, type=Path)
def main(steps: int, lr: float, out: Path) -> None:
    """Command line."""
    alone = run(ALONE, lr, steps)
    shardings = get_args(Sharding)
    each = {name: run({**LAYOUT, "parallel.sharding": name}, lr, steps) for name in shardings}
    apart, whole = {}, each["no_shard"].kept
    for name, result in each.items():
        pairs = zip(result.losses, alone.losses, strict=True)
        apart[name] = max(abs(a / b - 1) for a, b in pairs)
        print(f"{name:<19} losses off by {apart[name]:.1e}, {result.kept / whole:.0%} of moments")
    print(f"loss {alone.losses[0]:.3f} -> {alone.losses[-1]:.3f}")
    held = max(apart.values()) <= EXPECTED[0] and alone.losses[-1] < alone.losses[0] - 0.1
    held &= all(each[name].kept <= EXPECTED[1] * whole for name in shardings[1:])
    common.end(held, plot(alone, each), out)


if __name__ == "__main__":
    main()
