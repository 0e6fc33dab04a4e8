"""Gradients that are not numbers, or too large, end the run where they arise, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sharding import config_of
from threads import on_threads

from mfun import config as cfg
from mfun.comm import ProcessWorld, finish
from mfun.config import Config, ConfigError
from mfun.grads import GradientError, needed_groups
from mfun.grads.guard import Guard
from mfun.pipeline.flight import Flight
from mfun.train.plan import plan
from mfun.train.step import State, Trainer
from mfun.verify.batches import rank_batches

pytestmark = pytest.mark.usefixtures("new_memory_is_nan")


def run(
    monkeypatch: pytest.MonkeyPatch, plant: float, *settings: str, **row: str
) -> list[State | None]:
    """One step of two data ranks, of which rank 1 gets this number into a gradient."""
    config = cfg.override(config_of({"dp": "2", **row}), settings)
    layout = plan(cfg.resolve(config, None))
    original = Flight.backward

    def backward(self: Any, i: int, later: bool) -> None:
        original(self, i, later)
        path = "blocks.1.norm2.weight"
        grads = self._grads
        if path in grads.views and grads.views[path].numel() and at_rank_1(grads):
            view, keep = grads.claim(path)
            if not keep:  # the view's first gradient replaces what was there
                view.zero_()
            view.flatten()[3] = plant

    def at_rank_1(grads: Any) -> bool:
        return grads.guard is None or grads.guard.__self__.rank == 1

    monkeypatch.setattr(Flight, "backward", backward)

    def main(groups: Any) -> State:
        world = ProcessWorld(groups)
        trainer = Trainer(layout, world)
        batches = rank_batches(config, world.coords, 0)
        return finish(trainer.step(trainer.init(), batches))[0]

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


@pytest.mark.parametrize("sharding", ["no_shard", "optim_grads"])
@pytest.mark.parametrize("plant", [float("nan"), float("inf"), -float("inf")])
def test_not_finite_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, plant: float, sharding: str
) -> None:
    """Rank, parameter and value; and no update."""
    with pytest.raises(GradientError) as refused:
        run(monkeypatch, plant, "train.check_gradients=true", sharding=sharding)
    shown = "nan" if plant != plant else "inf"
    assert f"rank 1: the gradient of blocks.1.norm2.weight is {shown}" in str(refused.value)
    assert "rank 0" not in str(refused.value)


def test_large_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, with the limit; below it, nothing."""
    with pytest.raises(GradientError, match=r"norm2\.weight is 5000 .*large_gradient = 1000"):
        run(monkeypatch, -5000.0, "train.large_gradient=1000")
    assert len(run(monkeypatch, -5000.0, "train.large_gradient=10000")) == 2


def test_off_by_default() -> None:
    """No pass over the gradients is made that was not asked for."""
    config = config_of({"dp": "1"})
    assert not config.train.check_gradients
    assert config.train.large_gradient == 0


def test_scaled_losses_overflow_on_purpose() -> None:
    """With a dynamic loss scale what is not finite is the scaler's business."""
    settings = ["precision.policy=fp16", "train.check_gradients=true"]
    with pytest.raises(ConfigError, match=r"check_gradients.*precision\.policy"):
        cfg.resolve(cfg.override(Config(), settings), 1)


def test_finite_gradients_are_as_before() -> None:
    """Looking changes no bit."""
    found = []
    for settings in ((), ("train.check_gradients=true", "train.large_gradient=1e9")):
        config = cfg.resolve(cfg.override(config_of({"dp": "1"}), settings), None)
        layout = plan(config)

        def main(groups: Any, layout: Any = layout, config: Config = config) -> State:
            trainer = Trainer(layout, ProcessWorld(groups))
            batches = rank_batches(config, trainer.world.coords, 0)  # type: ignore[attr-defined]
            return finish(trainer.step(trainer.init(), batches))[0]

        found.append(main_alone(main, layout))
    a, b = (state.params["embed"]["tokens"] for state in found)
    assert torch.equal(a, b)


def main_alone(main: Any, layout: Any) -> Any:
    """On the only rank."""
    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))[0]


def test_five_parameters_are_named_and_the_others_counted() -> None:
    """A step in which all gradients are NaN must still give a line that can be read."""
    wrong = [(f"p{i}", float(i)) for i in range(7)]
    five = "p0 is 0, p1 is 1, p2 is 2, p3 is 3, p4 is 4"
    assert Guard(2).name(wrong[:5]) == f"rank 2: the gradient of {five}"
    assert Guard(2).name(wrong[:6]) == f"rank 2: the gradient of {five} (and 1 more)"
    assert Guard(2).name(wrong) == f"rank 2: the gradient of {five} (and 2 more)"
