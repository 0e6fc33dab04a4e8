"""Details that generic mutants (tests/mutation_run.py) changed and no quick test had seen."""

from __future__ import annotations

import copy
import json
from inspect import BoundArguments, signature
from typing import Any, Literal
from unittest import mock

import attrs
import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn.functional import cross_entropy

from mfun import flat, nn, rng
from mfun.comm import gather, overlap, process, single_groups
from mfun.comm.axis import Axis, Scope
from mfun.comm.exchange import sum_exchanged
from mfun.comm.p2p import Header
from mfun.comm.signed import signed
from mfun.config import Config, ConfigError, OptimConfig, PrecisionConfig, check, override
from mfun.grads import GradBuffers, normalise
from mfun.grads.guard import Guard
from mfun.grads.table import Reduction
from mfun.mesh import Mesh
from mfun.nn import linear
from mfun.nn.layer import Ctx
from mfun.nn.mlp import mlp
from mfun.optim import sgd
from mfun.optim.build import build, moments
from mfun.optim.lion import lion
from mfun.optim.masters import without_masters
from mfun.optim.muon import Matrix, muon
from mfun.optim.precision import with_precision
from mfun.optim.transform import Transform, apply_updates
from mfun.schedule import (
    SCHEDULES,
    B,
    Costs,
    Extras,
    F,
    I,
    Recv,
    ScheduleError,
    Sizes,
    plan,
    simulate_time,
)
from mfun.schedule.gather import with_gather
from mfun.schedule.greedy import soonest
from mfun.schedule.layers import expand
from mfun.schedule.ops import Offload, Reload
from mfun.schedule.streams import Placement
from mfun.schedule.timeline import timeline
from mfun.schedule.trace import to_trace
from mfun.schedule.walk import Walk
from tests.threads import on_threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_own_piece_is_left_as_it_is_by_a_sum(at: int, wide: bool, dtype: torch.dtype) -> None:
    """1 + 2 + 4 over 2, whoever adds; what this rank sent is not written to."""
    pieces = [torch.full((4,), float(2**i), dtype=dtype) for i in range(3)]
    own, received = pieces[at], torch.stack(pieces)
    received[at] = float("nan")  # never read
    axis: Any = mock.Mock(size=3, position=at)
    total = sum_exchanged(own, received, axis, over=2, wide=wide)
    assert total.dtype == dtype and total.tolist() == [3.5] * 4
    assert own.tolist() == [2.0**at] * 4


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_that_is_started_concatenates_along_its_dim(dim: int) -> None:
    """As `torch.cat` of the ranks' pieces."""
    pieces = [torch.arange(6.0).reshape(1, 2, 3) + 10 * rank for rank in range(2)]

    def main(groups: Any) -> Tensor:
        with torch.no_grad():
            return overlap.start_gather(pieces[groups.tp.position], groups.tp, dim).wait()

    for got in on_threads(Mesh(tp=2), main):
        assert torch.equal(got, torch.cat(pieces, dim))


def test_row_linear_in_halves_is_the_whole_product() -> None:
    """Half of the tokens travels under the other half's product; an odd number of tokens."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 5, 6, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)

    def main(groups: Any) -> Tensor:
        cut = slice(3 * groups.tp.position, 3 * groups.tp.position + 3)
        with torch.no_grad():
            return linear.row_linear(x[..., cut], w[:, cut], None, groups.tp)

    with mock.patch.object(linear, "HALVES", 1):
        for got in on_threads(Mesh(tp=2), main):
            assert got.shape == (1, 5, 3)
            assert torch.allclose(got, x @ w.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("smoothing", "zeta"), [(0.0, 0.0), (0.0, 0.3), (0.3, 0.0), (0.3, 0.2)])
def test_the_head_in_chunks_is_torchs(smoothing: float, zeta: float) -> None:
    """Cross entropy with smoothing by torch, and the square of logsumexp by autograd."""
    torch.manual_seed(0)
    h, w = torch.randn(1, 3, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    labels, weights = torch.tensor([[4, 0, 2]]), torch.tensor([[1.0, 0.5, 2.0]], dtype=h.dtype)
    axis = single_groups().tp

    def loss(h: Tensor, w: Tensor) -> Tensor:
        how = {"label_smoothing": smoothing, "z_loss": zeta, "chunk": 2}
        return nn.linear_cross_entropy(h, w, labels, weights, axis, vocab=5, **how)

    def plain(h: Tensor, w: Tensor) -> Tensor:
        z = (h @ w.T)[0]
        each = cross_entropy(z, labels[0], reduction="none", label_smoothing=smoothing)
        return (weights[0] * (each + zeta * z.logsumexp(-1).square())).sum()

    for got, right in zip(grad(loss, (0, 1))(h, w), grad(plain, (0, 1))(h, w), strict=True):
        assert torch.allclose(got, right, rtol=0, atol=1e-12)
    for at in ((h, w), (h.clone().requires_grad_(), w.clone().requires_grad_())):
        assert torch.allclose(loss(*at), plain(h, w), rtol=0, atol=1e-12)


def test_normalisation_is_told_as_configured() -> None:
    """Each rule's sentence names its own divisor."""
    assert "valid tokens of the global batch" in normalise.explain("tokens")
    assert "microbatches * data ranks" in normalise.explain("microbatch")


def test_updates_with_rounding_by_chance_are_counted() -> None:
    """From 0 up: the count is part of the key, so that a resumed run draws on."""
    opt = without_masters(sgd(1.0, momentum=0.0), key=rng.key(0, "rounding"))
    params = {"w": torch.ones(4, dtype=torch.bfloat16)}
    state: Any = opt.init(params)
    seen = []
    for _ in range(3):
        params, state = opt.update({"w": torch.zeros(4)}, state, params)
        seen.append(state["rounded"])
    assert seen == [1, 2, 3]


def test_parameters_are_donated_only_where_it_is_said() -> None:
    """By default the old ones stay as they are."""
    params = {"w": torch.ones(2)}
    new = apply_updates(params, {"w": torch.ones(2)})
    assert params["w"].tolist() == [1.0, 1.0] and new["w"].tolist() == [2.0, 2.0]
    assert apply_updates(params, {"w": torch.ones(2)}, donate=True)["w"] is params["w"]


def test_truncated_normal_has_spread_1_by_default() -> None:
    """Before the cut at twice that: the standard deviation 0.88."""
    x = rng.truncated_normal(rng.key(0), rng.Grid.whole((10_000,)), torch.float64)
    assert x.abs().max() < 2 and x.std().item() == pytest.approx(0.8796, abs=0.02)


def test_no_schedule_ends_sooner_by_hand() -> None:
    """The way of the first microbatch to the last stage, then all of that stage's work."""
    costs = Costs(F=1, I=1, W=1, transfer=0.25, latency=0.5)
    assert soonest(Sizes(2, 4, costs=costs), Placement(stages=2)) == 1 + 0.75 + 4 * 3
    # A wave: virtual stages 1 and 2 are both on stage 1, with no link between them.
    wave = Placement(stages=2, chunks=2, wave=True)
    assert soonest(Sizes(2, 4, 2, costs=costs), wave) == 1 + 0.75 + 4 * 6
    assert soonest(Sizes(1, 4, 2, costs=costs), Placement(stages=1, chunks=2)) == 4 * 6


def test_groups_by_name_are_those_of_their_axes() -> None:
    """A property for each axis of a stage."""
    groups = single_groups()
    for name in ("tp", "dp", "cp"):
        assert getattr(groups, name).name == groups.over(name).name == name


@pytest.mark.parametrize("start", range(8))
def test_a_piece_of_random_numbers_is_the_piece_of_the_whole(start: int) -> None:
    """Wherever it starts and ends in a row, by whole blocks of four or not."""
    key, sizes = rng.key(0, "piece"), (3, 12)
    whole = rng.normal(key, rng.Grid.whole(sizes), torch.float64)
    for stop in range(start + 1, 13):
        grid = rng.Grid((range(1, 3), range(start, stop)), sizes)
        assert torch.equal(rng.normal(key, grid, torch.float64), whole[1:, start:stop])


@pytest.mark.parametrize("group", [1, 3])
def test_groups_smaller_than_the_pipeline_are_refused(group: int) -> None:
    """Their first microbatch would not be back in time."""
    with pytest.raises(ScheduleError, match=f"group is {group}, but with 4 stages"):
        plan("interleaved", 4, 4, chunks=2, group=group)


def test_the_bound_of_interleaving_is_what_it_keeps() -> None:
    """Not one more: a stage that kept one chunk too many would not be seen."""
    sizes = Sizes(4, 8, 2)
    peak = simulate_time(plan("interleaved", 4, 8, chunks=2)).peak_in_flight
    assert list(peak) == [SCHEDULES["interleaved"].in_flight(s, sizes) for s in range(4)]


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dim_that_a_tensor_lacks_is_refused(dim: int) -> None:
    """One past either end."""
    with pytest.raises(ValueError, match=f"gather: dim {dim} is out of range"):
        gather(torch.zeros(2, 2), single_groups().tp, dim)


def test_layers_of_a_chunk_that_is_not_there_are_refused() -> None:
    """A chunk past the last has no layers."""
    with pytest.raises(ScheduleError, match="names layer 0 of chunk 1, which has 0 layers"):
        Extras(recompute=frozenset({(1, 0)}), layers=(1,))


def test_stages_are_labelled_as_wide_as_the_last() -> None:
    """`stage 9` alone with ten stages, ` 9` and `10` with eleven."""
    for stages, first in ((10, "stage 0 | "), (11, "stage  0 | ")):
        drawn = timeline(plan("gpipe", stages, 1))
        assert drawn.splitlines()[0].startswith(first)


def test_one_bucket_is_gathered_ahead_by_default() -> None:
    """As if it had been asked for."""
    ops = list(expand(plan("1f1b", 1, 2)[0], (3,)))
    buckets = [frozenset({(0, i)}) for i in range(3)]
    one, two = (list(with_gather(ops, buckets, prefetch)) for prefetch in (1, 2))
    assert list(with_gather(ops, buckets)) == one != two


def test_a_run_of_simulate_is_open_until_it_ends() -> None:
    """An axis of one that has ended is refused (`comm.collectives`)."""
    assert Scope().open


def test_ops_of_a_split_backward_take_one_column_each() -> None:
    """Without costs the picture shows the order alone."""
    assert timeline(plan("zb-h1", 1, 1)) == "stage 0 | F0 I0 W0"


def test_a_word_that_is_no_setting_is_told_the_form() -> None:
    """Without an equals sign, and nobody's name."""
    with pytest.raises(ConfigError, match=r"'nothing' is not of the form section\.key=value"):
        override(Config(), ["nothing"])


def test_dropout_keys_are_of_a_place_in_the_model() -> None:
    """Folded in from the root; none without one."""
    key = rng.key(3, "dropout")
    assert Ctx(single_groups(), {}, key).fold("blocks", 1) == key.fold("blocks", 1)
    assert Ctx(single_groups(), {}).fold("blocks", 1) is None


def test_sums_that_are_started_are_not_divided_by_default() -> None:
    """Each rank's piece of the sum; a mean where `over` says so."""
    x = torch.arange(4.0)

    def main(groups: Any) -> list[Tensor]:
        with torch.no_grad():
            start = overlap.start_reduce_scatter
            return [start(x, groups.tp, 0).wait(), start(x, groups.tp, 0, over=2).wait()]

    for rank, (total, mean) in enumerate(on_threads(Mesh(tp=2), main)):
        piece = x[2 * rank : 2 * rank + 2]
        assert torch.equal(total, 2 * piece) and torch.equal(mean, piece)


def test_sgd_without_momentum_keeps_nothing() -> None:
    """For the account of memory."""
    assert [moments(OptimConfig(name="sgd", momentum=m)) for m in (0.0, 0.5)] == [0, 1]


def test_a_guard_refuses_what_is_not_finite_alone_by_default() -> None:
    """No size is too large unless one is given."""
    assert Guard(0).largest == 0.0


def test_overlap_is_for_plain_tensors_of_processes() -> None:
    """Not under a transform of torch.func, not where a derivative is recorded, not simulated."""
    process: Any = mock.Mock(group=object())
    x, inside = torch.zeros(2, 3), []

    def seen(row: Tensor) -> Tensor:
        inside.append(overlap.can_overlap(row, process))
        return row

    assert not overlap.can_overlap(x, process)
    with torch.no_grad():
        assert overlap.can_overlap(x, process)
        assert not overlap.can_overlap(x, mock.Mock(group=None))
        torch.func.vmap(seen)(x)
    assert inside == [False]


def test_wide_gradients_are_taken_to_the_parameters_format() -> None:
    """A wrapper where the formats differ, none where they are one."""
    params = {"w": torch.ones(2)}
    plain, wide = PrecisionConfig(), PrecisionConfig(grads="fp64")
    assert "rounded" not in with_precision(sgd(0.1), plain).init(params)
    assert "rounded" in with_precision(sgd(0.1), wide).init(params)


def test_what_was_received_twice_is_told_with_the_op_that_used_it() -> None:
    """The input half of a split backward, not a whole one."""
    came = Recv(0, to=0, kind="grad", peer=1)
    for half, told in ((I(0), "after I0"), (B(0), "after B0")):
        walk = Walk(0, Placement(stages=2), 1, False, None)
        assert walk.compute(F(0)) is None and walk.recv(came) is None
        assert walk.compute(half) is None
        assert told in (walk.recv(came) or "")


def test_a_trace_is_of_one_process() -> None:
    """Counters stand under the same heading as the ops they count."""
    trace = json.loads(to_trace(simulate_time(plan("1f1b", 2, 3)), "a title"))
    assert len({record["pid"] for record in trace["traceEvents"]}) == 1


def test_a_header_says_by_default_that_no_description_follows() -> None:
    """As most do: shapes are told once."""
    assert Header(0, 1, 2, 3).described == 0


def test_an_axis_is_not_checked_unless_it_is_asked() -> None:
    """Declared types are asserted in `simulate(check=True)` alone."""
    assert attrs.fields_dict(Axis)["check"].default is False


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_nothing_is_donated_unless_it_is_said(name: Literal["adamw", "sgd", "lion"]) -> None:
    """Parameters, gradients and state stay as they are, weight decay and all."""
    config = OptimConfig(name=name, lr=0.1, weight_decay=0.5, clip=0.5)
    check_nothing_changes(build(config, 10))


def test_muon_donates_nothing_unless_it_is_said() -> None:
    """Nor its momentum."""
    check_nothing_changes(muon(0.1, {"w": Matrix()}, weight_decay=0.5))


def check_nothing_changes(opt: Transform) -> None:
    """An update leaves what it was given."""
    params = {"w": torch.ones(3, 3)}
    state = opt.init(params)
    before = copy.deepcopy((params, state))
    opt.update({"w": torch.full((3, 3), 2.0)}, state, params, norm=torch.tensor(6.0))
    assert repr((params, state)) == repr(before)


def test_a_rate_may_stay_where_it_is() -> None:
    """The lowest rate may be the highest, and no higher."""
    check(override(Config(), ["optim.lr=0.5", "optim.min_lr=0.5"]))
    with pytest.raises(ConfigError, match=r"min_lr"):
        check(override(Config(), ["optim.lr=0.5", "optim.min_lr=0.6"]))


def test_shards_have_one_copy_by_default() -> None:
    """The other ranks hold other pieces."""
    assert attrs.fields_dict(Reduction)["copies"].default == 1


def test_column_linear_without_bias_returns_none_for_it() -> None:
    """Asked to leave the bias to the caller, with outputs gathered."""
    x, w = torch.ones(1, 2, 3), torch.ones(4, 3)
    out = linear.column_linear(
        x, w, None, single_groups().tp, gather_output=True, skip_bias_add=True
    )
    assert isinstance(out, tuple) and out[1] is None and torch.equal(out[0], x @ w.T)


def test_defaults_are_those_of_the_papers_and_the_plain_ways() -> None:
    """Lion's two decays; no sequence parallelism; whole gradients, one window, plain sums."""
    defaults = {
        name: one.default for fn in (lion, mlp) for name, one in signature(fn).parameters.items()
    }
    assert (defaults["b1"], defaults["b2"], defaults["sequence_parallel"]) == (0.9, 0.99, False)
    buffers = signature(GradBuffers).parameters
    ways = ("sharded", "release", "mean", "wide")
    assert not any(buffers[name].default for name in ways)


def test_elements_of_gradients_are_counted_without_padding() -> None:
    """12 + 5."""
    buckets = flat.plan_buckets([flat.Leaf("a", (3, 4)), flat.Leaf("b", (5,))], shards=2)
    count = GradBuffers.numel.fget
    assert count is not None
    assert count(mock.Mock(buckets=buckets)) == 17


@pytest.mark.parametrize(("stages", "bubble"), [(3, 5), (4, 5), (6, 11)])
def test_v_half_idles_no_longer_for_more_microbatches(stages: int, bubble: int) -> None:
    """Six units of work a microbatch on each stage, and a bubble of the pipeline alone."""
    for microbatches in (stages, 6, 12):
        sizes = Sizes(stages, microbatches, 2)
        streams = plan("v-half", stages, microbatches, chunks=2)
        timing = simulate_time(streams, None, SCHEDULES["v-half"].place(sizes))
        assert timing.makespan == 6 * microbatches + bubble


def test_arguments_are_bound_as_python_binds_them() -> None:
    """At once where all are given by position; with defaults, by name and in errors as ever."""
    bind = signature(signed(lambda x, axis=3: (x, axis))).bind
    whole, short, named = bind(1, 2), bind(1), bind(1, axis=5)
    for bound in (whole, short, named):
        bound.apply_defaults()
    assert (whole.args, short.args, named.args) == ((1, 2), (1, 3), (1, 5))
    assert [isinstance(b, BoundArguments) for b in (whole, short, named)] == [False, True, True]
    for given in ((), (1, 2, 3)):
        with pytest.raises(TypeError):
            bind(*given)


def test_what_comes_back_is_on_the_device_again() -> None:
    """Chunk 0 leaves and comes back beside chunk 1: two at most; without coming back it is one."""
    one = [F(0), Offload(0), F(1), B(1)]
    assert simulate_time([one]).peak_in_flight == (1,)
    assert simulate_time([[*one[:3], Reload(0), B(1), B(0)]]).peak_in_flight == (2,)


@pytest.mark.parametrize(
    ("on_host", "backend", "expected"),
    [(True, "gloo", True), (False, "gloo", False), (True, "nccl", False)],
)
def test_memory_of_the_host_is_for_gloo_that_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, backend: str, expected: bool
) -> None:
    """Both must be: other backends do not say when what was written may be read."""
    here = {"is_initialized": True, "get_world_size": 2, "get_rank": 0, "get_backend": backend}
    for name, value in here.items():
        monkeypatch.setattr(process.dist, name, lambda value=value: value)
    monkeypatch.setattr(process, "make_groups", lambda *args: {})
    told = []
    monkeypatch.setattr(process, "process_groups", lambda *args, on_host: told.append(on_host))
    process.distribute(Mesh(dp=2), on_host=on_host)
    assert told == [expected]


def test_one_chunk_and_one_microbatch_can_be_interleaved() -> None:
    """By hand: forward on both stages, back through both, the weights of the first end at 5."""
    assert simulate_time(plan("zb-interleaved", 2, 1, chunks=1)).makespan == 5
