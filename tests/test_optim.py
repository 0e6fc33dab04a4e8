"""Optimizers against torch.optim, clipping by hand, donation, and the state a checkpoint sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mfun.config import OptimConfig
from mfun.optim import (
    Leaves,
    Matrix,
    Transform,
    adamw,
    add_decayed_weights,
    apply_updates,
    build,
    clip_by_global_norm,
    clip_by_value,
    cosine,
    learning_rate,
    lion,
    muon,
    named_chain,
    restore_state,
    scale_by_adam,
    scale_by_learning_rate,
    scale_by_lion,
    sgd,
    state_scalars,
    state_tensors,
    terminal,
    trace,
)

SHAPES = {"embed.tokens": (7, 5), "blocks.0.norm1.weight": (5,), "scale": (), "empty": (0, 3)}
MASK = {"embed.tokens": True, "blocks.0.norm1.weight": False, "scale": False, "empty": True}
HYPER = {"b1": 0.8, "b2": 0.93, "eps": 1e-6}


def leaves(seed: int, dtype: torch.dtype = torch.float64, lead: tuple[int, ...] = ()) -> Leaves:
    """Normal numbers of the shapes above."""
    g = torch.Generator().manual_seed(seed)
    return {k: torch.randn((*lead, *s), generator=g, dtype=dtype) for k, s in SHAPES.items()}


def copy(tree: Any) -> Any:
    """A deep copy of a state."""
    if isinstance(tree, dict):
        return {k: copy(v) for k, v in tree.items()}
    return tree.clone() if isinstance(tree, Tensor) else tree


def adamw_chain(rate: Any, weight_decay: float, mask: dict[str, bool] | None) -> Transform:
    """AdamW by its definition, out of blocks."""
    return terminal(
        named_chain(
            adam=scale_by_adam(**HYPER),
            decay=add_decayed_weights(weight_decay, mask),
            schedule=scale_by_learning_rate(rate),
        )
    )


def sgd_chain(rate: Any, weight_decay: float, groups: dict[str, bool] | None) -> Transform:
    """SGD by its definition, out of blocks."""
    return terminal(
        named_chain(
            decay=add_decayed_weights(weight_decay, groups),
            trace=trace(0.7),
            schedule=scale_by_learning_rate(rate),
        )
    )


def lion_chain(rate: Any, weight_decay: float, groups: dict[str, bool] | None) -> Transform:
    """Lion by its definition, out of blocks."""
    return terminal(
        named_chain(
            lion=scale_by_lion(b1=0.8, b2=0.93),
            decay=add_decayed_weights(weight_decay, groups),
            schedule=scale_by_learning_rate(rate),
        )
    )


# Every terminal optimizer is one row that must pass the common properties.
OPTIMIZERS: dict[str, Callable[[Any], Transform]] = {
    "adamw": lambda lr: adamw(lr, **HYPER, weight_decay=0.3, groups=MASK),
    "adamw of blocks": lambda lr: adamw_chain(lr, 0.3, MASK),
    "sgd": lambda lr: sgd(lr, momentum=0.7, weight_decay=0.3, groups=MASK),
    "sgd of blocks": lambda lr: sgd_chain(lr, 0.3, MASK),
    "lion": lambda lr: lion(lr, b1=0.8, b2=0.93, weight_decay=0.3, groups=MASK),
    "lion of blocks": lambda lr: lion_chain(lr, 0.3, MASK),
    "muon": lambda lr: muon(lr, {"embed.tokens": Matrix()}, weight_decay=0.3, groups=MASK),
    "clip by value and adamw": lambda lr: named_chain(
        clip=clip_by_value(0.3), adamw=adamw(lr, **HYPER, groups=MASK)
    ),
    "sgd without momentum": lambda lr: sgd(lr, momentum=0.0),
    "clip and adamw": lambda lr: named_chain(
        clip=clip_by_global_norm(2.0), adamw=adamw(lr, **HYPER, groups=MASK)
    ),
    "clip and sgd": lambda lr: named_chain(clip=clip_by_global_norm(2.0), sgd=sgd(lr)),
    "clip after momentum": lambda lr: terminal(
        named_chain(
            trace=trace(0.9), clip=clip_by_global_norm(0.5), schedule=scale_by_learning_rate(lr)
        )
    ),
}


def run(opt: Transform, params: Leaves, steps: int, **extra: Any) -> tuple[Leaves, Any]:
    """Some updates with fresh gradients and a norm of 5."""
    state = opt.init(params)
    dtype = params["scale"].dtype
    for step in range(steps):
        gradient = leaves(100 + step, dtype)
        params, state = opt.update(gradient, state, params, norm=torch.tensor(5.0), **extra)
    return params, state


def run_torch(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    rates: Sequence[float],
    decay: float,
    dtype: torch.dtype = torch.float64,
) -> Leaves:
    """The same with a torch.optim optimizer of two groups, its rate set before each step."""
    params = {k: p.requires_grad_() for k, p in leaves(0, dtype).items()}
    opt = make(
        [
            {"params": [p for k, p in params.items() if MASK[k]], "weight_decay": decay},
            {"params": [p for k, p in params.items() if not MASK[k]], "weight_decay": 0.0},
        ]
    )
    for step, rate in enumerate(rates):
        for group in opt.param_groups:
            group["lr"] = rate
        gradient = leaves(100 + step, dtype)
        for k, p in params.items():
            p.grad = gradient[k]
        opt.step()
    return {k: p.detach() for k, p in params.items()}


def assert_close(a: Leaves, b: Leaves, tolerance: float) -> None:
    """Equal paths, dtypes and, to the tolerance, values."""
    assert list(a) == list(b)
    for path in a:
        assert a[path].dtype == b[path].dtype
        torch.testing.assert_close(a[path], b[path], rtol=tolerance, atol=tolerance, msg=path)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("donate", [True, False])
def test_adamw_is_torchs(fused: bool, donate: bool) -> None:
    """AdamW, fused and of blocks, equals torch.optim.AdamW over 60 steps of a schedule."""
    rate = cosine(0.05, 50, min_lr=0.001, warmup=10)
    expected = run_torch(
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.93), eps=1e-6, fused=fused),
        [rate(n) for n in range(1, 61)],
        0.3,
    )
    for name in ("adamw", "adamw of blocks"):
        params, _ = run(OPTIMIZERS[name](rate), leaves(0), 60, donate=donate)
        assert_close(params, expected, 1e-12)


def test_adamw_float32_is_torchs_fused() -> None:
    """In float32 the fused step is torch's fused step, bitwise."""
    expected = run_torch(
        lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.93), eps=1e-6, fused=True),
        [0.01] * 20,
        0.3,
        torch.float32,
    )
    params, _ = run(OPTIMIZERS["adamw"](0.01), leaves(0, torch.float32), 20, donate=True)
    assert_close(params, expected, 0.0)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("momentum", [0.7, 0.0])
def test_sgd_is_torchs(momentum: float, donate: bool) -> None:
    """SGD with momentum and L2 decay equals torch.optim.SGD over 40 steps of a schedule."""
    rate = cosine(0.05, 30, warmup=5)
    opt = sgd(rate, momentum=momentum, weight_decay=0.3, groups=MASK)
    params, _ = run(opt, leaves(0), 40, donate=donate)
    expected = run_torch(
        lambda groups: torch.optim.SGD(groups, momentum=momentum),
        [rate(n) for n in range(1, 41)],
        0.3,
    )
    assert_close(params, expected, 1e-12)


def test_decay_is_decoupled() -> None:
    """With a zero gradient AdamW moves a decaying leaf by exactly the factor 1 - lr * decay."""
    params = leaves(0)
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    opt = adamw(0.5, weight_decay=0.25, groups=MASK)
    new, _ = opt.update(zeros, opt.init(params), params)
    for path, p in params.items():
        assert torch.equal(new[path], p * 0.875 if MASK[path] else p), path


def test_constant_gradient_and_the_count() -> None:
    """With gradient 1 update 11 of Adam(lr .01) moves .01, also after a restore (bugs row 92)."""
    opt = adamw(0.01, b1=0.9, b2=0.999, weight_decay=0.0)
    params = {"w": torch.zeros(3, dtype=torch.float64)}
    state = opt.init(params)
    ones = {"w": torch.ones(3, dtype=torch.float64)}
    for _ in range(10):
        params, state = opt.update(ones, state, params)
    state = restore_state(opt.init(params), state_tensors(state), state_scalars(state))
    new, state = opt.update(ones, state, params)
    torch.testing.assert_close(params["w"] - new["w"], ones["w"] * 0.01, rtol=1e-6, atol=0)
    assert state["count"] == 11
    lost = {**state, "count": 0}
    moved = new["w"] - opt.update(ones, lost, new)[0]["w"]
    assert moved[0] > 0.015


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_donation_everything_given_stays(name: str) -> None:
    """donate=False leaves gradients, state and parameters as they were, bit for bit."""
    opt = OPTIMIZERS[name](0.1)
    params, state = run(opt, leaves(0), 3)
    gradient, norm = leaves(7), torch.tensor(5.0)
    given = (gradient, state, params)
    before = copy({str(i): x for i, x in enumerate(given)})
    first = opt.update(gradient, state, params, norm=norm)
    again = opt.update(gradient, state, params, norm=norm, donate=False)
    for old, new in zip(before.values(), given, strict=True):
        for path, x in state_tensors(old).items():
            assert torch.equal(x, state_tensors(new)[path]), path
    for path, x in first[0].items():
        assert torch.equal(x, again[0][path])
        assert x.numel() == 0 or x.data_ptr() != params[path].data_ptr()
    assert state_scalars(before["1"]) == state_scalars(state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_donation_reuses_memory_and_changes_no_bit(name: str) -> None:
    """donate=True gives the same bits, in the old parameters' and moments' memory."""
    opt = OPTIMIZERS[name](0.1)
    expected, expected_state = run(opt, leaves(0), 5)
    params = leaves(0)
    where = {path: p.data_ptr() for path, p in params.items()}
    state = opt.init(params)
    moments = {k: x.data_ptr() for k, x in state_tensors(state).items() if x.ndim == 2}
    for step in range(5):
        gradient = leaves(100 + step)
        params, state = opt.update(gradient, state, params, norm=torch.tensor(5.0), donate=True)
    assert {path: p.data_ptr() for path, p in params.items()} == where
    assert {k: x.data_ptr() for k, x in state_tensors(state).items() if x.ndim == 2} == moments
    assert_close(params, expected, 0.0 if "blocks" not in name else 1e-14)
    assert_close(state_tensors(state), state_tensors(expected_state), 1e-14)
    pointers = [x.data_ptr() for x in (*params.values(), *state_tensors(state).values())]
    pointers = [p for p in pointers if p]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rank_stacked_leaves(name: str) -> None:
    """Leading rank dims, also as strided views of a flat buffer, equal one update per rank."""
    ranks = 3
    stacked = leaves(0, lead=(ranks,))
    gradients = [leaves(10 + step, lead=(ranks,)) for step in range(3)]
    norms = torch.tensor([1.0, 5.0, 9.0], dtype=torch.float64)
    opt = OPTIMIZERS[name](0.1)
    for donate in (False, True):
        params, state = views(stacked), opt.init(stacked)
        for gradient in gradients:
            params, state = opt.update(views(gradient), state, params, norm=norms, donate=donate)
        for rank in range(ranks):
            own = {path: p[rank].clone() for path, p in stacked.items()}
            own_state = opt.init(own)
            for g in gradients:
                g_rank = {path: x[rank] for path, x in g.items()}
                own, own_state = opt.update(g_rank, own_state, own, norm=norms[rank])
            assert_close({path: p[rank] for path, p in params.items()}, own, 1e-14)


def views(stacked: Leaves) -> Leaves:
    """The leaves as views of one buffer of shape (ranks, size), as a mailbox world has them."""
    flat = torch.cat([x.reshape(len(x), x[0].numel()) for x in stacked.values()], 1)
    out, start = {}, 0
    for path, x in stacked.items():
        size = x[0].numel()
        out[path] = (
            flat[:, start : start + size].unflatten(1, x.shape[1:])
            if x.ndim > 1
            else flat[:, start]
        )
        start += size
    assert not out["embed.tokens"].is_contiguous()
    return out


def test_clip_by_hand() -> None:
    """(3, 4) at norm 5 clipped to 1 is (.6, .8) up to the 1e-6; below the bound nothing moves."""
    clip = clip_by_global_norm(1.0)
    g = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    given = torch.tensor(5.0, dtype=torch.float64)
    out, state = clip.update(g, clip.init(g), g, norm=given)
    given.zero_()  # a caller may use its buffer again: the state keeps its own
    assert torch.equal(out["w"], g["w"] * (1.0 / 5.000001))
    assert state["norm"] == 5.0 and state["coefficient"] == 1 / 5.000001
    for norm in (0.0, 0.5, 0.999):
        for donate in (False, True):
            out, state = clip.update(g, state, g, norm=torch.tensor(norm), donate=donate)
            assert torch.equal(out["w"], torch.tensor([3.0, 4.0], dtype=torch.float64))
            assert state["coefficient"] == 1.0 and state["norm"] == torch.tensor(norm)


@given(max_norm=st.floats(1e-3, 1e3), scale=st.floats(1e-3, 1e3))
def test_clip_is_torchs(max_norm: float, scale: float) -> None:
    """With the norm of all leaves given, clipping equals torch.nn.utils.clip_grad_norm_."""
    g = {k: x * scale for k, x in leaves(3).items()}
    params = [torch.zeros_like(x).requires_grad_() for x in g.values()]
    for p, x in zip(params, g.values(), strict=True):
        p.grad = x.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    clip = clip_by_global_norm(max_norm)
    for donate in (False, True):
        out, state = clip.update(copy(g), clip.init(g), g, norm=norm, donate=donate)
        for p, x in zip(params, out.values(), strict=True):
            torch.testing.assert_close(x, p.grad, rtol=1e-14, atol=0)
        after = math.sqrt(sum(float((x**2).sum()) for x in out.values()))
        assert after <= max_norm * (1 + 1e-12)
        assert state["norm"] == norm


def test_clip_leaves_a_nan_norm_to_the_caller() -> None:
    """A NaN norm is reported and spreads to no element that was finite."""
    clip = clip_by_global_norm(1.0)
    g = {"w": torch.tensor([3.0, math.nan])}
    out, state = clip.update(g, clip.init(g), g, norm=torch.tensor(math.nan))
    assert out["w"][0] == 3.0 and out["w"][1].isnan() and state["norm"].isnan()


def test_clip_errors() -> None:
    """No norm, a norm per rank without rank dims, and a bound of 0 are refused by name."""
    clip, g = clip_by_global_norm(1.0), {"w.x": torch.ones(2)}
    with pytest.raises(ValueError, match="no norm given"):
        clip.update(g, clip.init(g), g)
    with pytest.raises(ValueError, match=r"shape \(3,\).*'w.x' \(2,\)"):
        clip.update(g, clip.init(g), g, norm=torch.ones(3))
    with pytest.raises(ValueError, match="max_norm is 0"):
        clip_by_global_norm(0.0)


def test_mismatched_trees_are_refused_by_path() -> None:
    """Absent, unknown, misshapen and wrongly typed gradients, and a mask with a hole, are named."""
    params = {"a.w": torch.ones(2), "b": torch.ones(2, 3)}
    for opt in (adamw(0.1), sgd(0.1), lion(0.1), adamw_chain(0.1, 0.0, None)):
        state = opt.init(params)
        with pytest.raises(ValueError, match=r"lack \['b'\] and have \['c'\]"):
            opt.update({"a.w": torch.ones(2), "c": torch.ones(2, 3)}, state, params)
        with pytest.raises(ValueError, match=r"'b' has shape \(3, 2\), the parameter \(2, 3\)"):
            opt.update({"a.w": torch.ones(2), "b": torch.ones(3, 2)}, state, params)
    double = {"a.w": torch.ones(2), "b": torch.ones(2, 3).double()}
    for name, opt in (("adamw", adamw(0.1)), ("sgd", sgd(0.1)), ("lion", lion(0.1))):
        with pytest.raises(ValueError, match=rf"{name}: .* 'b' is torch\.float64"):
            opt.update(double, opt.init(params), params)
    for opt in (adamw(0.1, groups={"b": True}), sgd(0.1, weight_decay=1.0, groups={})):
        with pytest.raises(ValueError, match=r"parameter groups: no entry for \['a\.w'"):
            opt.init(params)
    with pytest.raises(ValueError, match=r"lack \['b'\]"):
        apply_updates(params, {"a.w": torch.ones(2)})


def test_chain_names_its_states() -> None:
    """States lie under the names given, and another chain's state is refused."""
    params = {"w": torch.ones(2)}
    chain = named_chain(m=trace(0.5), s=scale_by_learning_rate(lambda n: n / 10))
    state = chain.init(params)
    updates, state = chain.update({"w": torch.ones(2)}, state, params)
    updates, state = chain.update({"w": torch.ones(2)}, state, params)
    assert list(state) == ["m", "s"] and state["s"] == {"count": 2, "lr": 0.2}
    assert state["m"]["trace"]["w"].tolist() == [1.5, 1.5]
    assert updates["w"].tolist() == pytest.approx([-0.3, -0.3])
    with pytest.raises(ValueError, match=r"state holds \['s', 'm'\], the chain \['m', 's'\]"):
        chain.update({"w": torch.ones(2)}, dict(reversed(state.items())), params)


def test_blocks_are_differentiable() -> None:
    """The gradient through an SGD step with respect to the old parameters is I - lr H."""
    chain = named_chain(trace=trace(0.5), schedule=scale_by_learning_rate(0.1))
    opt = terminal(chain)
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    h = torch.tensor([[3.0, 1.0], [1.0, 2.0]], dtype=torch.float64)

    def step(w: Tensor) -> Tensor:
        gradient = torch.func.grad(lambda w: 0.5 * w @ h @ w)(w)
        return opt.update({"w": gradient}, opt.init({"w": w}), {"w": w})[0]["w"]

    jacobian = torch.func.jacrev(step)(w)
    torch.testing.assert_close(jacobian, torch.eye(2).double() - 0.1 * h, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 1.5])
def test_build_is_the_configured_optimizer(name: Literal["adamw", "sgd"], clip: float) -> None:
    """`build` clips, decays by the mask, follows the schedule, and reports the rate used."""
    config = OptimConfig(
        name=name, lr=0.05, schedule="cosine", warmup=4, min_lr=0.01, clip=clip,
        b1=0.8, b2=0.93, eps=1e-6, momentum=0.7, weight_decay=0.3,
    )  # fmt: skip
    opt = build(config, 20, MASK)
    params, state = leaves(0), opt.init(leaves(0))
    assert learning_rate(state) == 0.0
    rates = []
    for step in range(24):
        norm = torch.tensor(5.0, dtype=torch.float64)
        params, state = opt.update(leaves(100 + step), state, params, norm=norm, donate=True)
        rates.append(learning_rate(state))
    by_formula = [
        0.05 * n / 4 if n <= 4 else 0.01 + 0.02 * (1 + math.cos(math.pi * min(n - 4, 16) / 16))
        for n in range(1, 25)
    ]
    assert rates == pytest.approx(by_formula, rel=1e-13)
    assert list(state) == (["clip"] if clip else []) + [name]

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if name == "sgd":
            return torch.optim.SGD(groups, momentum=0.7)
        return torch.optim.AdamW(groups, betas=(0.8, 0.93), eps=1e-6)

    def scaled(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        opt = make(groups)
        coefficient = clip / (5 + 1e-6) if clip else 1.0

        def scale(opt: torch.optim.Optimizer, *_: Any) -> None:
            for group in opt.param_groups:
                for p in group["params"]:
                    p.grad = p.grad * coefficient

        opt.register_step_pre_hook(scale)
        return opt

    assert_close(params, run_torch(scaled, rates, 0.3), 1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_bitwise(name: str) -> None:
    """A state taken apart by path and put together again continues bit for bit (bugs row 98)."""
    opt = OPTIMIZERS[name](cosine(0.1, 20, warmup=4))
    params, state = run(opt, leaves(0), 7)
    tensors, scalars = copy(state_tensors(state)), state_scalars(state)
    assert all(isinstance(x, Tensor) for x in tensors.values())
    assert all(type(x) in (int, float) for x in scalars.values())
    again = restore_state(opt.init(params), tensors, scalars)
    rates = []
    for step in range(8, 13):
        gradient, norm = leaves(200 + step), torch.tensor(5.0)
        params_a, state = opt.update(gradient, state, params, norm=norm)
        params_b, again = opt.update(gradient, again, params, norm=norm)
        assert_close(params_a, params_b, 0.0)
        assert state_scalars(state) == state_scalars(again)
        rates.append(learning_rate(again))
        params = params_a
    half = [0.05 * (1 + math.cos(math.pi * (n - 4) / 16)) for n in range(8, 13)]
    assert rates == pytest.approx(half, rel=1e-13)


def test_restore_names_every_fault() -> None:
    """Missing, unexpected and misshapen entries are all listed by path."""
    opt = adamw(0.1)
    state = opt.init({"a.w": torch.ones(2), "b": torch.ones(3)})
    tensors, scalars = state_tensors(state), state_scalars(state)
    tensors["mu.c"] = tensors.pop("mu.b")
    tensors["nu.a.w"] = torch.ones(4)
    with pytest.raises(
        ValueError, match=r"missing \['mu.b'\], unexpected \['mu.c'\].*nu.a.w \(4,\) for \(2,\)"
    ):
        restore_state(state, tensors, scalars)


def test_restored_norms_keep_their_rank_dims() -> None:
    """A reported norm per rank, which `init` cannot shape, is restored as it was saved."""
    opt, params = named_chain(clip=clip_by_global_norm(1.0)), {"w": torch.ones(3, 2)}
    _, state = opt.update(params, opt.init(params), params, norm=torch.tensor([1.0, 2.0, 4.0]))
    again = restore_state(opt.init(params), state_tensors(state), state_scalars(state))
    assert again["clip"]["norm"].tolist() == [1.0, 2.0, 4.0]


def test_learning_rate_must_be_one() -> None:
    """A state with no rate or two has no answer, and says where it looked."""
    with pytest.raises(ValueError, match="holds 0 learning rates"):
        learning_rate({"m": {}})
    rate = {"count": 1, "lr": 0.1}
    assert learning_rate({"a": rate, "b": rate}) == 0.1
    with pytest.raises(ValueError, match=r"2 learning rates \(\{'a.lr': 0.1, 'b.lr': 0.2\}\)"):
        learning_rate({"a": rate, "b": {**rate, "lr": 0.2}})
