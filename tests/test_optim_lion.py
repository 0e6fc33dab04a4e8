"""Lion against numpy loops over the paper's lines, and what is its own."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from mfun.optim import Leaves, Transform, cosine, lion, scale_by_lion
from mfun.train.plan import plan
from mfun.verify.run import verify_in_process
from mfun.verify.shrink import STILL, shrink
from tests.layouts import ROWS, config_of, unpacked
from tests.properties import small
from tests.test_optim import MASK, OPTIMIZERS, assert_close, leaves, run


def by_numpy(rate: Any, steps: int, b1: float, b2: float, decay: float) -> Leaves:
    """Algorithm 2 of the paper on the trees of `leaves`, element by element where it matters."""
    params = {k: x.numpy().copy() for k, x in leaves(0).items()}
    kept = {k: np.zeros_like(x) for k, x in params.items()}
    for n in range(1, steps + 1):
        for k, g in leaves(99 + n).items():
            g, m, lr = g.numpy(), kept[k], rate(n)
            mean = b1 * m + (1 - b1) * g
            direction = np.where(mean > 0, 1.0, np.where(mean < 0, -1.0, 0.0))
            params[k] = params[k] - lr * (direction + (decay if MASK[k] else 0.0) * params[k])
            kept[k] = b2 * m + (1 - b2) * g
    return {k: torch.from_numpy(np.asarray(x)) for k, x in params.items()}


@pytest.mark.parametrize("name", ["lion", "lion of blocks"])
@pytest.mark.parametrize("donate", [True, False])
def test_lion_is_the_papers(name: str, donate: bool) -> None:
    """Fused and of blocks, over 60 steps of a schedule with warm-up."""
    rate = cosine(0.05, 50, min_lr=0.001, warmup=10)
    params, _ = run(OPTIMIZERS[name](rate), leaves(0), 60, donate=donate)
    assert_close(params, by_numpy(rate, 60, 0.8, 0.93, 0.3), 1e-12)


def test_every_element_moves_by_the_learning_rate_or_not_at_all() -> None:
    """Whatever the gradient's size; an element that never had a gradient stays."""
    opt = lion(0.25)
    params = {"w": torch.zeros(4)}
    gradient = {"w": torch.tensor([1e-20, -1e20, 0.0, 3.0])}
    new, state = opt.update(gradient, opt.init(params), params)
    assert new["w"].tolist() == [-0.25, 0.25, 0.0, -0.25]
    new, state = opt.update({"w": torch.zeros(4)}, state, new)  # the mean kept its sign
    assert new["w"].tolist() == [-0.5, 0.5, 0.0, -0.5] and state["count"] == 2


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), ((1 << 18) + 3,), (2, 1 << 18)])
def test_pieces_are_the_whole(shape: tuple[int, ...]) -> None:
    """Tensors below, at and above the size of a piece, and strided ones, equal the blocks."""
    g = torch.Generator().manual_seed(0)
    draw = lambda: {"w": torch.randn(shape, generator=g).T}  # noqa: E731
    if len(shape) < 2:
        draw = lambda: {"w": torch.randn(shape, generator=g)}  # noqa: E731
    block, opt, params = scale_by_lion(b1=0.9, b2=0.5), lion(0.5, b1=0.9, b2=0.5), draw()
    state, kept, want = opt.init(params), block.init(params), params
    for _ in range(2):
        gradient = draw()
        params, state = opt.update(gradient, state, params)
        signs, kept = block.update(gradient, kept, want)
        want = {"w": want["w"] - 0.5 * signs["w"]}
    assert torch.equal(params["w"], want["w"]) and torch.equal(state["mu"]["w"], kept["mu"]["w"])


@pytest.mark.parametrize(
    "settings",
    [
        "name=lion steps=3 weight_decay=0.5",
        "name=lion tp=2 dp=2 steps=3 sequence_parallel=true",
        "name=lion pp=2 layers=2 steps=3 clip_value=0.01",
        "name=lion dp=2 tp=2 sharding=optim steps=3",
    ],
)
def test_lion_in_every_layout(settings: str) -> None:
    """The reference's weights; layouts round gradients differently, but none so near 0."""
    report = verify_in_process(small(settings))
    assert report.ok, report


@pytest.mark.parametrize(
    "digits", [*ROWS[5:8], *(pytest.param(r, marks=pytest.mark.full) for r in ROWS[:5] + ROWS[8:])]
)
def test_layouts_and_features(digits: str) -> None:
    """The rows that cover every pair, with Lion in each; a key bias's rounding moves nothing."""
    config = config_of({**unpacked(digits), "optimizer": "lion"})
    paths = plan(config).specs
    still = {k: v for k, v in STILL.items() if any(fnmatchcase(path, k) for path in paths)}
    config = attrs.evolve(config, optim=attrs.evolve(config.optim, overrides=still))
    report = verify_in_process(config)
    assert report.ok, report


def test_the_small_twin_does_not_move_a_key_bias() -> None:
    """`mfun verify` of Lion with biases and learned positions: no false alarm."""
    given = "name=lion bias=qkv tied=false position=learned heads=4 kv_heads=2 tp=2 steps=3"
    twin = shrink(small(given))
    assert twin.optim.overrides == {"*.kv_bias": {"lr": 0.0}}
    report = verify_in_process(twin)
    assert report.ok, report
    assert shrink(small("name=lion")).optim.overrides == {}


def test_it_is_a_transform() -> None:
    """Its state is by path, and named as a checkpoint will name it."""
    opt: Transform = lion(0.1)
    assert list(opt.init({"a.b": torch.ones(2)})) == ["count", "lr", "mu"]
