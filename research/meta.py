"""Can a model learn how fast to learn? Differentiate through its training steps.

Three steps of gradient descent on the mesh (tp 2 with sequence parallelism, dp 2), each leaf with
a learning rate of its own, then the loss on other text: a function of the learning rates, whose
gradient passes through the gradients within. It starts from the best single rate of a grid.

Run:    python -m research.meta
Expect: the derivative equals central differences to 1e-6, and learned rates bring the loss after
        three steps, on text not used to learn them, at least 0.02 nats below that of the best
        single one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from mfun import func, tree
from mfun.config import Config
from research import common

INNER = 3
GRID = tuple(2.0**k for k in range(-3, 4))
EXPECTED = (1e-6, 0.02)
Task = int
"""A number: the task of learning some text from some initial weights."""


def after_training(config: Config) -> Callable[[Any, Task], Tensor]:
    """(logarithms of learning rates by leaf, task) -> loss on other text after the steps."""
    mean = common.mean_loss(config)

    def value(logs: Any, task: Task) -> Tensor:
        params = common.start(config, task)
        for i in range(INNER):
            text = common.text(config, 2 * task * INNER + i)
            grads = func.gradient(lambda p, t=text: mean(p, t), params)
            params = tree.map(lambda p, g, log: p - log.exp() * g, params, grads, logs)
        return mean(params, common.text(config, (2 * task + 1) * INNER))

    return value


def single(config: Config, rate: float) -> Any:
    """One learning rate for all leaves."""
    log = torch.tensor(rate, dtype=torch.float64).log()
    return tree.map(lambda _: log, func.specs_of(config))


def mismatch(value: Callable[[Any], Tensor], logs: Any) -> float:
    """Largest relative difference of the derivative from central differences."""
    grads, e = torch.func.grad(value)(logs), 1e-4
    worst = 0.0
    for path in ("embed.tokens", "blocks.0.attn.out", "blocks.0.norm1.weight", "head.weight"):
        at = tree.get(logs, path)
        up, down = (value(tree.put(logs, path, at + sign * e)) for sign in (1, -1))
        have = tree.get(grads, path)
        worst = max(worst, float(((up - down) / (2 * e) - have).abs() / have.abs()))
    return worst


def run(config: Config, steps: int, tests: int) -> tuple[float, list[float], float, Any]:
    """Mismatch, mean loss on held-out tasks while learning, that of the best single rate, rates."""
    value = after_training(config)
    held_out = range(10_000, 10_000 + tests)

    def tested(logs: Any) -> float:
        return float(torch.stack([value(logs, task) for task in held_out]).mean())

    best = min(GRID, key=lambda rate: tested(single(config, rate)))
    logs = single(config, best)
    trace, curve = tree.map(torch.zeros_like, logs), [tested(logs)]
    wrong = mismatch(lambda x: value(x, 0), logs)
    for step in range(steps):
        grads = torch.func.grad(value)(logs, step)
        trace = func.add(grads, trace, 0.8)
        logs = func.add(logs, trace, -0.5)
        if (step + 1) % 5 == 0:
            curve.append(tested(logs))
    return wrong, curve, curve[0], tree.map(lambda log: float(log.exp()), logs)


def plot(curve: list[float], rates: Any) -> common.Figure:
    """Loss after training against meta-steps; what the rates became."""
    figure, (left, right) = common.panels(2)
    left.axhline(curve[0], color="0.6", linestyle="--", linewidth=1, label="best single rate")
    left.plot([5 * i for i in range(len(curve))], curve, "o-", markersize=4, label="learned rates")
    left.set(xlabel="step of the outer descent", ylabel=f"loss after {INNER} steps, nats a token")
    left.legend(fontsize=8, frameon=False)
    leaves = tree.flatten(rates)
    right.barh(range(len(leaves)), list(leaves.values()), color="tab:blue", height=0.6)
    right.set_yticks(range(len(leaves)), list(leaves), fontsize=8)
    right.set(xscale="log", xlabel="learning rate")
    right.invert_yaxis()
    return figure


@click.command(help=__doc__)
@click.option("--steps", default=10, show_default=True)
@click.option("--tests", default=2, show_default=True, help="Tasks to judge by.")
@click.option("--out", default=common.FIGURES / "meta.png", show_default=True, type=Path)
def main(steps: int, tests: int, out: Path) -> None:
    """Command line."""
    wrong, curve, single_rate, rates = run(common.tiny(), steps, tests)
    print(f"derivative through {INNER} steps: off by {wrong:.1e} from central differences")
    print(
        f"loss after {INNER} steps: {single_rate:.3f} with one rate, {curve[-1]:.3f} with learned"
    )
    held = wrong <= EXPECTED[0] and single_rate - curve[-1] >= EXPECTED[1]
    common.end(held, plot(curve, rates), out)


if __name__ == "__main__":
    main()
