"""Overlap, by the order of events on each rank: nothing here looks at a clock."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from test_sharding import config_of

from mfun import config as cfg
from mfun.train.plan import Plan, plan
from research.bench import overlap
from tests.sharding_properties import at, hidden, layer_of, recorded


def laid(sharding: str, overlap: str, microbatches: str = "2") -> Plan:
    """Three blocks on two data ranks, in several buckets."""
    row = {"dp": "2", "sharding": sharding, "overlap": overlap, "microbatches": microbatches}
    return plan(config_of({**row, "tied": "false", "bucket_size": "200"}))


OVERLAPPED = {
    "no_shard": {},
    "optim": {"sharding": "optim"},
    "norms over tp": {"sharding": "optim", "tp": "2", "sequence_parallel": "true"},
    "norms in fp32": {"sharding": "optim"},
}


@pytest.mark.parametrize("case", OVERLAPPED)
def test_a_bucket_is_on_its_way_while_earlier_layers_run_backward(case: str) -> None:
    """Each starts after its last gradient and before earlier layers' last; waits end the step.

    All but the embedding's have something to hide behind: no bucket gathers what is special (has
    no decay, another group or type) of all layers.
    """
    row = {"dp": "2", "overlap": "true", "microbatches": "2", "tied": "false", "bucket_size": "200"}
    config = config_of({**row, **OVERLAPPED[case]})
    if case == "norms in fp32":
        config = cfg.override(config, ["precision.policy=bf16", "precision.norms=fp32"])
    layout = plan(config)
    buckets, layer = layout.buckets(0), layer_of(layout)
    last = [b for b in buckets if any(layer[span.path] == 0 for span in b.spans)]
    assert len(buckets) - len(last) >= 3
    for bucket in last:  # the embedding's, and of the block after it what fills them up
        assert all(layer[span.path] <= 1 for span in bucket.spans)
    for events in recorded(layout):
        assert hidden(layout, events) == len(buckets) - len(last)


@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_without_overlap_all_of_it_comes_after_the_last_backward(sharding: str) -> None:
    """The same buckets start together at the end, before one is waited for."""
    for events in recorded(laid(sharding, "false")):
        kinds = [event.kind for event in events if event.kind in ("grad", "start", "wait")]
        assert kinds == sorted(kinds, key=["grad", "start", "wait"].index)
        assert kinds.count("start") == kinds.count("wait") >= 4


@pytest.mark.parametrize("sharding", ["optim_grads", "optim_grads_params"])
def test_released_gradients_travel_beside_the_next_layers(sharding: str) -> None:
    """Of each microbatch: a bucket is waited for when the next starts, and not before."""
    layout = laid(sharding, "true")
    layer, buckets = layer_of(layout), layout.buckets(0)
    for events in recorded(layout):
        going, behind = -1, 0
        for i, event in enumerate(events):
            if event.kind == "wait":
                assert event.what == going
                started = max(at(events[:i], "start", going))
                between = {str(e.what) for e in events[started:i] if e.kind == "grad"}
                members = {span.path for span in buckets[going].spans}
                assert not between & members
                behind += any(layer[path] < layer[min(members)] for path in between)
                going = -1
            elif event.kind == "start":
                assert going == -1
                going = int(event.what)
        starts = [event.what for event in events if event.kind == "start"]
        assert sorted(starts) == sorted(2 * [*range(len(buckets))])
        assert going == -1 and behind == 2 * max(layer.values())  # a layer has several buckets


# ---------------------------------------------------------------------------- the measurement


@pytest.mark.parametrize(
    ("off", "on", "queued", "status"),
    [
        (1.0, 0.2, 0.9, 0),
        (0.3, 0.1, 1.1, 0),  # gloo runs them side by side
        (1.0, 0.21, 1.0, 1),
        (1.0, 0.1, 0.89, 1),
    ],
)
@pytest.mark.parametrize("link", ["queue", "slow"])
def test_the_measurement_exits_by_its_expectation(
    link: str, off: float, on: float, queued: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two seconds in all: what is exposed with and without, on gloo and on either queue."""
    held = {"summed": 2.0, "off": 2.0, "on": 0.0, "whole off": 2.1, "whole on": 0.1}
    seconds = {name: dict(held) for name in overlap.LINKS}
    seconds["gloo"] |= {"off": 2 * off, "on": 2 * on}
    seconds[link] |= {"off": 2 * queued}
    given: Any = {"seconds": seconds, "buckets": 9}
    monkeypatch.setattr(overlap, "launch", lambda *_, **__: given)
    done = CliRunner().invoke(overlap.main, ["--sharding", "no_shard"])
    assert done.exit_code == status, done.output
    assert done.output.count("9 buckets,  2000.0 ms summed") == 3
    seconds[link] |= {"off": 2.0, "on": 0.5}
    assert CliRunner().invoke(overlap.main, ["--sharding", "no_shard"]).exit_code == 1


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
def test_the_measurement_runs(sharding: str) -> None:
    """On two ranks at toy size; the slow queue takes its time for the buckets together."""
    found = overlap.launch(sharding, steps=1, delay=0.2, tiny=True)
    assert found["buckets"] > 1
    late = found["seconds"]["slow"]
    assert min(late["summed"], late["whole off"]) >= 0.2
    assert late["on"] < late["summed"]
