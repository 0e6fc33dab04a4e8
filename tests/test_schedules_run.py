"""Every schedule trains to the values of one device, in the mailbox.

Half of the rows run plain (a process's code: products left for W by the layers themselves), half
under the ranks' vmap. `make test` takes a pairwise cover, `make test-full` the whole grid.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from mfun.config import Config
from mfun.schedule import SCHEDULES
from mfun.train.plan import plan
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, reference_history
from tests.pairwise import Row, covering
from tests.properties import small

FIELDS = {
    "schedule": tuple(name for name in SCHEDULES if name != "none"),
    "p": ("1", "2", "3", "4"),
    "v": ("1", "2", "3"),
    "m": ("1", "2", "3", "4", "5", "6", "7", "8", "9"),
    "tied": ("true", "false"),
    "layers": ("even", "uneven", "standalone"),
    "split": ("true", "false"),
    "recompute": ("none", "full"),
    "world": ("plain", "vmap"),
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
        f"{row['recompute']} parallel.split_backward={row['split']}"
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
    rest = [FIELDS[field] for field in ("tied", "layers", "split", "recompute", "world")]
    features = itertools.cycle(itertools.product(*rest))
    for v, m in itertools.product(FIELDS["v"], FIELDS["m"]):
        row = {"schedule": name, "p": p, "v": v, "m": m}
        if allowed(row):
            more = zip(
                ("tied", "layers", "split", "recompute", "world"), next(features), strict=True
            )
            assert_equal(row | dict(more))
