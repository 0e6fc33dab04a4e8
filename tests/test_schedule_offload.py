"""Activations on the host: bitwise the same numbers, and fewer bytes on the device."""

from __future__ import annotations

import pytest
import torch

from mfun.config import ConfigError
from mfun.pipeline import offload
from mfun.pipeline.offload import Shelf
from mfun.schedule.ops import Offload, Recompute, Reload
from mfun.train.memory import live_activations
from mfun.train.plan import Plan, plan
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, reference_history
from tests.pool import Pool
from tests.properties import small
from tests.test_schedule_overlap import assert_same_bits, on_rank
from tests.test_schedule_recompute import WIDE, measured
from tests.threads import in_threads

BASE = "pp=2 layers=5 microbatches=4 global_batch=6 dropout=0.1 tied=true"
DEPTHS = {"1f1b": 1, "gpipe": 2, "zbv": 3, "interleaved": 2, "dualpipe": 2, "dualpipev": 3}


def pair(text: str, depth: int) -> tuple[Plan, Plan]:
    """Without and with; the latter's first stage moves something, and brings it back."""
    here, away = plan(small(text)), plan(small(f"{text} offload={depth}"))
    assert not any(isinstance(op, Offload) for ops in here.streams for op in ops)
    moved, back = (
        sum(isinstance(op, kind) for op in away.streams[0]) for kind in (Offload, Reload)
    )
    assert moved == back > 0
    return here, away


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "vmap"])
@pytest.mark.parametrize("name", DEPTHS)
def test_offloading_changes_no_bit(name: str, plain: bool) -> None:
    """Dropout on, tied, split backwards; and right: the reference's numbers."""
    here, away = pair(f"{BASE} parallel.schedule={name}", DEPTHS[name])
    results = in_mailbox(here, plain=plain)
    assert_same_bits(results, in_mailbox(away, plain=plain))
    report = judge(away, results, reference_history(away.config))
    assert report.ok, report.notes


@pytest.mark.parametrize("model", ["", "kv_heads=1 bias=all activation=swiglu position=rotary"])
@pytest.mark.parametrize("way", ["full", "selective", "first recompute_layers=1"])
def test_with_recomputing_and_reductions_it_changes_no_bit(way: str, model: str) -> None:
    """Inputs that wait to run again move too; weights put together of two stay known."""
    text = f"{BASE} {model} dp=2 global_batch=8 parallel.schedule=gpipe recompute={way}"
    here, away = pair(f"{text} parallel.overlap=true bucket_size=300", 1)
    assert any(isinstance(op, Recompute) for op in away.streams[0])
    assert_same_bits(in_threads(here), in_threads(away))


def test_offloading_changes_no_bit_on_processes(pool: Pool) -> None:
    """Over gloo, with tensor parallelism."""
    text = f"{BASE} tp=2 sequence_parallel=true parallel.schedule=gpipe"
    runs = [pool.run(on_rank, one, world=4) for one in (text, f"{text} offload=1")]
    assert_same_bits(*runs)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bytes_on_the_device_fall_as_the_formula_says(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPipe's four microbatches with one, two or all on the device; copies are the host's."""
    have, want = {}, {}
    for depth in (0, 2, 1):
        layout = plan(small(f"{WIDE} recompute={recompute} offload={depth}"))
        hosts: list[int] = []
        monkeypatch.setattr(offload, "to_host", lambda x, hosts=hosts: on_host(x, hosts))
        have[depth] = max(measured(layout, monkeypatch))
        want[depth] = max(live_activations(layout, 0))
        assert bool(hosts) == (depth > 0)
    for depth, bytes_ in have.items():
        assert bytes_ == pytest.approx(want[depth], rel=0.25), (have, want)
    assert have[1] < have[2] < have[0]


def on_host(x: torch.Tensor, hosts: list[int]) -> torch.Tensor:
    """A copy in memory that no tensor op has made, as the host's of a GPU."""
    hosts.append(x.numel())
    return torch.frombuffer(bytearray(x.numpy().tobytes()), dtype=torch.uint8)


def test_views_of_one_memory_share_it_again() -> None:
    """Moved once, whole, and every view is its own bits; of other types too."""
    shelf, x = Shelf(), torch.arange(12.0, dtype=torch.float64)
    views = [x, x.view(3, 4).T, x[2:7:2], x.view(torch.int64)[3:]]
    places = [shelf.put(view) for view in views]
    shelf.offload()
    moved = [shelf.get(place) for place in places]
    shelf.reload()
    for view, away, place in zip(views, moved, places, strict=True):
        back = shelf.get(place)
        assert torch.equal(back, view) and torch.equal(away, view)
        assert back.stride() == view.stride() and back.dtype == view.dtype
        assert back.untyped_storage().data_ptr() not in (
            x.untyped_storage().data_ptr(),
            away.untyped_storage().data_ptr(),
        )
    shared = {shelf.get(place).untyped_storage().data_ptr() for place in places}
    assert len(shared) == 1


def test_parameters_and_the_batch_stay() -> None:
    """Only what the layer has made is put on the shelf."""
    shelf, w, x = Shelf(), torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with shelf.saving([w]):
        y = (w @ x).exp()
    shelf.offload()
    assert [memory.numel() for memory in shelf._bytes] == [32 // 2, 32 // 2]  # x, and exp's result
    shelf.reload()
    (grad,) = torch.autograd.grad(y.sum(), w)
    assert torch.equal(grad, torch.full((2, 2), 2 * torch.tensor(2.0).exp().item()))


def test_a_depth_that_backwards_do_not_fit_in_is_refused() -> None:
    """ZB-H2 keeps more between I and W than one."""
    with pytest.raises(ConfigError, match=r"parallel\.offload is 1.*depth is 1"):
        plan(small("pp=2 layers=2 microbatches=4 parallel.schedule=zb-h2 offload=1"))
