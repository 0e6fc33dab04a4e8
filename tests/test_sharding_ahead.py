"""Updated parameters gathered beside the next forward: the same bits, and safe between steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from pool import Pool
from test_sharding import (
    FIELDS,
    allowed,
    assert_equal,
    config_of,
    equal,
    name_of,
    one_stage,
    whole,
)
from test_verify import on_a_rank
from threads import in_threads, on_threads

from mfun import config as cfg
from mfun.comm import ProcessWorld, finish
from mfun.config import Config, ConfigError, load
from mfun.grads import needed_groups
from mfun.train.plan import Plan, plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.compare import RankResult, judge
from mfun.verify.run import in_mailbox, reference_history
from tests.pairwise import Row, covering
from tests.sharding_properties import recorded, waits_by_layer

SHARDINGS = ("optim", "optim_grads")


def ranks(row: Row) -> int:
    """Of a row, or of what is known of it."""
    return math.prod(int(row.get(axis, "1")) for axis in ("tp", "pp", "dp"))


def ahead(row: Row, steps: int = 3) -> Config:
    """A row's configuration, gathering ahead, with steps to gather for."""
    config = config_of(row)
    return attrs.evolve(
        config,
        parallel=attrs.evolve(config.parallel, gather_ahead=True),
        train=attrs.evolve(config.train, steps=steps),
    )


def behind(config: Config) -> Config:
    """The same without."""
    return attrs.evolve(config, parallel=attrs.evolve(config.parallel, gather_ahead=False))


ROWS = covering(
    {
        "sharding": SHARDINGS,
        **{name: FIELDS[name] for name in ("tp", "pp", "shard_copies", "overlap", "tied")},
        **{name: FIELDS[name] for name in ("bucket_size", "recompute", "clip", "optimizer")},
        "dp": ("2", "3", "4"),
        "microbatches": ("1", "2"),
        "schedule": ("1f1b", "zb-h1"),
    },
    lambda row: allowed(row) and ranks(row) <= 8,
    seed=0,
)


@pytest.mark.parametrize(
    ("row", "place"),
    [(row, (in_mailbox, in_threads)[i % 2]) for i, row in enumerate(ROWS)],
    ids=lambda x: name_of(x) if isinstance(x, dict) else x.__name__,
)
def test_bitwise_as_gathered_at_once(row: Row, place: Callable[[Plan], list[RankResult]]) -> None:
    """Losses, norms, gradients and parameters of three steps, and those of one device."""
    layout = plan(ahead(row))
    found, want = place(layout), place(plan(behind(layout.config)))
    for one, other in zip(found, want, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        for kind in ("grads", "params"):
            assert equal(getattr(one, kind), getattr(other, kind)), kind
    assert_equal(judge(layout, found, reference_history(layout.config)))


@pytest.mark.parametrize(
    ("sharding", "row"),
    [
        ("optim", {"dp": "2", "microbatches": "2", "bucket_size": "50"}),
        ("optim_grads", {"dp": "2", "pp": "2", "schedule": "zb-h1", "overlap": "true"}),
        ("optim", {"dp": "4", "shard_copies": "2", "bucket_size": "50"}),
    ],
    ids=lambda x: name_of(x) if isinstance(x, dict) else x,
)
def test_on_gloo_ranks(pool: Pool, row: Row, sharding: str) -> None:
    """Real processes, three steps, against one device."""
    layout = plan(ahead({**row, "sharding": sharding}))
    found = pool.run(on_gloo, cfg.to_toml(layout.config), world=layout.mesh.world)
    for result in found:
        for kind in ("grads", "params"):
            result[kind] = {p: torch.from_numpy(x) for p, x in result[kind].items()}
    results = [RankResult(**result) for result in found]
    assert_equal(judge(layout, results, reference_history(layout.config)))


def on_gloo(rank: int, toml: str) -> dict[str, Any]:
    """One rank's result."""
    return on_a_rank(rank, (), cfg.from_toml(toml))


# ---------------------------------------------------------------------------- between steps


def trainers(sharding: str) -> tuple[Trainer, Trainer, Callable[[int], Any]]:
    """One that gathers ahead and one that does not, in the mailbox; batches by step."""
    late, batches = one_stage(sharding, bucket_size="50")
    config = attrs.evolve(late.plan.config, train=attrs.evolve(late.plan.config.train, steps=9))
    early = attrs.evolve(config, parallel=attrs.evolve(config.parallel, gather_ahead=True))
    return Trainer(plan(early), late.world), Trainer(plan(config), late.world), batches


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_state_is_whole_whatever_is_on_its_way(sharding: str) -> None:
    """Read as a checkpoint is, evaluated, stepped from twice, and gone back to: the same bits."""
    early, late, batches = trainers(sharding)
    state, same = early.init(), late.init()
    for step in range(4):
        state, mine = finish(early.step(state, batches(step)))
        same, its = finish(late.step(same, batches(step)))
        assert mine == its
        if step == 0:  # read while gathers are on their way
            assert early.params.flat is not None and early.params.flat.going
            assert equal(whole(early, state), whole(late, same))
        if step == 1:
            pair = (early.evaluate(state, batches(9)), late.evaluate(same, batches(9)))
            assert finish(pair[0]) == finish(pair[1])
            assert early.params.flat is not None and not early.params.flat.going
    old = whole(early, state)
    one, _ = finish(early.step(state, batches(5), donate=False))
    two, _ = finish(early.step(state, batches(5), donate=False))
    assert equal(whole(early, one), whole(early, two)) and equal(old, whole(early, state))
    three, _ = finish(early.step(one, batches(6)))
    assert equal(old, whole(early, state))
    want, _ = finish(late.step(same, batches(5)))
    want, _ = finish(late.step(want, batches(6)))
    assert equal(whole(early, three), whole(late, want))
    assert finish(early.evaluate(state, batches(9))) != finish(late.evaluate(want, batches(9)))


def test_a_shard_may_be_read_as_a_checkpoint_reads_it() -> None:
    """By numpy, which pins the memory of what it looks at to its size."""
    layout = plan(ahead({"dp": "2", "sharding": "optim"}))

    def main(groups: Any) -> float:
        trainer = Trainer(layout, ProcessWorld(groups))
        batches = rank_batches(layout.config, trainer.world.coords, 0)  # type: ignore[attr-defined]
        state, _ = finish(trainer.step(trainer.init(), batches))
        assert [x.numpy().size for x in state.params.values()]
        return finish(trainer.step(state, batches))[1].loss

    one, two = on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))
    assert one == two


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_nothing_is_on_its_way_after_the_last_step_or_settling(sharding: str) -> None:
    """Ranks may part then."""
    early, _, batches = trainers(sharding)
    state, _ = finish(early.step(early.init(), batches(0)))
    assert early.params.flat is not None and early.params.flat.going
    finish(early.params.settle())
    assert not early.params.flat.going
    config = early.plan.config
    last = Trainer(
        plan(attrs.evolve(config, train=attrs.evolve(config.train, steps=1))), early.world
    )
    finish(last.step(last.init(), batches(0)))
    assert last.params.flat is not None and not last.params.flat.going
    assert state.step == 1


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_a_skipped_update_gathers_what_was(sharding: str) -> None:
    """An overflow leaves parameters bitwise as they are, and the next forward uses them."""
    early, _, batches = trainers(sharding)
    state, _ = finish(early.step(early.init(), batches(0)))
    before = whole(early, state)
    update = early.optimizer.update
    skipped = early.optimizer._replace(update=lambda u, s, p, **extra: (p, s))
    early.optimizer = skipped
    state, _ = finish(early.step(state, batches(1)))
    early.optimizer = early.optimizer._replace(update=update)
    after = whole(early, state)
    assert equal(*({k: x for k, x in s.items() if k.startswith("params")} for s in (before, after)))


# ---------------------------------------------------------------------------- order of events


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_each_layer_waits_for_its_own_buckets_only(sharding: str) -> None:
    """All gathers start after the update, in order of use; later layers' are not waited for."""
    row = {"dp": "2", "sharding": sharding, "tied": "false", "bucket_size": "200"}
    layout = plan(ahead(row))
    for events in recorded(layout, steps=2):
        order = [event.what for event in events if event.kind == "gather"][: len(layout.buckets(0))]
        assert order == sorted(range(len(layout.buckets(0))), reverse=True)
        waits_by_layer(layout, events)


# ---------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("", "no_shard, which cuts nothing"),
        ("parallel.sharding=optim_grads_params", "which gathers by its stream"),
        (
            "parallel.sharding=optim precision.policy=bf16 precision.params=fp32",
            "gather_ahead gathers parameters as they are used",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: str, message: str) -> None:
    """By name, with the way out."""
    with pytest.raises(ConfigError, match=message):
        cfg.resolve(load("tiny", ["parallel.gather_ahead=true", *settings.split()]), None)


def test_buckets_by_layers_without_overlap() -> None:
    """One bucket would have the first layer wait for all of them."""
    row = {"dp": "2", "sharding": "optim"}
    assert cfg.override(Config(), ["parallel.gather_ahead=true"]).parallel.gather_ahead
    layout = plan(ahead({**row, "bucket_size": "50"}))
    assert len(layout.buckets(0)) > len(plan(behind(ahead(row))).buckets(0))
