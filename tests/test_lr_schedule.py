"""Learning-rate schedules at their edges, by hand and by the formulas of their sources."""

from __future__ import annotations

import itertools
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.config import OptimConfig
from mfun.config.sections import LearningRate
from mfun.optim import Schedule, build_schedule, constant, cosine, inverse_sqrt, linear, wsd

# name, schedule, {update: learning rate worked out by hand}
BY_HAND = [
    ("constant", constant(0.3), {1: 0.3, 7: 0.3, 10**9: 0.3}),
    ("constant, warm-up", constant(8.0, warmup=4), {1: 2, 2: 4, 3: 6, 4: 8, 5: 8}),
    ("linear", linear(8.0, 4), {1: 6, 2: 4, 3: 2, 4: 0, 5: 0}),
    (
        "linear, warm-up and floor",
        linear(10.0, 10, min_lr=2.0, warmup=2),
        {1: 5, 2: 10, 3: 9, 4: 8, 6: 6, 9: 3, 10: 2, 11: 2, 1000: 2},
    ),
    (
        "cosine",
        cosine(4.0, 8, min_lr=0.0, warmup=2),
        {1: 2, 2: 4, 4: 3, 5: 2, 8: 0, 9: 0},
    ),
    ("cosine, floor", cosine(3.0, 4, min_lr=1.0), {2: 2, 4: 1, 5: 1}),
    (
        "inverse square root",
        inverse_sqrt(6.0, warmup=9, min_lr=1.0, decay_steps=1000),
        {1: 6 / 9, 9: 6, 36: 3, 81: 2, 324: 1, 400: 1, 1000: 1, 1001: 1},
    ),
    ("inverse square root, no warm-up", inverse_sqrt(6.0), {1: 6, 4: 3, 10**6: 0.006}),
    (
        "inverse square root, cut",
        inverse_sqrt(6.0, warmup=1, min_lr=0.5, decay_steps=9),
        {9: 2, 10: 0.5},
    ),
    (
        "wsd",
        wsd(4.0, 20, 4, min_lr=0.0, warmup=2),
        {1: 2, 2: 4, 3: 4, 16: 4, 17: 3, 18: 2, 19: 1, 20: 0, 21: 0},
    ),
    (
        "wsd, exponential",
        wsd(1.0, 12, 2, min_lr=0.0, shape="exponential"),
        {10: 1, 11: 2 / math.sqrt(2) - 1, 12: 0},
    ),
    ("wsd, minus_sqrt", wsd(1.0, 12, 4, shape="minus_sqrt"), {8: 1, 9: 0.5, 12: 0}),
    ("wsd, cosine", wsd(1.0, 12, 4, min_lr=0.5, shape="cosine"), {8: 1, 10: 0.75, 12: 0.5}),
    ("warm-up longer than the run", linear(8.0, 2, min_lr=1.0, warmup=4), {2: 4, 4: 8, 5: 1}),
]


@pytest.mark.parametrize(("name", "schedule", "points"), BY_HAND)
def test_values_by_hand(name: str, schedule: Schedule, points: dict[int, float]) -> None:
    """Each schedule has the values worked out by hand, before, at and after every edge."""
    for n, value in points.items():
        got = schedule(n)
        assert isinstance(got, float)
        assert got == pytest.approx(value, rel=1e-14, abs=1e-15), (name, n)


@given(
    name=st.sampled_from(get_args(LearningRate)),
    warmup=st.integers(0, 20),
    length=st.integers(1, 40),
    floor=st.floats(0, 1),
    wsd_decay=st.floats(0.01, 0.99),
)
def test_configured_schedules(
    name: LearningRate, warmup: int, length: int, floor: float, wsd_decay: float
) -> None:
    """Every schedule rises to lr, never rises after, stays in [min_lr, lr], ends at min_lr."""
    end = warmup + length
    config = OptimConfig(
        lr=1.0, min_lr=floor, schedule=name, warmup=warmup, decay_steps=end, wsd_decay=wsd_decay
    )
    rates = [build_schedule(config, steps=10**6)(n) for n in range(1, end + 5)]
    assert rates[:warmup] == [n / warmup for n in range(1, warmup + 1)]
    after = rates[max(warmup - 1, 0) :]
    assert all(a >= b for a, b in itertools.pairwise(after))
    assert all(floor - 1e-12 <= rate <= 1.0 for rate in after)
    assert rates[-1] == (1.0 if name == "constant" else floor)
    if name in ("linear", "cosine", "wsd"):
        assert rates[end - 1] == pytest.approx(floor, abs=1e-12)


def test_steps_are_the_default_end() -> None:
    """decay_steps 0 means the run's steps; another value wins over them."""
    config = OptimConfig(lr=4.0, schedule="linear")
    assert [build_schedule(config, steps=4)(n) for n in (1, 2, 3, 4)] == [3, 2, 1, 0]
    config = OptimConfig(lr=4.0, schedule="linear", decay_steps=8)
    assert [build_schedule(config, steps=4)(n) for n in (2, 4)] == [3, 2]
    config = OptimConfig(lr=4.0, schedule="wsd", wsd_decay=0.2)
    assert [build_schedule(config, steps=20)(n) for n in (15, 16, 17, 20)] == [4, 4, 3, 0]
    config = OptimConfig(lr=4.0, schedule="wsd", wsd_decay=0.01)
    assert [build_schedule(config, steps=20)(n) for n in (19, 20)] == [4, 0]


def test_bad_numbers_are_refused_by_name() -> None:
    """Negative numbers, a floor above lr, an empty fall and an unknown shape are named."""
    with pytest.raises(ValueError, match="warmup is -1"):
        constant(1.0, warmup=-1)
    with pytest.raises(ValueError, match=r"min_lr 2\.0 is above lr 1\.0"):
        cosine(1.0, 10, min_lr=2.0)
    with pytest.raises(ValueError, match="decay_steps is -3"):
        linear(1.0, -3)
    with pytest.raises(ValueError, match="fall_steps is 0"):
        wsd(1.0, 10, 0)
    with pytest.raises(ValueError, match="'square' is not one of"):
        wsd(1.0, 10, 2, shape="square")  # type: ignore[arg-type]
