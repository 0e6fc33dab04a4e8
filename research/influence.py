"""Which training example made the model say this? The inverse Hessian tells, without retraining.

The output head of a GPT, its vocabulary cut over tp 2 and its samples over dp 2, trained with
weight decay to the one minimum that there is. Leaving out example i changes the loss of a test
batch by about

    (1/n) g_test . (H + decay)^-1 g_i

(Koh and Liang 2017, arXiv 1703.04730): one solve for all examples, by conjugate gradients on
Hessian-vector products through the mesh. The answer is known here: the head is trained again
without each example, all of them at once under one vmap, until its gradient is 0.

What the formula leaves out is that the Hessian loses the example too. Were the loss quadratic, the
truth would be g_test . (1 - K_i)^-1 (H + decay)^-1 g_i / n with K_i = (H + decay)^-1 H_i / n, whose
eigenvalues lie between 0 and their sum, the example's leverage. All leverages sum to d, the number
of parameters that the data decide: d = tr (H + decay)^-1 H.

Run:    python -m research.influence
Expect: the gradients left are below 1e-9; predicted and true changes correlate above 0.98; and the
        predicted ones are smaller, by no more than the mean leverage: slope in [1 - d/n, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from mfun import func, tree
from mfun.config import Config
from research import common

DECAY = 0.5
EXPECTED = (1e-9, 0.98)
Objective = Callable[[Any, Tensor], Tensor]


class Found(NamedTuple):
    """Change of the test loss by example, predicted and true; d/n; the largest gradient left."""

    predicted: Tensor
    true: Tensor
    leverage: float
    left: float


def objective(config: Config, rest: Any, batch: common.Batch) -> Objective:
    """(head, weights of examples) -> weighted loss over their number; convex in the head."""
    total = func.mesh_loss(config, check=False)

    def value(head: Any, weights: Tensor) -> Tensor:
        weighted = {**batch, "mask": batch["mask"] * weights.unsqueeze(1)}
        return total({**rest, "head": head}, weighted) / batch["mask"].sum()

    return value


def solver(value: Objective, head: Any, weights: Tensor) -> tuple[Callable[[Any], Any], float]:
    """v -> (H + decay)^-1 v by the whole matrix, and tr (H + decay)^-1 H."""
    size, like = common.flat(head).numel(), head["weight"]
    basis = {"weight": torch.eye(size, dtype=torch.float64).view(size, *like.shape)}
    h = common.rows(func.hessian(lambda p: value(p, weights), head, basis, chunk=32))
    inverse = (h + DECAY * torch.eye(size, dtype=torch.float64)).inverse()
    return (
        lambda v: tree.map(lambda x: (inverse @ x.flatten()).view(x.shape), v),
        float((inverse @ h).trace()),
    )


def trained(value: Objective, head: Any, weights: Tensor, solve: Any, steps: int) -> Any:
    """The minimum, by descent with a fixed inverse Hessian; and the largest gradient left."""

    def grads(p: Any) -> Any:
        return func.add(func.gradient(lambda q: value(q, weights), p), p, DECAY)

    for _ in range(steps):
        head = func.add(head, solve(grads(head)), -1.0)
    return head, grads(head)["weight"].abs().max()


def run(config: Config, warm: int = 12, steps: int = 16) -> Found:
    """Everything about every training example left out."""
    params, batch, test = common.start(config), common.text(config), common.text(config, 1)
    mean = common.mean_loss(config)
    for _ in range(warm):  # of the whole model, so that its features say something
        params = func.add(params, func.gradient(lambda p: mean(p, batch), params), -0.5)
    rest = {k: v for k, v in params.items() if k != "head"}
    value, on_test = objective(config, rest, batch), objective(config, rest, test)
    n = len(batch["sample"])
    ones = torch.ones(n, dtype=torch.float64)
    head, own = params["head"], 0.0
    solve, known = solver(value, head, ones)
    for _ in range(2):  # the fixed inverse follows the head
        head, own = trained(value, head, ones, solve, steps)
        solve, known = solver(value, head, ones)

    def product(v: Any) -> Any:
        return func.hessian_vector(lambda p: value(p, ones), head, v)

    g_test = func.gradient(lambda p: on_test(p, ones), head)
    asked = func.conjugate_gradients(product, g_test, 40, damping=DECAY)

    # value is linear in the weights: its mixed derivative along `asked` is all examples' answer.
    def along(weights: Tensor) -> Tensor:
        return func.tree_dot(func.gradient(lambda p: value(p, weights), head), asked)

    predicted = torch.func.grad(along)(ones)
    without = ones - torch.eye(n, dtype=torch.float64)
    again, left = torch.func.vmap(lambda w: trained(value, head, w, solve, steps))(without)
    true = torch.func.vmap(lambda p: on_test(p, ones))(again) - on_test(head, ones)
    return Found(predicted, true, known / n, max(float(own), float(left.max())))


def plot(found: Found) -> common.Figure:
    """One point an example, in millinats."""
    figure, (axis,) = common.panels(1, 4.2, 3.6)
    true, predicted = 1e3 * found.true, 1e3 * found.predicted
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
    axis.plot(ends, ends, color="0.6", linewidth=1, label="equal")
    slope = 1 - found.leverage
    axis.plot(ends, [slope * x for x in ends], "--", color="0.6", linewidth=1,
              label="smaller by d/n")  # fmt: skip
    axis.plot(true, predicted, "o", color="tab:blue", markersize=4, alpha=0.8)
    axis.set_xlabel("change of the test loss, trained again, 1e-3 nats")
    axis.set_ylabel("predicted by the inverse Hessian")
    axis.legend(fontsize=8, frameon=False)
    return figure


@click.command(help=__doc__)
@click.option("--examples", default=64, show_default=True)
@click.option("--out", default=common.FIGURES / "influence.png", show_default=True, type=Path)
def main(examples: int, out: Path) -> None:
    """Command line."""
    found = run(common.tiny({"train.global_batch": examples}))
    correlation = float(torch.corrcoef(torch.stack([found.predicted, found.true]))[0, 1])
    slope = float((found.predicted @ found.true) / (found.true @ found.true))
    print(f"{examples} examples: correlation {correlation:.4f}, slope {slope:.3f}")
    print(f"mean leverage d/n {found.leverage:.3f}; largest gradient left {found.left:.1e}")
    held = found.left <= EXPECTED[0] and correlation >= EXPECTED[1]
    held &= 1 - found.leverage <= slope <= 1
    common.end(held, plot(found), out)


if __name__ == "__main__":
    main()
