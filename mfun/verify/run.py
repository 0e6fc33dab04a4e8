"""Run a shrunk configuration on its layout: in one process (mailbox), or as one rank of many."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs

from mfun import tree
from mfun.comm.world import World
from mfun.config import Config
from mfun.pipeline import mailbox
from mfun.train.plan import Plan, plan
from mfun.train.shards import by_path
from mfun.train.step import Trainer
from mfun.verify import reference
from mfun.verify.batches import all_batches, rank_batches
from mfun.verify.compare import RankResult, Report, judge


def program(layout: Plan, world: World) -> Generator[str, None, dict[str, Any]]:
    """Train the configured steps on made-up batches.

    Returns:
        (as the generator's value) {"grads", "params": by path, with the world's lead dims;
        "losses", "norms": numbers}.
    """
    config, trainer = layout.config, Trainer(layout, world)
    state = trainer.init()
    first: dict[str, Any] = {}
    losses, norms = [], []
    for step in range(config.train.steps):
        count = config.train.microbatches
        batches = [
            world.build(lambda c, s=step, i=i: rank_batches(config, c, s)[i]) for i in range(count)
        ]
        if step == 0:
            grads, *_ = yield from trainer.gradients(state, batches)
            whole = yield from by_path(layout, world, grads)
            first = {path: grad.clone() for path, grad in whole.items()}
        state, metrics = yield from trainer.step(state, batches)
        losses.append(metrics.loss)
        norms.append(metrics.grad_norm)
    params = tree.flatten((yield from by_path(layout, world, state.params)))
    return {"grads": first, "params": params, "losses": losses, "norms": norms}


def in_mailbox(
    layout: Plan,
    *,
    check: bool = True,
    plain: bool = False,
    office: mailbox.Office | None = None,
) -> list[RankResult]:
    """All ranks in this process: stages in the mailbox, the ranks of each as one vmap.

    Args:
        layout: what to run.
        check: assert declared types at every collective.
        plain: stages are of one rank and run without the vmap (`MailboxWorld`).
        office: the transport to play.
    """
    office = office or mailbox.Office()
    worlds = mailbox.worlds(layout.mesh, office, check=check, plain=plain)
    done = mailbox.run([program(layout, world) for world in worlds], office)
    out = []
    for world, result in zip(worlds, done, strict=True):
        for i, rank in enumerate(layout.mesh.stage_ranks(world.stage)):
            at = i if world.lead else ...
            pick = {k: {p: x[at] for p, x in result[k].items()} for k in ("grads", "params")}
            coords = layout.mesh.coords(rank)
            out.append(RankResult(coords, **pick, losses=result["losses"], norms=result["norms"]))
    return out


def settings_of(config: Config) -> dict[str, dict[str, Any]]:
    """The plain nested dict that the reference reads."""
    return {name: attrs.asdict(getattr(config, name)) for name in ("model", "train", "optim")}


def reference_history(config: Config) -> reference.History:
    """The same steps by the independent reference on one device, in float64."""
    steps = [all_batches(config, step) for step in range(config.train.steps)]
    return reference.train(settings_of(config), steps)


def verify_in_process(config: Config, *, check: bool = True) -> Report:
    """Run a shrunk configuration in this process and judge it.

    Example:
        >>> from mfun.config import load, resolve
        >>> from mfun.verify.shrink import shrink
        >>> small = shrink(resolve(load("tiny", ["parallel.tp=2", "parallel.pp=1"]), 2), steps=1)
        >>> verify_in_process(small).ok
        True
    """
    layout = plan(config)
    return judge(layout, in_mailbox(layout, check=check), reference_history(config))
