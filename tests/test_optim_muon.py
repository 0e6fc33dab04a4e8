"""Muon against torch.optim.Muon and singular values; the same update in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mfun import tree
from mfun.config import OptimConfig
from mfun.mesh import Factor, Mesh
from mfun.models.specs import block_specs, embedding_specs, head_specs
from mfun.optim import (
    Leaves,
    Matrix,
    adamw,
    build,
    cosine,
    learning_rate,
    matrices_of,
    muon,
    orthogonalise,
    partition,
    scale_by_muon,
    sgd,
    state_tensors,
)
from mfun.pipeline import mailbox
from mfun.spec import P, ParamSpec, shard_leaf
from mfun.train.plan import plan
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, reference_history, verify_in_process
from tests.layouts import ROWS, config_of, unpacked
from tests.properties import small
from tests.threads import in_threads


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def quintic(s: float, steps: int) -> float:
    """Where Newton-Schulz takes a singular value of a matrix of norm 1."""
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@given(
    rows=st.integers(1, 7),
    columns=st.integers(1, 7),
    steps=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_singular_values_follow_the_quintic(rows: int, columns: int, steps: int, seed: int) -> None:
    """Wide, tall and square: U s V^T becomes U f(s / |s|) V^T."""
    x = randn(seed, rows, columns)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    size = math.sqrt(sum(float(one) ** 2 for one in s))
    f = torch.tensor([quintic(float(one) / size, steps) for one in s], dtype=torch.float64)
    torch.testing.assert_close(orthogonalise(x, steps), u * f @ v, rtol=1e-11, atol=1e-11)


def test_five_steps_are_nearly_orthogonal() -> None:
    """Singular values of 0.002 of the norm and more end within the docstring's bounds."""
    ends = [quintic(i / 20_000, 5) for i in range(40, 20_001)]
    assert 0.68 < min(ends) < 0.69 and 1.20 < max(ends) < 1.21
    for shape in ((24, 60), (60, 24), (16, 16)):
        x = randn(0, *shape)
        s = torch.linalg.svdvals(x)
        assert s.min() / s.norm() > 0.002
        found = torch.linalg.svdvals(orthogonalise(x))
        assert 0.68 < found.min() and found.max() < 1.21


def test_size_zero_and_rank() -> None:
    """A gradient's size does not count, a zero stays zero, a stack is its matrices one by one."""
    x = randn(1, 3, 4, 5)
    torch.testing.assert_close(orthogonalise(1000 * x), orthogonalise(x), rtol=1e-12, atol=1e-12)
    assert torch.equal(orthogonalise(torch.zeros(2, 3)), torch.zeros(2, 3))
    for one, alone in zip(orthogonalise(x), x, strict=True):
        torch.testing.assert_close(one, orthogonalise(alone), rtol=1e-13, atol=1e-13)
    half = randn(2, 4, 6).bfloat16()
    assert orthogonalise(half).dtype == torch.bfloat16
    torch.testing.assert_close(orthogonalise(half), orthogonalise(half.float()).bfloat16())


@pytest.mark.parametrize("scale", ["original", "match_rms"])
@pytest.mark.parametrize("donate", [True, False])
def test_muon_is_torchs(scale: Any, donate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon over 30 steps of a schedule, kept from rounding to bfloat16."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    shapes = {"wide": (4, 9), "tall": (9, 4), "square": (5, 5), "row": (1, 6)}
    rate = cosine(0.1, 20, min_lr=0.01, warmup=5)
    params = {k: randn(i, *s) for i, (k, s) in enumerate(shapes.items())}
    theirs = [p.clone().requires_grad_() for p in params.values()]
    name = "match_rms_adamw" if scale == "match_rms" else "original"
    oracle = torch.optim.Muon(theirs, momentum=0.9, weight_decay=0.3, adjust_lr_fn=name)
    opt = muon(rate, {k: Matrix() for k in shapes}, momentum=0.9, weight_decay=0.3, scale=scale)
    state = opt.init(params)
    for n in range(1, 31):
        gradient = {k: randn(100 * n + i, *s) for i, (k, s) in enumerate(shapes.items())}
        oracle.param_groups[0]["lr"] = rate(n)
        for p, g in zip(theirs, gradient.values(), strict=True):
            p.grad = g.clone()
        oracle.step()
        params, state = opt.update(gradient, state, params, donate=donate)
        assert learning_rate(state) == rate(n)
    for (path, have), want in zip(params.items(), theirs, strict=True):
        torch.testing.assert_close(have, want.detach(), rtol=1e-11, atol=1e-11, msg=path)


def test_the_rest_is_adamws() -> None:
    """What is no hidden matrix moves as under AdamW alone, whatever its shape."""
    params = {"w": randn(0, 3, 3), "embed": randn(1, 5, 3), "b": randn(2, 3)}
    gradient = {k: randn(9, *p.shape) for k, p in params.items()}
    groups = {"w": (0.0, 1.0), "embed": (2.0, 0.5), "b": (1.0, 0.0)}
    opt = muon(0.1, {"w": Matrix()}, weight_decay=0.3, groups=groups)
    alone = adamw(0.1, weight_decay=0.3, groups=groups)
    new, state = opt.update(gradient, opt.init(params), params)
    want, _ = alone.update(gradient, alone.init(params), params)
    assert list(new) == list(params) and torch.equal(new["w"], params["w"])
    assert torch.equal(new["embed"], want["embed"]) and torch.equal(new["b"], want["b"])
    found = [path for path in state_tensors(state) if path.endswith(("w", "b", "embed"))]
    assert found == [
        "matrices.muon.mu.w",
        *(f"others.{m}.{p}" for m in ("mu", "nu") for p in ("embed", "b")),
    ]


SHAPES = {
    "qkv": ((3, 2, 4, 5), (2, 1), (3, 8, 5)),
    "kv": ((2, 1, 4, 5), (2, 1), (2, 4, 5)),
    "out": ((5, 2, 4), (1, 2), (1, 5, 8)),
    "gated": ((2, 6, 5), (1, 1), (2, 6, 5)),
    "down": ((5, 6), (1, 1), (1, 5, 6)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_leaves_as_matrices(name: str) -> None:
    """q, k and v each over all heads, the output over its heads, gate and up; stacked ranks."""
    shape, matrix, want = SHAPES[name]
    x = randn(0, *shape)
    assert Matrix(*matrix).view(x).shape == want
    ranks = torch.stack([x, 2 * x])
    assert torch.equal(Matrix(*matrix).view(ranks)[want[0] :], Matrix(*matrix).view(2 * x))


def test_which_parameters_are_hidden_matrices() -> None:
    """All of attention's and the feed-forward's; no vocabulary table, position, norm or bias."""
    for settings in ("bias=all tied=false", "heads=4 kv_heads=2 activation=swiglu qk_norm=true"):
        config = small(settings)
        parts = (embedding_specs(config), block_specs(config, 0), head_specs(config))
        specs = {k: s for part in parts for k, s in tree.flatten(part).items()}
        found = set(matrices_of(specs).matrices)
        want = (
            {"qkv", "out", "up", "down"} if "tied" in settings else {"q", "kv", "out", "up", "down"}
        )
        assert {path.split(".")[-1] for path in found} == want
        assert all(path.startswith("blocks.0.") for path in found)


CUTS: dict[str, tuple[ParamSpec, Any]] = {
    "column": (ParamSpec(shape=(8, 3), p=P("tp")), {"tp": 4}),
    "row": (ParamSpec(shape=(3, 8), p=P(None, "tp")), {"tp": 4}),
    "whole": (ParamSpec(shape=(3, 8), grad={"tp": "equal"}), {"tp": 4}),
    "heads in the middle": (ParamSpec(shape=(3, 4, 2, 5), p=P(None, "tp")), {"tp": 2, "dp": 2}),
    "two heads on four": (ParamSpec(shape=(2, 2, 3, 5), p=P(None, Factor("tp", 2))), {"tp": 4}),
    "two heads a copy": (ParamSpec(shape=(4, 3), p=P(Factor("tp", 2))), {"tp": 4}),
    "inner half": (ParamSpec(shape=(6, 2), p=P(Factor("tp", 2, "inner"))), {"tp": 4}),
    "one head on four": (ParamSpec(shape=(2, 1, 3), p=P(None, Factor("tp", 1))), {"tp": 4}),
    "both dims": (ParamSpec(shape=(4, 6), p=P("tp", "dp")), {"tp": 2, "dp": 3}),
    "one dim twice": (ParamSpec(shape=(12, 2), p=P(("dp", "tp"))), {"tp": 2, "dp": 3}),
    "padded": (ParamSpec(shape=(7, 2), p=P("tp"), pads=(0,)), {"tp": 4}),
}


@pytest.mark.parametrize("name", CUTS)
def test_pieces_become_whole_and_pieces_again(name: str) -> None:
    """`whole` is the tensor that was cut, on every rank, and `cut` is each rank's piece of it."""
    spec, sizes = CUTS[name]
    mesh, full = Mesh(**sizes), randn(3, *spec.shape)
    (world,) = mailbox.worlds(mesh)
    pieces = world.build(lambda coords: {"w": shard_leaf(full, spec, mesh, coords)})
    hooks = matrices_of({"w": spec}, world)
    whole = hooks.whole(pieces)["w"]
    assert torch.equal(whole, full.expand(mesh.stage_size, *spec.shape))
    assert torch.equal(hooks.cut({"w": whole})["w"], pieces["w"])


LAYOUTS = (
    "tp=2 dp=2 sequence_parallel=true bias=all weight_decay=0.5",
    "tp=4 heads=4 kv_heads=2 position=rotary norm=rmsnorm activation=swiglu qk_norm=true",
    "tp=4 heads=4 kv_heads=1 bias=qkv tied=false clip=0.05",
    "tp=2 pp=2 layers=3 activation=swiglu muon_scale=original clip_value=0.05",
    "pp=2 layers=4 parallel.schedule=interleaved microbatches=4 ns_steps=3 momentum=0.95",
    "dp=2 sharding=optim overlap=true bias=all",
    "tp=4 heads=4 kv_heads=2 sharding=optim_grads",
    "tp=2 pp=2 layers=2 dp=2 sharding=optim_grads_params tied=false weight_decay=0.5",
    'dp=2 sharding=optim overrides={"*.qkv"={lr=0.3},"*.down"={decay=0.0}}',
    'tp=2 overrides={"*.qkv"={lr=0.3},"*.down"={decay=0.0},"embed.*"={lr=2.0}}',
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["mailbox", "threads"])
def test_the_same_update_in_every_layout(layout: str, where: str) -> None:
    """tp 1, 2, 4, repeated kv heads, stages: the reference's weights after four updates."""
    config = small(f"name=muon steps=4 lr=0.05 {layout}")
    built = plan(config)
    results = {"mailbox": in_mailbox, "threads": in_threads}[where](built)
    report = judge(built, results, reference_history(config))
    assert report.ok, report


@pytest.mark.parametrize(
    "digits", [*ROWS[:4], *(pytest.param(row, marks=pytest.mark.full) for row in ROWS[4:])]
)
def test_layouts_and_features(digits: str) -> None:
    """The rows that cover every pair of layouts and features, with Muon in each."""
    report = verify_in_process(config_of({**unpacked(digits), "optimizer": "muon"}))
    assert report.ok, report


def test_one_two_and_four_ranks_agree() -> None:
    """The same model at tp 1, 2 and 4: whole weights equal, whatever was gathered."""
    found = []
    for tp in (1, 2, 4):
        config = small(f"name=muon steps=3 lr=0.05 heads=4 kv_heads=2 tp={tp}")
        found.append(verify_in_process(config))
    assert all(report.ok for report in found)


def test_refusals() -> None:
    """No matrices given; a label that names no transform."""
    with pytest.raises(ValueError, match="give `matrices`"):
        build(OptimConfig(name="muon"), 10)
    opt = partition(lambda path: path, a=sgd(0.1))
    with pytest.raises(KeyError, match="b"):
        opt.init({"b": torch.ones(1)})


def test_hooks_are_called_once_an_update_with_all_matrices() -> None:
    """In the order of the parameters, and with the momentum's look-ahead rather than gradients."""
    calls: list[Leaves] = []

    def whole(leaves: Leaves) -> Leaves:
        calls.append(leaves)
        return {f"full.{path}": x for path, x in leaves.items()}

    def cut(leaves: Leaves) -> Leaves:
        return {path.removeprefix("full."): x for path, x in leaves.items()}

    make: Callable[..., Any] = scale_by_muon
    block = make({"full.b": Matrix(), "full.a": Matrix()}, momentum=0.5, whole=whole, cut=cut)
    params = {"b": randn(0, 2, 2), "a": randn(1, 2, 3)}
    state = block.init(params)
    for _ in range(2):
        _, state = block.update(params, state, params)
    assert [list(leaves) for leaves in calls] == [["b", "a"]] * 2
    # mu = u / 2, then 3 u / 4; ahead = mu / 2 + u / 2
    torch.testing.assert_close(calls[0]["a"], 0.75 * params["a"], rtol=1e-15, atol=0)
    torch.testing.assert_close(calls[1]["a"], 0.875 * params["a"], rtol=1e-15, atol=0)
