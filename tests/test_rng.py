"""Keys, Philox and the distributions: known answers, an oracle in Python integers, and layouts."""

from __future__ import annotations

import math
import pickle
import random
import struct
from hashlib import blake2b

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mfun.rng import (
    Grid,
    bernoulli,
    bits,
    key,
    normal,
    philox,
    truncated_normal,
    uniform,
)

# The distributions as rows: everything drawn obeys the properties below.
DRAWS = {
    "bits": lambda k, g, dtype: bits(k, g),
    "uniform": lambda k, g, dtype: uniform(k, g, dtype, low=-1.5, high=2.0),
    "normal": lambda k, g, dtype: normal(k, g, dtype, std=0.3),
    "truncated_normal": lambda k, g, dtype: truncated_normal(k, g, dtype, std=0.3),
    "bernoulli": lambda k, g, dtype: bernoulli(k, g, 0.7),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def oracle_philox(counter: tuple[int, ...], words: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 written from the paper in unbounded Python integers."""
    x, (k0, k1) = list(counter), words
    for r in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        key0, key1 = (k0 + r * 0x9E3779B9) % 2**32, (k1 + r * 0xBB67AE85) % 2**32
        x = [b // 2**32 ^ x[1] ^ key0, b % 2**32, a // 2**32 ^ x[3] ^ key1, a % 2**32]
    return tuple(x)


def oracle_words(seed: int, path: tuple, index: int) -> tuple[int, ...]:
    """The four words of the block of an element, from the definition alone."""
    text = "\x1f".join(str(part) for part in (seed, *path))
    k0, k1, c2, c3 = struct.unpack("<4I", blake2b(text.encode(), digest_size=16).digest())
    block = index // 4
    return oracle_philox((block % 2**32, block // 2**32, c2, c3), (k0, k1))


def as_tensors(grid: Grid) -> Grid:
    """The same grid with tensors for ranges."""
    coords = tuple(torch.tensor(list(c), dtype=torch.int64) for c in grid.coords)
    return Grid(coords, grid.sizes)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[range, ...]]:
    """A small shape, and a box inside it: aligned, misaligned and empty pieces all occur."""
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=4))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append(range(start, draw(st.integers(start, size))))
    if draw(st.booleans()):
        shape[-1] *= 4
        start = 4 * draw(st.integers(0, shape[-1] // 4 - 1))
        box[-1] = range(start, draw(st.integers(start // 4, shape[-1] // 4)) * 4)
    return tuple(shape), tuple(box)


def take(x: Tensor, box: tuple[range, ...]) -> Tensor:
    """The box of a whole tensor."""
    return x[tuple(slice(r.start, r.stop) for r in box)]


@pytest.mark.parametrize(
    ("given_words", "answer"),
    [
        ("00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(given_words: str, answer: str) -> None:
    """Random123's vectors hold for tensors, for Python ints and for this file's oracle."""
    c0, c1, c2, c3, k0, k1 = (int(w, 16) for w in given_words.split())
    expected = tuple(int(w, 16) for w in answer.split())
    t0, t1, t2, t3 = torch.tensor([c0, c1, c2, c3])
    assert tuple(int(w) for w in philox((t0, t1, t2, t3), (k0, k1))) == expected
    assert philox((c0, c1, c2, c3), (k0, k1)) == expected
    assert oracle_philox((c0, c1, c2, c3), (k0, k1)) == expected


@pytest.mark.parametrize("factor", [0xD2511F53, 0xCD9E8D57, 0xFFFFFFFF])
def test_high_word_of_a_wrapping_product(factor: int) -> None:
    """The masked arithmetic shift gives the true high word, also where int64 overflows."""
    rng = random.Random(0)
    edges = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, (2**63 - 1) // factor, 2**63 // factor + 1]
    words = edges + [rng.getrandbits(32) for _ in range(5000)]
    assert any(w * factor >= 2**63 for w in words)
    high = (torch.tensor(words) * factor >> 32) & 0xFFFFFFFF
    assert high.tolist() == [w * factor >> 32 for w in words]


@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_equals_big_integers(words: list[int]) -> None:
    """Philox on int64 tensors equals Philox in unbounded integers, all words in range."""
    k0, k1 = words[4:]
    c0, c1, c2, c3 = torch.tensor(words[:4])
    got = tuple(int(w) for w in philox((c0, c1, c2, c3), (k0, k1)))
    assert got == oracle_philox(tuple(words[:4]), (k0, k1))


def test_key_words() -> None:
    """A key's words are the little-endian words of blake2b of seed and path."""
    digest = blake2b(b"5\x1finit\x1f3\x1fa.b", digest_size=16).digest()
    expected = tuple(int(w) for w in np.frombuffer(digest, dtype="<u4"))
    assert key(5, "init", 3, "a.b").words == expected
    assert key(5).fold("init").fold(3, "a.b").words == expected
    assert key(5).fold("init", 3, "a.b") == key(5, "init", 3, "a.b")
    assert hash(key(5).fold("init")) == hash(key(5, "init"))


def test_key_refuses_what_it_cannot_name() -> None:
    """Entries that are not str or int, and the separator, are refused by value."""
    with pytest.raises(TypeError, match=r"3\.0 is a float"):
        key(0, 3.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a Tensor"):
        key(0).fold(torch.tensor(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="True is a bool"):
        key(0, True)
    with pytest.raises(ValueError, match="separator"):
        key(0, "a\x1fb")


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(-3, 2**70))
def test_bits_follow_the_definition(shape: list[int], seed: int) -> None:
    """Element i is word i % 4 of block i // 4, on both paths."""
    got = bits(key(seed, "w"), Grid.whole(tuple(shape))).flatten().tolist()
    assert got == [oracle_words(seed, ("w",), i)[i % 4] for i in range(math.prod(shape))]


@pytest.mark.parametrize("columns", [8, 7])
def test_index_beyond_32_bits(columns: int) -> None:
    """Rows far out have a block number above 2^32, whose high word enters the counter."""
    rows = [2**32 // columns - 1, 2**34 + 5, 2**40 + 3, 2**45]
    k = key(1, "far")
    for coords in (torch.tensor(rows), range(rows[2], rows[2] + 2)):
        grid = Grid((coords, range(columns)), (0, columns))
        numbers = [int(r) * columns + c for r in coords for c in range(columns)]
        expected = [oracle_words(1, ("far",), i)[i % 4] for i in numbers]
        assert bits(k, grid).flatten().tolist() == expected
    assert oracle_words(1, ("far",), 4 * 2**32) != oracle_words(1, ("far",), 0)


@pytest.mark.parametrize("columns", [8, 6])
def test_values_follow_the_definition(columns: int) -> None:
    """Every distribution equals its formula, evaluated by `math` on the oracle's words."""
    k, grid = key(2, "v"), Grid.whole((3, columns))
    blocks = [oracle_words(2, ("v",), i) for i in range(3 * columns)]
    u = [[(w + 0.5) / 2**32 for w in block] for block in blocks]
    own = [u[i][i % 4] for i in range(3 * columns)]
    box_muller = []
    for i, four in enumerate(u):
        a, b = four[i % 4 // 2 * 2 : i % 4 // 2 * 2 + 2]
        turn = math.cos if i % 2 == 0 else math.sin
        box_muller.append(0.5 * math.sqrt(-2 * math.log(a)) * turn(2 * math.pi * b))

    def same(x: Tensor, expected: list[float]) -> None:
        assert np.allclose(x.flatten().numpy(), expected, rtol=0, atol=1e-14)

    same(uniform(k, grid, torch.float64, low=-1.0, high=3.0), [-1 + 4 * x for x in own])
    same(normal(k, grid, torch.float64, std=0.5), box_muller)
    kept = bernoulli(k, grid, 0.3).flatten().tolist()
    assert kept == [b[i % 4] < round(0.3 * 2**32) for i, b in enumerate(blocks)]
    x = truncated_normal(k, grid, torch.float64, std=2.0, bound=1.5).flatten().tolist()
    phi = [0.5 * math.erfc(-value / 2.0 / math.sqrt(2)) for value in x]
    low = 0.5 * math.erfc(1.5 / math.sqrt(2))
    assert np.allclose(phi, [low + v * (1 - 2 * low) for v in own], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", DRAWS)
@given(case=boxes(), dtype=st.sampled_from(DTYPES))
def test_shard_is_the_slice(name: str, case: tuple, dtype: torch.dtype) -> None:
    """A box drawn alone is bitwise the box of the whole, by ranges and by tensors."""
    shape, box = case
    k = key(3, name)
    whole = DRAWS[name](k, Grid.whole(shape), dtype)
    shard = DRAWS[name](k, Grid(box, shape), dtype)
    assert whole.shape == shape and shard.shape == tuple(len(r) for r in box)
    assert torch.equal(shard, take(whole, box))
    assert torch.equal(DRAWS[name](k, as_tensors(Grid(box, shape)), dtype), shard)
    assert shard.dtype == {"bits": torch.int64, "bernoulli": torch.bool}.get(name, dtype)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("columns", [512, 513])
def test_shard_is_the_slice_across_tiles(name: str, columns: int) -> None:
    """The same with several tiles, where pieces start anywhere in a tile."""
    shape = (300, columns)
    whole = DRAWS[name](key(4), Grid.whole(shape), torch.float32)
    for box in [
        (range(150, 300), range(columns)),
        (range(7, 293), range(4, 508)),
        (range(1, 300), range(3, 511)),
    ]:
        assert torch.equal(DRAWS[name](key(4), Grid(box, shape), torch.float32), take(whole, box))


@pytest.mark.parametrize("name", DRAWS)
@settings(max_examples=40)
@given(data=st.data())
def test_batched_starts_equal_calls_per_rank(name: str, data: st.DataObject) -> None:
    """Under vmap, where a rank's start is a batched tensor, each rank draws its own piece."""
    rows, ranks, columns = (data.draw(st.integers(1, 6)) for _ in range(3))
    columns *= data.draw(st.sampled_from([1, 4]))
    axis = data.draw(st.sampled_from([0, 1]))
    k = key(5, name)

    def local(start: Tensor) -> Tensor:
        mine = start + torch.arange(rows)
        coords, sizes = (mine, range(5), range(columns)), (ranks * rows, 5, columns)
        if axis == 1:
            coords, sizes = (range(5), mine, range(columns)), (5, ranks * rows, columns)
        return DRAWS[name](k, Grid(coords, sizes), torch.float32)

    starts = rows * torch.arange(ranks)
    whole_shape = (ranks * rows, 5, columns) if axis == 0 else (5, ranks * rows, columns)
    whole = DRAWS[name](k, Grid.whole(whole_shape), torch.float32)
    batched = torch.func.vmap(local)(starts)
    assert torch.equal(batched, torch.stack([local(start) for start in starts]))
    assert torch.equal(torch.cat(tuple(batched), axis), whole)


def test_batched_last_coordinate() -> None:
    """A last dim cut over ranks, so that no row of blocks is whole, is drawn under vmap too."""
    whole = normal(key(6), Grid.whole((6, 8)), torch.float64)

    def local(start: Tensor) -> Tensor:
        grid = Grid((range(6), start + torch.arange(4)), (6, 8))
        return normal(key(6), grid, torch.float64)

    both = torch.func.vmap(local)(torch.tensor([0, 4]))
    assert torch.equal(torch.cat(tuple(both), 1), whole)


@pytest.mark.parametrize("columns", [8, 7])
def test_dropout_is_pure_under_transforms(columns: int) -> None:
    """Same key, same mask: twice, under grad, vjp, grad of grad, and per sample (bugs row 138)."""
    grid = Grid((torch.arange(3), range(columns)), (0, columns))
    k = key(7, "dropout", 0)
    mask = bernoulli(k, grid, 0.5)
    assert 0 < mask.sum() < mask.numel()
    x = torch.arange(3.0 * columns, dtype=torch.float64).reshape(3, columns)

    def loss(x: Tensor) -> Tensor:
        return (torch.where(bernoulli(k, grid, 0.5), x, 0) ** 3).sum()

    assert torch.equal(bernoulli(k, grid, 0.5), mask)
    assert torch.equal(torch.func.grad(loss)(x), 3 * x**2 * mask)
    value, pull = torch.func.vjp(loss, x)[:2]
    assert torch.equal(value, ((x * mask) ** 3).sum())
    assert torch.equal(pull(torch.ones_like(value))[0], 3 * x**2 * mask)
    second = torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)
    assert torch.equal(second, 6 * x * mask)

    def of_sample(x: Tensor, sample: Tensor) -> Tensor:
        keep = bernoulli(k, Grid((sample[None], range(columns)), (0, columns)), 0.5)[0]
        return (torch.where(keep, x, 0) ** 3).sum()

    per_sample = torch.func.vmap(torch.func.grad(of_sample))(x, torch.arange(3))
    assert torch.equal(per_sample, 3 * x**2 * mask)


def test_coordinates_tracked_by_a_transform() -> None:
    """Coordinates that pass through grad as arguments are drawn as if they were not."""

    def masked(x: Tensor, rows: Tensor) -> Tensor:
        return x * bernoulli(key(8), Grid((rows, range(8)), (0, 8)), 0.5)

    x, rows = torch.ones(4, 8), torch.arange(4)
    y = masked(x, rows)
    assert torch.equal(torch.func.grad(lambda x, rows: masked(x, rows).sum())(x, rows), y)
    jacobian = torch.func.jacrev(masked)(x, rows)
    assert torch.equal(jacobian.sum((2, 3)), y)


@pytest.mark.parametrize("name", DRAWS)
def test_global_generators_are_untouched(name: str) -> None:
    """Neither torch's, nor numpy's, nor Python's generator moves or matters."""
    torch.manual_seed(0)
    first = DRAWS[name](key(9), Grid.whole((5, 8)), torch.float32)
    before = (torch.get_rng_state(), pickle.dumps(np.random.get_state()), random.getstate())
    torch.manual_seed(1)
    again = DRAWS[name](key(9), Grid.whole((5, 8)), torch.float32)
    torch.manual_seed(0)
    assert torch.equal(first, again)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == pickle.dumps(np.random.get_state())
    assert before[2] == random.getstate()


def test_streams_differ() -> None:
    """Another seed, path, step or nesting is another stream: 19 streams share few words."""
    keys = [
        key(seed, path, step) for seed in (0, 1, -1) for path in ("a", "b") for step in (0, 1, 2)
    ]
    keys.append(key(0, "a").fold(0, 0))
    drawn = torch.stack([bits(k, Grid.whole((4096,))) for k in keys])
    distinct = drawn.unique().numel()
    assert drawn.numel() - distinct < 10  # 0.7 collisions expected among 77,824 words
    correlation = torch.corrcoef((drawn.double() / 2**32) - 0.5) - torch.eye(len(keys))
    assert correlation.abs().max() < 5 / math.sqrt(4096)


@pytest.mark.parametrize(
    ("draw", "cdf"),
    [
        (lambda k, g: uniform(k, g, torch.float64, low=-1.0, high=1.0), lambda x: (x + 1) / 2),
        (
            lambda k, g: normal(k, g, torch.float64, std=3.0),
            lambda x: torch.special.ndtr(x / 3),
        ),
        (
            lambda k, g: truncated_normal(k, g, torch.float64, std=2.0, bound=1.5),
            lambda x: (
                (torch.special.ndtr(x / 2) - torch.special.ndtr(torch.tensor(-1.5).double()))
                / (1 - 2 * torch.special.ndtr(torch.tensor(-1.5).double()))
            ),
        ),
    ],
    ids=["uniform", "normal", "truncated_normal"],
)
@pytest.mark.parametrize("shape", [(400, 500), (401, 499)])
def test_distribution_functions(draw, cdf, shape: tuple[int, int]) -> None:
    """Kolmogorov's distance to the distribution is what chance allows, in all and per lane."""
    x = draw(key(10), Grid.whole(shape)).flatten()
    for sample in (x, *(x[lane::4] for lane in range(4))):
        n = sample.numel()
        steps = torch.arange(1, n + 1) / n
        distance = (cdf(sample.sort().values) - steps).abs().max() + 1 / n
        assert distance < 1.95 / math.sqrt(n)  # passed with probability 0.999


def test_normal_moments_and_independence() -> None:
    """Moments to the fourth, and no correlation between neighbouring lanes, of 10^6 normals."""
    x = normal(key(11), Grid.whole((1000, 1000)), torch.float64).flatten()
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        error = ((x**power).mean() - moment).abs()
        assert error < 4 * math.sqrt(variance / x.numel()), power
    for lag in (1, 2, 3, 4, 1000):
        assert (x[lag:] * x[:-lag]).mean().abs() < 4 / math.sqrt(x.numel())
    assert x.abs().max() <= math.sqrt(66 * math.log(2))


def test_truncated_normal_stays_inside() -> None:
    """No number leaves the bound, and the spread is the truncated one: 0.8796 std at bound 2."""
    x = truncated_normal(key(12), Grid.whole((512, 512)), torch.float64, std=0.5, bound=2.0)
    assert x.abs().max() < 1.0
    assert abs(x.std().item() / 0.5 - 0.879626) < 0.005
    wide = truncated_normal(key(12), Grid.whole((64, 64)), torch.float64, bound=50.0)
    assert bool(wide.isfinite().all()) and 0.95 < wide.std() < 1.05


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("columns", [512, 511])
def test_bernoulli_counts(p: float, columns: int) -> None:
    """The count of True is binomial; p 0 and p 1 are exact."""
    n = 512 * columns
    count = int(bernoulli(key(13), Grid.whole((512, columns)), p).sum())
    assert abs(count - p * n) <= 4 * math.sqrt(n * p * (1 - p))


def test_spread_does_not_depend_on_the_cut() -> None:
    """A xavier 64x64 weight drawn in 4 row shards has the global spread .125 (bugs row 83)."""
    std = math.sqrt(2 / (64 + 64))
    k = key(0, "init", "w")
    shards = [
        normal(k, Grid((range(16 * i, 16 * i + 16), range(64)), (64, 64)), torch.float64, std=std)
        for i in range(4)
    ]
    gathered = torch.cat(shards)
    assert abs(gathered.std().item() - 0.125) < 0.125 * 4 / math.sqrt(2 * 64 * 64)
    assert torch.equal(gathered, normal(k, Grid.whole((64, 64)), torch.float64, std=std))


def test_shards_are_not_copies() -> None:
    """Column shards differ, and the gathered 16x16 matrix has rank 16 (bugs row 86)."""
    k = key(0, "init", "w")
    left, right = (
        normal(k, Grid((range(16), range(8 * i, 8 * i + 8)), (16, 16)), torch.float64)
        for i in range(2)
    )
    assert not torch.equal(left, right)
    assert torch.linalg.matrix_rank(torch.cat([left, right], 1)) == 16
    assert torch.linalg.matrix_rank(torch.cat([left, left], 1)) == 8


@pytest.mark.parametrize("name", DRAWS)
def test_empty_scalar_and_meta(name: str) -> None:
    """Empty grids, a grid of no dims, and the meta device give the right shapes."""
    draw = DRAWS[name]
    assert draw(key(0), Grid((range(0), range(8)), (3, 8)), torch.float32).shape == (0, 8)
    assert draw(key(0), Grid((range(3), range(5, 5)), (3, 9)), torch.float32).shape == (3, 0)
    scalar = draw(key(0), Grid.whole(()), torch.float32)
    first = draw(key(0), Grid.whole((4,)), torch.float32)[0]
    assert scalar.shape == () and torch.equal(scalar, first)
    assert bits(key(0), Grid.whole((3, 5)), device="meta").device.type == "meta"
    rows = torch.empty(3, dtype=torch.int64, device="meta")
    on_meta = draw(key(0), Grid((rows, range(5)), (0, 5)), torch.float32)
    assert on_meta.device.type == "meta" and on_meta.shape == (3, 5)


def test_stepped_ranges() -> None:
    """A range with a step, as of a cyclic placement, picks the same elements."""
    whole = normal(key(14), Grid.whole((9, 16)), torch.float64)
    grid = Grid((range(1, 9, 3), range(0, 16, 2)), (9, 16))
    assert torch.equal(normal(key(14), grid, torch.float64), whole[1:9:3, 0:16:2])
    backward = Grid((range(8, -1, -1), range(15, -1, -1)), (9, 16))
    assert torch.equal(normal(key(14), backward, torch.float64), whole.flip(0, 1))


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (Grid((range(2),), (2, 3)), r"coords has 1 dims and sizes has 2"),
        (Grid((range(2), range(2, 5)), (2, 4)), r"coords\[1\] runs from 2 to 4"),
        (Grid((range(-1, 2), range(4)), (2, 4)), r"coords\[0\] runs from -1 to 1"),
        (Grid((torch.zeros(2), range(4)), (2, 4)), r"coords\[0\] is a torch.float32"),
        (Grid((range(2), torch.zeros((2, 2), dtype=torch.int64)), (2, 4)), r"tensor of 2 dims"),
    ],
)
def test_malformed_grids_are_refused(grid: Grid, message: str) -> None:
    """The error names the dim, what it holds and the size."""
    with pytest.raises(ValueError, match=message):
        bits(key(0), grid)


def test_malformed_parameters_are_refused() -> None:
    """A probability outside [0, 1] and a bound that is not positive are named."""
    with pytest.raises(ValueError, match=r"p is 1\.5"):
        bernoulli(key(0), Grid.whole((4,)), 1.5)
    with pytest.raises(ValueError, match="bound is 0"):
        truncated_normal(key(0), Grid.whole((4,)), torch.float32, bound=0)
