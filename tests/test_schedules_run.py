"""Every schedule trains to the values of one device, in the mailbox.

Half of the rows run plain (a process's code: products left for W by the layers themselves), half
under the ranks' vmap. `make test` takes a pairwise cover, `make test-full` the whole grid.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from mfun.comm import ProcessWorld, distribute, finish
from mfun.config import Config
from mfun.grads import needed_groups
from mfun.pipeline.executor import train_step
from mfun.pipeline.mailbox import Office
from mfun.schedule import SCHEDULES
from mfun.train.plan import plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.compare import RankResult, judge
from mfun.verify.run import in_mailbox, program, reference_history
from tests.pairwise import Row, covering
from tests.pool import Pool
from tests.properties import small

FIELDS = {
    "schedule": tuple(name for name in SCHEDULES if name != "none"),
    "p": ("1", "2", "3", "4"),
    "v": ("1", "2", "3"),
    "m": ("1", "2", "3", "4", "5", "6", "7", "8", "9"),
    "tied": ("true", "false"),
    "layers": ("even", "uneven", "standalone"),
    "split": ("true", "false"),
    "recompute": ("none", "full", "selective"),
    "world": ("plain", "vmap"),
    "overlap": ("false", "true"),
}


def allowed(row: Row) -> bool:
    """A schedule with a fixed number of chunks runs that number."""
    fixed = SCHEDULES[row["schedule"]].chunks if "schedule" in row else 0
    return "v" not in row or not fixed or row["v"] == str(fixed)


def settings(row: Row) -> str:
    """The row as a configuration of the smallest model, with dropout and an uneven last batch."""
    p, v = int(row["p"]), int(row["v"])
    slices = p * v // SCHEDULES[row["schedule"]].replicas
    sizes = {"even": [1] * slices, "uneven": [1 + (i == slices // 2) for i in range(slices)]}
    sizes["standalone"] = [0, *[1] * max(slices - 2, 1), 0] if slices > 2 else sizes["uneven"]
    layers = sizes[row["layers"]]
    return (
        f"pp={p} chunks={v} parallel.schedule={row['schedule']} microbatches={row['m']} "
        f"global_batch={int(row['m']) + 1} layers={sum(layers)} tied={row['tied']} dropout=0.1 "
        f"parallel.layers_per_stage={','.join(map(str, layers))} parallel.recompute="
        f"{row['recompute']} parallel.split_backward={row['split']} "
        f"parallel.overlap={row.get('overlap', 'false')} bucket_size=300"
    )


@cache
def history(layers: int, microbatches: str, tied: str):
    """One device's steps, which no layout of the pipeline changes."""
    config = small(
        f"layers={layers} microbatches={microbatches} global_batch={int(microbatches) + 1} "
        f"tied={tied} dropout=0.1"
    )
    return reference_history(config)


def assert_equal(row: Row) -> None:
    """Losses, gradients and parameters of every stage are those of one device to 1e-10."""
    config: Config = small(settings(row))
    layout = plan(config)
    results = in_mailbox(layout, plain=row["world"] == "plain")
    report = judge(layout, results, history(config.model.layers, row["m"], row["tied"]))
    assert report.ok, "\n".join(report.notes)
    assert max(report.errors.values()) <= 1e-10


@pytest.mark.parametrize("row", covering(FIELDS, allowed), ids=lambda row: "-".join(row.values()))
def test_schedule_equals_one_device(row: Row) -> None:
    """A pairwise cover of schedules, sizes and features."""
    assert_equal(row)


@pytest.mark.full
@pytest.mark.parametrize("name", FIELDS["schedule"])
@pytest.mark.parametrize("p", FIELDS["p"])
def test_whole_grid_equals_one_device(name: str, p: str) -> None:
    """Every v and m; the features change from row to row."""
    names = ("tied", "layers", "split", "recompute", "world", "overlap")
    features = itertools.cycle(itertools.product(*(FIELDS[field] for field in names)))
    for v, m in itertools.product(FIELDS["v"], FIELDS["m"]):
        row = {"schedule": name, "p": p, "v": v, "m": m}
        if allowed(row):
            assert_equal(row | dict(zip(names, next(features), strict=True)))


DOZEN = (
    ("gpipe", "2", "1", "3", "true", "uneven", "true", "none"),
    ("1f1b", "4", "1", "5", "true", "standalone", "true", "full"),
    ("interleaved", "2", "2", "4", "false", "even", "true", "none"),
    ("interleaved", "2", "3", "5", "true", "uneven", "true", "full"),
    ("looped-bfs", "3", "2", "2", "true", "even", "true", "none"),
    ("zb-h1", "4", "1", "6", "true", "uneven", "true", "none"),
    ("zb-h2", "3", "1", "7", "false", "standalone", "true", "none"),
    ("zb-interleaved", "2", "2", "3", "true", "uneven", "true", "none"),
    ("zbv", "4", "2", "5", "true", "even", "true", "none"),
    ("v-half", "3", "2", "6", "false", "uneven", "true", "full"),
    ("v-min", "2", "2", "8", "true", "uneven", "true", "none"),
    ("dualpipe", "4", "2", "8", "true", "uneven", "true", "none"),
    ("dualpipev", "2", "2", "5", "true", "uneven", "true", "none"),
)


def on_rank(rank: int, text: str) -> RankResult:
    """Train as one process of a pipeline."""
    layout = plan(small(text))
    groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    result = finish(program(layout, ProcessWorld(groups)))
    return RankResult(coords=layout.mesh.coords(rank), **result)


@pytest.mark.parametrize("values", DOZEN, ids="-".join)
def test_schedule_on_processes_equals_one_device(pool: Pool, values: tuple[str, ...]) -> None:
    """Over gloo: real messages, and each layer's own products at W."""
    row = dict(zip(FIELDS, values, strict=False))
    text = settings(row)
    layout = plan(small(text))
    results = pool.run(on_rank, text, world=layout.mesh.world)
    want = history(layout.config.model.layers, row["m"], row["tied"])
    report = judge(layout, results, want)
    assert report.ok, "\n".join(report.notes)


def identical(rank: int, text: str) -> list[float]:
    """Losses of four copies of one microbatch."""
    layout = plan(small(text))
    groups = distribute(layout.mesh, needed_groups(layout.table, layout.mesh))
    trainer = Trainer(layout, ProcessWorld(groups))
    state = trainer.init()
    batch = rank_batches(layout.config, {"dp": 0, "cp": 0}, 0)[0]
    seeds = [torch.ones((), dtype=torch.float64)] * 4
    grads = trainer.buffers()
    stream = layout.streams[trainer.stage.index]
    steps = train_step(
        trainer.params.program(state.params), stream, [batch] * 4, seeds, grads, None
    )
    return [float(loss) for loss in finish(steps).values()]


@pytest.mark.parametrize("name", ["interleaved", "zb-interleaved", "zbv", "dualpipev"])
def test_four_identical_microbatches_have_four_identical_losses(pool: Pool, name: str) -> None:
    """Megatron-core's interleaved schedule at pp 2 with its defaults trains on swapped ones."""
    text = f"pp=2 layers=4 parallel.schedule={name} microbatches=4 global_batch=4"
    losses = [loss for rank in pool.run(identical, text, world=2) for loss in rank]
    assert len(losses) == 4 and len(set(losses)) == 1


@pytest.mark.parametrize("office", [{"rendezvous": True}, {"late": True}], ids=str)
@pytest.mark.parametrize("name", [n for n in FIELDS["schedule"] if n not in ("gpipe", "1f1b")])
def test_other_transports_change_no_bit(name: str, office: dict[str, bool]) -> None:
    """Sends that wait for their receiver, and payloads read late: bug rows 55 and 56."""
    text = f"pp=3 layers=9 parallel.schedule={name} microbatches=5 global_batch=5 tied=true"
    layout = plan(small(text))
    want = in_mailbox(layout, plain=True)
    have = in_mailbox(layout, plain=True, office=Office(**office))
    for a, b in zip(want, have, strict=True):
        assert all(torch.equal(a.grads[path], b.grads[path]) for path in a.grads)
