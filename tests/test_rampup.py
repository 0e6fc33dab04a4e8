"""The batch ramps up: sizes by hand and by simulation, and runs that go through it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun import checkpoint
from mfun.config import (
    Config,
    ConfigError,
    TrainConfig,
    from_toml,
    load,
    microbatch_sizes,
    override,
    rampup,
    resolve,
    to_toml,
)
from mfun.config import check as check_config
from mfun.pipeline import mailbox
from mfun.schedule import ScheduleError
from mfun.train import loop
from mfun.train.feed import feed
from mfun.train.plan import plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from tests.properties import small


def simulated(train: TrainConfig, steps: int) -> list[tuple[int, int]]:
    """(consumed before, size) of each step, by Megatron's lines in fractions."""
    start, increment, samples = train.rampup
    out, done = [], 0
    for _ in range(steps):
        count = (train.global_batch - start) // increment
        size = train.global_batch
        if count and done < samples:
            size = start + increment * ((done * count) // samples)
        out.append((done, min(size, train.global_batch)))
        done += out[-1][1]
    return out


@given(
    start=st.integers(1, 6),
    increment=st.integers(1, 5),
    count=st.integers(0, 6),
    samples=st.integers(1, 400),
    steps=st.integers(1, 80),
)
def test_sizes_and_consumed_samples(
    start: int, increment: int, count: int, samples: int, steps: int
) -> None:
    """Each step's size and first sample, from the step alone, are those of the walk."""
    train = TrainConfig(global_batch=start + increment * count, rampup=(start, increment, samples))
    for step, (done, size) in enumerate(simulated(train, steps)):
        assert rampup.consumed(train, step) == done
        assert rampup.batch_size(train, done) == size and size in rampup.sizes(train)


def test_by_hand() -> None:
    """Start 16, increment 8, 300 samples, batch 32: two increments, one every 150 samples."""
    train = TrainConfig(global_batch=32, rampup=(16, 8, 300))
    assert rampup.sizes(train) == (16, 24, 32)
    sizes = [rampup.batch_size(train, n) for n in (0, 149, 150, 299, 300, 10**12)]
    assert sizes == [16, 16, 24, 24, 32, 32]
    # ten steps of 16 end at 160, six of 24 at 304
    assert [rampup.consumed(train, n) for n in (9, 10, 15, 16, 17)] == [144, 160, 280, 304, 336]
    assert rampup.consumed(train, 10**9) == 304 + (10**9 - 16) * 32
    assert rampup.consumed(TrainConfig(global_batch=7), 5) == 35
    assert from_toml(to_toml(Config(train=train))).train == train
    assert override(Config(), ["train.rampup=16,8,300"]).train.rampup == (16, 8, 300)


REFUSED = {
    "train.rampup=4,4": r"rampup is \[4, 4\]; give three numbers",
    "train.rampup=4,8,10": r"from 4 in steps of 8, .* train\.global_batch = 16; .* divides 16 - 4",
    "train.rampup=20,4,10": r"from 20 .* train\.global_batch = 16; use a start below 16",
    "train.rampup=2,2,10": r"start is 2, no multiple of the 4 sequences .* = 16 over .* = 4",
    "train.rampup=4,2,10": r"increment is 2, no multiple of the 4 sequences",
    "train.rampup=4,4,10 parallel.dp=2 train.microbatches=3": r"= 16 is no multiple of .* = 2 \* 3",
    "train.rampup=0,4,10": r"train\.rampup is \(0, 4, 10\); give a list of whole numbers of at",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_numbers_that_do_not_divide_are_refused(settings: str) -> None:
    """Each names the numbers and the fix."""
    base = ["train.global_batch=16", "train.microbatches=4", "parallel.pp=1", "parallel.tp=1"]
    with pytest.raises(ConfigError, match=REFUSED[settings]):
        check_config(override(load("tiny", base), settings.split()))


def test_every_size_is_planned_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a schedule refuses is refused at once, not at the step where the batch gets there."""
    real = loop.plan.__globals__["dressed"]

    def refuses_two(layout, microbatches=0):
        if microbatches == 2:
            raise ScheduleError("2 microbatches")
        return real(layout, microbatches)

    monkeypatch.setitem(loop.plan.__globals__, "dressed", refuses_two)
    plan(small("global_batch=4 microbatches=4"))
    with pytest.raises(ScheduleError, match="2 microbatches"):
        plan(small("global_batch=4 microbatches=4 rampup=1,1,9"))


RUNS = (
    "rampup=2,2,5 global_batch=6 microbatches=3 steps=6",
    "rampup=4,2,9 global_batch=8 microbatches=4 dp=2 pp=2 layers=2 steps=5",
    "rampup=2,2,5 global_batch=6 microbatches=3 dp=2 sharding=optim overlap=true steps=5",
    "rampup=2,2,5 global_batch=6 microbatches=3 dp=2 sharding=optim_grads_params steps=5",
)


@pytest.mark.parametrize("settings", RUNS)
def test_every_step_is_the_step_of_its_size(settings: str) -> None:
    """Losses, norms and weights equal those of trainers made for each step's size alone."""
    config = small(settings)
    layout, office = plan(config), mailbox.Office()
    sizes = [rampup.batch_size(config.train, rampup.consumed(config.train, n)) for n in range(5)]
    assert len({*sizes}) > 2 or len(rampup.sizes(config.train)) < 3

    def program(world, alone):
        state, out = Trainer(layout, world).init(), []
        trainer = Trainer(layout, world)
        for step in range(5):
            then = rampup.at(config, step)
            if alone:
                trainer = Trainer(plan(then), world)
            batches = [
                world.build(lambda c, i=i, t=then, s=step: rank_batches(t, c, s)[i])
                for i in range(then.train.microbatches)
            ]
            assert then.train.microbatches == len(microbatch_sizes(then))
            state, metrics = yield from trainer.step(state, batches, donate=False)
            out.append((metrics.loss, metrics.grad_norm, metrics.tokens))
        return out

    results = []
    for alone in (False, True):
        worlds = mailbox.worlds(layout.mesh, office)
        results.append(mailbox.run([program(w, alone) for w in worlds], office))
    assert results[0] == results[1]


SMALL = (
    "model.layers=1 model.hidden=16 model.heads=2 model.seq_len=8 parallel.tp=1 parallel.pp=1 "
    "train.global_batch=6 train.microbatches=3 train.steps=7 train.eval_every=3 "
    "train.eval_batches=1 train.checkpoint_every=2 train.rampup=2,2,9 "
    "optim.count_zeros=true model.tied=false"
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run whose batch is 2 for three steps, then 4 for one, then 6."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} squared is {n * n}.\n" for n in range(120)))
    return resolve(load("tiny", [*SMALL.split(), f"data.path={text}"]), 1)


def test_samples_come_in_order_each_once(config: Config) -> None:
    """Whatever the size, a step takes up where the one before stopped, on every data rank."""
    taken: list[int] = []
    wide = resolve(override(config, ["parallel.dp=2", "train.global_batch=12",
                                     "train.rampup=4,4,18"]), None)  # fmt: skip
    for step in range(6):
        own = [feed(wide, {"dp": dp}).step(step) for dp in (0, 1)]
        taken += [n for batches in own for b in batches for n in b["sample"].tolist()]
    assert taken == list(range(len(taken))) and len(taken) == rampup.consumed(wide.train, 6)
    assert [len(feed(config, {"dp": 0}).step(n)) for n in range(6)] == [1, 1, 1, 2, 3, 3]


def test_resume_within_the_ramp_is_bitwise(config: Config, tmp_path: Path) -> None:
    """Stopped at any step, the rest of the run is as it would have been."""
    whole = list(loop.train(loop.job(config, folder=_made(tmp_path / "whole"))))
    assert [r.tokens for r in whole] == [16, 16, 16, 32, 48, 48, 48]
    assert all(r.num_zeros and r.row()["num_zeros"] == r.num_zeros for r in whole)
    for stop in (2, 4):
        folder = _made(tmp_path / f"stop{stop}")
        training = loop.train(loop.job(config, folder=folder))
        for _ in range(stop):
            next(training)
        training.close()
        index = checkpoint.read_index(checkpoint.step_folder(folder, stop))
        assert index.consumed == {2: 4, 4: 10}[stop]
        rest = list(loop.train(loop.job(config, folder=folder)))
        assert [r.step for r in rest] == list(range(stop + 1, 8))
        assert [(r.loss, r.grad_norm) for r in rest] == [
            (r.loss, r.grad_norm) for r in whole[stop:]
        ]


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize("sharding", ["no_shard", "optim", "optim_grads_params"])
def test_muon_resumes_to_the_bit(config: Config, sharding: str, tmp_path: Path) -> None:
    """Momentum of matrices and moments of the rest are in the checkpoint, also of shards."""
    shards = f"parallel.sharding={sharding}"
    config = override(config, ["optim.name=muon", "train.rampup=", shards])
    assert config.train.rampup == ()
    whole = list(loop.train(loop.job(config, folder=_made(tmp_path / "whole"))))
    folder = _made(tmp_path / "stopped")
    training = loop.train(loop.job(config, folder=folder))
    for _ in range(4):
        next(training)
    training.close()
    rest = list(loop.train(loop.job(config, folder=folder)))
    assert [r.loss for r in rest] == [r.loss for r in whole[4:]]
