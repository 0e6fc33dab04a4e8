"""The executor, the mailbox and finalize on models small enough for a pencil."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfun.grads import explain, reductions
from mfun.grads.finalize import sum_of_squares
from mfun.mesh import Mesh
from mfun.nn.layer import Layer
from mfun.pipeline import mailbox
from mfun.pipeline.pullback import autograd_layer, vjp_layer
from mfun.pipeline.stage import cut
from mfun.schedule import Recv, plan
from mfun.spec import ParamSpec
from tests import toys

ONE, FOUR = ((8.0, 0.0, 0.0), (1, 0, 0)), ((1.0, 2.0, 3.0), (1, 1, 1))
NONE = ((5.0, 5.0, 5.0), (0, 0, 0))


def scalar(data, mesh, **kwargs):
    cuts = [2] if mesh.pp == 1 else [1, 1]
    return toys.run(toys.scalar_model(), cuts, data, mesh=mesh, **kwargs)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_token_mean_over_microbatches_is_by_tokens(tp, pp):
    """One valid token x=8, then 1,2,3: the gradient is 14/4, not the mean of means 5."""
    result = scalar([[ONE, FOUR]], Mesh(tp=tp, pp=pp))
    assert result.grad("w").item() == 3.5 and result.tokens.item() == 4


@pytest.mark.parametrize("pp", [1, 2])
def test_token_mean_over_data_ranks_is_divided_once(pp):
    """Rank 0 has {8}, rank 1 {1,2,3}: 3.5; a double division gives 1.75, a mean of means 5."""
    result = scalar([[ONE], [FOUR]], Mesh(dp=2, pp=pp))
    assert [g.item() for g in result.grads[0]["w"][:, 0]] == [3.5, 3.5]


def test_microbatch_mean_is_the_mean_of_means():
    """loss_norm="microbatch" gives (8 + 2) / 2 over microbatches, and the same over ranks."""
    assert scalar([[ONE, FOUR]], Mesh(), norm="microbatch").grad("w").item() == 5.0
    assert scalar([[ONE], [FOUR]], Mesh(dp=2), norm="microbatch").grad("w").item() == 5.0


def test_windows_do_not_leak_into_each_other():
    """Three steps with the same buffers give the same gradient: 21/6 for x = 1..6."""
    data = [[((1.0, 2.0), (1, 1)), ((3.0, 4.0), (1, 1)), ((5.0, 6.0), (1, 1))]]
    for windows in (1, 3):
        assert scalar(data, Mesh(pp=2), windows=windows).grad("w").item() == 3.5


def test_step_without_a_valid_token_gives_exact_zeros():
    """No valid token anywhere: gradient 0, norm 0, never NaN."""
    for norm in ("tokens", "microbatch"):
        result = scalar([[NONE, NONE]], Mesh(pp=2), norm=norm)
        assert result.grad("w").item() == 0.0 and result.norms[0].tolist() == [0.0]


def test_unknown_normalisation_is_refused():
    """A misspelt loss_norm names the two that exist."""
    with pytest.raises(ValueError, match=r'"tokens" or "microbatch"'):
        scalar([[ONE]], Mesh(), norm="token")


def two_tensor_model():
    """Two tensors over each boundary, used with different weights afterwards."""
    spec = lambda: ParamSpec(shape=(1,), grad={"tp": "equal"})  # noqa: E731
    first = Layer(
        "first", {"a": spec()}, lambda p, x, c: {"h": p["a"] * c.batch["values"], "r": p["a"] ** 2}
    )
    middle = Layer(
        "middle", {"b": spec()}, lambda p, x, c: {"h": x["h"] * p["b"], "r": x["r"] + p["b"]}
    )
    last = Layer(
        "last", {}, lambda p, x, c: {"loss": ((x["h"] + 2 * x["r"]) * c.batch["mask"]).sum()}
    )
    return [first, middle, last]


VALUES = {"a": torch.tensor([3.0]).double(), "b": torch.tensor([5.0]).double()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_two_tensors_cross_every_boundary(schedule, microbatches):
    """d/da sum(a b x + 2 (a^2 + b)) = b sum x + 4 a n, d/db = a sum x + 2 n, by hand."""
    data = [[((m + 1.0, 2.0), (1, 1)) for m in range(microbatches)]]
    result = toys.run(
        two_tensor_model(), [1, 1, 1], data, mesh=Mesh(pp=3), schedule=schedule, params=VALUES
    )
    n = 2 * microbatches
    total = sum(m + 3.0 for m in range(microbatches))
    assert result.grad("a").item() == pytest.approx((5 * total + 12 * n) / n, rel=1e-14)
    assert result.grad("b").item() == pytest.approx((3 * total + 2 * n) / n, rel=1e-14)
    assert len(result.losses) == microbatches


@pytest.mark.parametrize("office", [{"rendezvous": True}, {"late": True}])
@pytest.mark.parametrize("stages", [2, 3])
def test_other_transports_change_no_bit(office, stages):
    """A send that blocks until received, and one that copies late, give the same bits."""
    data = [[((m + 0.1, 2.0), (1, 1)) for m in range(5)]]
    cuts = [1, 2] if stages == 2 else [1, 1, 1]
    mesh = Mesh(pp=stages)
    plain = toys.run(two_tensor_model(), cuts, data, mesh=mesh, params=VALUES)
    other = toys.run(
        two_tensor_model(), cuts, data, mesh=mesh, params=VALUES, office=mailbox.Office(**office)
    )
    for path in ("a", "b"):
        assert torch.equal(plain.grad(path), other.grad(path))


def test_pullbacks_agree():
    """torch.func.vjp gives bitwise the executor's gradients."""
    data = [[((0.3, 2.0), (1, 0)), ((1.7, 2.0), (1, 1))]]
    run = lambda how: toys.run(  # noqa: E731
        two_tensor_model(), [2, 1], data, mesh=Mesh(pp=2), params=VALUES, linearize=how
    )
    want, have = run(autograd_layer), run(vjp_layer)
    assert all(torch.equal(want.grad(p), have.grad(p)) for p in "ab")


def tied_model(swap: bool):
    """Two weights, each used on both stages, declared in opposite order on the second."""
    spec = ParamSpec(shape=(1,), grad={"tp": "equal"})
    names = ("u", "v")
    first = Layer(
        "first",
        {n: spec for n in names},
        lambda p, x, c: {"h": p["u"] * c.batch["values"] + p["v"]},
    )
    order = names[::-1] if swap else names
    second = Layer(
        "second", {n: spec for n in order}, lambda p, x, c: {"h": x["h"] * p["u"] * p["v"]}
    )
    return [first, second, toys.sum_loss()]


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
def test_tied_leaves_sum_over_stages_in_any_declared_order(swap, dp):
    """loss = (u x + v) u v: du = 2 u v x + v^2, dv = u^2 x + 2 u v, whole on both stages."""
    params = {"u": torch.tensor([2.0]).double(), "v": torch.tensor([3.0]).double()}
    data = [[((x, 0.0), (1, 0))] for x in (1.5, 1.5)[:dp]]
    result = toys.run(tied_model(swap), [1, 2], data, mesh=Mesh(pp=2, dp=dp), params=params)
    u, v, x = 2.0, 3.0, 1.5
    for grads in result.grads:
        assert grads["u"].unique().tolist() == [2 * u * v * x + v * v]
        assert grads["v"].unique().tolist() == [u * u * x + 2 * u * v]


def test_norm_counts_tied_and_replicated_elements_once():
    """The norm over tp 2, dp 2, pp 2 of tied leaves is that of (du, dv) once."""
    params = {"u": torch.tensor([2.0]).double(), "v": torch.tensor([3.0]).double()}
    data = [[((1.5, 0.0), (1, 0))]] * 2
    mesh = Mesh(tp=2, dp=2, pp=2)
    result = toys.run(tied_model(True), [1, 2], data, mesh=mesh, params=params)
    want = ((2 * 6 * 1.5 + 9) ** 2 + (4 * 1.5 + 12) ** 2) ** 0.5
    for norms in result.norms:
        assert norms.tolist() == [pytest.approx(want, rel=1e-14)] * 4


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 3_000_001])
def test_float32_norm_is_exact_to_float32(size):
    """The sum of squares of millions of float32 is that of float64 to a few float32 ulps."""
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(size))
    want = x.double().square().sum(-1)
    assert torch.allclose(sum_of_squares(x), want, rtol=5e-7, atol=0.0)


def test_unused_and_stale_gradients_are_zero():
    """A leaf no layer uses gets zeros even when its buffer was poisoned."""
    layers = toys.scalar_model()
    unused = Layer("unused", {"z": ParamSpec(shape=(3,), grad={"tp": "equal"})}, lambda p, x, c: x)
    poison = lambda grads: [b.fill_(float("nan")) for b in grads.buffers]  # noqa: E731
    data = [[ONE, FOUR]]
    result = toys.run([layers[0], unused, layers[1]], [3], data, mesh=Mesh(), hook=poison)
    assert result.grad("z").tolist() == [0, 0, 0] and result.grad("w").item() == 3.5


def test_a_missing_declaration_is_refused_by_path():
    """A leaf replicated over tp without partial/equal names itself and the fix."""
    with pytest.raises(ValueError, match=r"norm\.weight.*grad="):
        reductions([{"norm": {"weight": ParamSpec(shape=(4,))}}], Mesh(tp=2))


def test_explain_names_every_leaf_and_reason():
    """One line a leaf, with its axes, weights and why."""
    spec = {
        "n": ParamSpec(shape=(4,), grad={"tp": "equal"}),
        "e": ParamSpec(shape=(4,), grad={"tp": "partial"}),
    }
    text = explain(reductions([spec, {"e": spec["e"]}], Mesh(tp=2, dp=2, pp=2)))
    lines = text.splitlines()
    assert "x0.5" in lines[0] and "tp:2 equal" in lines[0] and "dp:2 data" in lines[0]
    assert "stages (0, 1)" in lines[1] and "pp:2 tied" in lines[1]


def test_stuck_pipeline_says_who_waits_for_what():
    """A stage waiting for a message nobody sends is reported, not hung."""
    office = mailbox.Office()
    world = mailbox.worlds(Mesh(pp=2), office)[1]
    op = next(op for op in plan("1f1b", 2, 1)[1] if isinstance(op, Recv))

    def program():
        yield from world.take(op)

    with pytest.raises(RuntimeError, match="stage 0 waits for Recv"):
        mailbox.run([program()], office)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_cut_accepts_only_every_block_once_in_order(sizes):
    """Consecutive slices are accepted; any permutation or hole is refused."""
    layers = [Layer(str(i), {}, lambda p, x, c: x) for i in range(sum(sizes) + 2)]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    blocks = [list(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)]
    stages = cut(layers, blocks)
    assert [x.name for s in stages for x in s.layers] == [x.name for x in layers]
    with pytest.raises(ValueError, match="each to be run once and in order"):
        cut(layers, [*blocks, [0]])
