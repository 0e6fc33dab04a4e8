"""Masters, rounding and loss scaling as transforms, against plain torch and hand arithmetic."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mfun import optim, rng
from mfun.optim import masters, scaler
from mfun.optim.transform import Leaves, Transform

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def randoms(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def same(a: Leaves, b: Leaves) -> None:
    """Equal names, types and bits."""
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        assert torch.equal(a[path], b[path]), path


# masters

SHAPES = {"a.w": (5, 3), "norm": (4,), "bucket.0": (37,), "empty": (0,), "number": ()}


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_masters_are_torchs_float32_loop(name: str, low: torch.dtype, donate: bool) -> None:
    """Weights and masters equal torch.optim on float32 copies, copied back, to the bit."""
    params = {p: x.to(low) for p, x in zip(SHAPES, randoms(0, *SHAPES.values()), strict=True)}
    wide = [x.float().requires_grad_() for x in params.values()]
    if name == "adamw":
        inner = optim.adamw(0.1, b1=0.9, b2=0.95, weight_decay=0.1)
        right = torch.optim.AdamW(wide, 0.1, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    else:
        inner = optim.sgd(0.1, momentum=0.9, weight_decay=0.1)
        right = torch.optim.SGD(wide, 0.1, momentum=0.9, weight_decay=0.1, foreach=False)
    opt = optim.with_masters(inner)
    state = opt.init(params)
    for step in range(1, 5):
        grads = dict(zip(SHAPES, randoms(step, *SHAPES.values()), strict=True))
        params, state = opt.update(
            {p: g.clone() for p, g in grads.items()}, state, params, donate=donate
        )
        for x, g in zip(wide, grads.values(), strict=True):
            x.grad = g
        right.step()
        want = {p: x.detach() for p, x in zip(SHAPES, wide, strict=True)}
        if name == "adamw":
            same(state["master"], want)
            same(params, {p: x.to(low) for p, x in want.items()})
        else:  # torch's own order of rounding is another one
            for p in want:
                torch.testing.assert_close(state["master"][p], want[p], rtol=1e-6, atol=1e-6)
                assert torch.equal(params[p], state["master"][p].to(low))


def test_an_update_below_half_a_unit(subtests) -> None:
    """Bug row 76: 100 updates of -6e-4 from 1: masters reach 0.94, bf16 alone stays 1."""
    params, gradient = {"w": torch.ones(3, dtype=BF16)}, {"w": torch.full((3,), 6e-4)}
    for name, wrap, want in (
        ("masters", optim.with_masters, 0.94),
        ("bf16", optim.without_masters, 1.0),
    ):
        with subtests.test(name):
            opt = wrap(optim.sgd(1.0, momentum=0.0))
            new, state = params, opt.init(params)
            for _ in range(100):
                new, state = opt.update(gradient, state, new)
            assert new["w"].dtype == BF16
            assert new["w"].tolist() == [float(torch.tensor(want).to(BF16))] * 3


@pytest.mark.parametrize(
    "wrap",
    [
        optim.with_masters,
        optim.without_masters,
        lambda t: optim.without_masters(t, key=rng.key(3, "rounding")),
        lambda t: optim.with_loss_scale(optim.with_masters(t), optim.dynamic_scale(4.0)),
    ],
    ids=["masters", "nearest", "chance", "scaled"],
)
class TestAsTransforms:
    """What every transform promises."""

    @staticmethod
    def run(opt: Transform, params: Leaves, state: object, steps: range, donate: bool) -> tuple:
        for step in steps:
            grads = {p: g * 0.1 for p, g in zip(params, randoms(step, (8, 3), (7,)), strict=True)}
            params, state = opt.update(grads, state, params, donate=donate, overflow=step == 2)
        return params, state

    @staticmethod
    def start() -> Leaves:
        w, norm = randoms(9, (8, 3), (7,))
        return {"w": w.to(BF16), "norm": norm}  # a float32 leaf among bf16 ones

    def test_donation(self, wrap) -> None:
        """Donated or not the bits are the same; without, what was given is as it was."""
        opt, start = wrap(optim.adamw(0.1)), self.start()
        state = opt.init(start)
        before = {p: x.clone() for p, x in (start | optim.state_tensors(state)).items()}
        kept = self.run(opt, start, state, range(4), donate=False)
        same(start | optim.state_tensors(state), before)
        given = {p: x.clone() for p, x in start.items()}
        donated = self.run(opt, given, opt.init(given), range(4), donate=True)
        same(kept[0] | optim.state_tensors(kept[1]), donated[0] | optim.state_tensors(donated[1]))
        assert optim.state_scalars(kept[1]) == optim.state_scalars(donated[1])
        assert all(donated[0][p].data_ptr() == given[p].data_ptr() for p in given)

    def test_types_stay(self, wrap) -> None:
        """No leaf changes type; moments are float32; no output shares memory with the state."""
        opt = wrap(optim.adamw(0.1))
        params, state = self.run(opt, self.start(), opt.init(self.start()), range(3), donate=True)
        assert {p: x.dtype for p, x in params.items()} == {"w": BF16, "norm": FP32}
        tensors = optim.state_tensors(state)
        assert {x.dtype for x in tensors.values()} == {FP32}
        addresses = {x.data_ptr() for x in tensors.values()}
        assert len(addresses) == len(tensors)
        assert addresses.isdisjoint(x.data_ptr() for x in params.values())
        assert not any(x.requires_grad for x in (*params.values(), *tensors.values()))

    def test_save_and_restore(self, wrap) -> None:
        """Bug row 75: through tensors and JSON numbers and on, as without stopping, to the bit."""
        opt, start = wrap(optim.adamw(0.1)), self.start()
        whole = self.run(opt, start, opt.init(start), range(6), donate=False)
        params, state = self.run(opt, start, opt.init(start), range(3), donate=False)
        numbers = json.loads(json.dumps(optim.state_scalars(state)))
        like = opt.init({p: torch.empty_like(x, device="meta") for p, x in start.items()})
        tensors = optim.state_tensors(state)
        assert {p: x.dtype for p, x in optim.state_tensors(like).items()} == {
            p: x.dtype for p, x in tensors.items()
        }
        back = optim.restore_state(like, tensors, numbers)
        again = self.run(opt, params, back, range(3, 6), donate=False)
        same(whole[0] | optim.state_tensors(whole[1]), again[0] | optim.state_tensors(again[1]))
        assert optim.state_scalars(whole[1]) == optim.state_scalars(again[1])

    def test_paths_are_checked(self, wrap) -> None:
        """A missing gradient is named."""
        opt, start = wrap(optim.adamw(0.1)), self.start()
        with pytest.raises(ValueError, match=r"lack \['norm'\]"):
            opt.update({"w": start["w"]}, opt.init(start), start, overflow=False)


# rounding by chance


def neighbours(x: float) -> tuple[float, float]:
    """The numbers of bf16 around a positive float32, from its exponent: 7 bits of mantissa."""
    exponent = math.frexp(x)[1] - 1
    unit = 2.0 ** (exponent - 7)
    low = math.floor(x / unit) * unit
    return low, low + unit


@given(st.floats(2.0**-60, 2.0**60, width=32), st.booleans(), st.integers(0, 2**32 - 1))
def test_rounds_to_a_neighbour_by_the_word(x: float, negative: bool, word: int) -> None:
    """Away from zero if and only if the word's upper 16 bits reach 2^16 (1 - distance)."""
    low, high = neighbours(x)
    fraction = math.floor((x - low) / (high - low) * 2**16)
    want = high if (word >> 16) + fraction >= 2**16 else low
    sign = -1.0 if negative else 1.0
    got = masters.round_by_chance(torch.tensor([sign * x]), torch.tensor([word]))
    assert got.dtype == BF16
    assert got.item() == sign * want


def test_rounding_is_unbiased() -> None:
    """The mean of 2^16 roundings, one for each word, is the number itself, exactly."""
    words = torch.arange(2**16) << 16
    for x in (1.0 + 2.0**-9, -3.1415927, 6e-4, 1e-38, -1e-40):
        value = torch.full((2**16,), x)
        mean = masters.round_by_chance(value, words).double().mean()
        assert float(mean) == float(value[0].double())


def test_what_is_exact_stays() -> None:
    """Numbers of bf16, zeros with their signs, infinities and NaNs whatever the word."""
    x = torch.tensor([0.0, -0.0, 1.0, -2.5, math.inf, -math.inf, 2.0**-133])
    quiet, rare = torch.tensor([math.nan]), torch.tensor([0x7F800001], dtype=torch.int32)
    for word in (0, 2**31, 2**32 - 1):
        got = masters.round_by_chance(x, torch.full((7,), word))
        assert torch.equal(got.float().view(torch.int32), x.view(torch.int32))
        for nan in (quiet, rare.view(FP32)):
            assert masters.round_by_chance(nan, torch.tensor([word])).isnan().all()


def test_masterless_training_drifts_as_masters_do() -> None:
    """100 updates of -6e-4 from 1, rounded by chance: 0.94 in the mean of 20000."""
    params = {"w": torch.ones(20000, dtype=BF16)}
    opt = optim.without_masters(optim.sgd(1.0, momentum=0.0), key=rng.key(0, "rounding"))
    state = opt.init(params)
    for _ in range(100):
        gradient = {"w": torch.full((20000,), 6e-4)}
        params, state = opt.update(gradient, state, params, donate=True)
    # A rounding's variance is at most unit^2 / 4; six standard deviations of the mean.
    bound = 6 * math.sqrt(100 / 4) * 2.0**-8 / math.sqrt(20000)
    assert abs(float(params["w"].double().mean()) - 0.94) < bound


@pytest.mark.parametrize("cuts", [[24], [1, 23], [5, 0, 12, 7], [1] * 24])
def test_flat_pieces_round_as_the_whole(cuts: list[int]) -> None:
    """However a flat leaf is cut, the pieces' updates are the whole's to the bit."""

    def run(words: masters.Words | None, piece: slice) -> Tensor:
        (w,) = randoms(0, (24,))
        params = {"bucket.0": w.to(BF16)[piece]}
        opt = optim.without_masters(optim.adamw(0.01), key=rng.key(1, "rounding"), words=words)
        state = opt.init(params)
        for step in range(3):
            (g,) = randoms(step + 1, (24,))
            params, state = opt.update({"bucket.0": g[piece]}, state, params)
        return params["bucket.0"]

    whole, start, pieces = run(None, slice(None)), 0, []
    for size in cuts:
        words = masters.flat_words({"bucket.0": start})
        pieces.append(run(words, slice(start, start + size)))
        start += size
    assert torch.equal(torch.cat(pieces), whole)


def test_another_update_and_leaf_round_otherwise() -> None:
    """Words of two updates, and of two leaves of one, are unrelated."""
    seen: list[Tensor] = []

    def words(key: rng.Key, path: str, leaf: Tensor) -> Tensor:
        seen.append(masters.whole_words(key, path, leaf))
        return seen[-1]

    opt = optim.without_masters(optim.sgd(1.0), key=rng.key(0), words=words)
    params = {path: torch.ones(1000, dtype=BF16) for path in ("a", "b")}
    state = opt.init(params)
    for _ in range(2):
        params, state = opt.update({p: torch.ones(1000) for p in params}, state, params)
    assert len(seen) == 4
    for i, x in enumerate(seen):
        for y in seen[:i]:
            assert int((x == y).sum()) == 0


# the loss scale


class Plain:
    """The rule in words of its own: counters that count up."""

    def __init__(self, scale: float, every: int, hysteresis: int, minimum: float) -> None:
        self.scale, self.every, self.hysteresis, self.minimum = scale, every, hysteresis, minimum
        self.good = self.bad_since_growth = 0

    def step(self, overflow: bool) -> float:
        if overflow:
            self.good = 0
            self.bad_since_growth += 1
            if self.bad_since_growth >= self.hysteresis:
                self.scale = max(self.minimum, self.scale * 0.5)
        else:
            self.good += 1
            if self.good % self.every == 0:
                self.bad_since_growth = 0
                self.scale *= 2.0
        return self.scale


@given(
    st.lists(st.booleans(), max_size=60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([1.0, 4.0, 0.25]),
)
def test_dynamic_scale(overflows: list[bool], every: int, hysteresis: int, minimum: float) -> None:
    """Scales and skips of any history."""
    rule = optim.dynamic_scale(16.0, growth_every=every, hysteresis=hysteresis, minimum=minimum)
    state, plain = rule.init(), Plain(16.0, every, hysteresis, minimum)
    for n, overflow in enumerate(overflows, 1):
        state = rule.update(state, overflow)
        assert state.scale == plain.step(overflow)
        assert state.skipped == sum(overflows[:n])


def test_dynamic_scale_by_hand() -> None:
    """Growth every 3, hysteresis 2: the first overflow is forgiven, growth forgives again."""
    rule = optim.dynamic_scale(growth_every=3)
    state, seen = rule.init(), []
    for mark in "xx...xx.x....":
        state = rule.update(state, mark == "x")
        seen.append(round(math.log2(state.scale)))
    assert seen == [32, 31, 31, 31, 32, 32, 31, 31, 30, 30, 30, 31, 31]
    assert state.skipped == 5


def test_scale_stays_finite() -> None:
    """Gradients of zero never overflow; the scale must not become infinite by them."""
    rule = optim.dynamic_scale(growth_every=1)
    state = rule.init()
    for _ in range(2000):
        state = rule.update(state, False)
    assert math.isfinite(state.scale) and torch.tensor(1 / state.scale) > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: optim.constant_scale(0.0), "scale is 0.0"),
        (lambda: optim.constant_scale(math.inf), "scale is inf"),
        (lambda: optim.dynamic_scale(math.nan), "initial is nan"),
        (lambda: optim.dynamic_scale(minimum=-1.0), "minimum is -1.0"),
        (lambda: optim.dynamic_scale(growth=1.0), "growth is 1.0"),
        (lambda: optim.dynamic_scale(backoff=1.0), "backoff 1.0"),
        (lambda: optim.dynamic_scale(growth_every=0), "growth_every 0"),
        (lambda: optim.dynamic_scale(hysteresis=0), "hysteresis 0"),
        (lambda: optim.without_masters(optim.sgd(1.0), torch.float64, key=rng.key(0)), "float64"),
    ],
)
def test_numbers_are_checked(make, words: str) -> None:
    """By name."""
    with pytest.raises(ValueError, match=words):
        make()


def test_the_decision_must_be_given() -> None:
    """A caller that forgets the flag would never skip."""
    opt = optim.with_loss_scale(optim.sgd(1.0), optim.constant_scale(2.0))
    params = {"w": torch.ones(1)}
    with pytest.raises(ValueError, match="overflow"):
        opt.update(params, opt.init(params), params)


@pytest.mark.parametrize("donate", [False, True])
def test_a_skipped_update_touches_nothing(donate: bool) -> None:
    """Row 105: parameters, masters, moments, count and learning rate stay; the scale moves."""
    inner = optim.named_chain(
        clip=optim.clip_by_global_norm(1.0), adamw=optim.adamw(optim.linear(0.1, 10, warmup=2))
    )
    opt = optim.with_loss_scale(optim.with_masters(inner), optim.dynamic_scale(8.0, hysteresis=1))
    params = {"w": torch.ones(4, dtype=BF16)}
    state = opt.init(params)
    good = {"w": torch.tensor([3.0, -1.0, 0.5, 0.0])}
    params, state = opt.update(good, state, params, overflow=False, norm=torch.tensor(3.0))
    before = {p: x.clone() for p, x in (params | optim.state_tensors(state)).items()}
    numbers = optim.state_scalars(state)
    bad = {"w": torch.tensor([math.nan, math.inf, 1.0, 0.0])}
    params, state = opt.update(
        bad, state, params, overflow=True, norm=torch.tensor(math.nan), donate=donate
    )
    same(params | optim.state_tensors(state), before)
    after = optim.state_scalars(state)
    changed = {"scale": 4.0, "clean": 0, "hysteresis": 0, "skipped": 1}
    assert {k: v for k, v in after.items() if v != numbers[k]} == {
        f"loss_scale.{k}": v for k, v in changed.items()
    }
    assert optim.learning_rate(state) == 0.05 and after["inner.inner.adamw.count"] == 1
    # The next update is the second: its learning rate is the schedule's at 2.
    _, state = opt.update(good, state, params, overflow=False, norm=torch.tensor(3.0))
    assert optim.learning_rate(state) == 0.1


@pytest.mark.parametrize("dtype", [FP32, torch.float64, BF16])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**32, 3.0])
def test_unscale(dtype: torch.dtype, scale: float) -> None:
    """Divided, a power of two without any rounding; leaves of no elements are no trouble."""
    (x,) = randoms(0, (257,))
    x = x.to(dtype)
    grads = [x * scale, torch.zeros(0, dtype=dtype), torch.zeros(3, 2, dtype=dtype)]
    want = [g / scale for g in grads]
    assert float(scaler.unscale_(grads, scale)) == 0.0
    for a, b in zip(grads, want, strict=True):
        assert torch.equal(a, b)
    if scale != 3.0:
        assert torch.equal(grads[0], x)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [(0, 0), (0, 100), (2, 5)])
def test_unscale_finds_what_is_not_finite(value: float, at: tuple[int, int]) -> None:
    """Anywhere, of any kind, in buffers of several types."""
    grads = [torch.ones(101), torch.ones(3, dtype=torch.float64), torch.ones(6)]
    assert float(scaler.unscale_(grads, 4.0)) == 0.0
    grads[at[0]][at[1]] = value
    assert float(scaler.unscale_(grads, 4.0)) == 1.0


def test_unscale_before_clipping() -> None:
    """Bug row 73: gradient (3, 4) of a loss scaled by 1024, clipped at 1: (0.6, 0.8)."""
    grads = {"w": torch.tensor([3.0, 4.0]) * 1024}
    scaler.unscale_([*grads.values()], 1024.0)
    clip = optim.clip_by_global_norm(1.0)
    norm = torch.linalg.vector_norm(grads["w"])
    updates, _ = clip.update(grads, clip.init(grads), grads, norm=norm)
    torch.testing.assert_close(updates["w"], torch.tensor([0.6, 0.8]), rtol=2e-6, atol=0)


def test_scale_is_read_from_any_state() -> None:
    """1 and 0 without one."""
    params = {"w": torch.ones(1)}
    plain = optim.adamw(0.1)
    wrapped: Sequence[Transform] = [
        optim.with_loss_scale(plain, optim.constant_scale(64.0)),
        optim.named_chain(all=optim.with_loss_scale(plain, optim.constant_scale(64.0))),
    ]
    assert optim.loss_scale(plain.init(params)) == 1.0
    assert scaler.skipped_steps(plain.init(params)) == 0
    for opt in wrapped:
        assert optim.loss_scale(opt.init(params)) == 64.0
