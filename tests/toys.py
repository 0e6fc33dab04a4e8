"""Toy models run whole in the mailbox: small enough to check by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mfun import tree
from mfun.grads import GradBuffers, finalize_steps, global_norm, lay_out, reductions, seeds
from mfun.mesh import Mesh
from mfun.nn.layer import Layer
from mfun.pipeline import executor, mailbox
from mfun.pipeline.program import Program
from mfun.pipeline.pullback import Linearize, autograd_layer
from mfun.pipeline.stage import Stage
from mfun.schedule import Placement, Schedule, plan
from mfun.spec import Init, ParamSpec

Microbatch = tuple[Sequence[float], Sequence[float]]  # values and loss mask of one row of tokens


class Result(NamedTuple):
    """What each stage ended with."""

    grads: list[dict[str, Tensor]]
    norms: list[Tensor]
    losses: list[Tensor]
    tokens: Tensor

    def grad(self, path: str) -> Tensor:
        """The gradient of a leaf on the first stage that holds it, of rank 0 there."""
        return next(g[path][0] for g in self.grads if path in g)


def scalar_model() -> list[Layer]:
    """One weight w, token loss x_t * w: its gradient is the weighted mean of the x_t."""
    spec = {"w": ParamSpec(shape=(1,), init=Init("zeros"), grad={"tp": "equal"})}
    multiply = Layer("w", spec, lambda p, x, c: {"h": p["w"] * c.batch["values"]})
    return [multiply, sum_loss()]


def sum_loss() -> Layer:
    """Sum of the valid tokens of `h`."""
    return Layer("loss", {}, lambda p, x, c: {"loss": (x["h"] * c.batch["mask"]).sum()})


def run(
    layers: Sequence[Layer],
    cuts: Sequence[int],
    data: Sequence[Sequence[Microbatch]],
    *,
    mesh: Mesh,
    norm: str = "tokens",
    schedule: str | Schedule = "1f1b",
    params: dict[str, Tensor] | None = None,
    office: mailbox.Office | None = None,
    linearize: Linearize = autograd_layer,
    windows: int = 1,
    hook: Callable[[GradBuffers], object] | None = None,
) -> Result:
    """One step of `layers` cut after the given counts, on rank-stacked stages.

    Args:
        layers: the model; the last one returns {"loss"}.
        cuts: number of layers of each stage.
        data: for each data rank, its microbatches.
        mesh: the mesh.
        norm: the loss normalisation.
        schedule: of `plan`, for more than one stage.
        params: whole leaves by path, replicated; zeros by default.
        office: transport to use.
        linearize: how layers are pulled back.
        windows: run the step this often with the same buffers.
        hook: called with the buffers before the first step.
    """
    assert len(cuts) == mesh.pp and sum(cuts) == len(layers)
    starts = [sum(cuts[:i]) for i in range(len(cuts))]
    place = Placement(len(cuts))
    stages = [
        Stage(i, place, (tuple(layers[a : a + n]),))
        for i, (a, n) in enumerate(zip(starts, cuts, strict=True))
    ]
    table = reductions([s.specs for s in stages], mesh)
    office = office or mailbox.Office()
    count = len(data[0])
    streams = plan(schedule if mesh.pp > 1 else "none", mesh.pp, count)

    def program(world: mailbox.MailboxWorld, stage: Stage) -> Any:
        def leaf(path: str, spec: ParamSpec) -> Tensor:
            whole = (params or {}).get(path)
            return torch.zeros(spec.shape).double() if whole is None else whole.clone()

        mine = world.build(lambda c: tree.map_with_path(leaf, stage.specs))
        batches = [world.build(lambda c, m=m: _batch(*data[c["dp"]][m])) for m in range(count)]
        buckets = lay_out(stage.specs, table, mesh, torch.float64)
        grads = GradBuffers(stage.specs, table, buckets, torch.float64, lead=world.lead)
        if hook:
            hook(grads)
        total = size = losses = None
        for _ in range(windows):
            scale, total = yield from seeds(
                world, [b["mask"].double().flatten(-2).sum(-1) for b in batches], norm
            )
            losses = yield from executor.train_step(
                Program(world, stage, mine, linearize),
                streams[stage.index],
                batches,
                scale,
                grads,
                None,
            )
            yield from finalize_steps(world, grads)
            size = yield from global_norm(world, grads)
        return grads.views, size, losses, total

    worlds = mailbox.worlds(mesh, office)
    done = mailbox.run([program(w, s) for w, s in zip(worlds, stages, strict=True)], office)
    losses = list(done[-1][2].values())
    return Result([d[0] for d in done], [d[1] for d in done], losses, done[0][3][0])


def _batch(values: Sequence[float], mask: Sequence[float]) -> dict[str, Tensor]:
    x = torch.tensor([list(values)], dtype=torch.float64)
    return {"values": x, "tokens": x, "mask": torch.tensor([list(mask)], dtype=torch.float64)}
