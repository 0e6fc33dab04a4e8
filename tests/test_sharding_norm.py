"""The gradient norm and the clipped gradients of every layout, to 1e-12 of one device's."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

import attrs
import pytest
from test_sharding import STRATEGIES, config_of, name_of
from threads import on_threads
from torch import Tensor

from mfun import optim
from mfun.comm import ProcessWorld, finish
from mfun.comm.world import World
from mfun.config import Config
from mfun.grads import needed_groups
from mfun.pipeline import mailbox
from mfun.spec import window
from mfun.train.plan import Plan, plan
from mfun.train.shards import by_path
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.run import reference_history
from tests.pairwise import Row, covering

BOUND = 1e-12
LIMIT = 0.05
"""Well below any of these gradients' norms."""
FIELDS: dict[str, tuple[str, ...]] = {
    "sharding": STRATEGIES,
    "tp": ("1", "2", "4"),
    "pp": ("1", "2"),
    "dp": ("1", "2", "3", "4"),
    "shard_copies": ("1", "2"),
    "sequence_parallel": ("false", "true"),
    "kv_heads": ("4", "2", "1"),
    "tied": ("true", "false"),
    "mean_gradients": ("false", "true"),
    "overlap": ("false", "true"),
    "bucket_size": ("0", "50"),
    "microbatches": ("1", "2"),
    "qk_norm": ("true", "false"),
    "position": ("learned", "rotary"),
}


def allowed(row: Row) -> bool:
    """Copies are of the shards of half the data ranks; 8 ranks are the most."""
    copies = row.get("shard_copies") == "2"
    odd = copies and (row.get("dp") in ("1", "3") or row.get("sharding") == "no_shard")
    least = {"dp": "2" if copies else "1", **row}  # where dp is not chosen yet
    return not odd and math.prod(int(least.get(a, "1")) for a in ("tp", "pp", "dp")) <= 8


def small(row: Row) -> Config:
    """The configuration of a row: one step, and what `config_of` does not know."""
    config = config_of(row)
    more = {"qk_norm": row["qk_norm"] == "true", "position": row["position"]}
    return attrs.evolve(
        config,
        model=attrs.evolve(config.model, **more, bias="all"),
        train=attrs.evolve(config.train, steps=1),
    )


def clipped(layout: Plan, world: World) -> Generator[str, None, tuple[float, dict[str, Tensor]]]:
    """The norm of a step's gradient, and the clipped gradients by path."""
    trainer = Trainer(layout, world)
    state = trainer.init()
    count = layout.config.train.microbatches
    batches = [
        world.build(lambda c, i=i: rank_batches(layout.config, c, 0)[i]) for i in range(count)
    ]
    leaves, _, norm, *_ = yield from trainer.gradients(state, batches)
    clip = optim.clip_by_global_norm(LIMIT)
    cut, _ = clip.update(leaves, clip.init(leaves), leaves, norm=norm)
    whole = yield from by_path(layout, world, cut)
    assert bool((norm == norm.flatten()[0]).all()), "ranks of a stage have other norms"
    return float(norm.flatten()[0]), {path: x.clone() for path, x in whole.items()}


Result = tuple[dict[str, int], float, dict[str, Tensor]]


def in_mailbox(layout: Plan) -> list[Result]:
    """Of every rank, ranks as one vmap a stage: coordinates, norm, clipped gradients."""
    office = mailbox.Office()
    worlds = mailbox.worlds(layout.mesh, office)
    done = mailbox.run([clipped(layout, world) for world in worlds], office)
    return [
        (layout.mesh.coords(rank), norm, {path: x[i] for path, x in grads.items()})
        for world, (norm, grads) in zip(worlds, done, strict=True)
        for i, rank in enumerate(layout.mesh.stage_ranks(world.stage))
    ]


def in_threads(layout: Plan) -> list[Result]:
    """Of every rank, each a thread that runs what it would run as a process."""

    def main(groups: Any) -> Result:
        norm, grads = finish(clipped(layout, ProcessWorld(groups)))
        return layout.mesh.coords(int(groups.rank)), norm, grads

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


def check(layout: Plan, results: list[Result]) -> None:
    """Every rank's norm and clipped gradients are what one device's make by hand.

    A clipped gradient's error is measured by the largest element of its leaf, or where all of that
    are next to nothing (a key's bias has no gradient but rounding) by the largest of all.
    """
    grads = reference_history(layout.config).first_grads
    norm = math.sqrt(math.fsum(float(x) ** 2 for g in grads.values() for x in g.flatten()))
    factor = LIMIT / (norm + 1e-6)
    assert factor < 1
    top = max(float(g.abs().max()) for g in grads.values()) * factor
    for coords, have, cut in results:
        assert abs(have / norm - 1) <= BOUND, (coords, have, norm)
        for path, x in cut.items():
            box = tuple(slice(a, b) for a, b in window(layout.specs[path], layout.mesh, coords))
            want = grads[path][box] * factor
            local = x[tuple(slice(s.stop - s.start) for s in box)]
            scale = max(float(grads[path].abs().max()) * factor, 1e-2 * top)
            worst = float((local - want).abs().max()) if want.numel() else 0.0
            assert worst <= BOUND * scale, (coords, path, worst / scale)


PLACES: dict[str, Callable[[Plan], list[Result]]] = {"mailbox": in_mailbox, "threads": in_threads}
ROWS = covering(FIELDS, allowed, seed=0)


@pytest.mark.parametrize(
    ("row", "place"),
    [(row, ("mailbox", "threads")[i % 2]) for i, row in enumerate(ROWS)],
    ids=lambda x: x if isinstance(x, str) else name_of(x),
)
def test_norm_and_clipped_gradients_are_one_devices(row: Row, place: str) -> None:
    """Each logical element counts once, whatever is tied, repeated, cut or copied."""
    layout = plan(small(row))
    check(layout, PLACES[place](layout))


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", range(10, 14))
def test_grid_of_norms(seed: int, place: str) -> None:
    """More rows that cover every pair, in both places."""
    for row in covering(FIELDS, allowed, seed=seed):
        layout = plan(small(row))
        check(layout, PLACES[place](layout))
