"""Collectives and groups on real ranks: the same numbers as under `simulate`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_cases import Layout, Program, call, define, some
from pool import Pool
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from mfun.comm import DUALS, Groups, ProcessWorld, distribute, finish, map_ranks, max
from mfun.comm.overlap import can_overlap, start_all_reduce, start_gather, start_reduce_scatter
from mfun.comm.process import STANDARD
from mfun.mesh import FAMILIES, Factor, Mesh

Trees = dict[str, Any]

LAYOUTS = {
    "tp2": Layout(Mesh(tp=2), ("tp",)),
    "tp of 4": Layout(Mesh(tp=2, dp=2), ("tp",)),
    "dp of 4, first": Layout(Mesh(tp=2, dp=2, order="dp-tp-cp-ep-pp"), ("dp",)),
    "dp_cp": Layout(Mesh(cp=2, dp=2), ("dp", "cp")),
    "tp inner": Layout(Mesh(tp=4), (Factor("tp", 2, "inner"),)),
    "dp3": Layout(Mesh(dp=3), ("dp",)),
}


def programs(layout: Layout) -> list[Program]:
    """One around each collective."""
    return [Program(layout, name, *some(name, layout.size)) for name in sorted(DUALS)]


def derivatives(p: Program, groups: Groups, x: Tensor, w: Tensor, u: Tensor) -> Trees:
    """What one rank computes of a program: value, gradients, second orders, per sample."""
    v = torch.cos(3 * x)

    def loss(x: Tensor, w: Tensor = w, u: Tensor = u) -> Tensor:
        return p.local(groups, x, w, u)

    def product(x: Tensor) -> Tensor:
        return (grad(loss)(x) * v).sum()

    many = torch.stack([x, 2 * x, -x], dim=1)
    return {
        "value": loss(x),
        "gradients": torch.cat([g.flatten() for g in grad(loss, (0, 1, 2))(x, w, u)]),
        "tangent": jvp(loss, (x,), (v,))[1],
        "grad of grad": grad(product)(x),
        "jvp of grad": jvp(grad(loss), (x,), (v,))[1],
        "jvp of jvp": jvp(lambda x: jvp(loss, (x,), (v,))[1], (x,), (v,))[1],
        "per sample": vmap(grad(loss), 1)(many),
        "per sample, second": vmap(lambda v: jvp(grad(loss), (x,), (v,))[1], 1)(many),
    }


def eager(p: Program, groups: Groups, x: Tensor, w: Tensor, u: Tensor) -> Trees:
    """The same by plain autograd, without torch.func."""
    x = x.clone().requires_grad_()
    v = torch.cos(3 * x.detach())
    loss = p.local(groups, x, w, u)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((slope * v).sum(), x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), v)
        tangent = torch.autograd.forward_ad.unpack_dual(p.local(groups, dual, w, u)).tangent
    return {
        "value": loss.detach(),
        "slope": slope.detach(),
        "grad of grad": second,
        "tangent": tangent,
    }


def pieces(p: Program, rank: int | None = None) -> list[Tensor]:
    """x, w, u as a rank holds them, or of all ranks, stacked."""
    out = []
    for x, kind in zip(p.inputs(), (0, 0, 1), strict=True):
        of_rank = x[p.layout.number] if p.types[kind] == "I" else x
        out.append((of_rank if rank is None else of_rank[rank]).unsqueeze(-len(x.shape[1:]) - 1))
    return out


def groups_of(layout: Layout) -> Groups:
    return distribute(layout.mesh, extra=[(layout.axes, None)])


def on_ranks(rank: int, layout: Layout) -> list[tuple[Trees, Trees]]:
    groups = groups_of(layout)
    return [
        (derivatives(p, groups, *pieces(p, rank)), eager(p, groups, *pieces(p, rank)))
        for p in programs(layout)
    ]


@pytest.fixture(scope="module")
def results(pool: Pool) -> Callable[[str], list[Any]]:
    """Of every program, on the real ranks of a layout; run once."""

    @functools.cache
    def run(layout: str) -> list[Any]:
        return pool.run(on_ranks, LAYOUTS[layout], world=LAYOUTS[layout].ranks)

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", sorted(DUALS))
def test_ranks_compute_what_simulate_does(results: Any, layout: str, name: str) -> None:
    """Values, gradients, jvp, gradients of gradients and per-sample ones, by either autograd."""
    at = sorted(DUALS).index(name)
    p = programs(LAYOUTS[layout])[at]
    want = map_ranks(lambda groups, *args: derivatives(p, groups, *args), p.layout.mesh)(*pieces(p))
    for rank, found in enumerate(results(layout)):
        by_func, by_autograd = found[at]
        assert list(by_func) == list(want)
        for key, value in by_func.items():
            torch.testing.assert_close(value, want[key][rank], rtol=1e-12, atol=1e-12, msg=key)
        for key, value in by_autograd.items():
            other = want["jvp of grad"] if key == "grad of grad" else want.get(key)
            if key == "slope":
                size = value.numel()
                other = want["gradients"][:, :size].reshape(-1, *value.shape)
            assert other is not None
            torch.testing.assert_close(value, other[rank], rtol=1e-12, atol=1e-12, msg=key)


@pytest.mark.parametrize("name", sorted(DUALS))
def test_whole_mesh_equals_one_device(results: Any, name: str) -> None:
    """The ranks' gradients of x are the dense program's, piece by piece."""
    p = programs(LAYOUTS["dp_cp"])[sorted(DUALS).index(name)]
    x, w, u = p.inputs()
    slope = grad(p.dense)(x, w, u)
    for rank, found in enumerate(results("dp_cp")):
        got = found[sorted(DUALS).index(name)][1]["slope"][0]
        mine = slope[p.layout.number[rank]] if p.types[0] == "I" else slope[rank]
        torch.testing.assert_close(got, mine, rtol=1e-12, atol=1e-12)


def any_layout(rank: int, name: str, x: Tensor, cts: list[Tensor], params: Any) -> list[Tensor]:
    """Values and pullbacks of a transposed input and of odd cotangents, and of contiguous ones."""
    axis = distribute(Mesh(tp=2)).tp
    out = []
    for mine in (x[rank], x[rank].contiguous()):
        y, pull = vjp(lambda x: call(name, x, axis, params), mine)[:2]
        leaf = mine.detach().requires_grad_()
        eager = call(name, leaf, axis, params)
        pulled = [c for ct in cts for c in (ct, ct.contiguous())]
        out.append(y)
        out += [pull(ct)[0] for ct in pulled]
        out += [torch.autograd.grad(eager, leaf, ct, retain_graph=True)[0] for ct in pulled]
        out += [jvp(lambda x: call(name, x, axis, params), (mine,), (t,))[1] for t in (x[0], x[1])]
    return out


@pytest.mark.parametrize("name", sorted(DUALS))
def test_tensors_of_any_layout(pool: Pool, name: str) -> None:
    """Transposed inputs and expanded or transposed cotangents are communicated like others."""
    params = {"all_to_all": (0, 1), "shift": (1,)}.get(name, some(name, 2)[0])
    x = torch.arange(16.0, dtype=torch.float64).reshape(2, 2, 4).transpose(1, 2)
    result = define(Layout(Mesh(tp=2), ("tp",)), name, params, x.numpy()).shape[1:]
    row = torch.arange(1.0, 1 + result[-1], dtype=torch.float64).expand(*result)
    turned = torch.arange(float(prod(result)), dtype=torch.float64)
    turned = turned.reshape(*reversed(result)).T
    axis_run = map_ranks(lambda g, x: call(name, x, g.tp, params), Mesh(tp=2))
    y, pull = vjp(axis_run, x)[:2]
    found = pool.run(any_layout, name, x, [row, turned], params)
    for rank, got in enumerate(found):
        assert len(got) == 2 * (1 + 4 + 4 + 2)
        for half in (got[:11], got[11:]):
            assert torch.equal(half[0], y[rank])
            for i, ct in ((1, row), (3, turned), (5, row), (7, turned)):
                want = pull(ct.expand(2, *ct.shape))[0][rank]
                assert torch.equal(half[i], want)
                assert torch.equal(half[i + 1], want)
            for i, t in ((9, x[0]), (10, x[1])):
                assert torch.equal(half[i], axis_run(t.expand(2, *t.shape))[rank])


def odds_and_ends(rank: int) -> Trees:
    """Maxima, whole numbers, other dtypes, a vmap, an axis of size 1."""
    groups = distribute(Mesh(tp=2))
    tp = groups.tp
    x = torch.tensor([[1.0, -2.0], [3.0, 5.0]]) * (1 - 2 * rank)
    slope = grad(lambda x: (x * x).sum() * max(x, tp).sum())(x)
    return {
        "max": max(x, tp),
        "max under vmap": vmap(lambda x: max(x, tp))(x),
        "slope": slope,
        "jvp of max": jvp(lambda x: max(x, tp), (x,), (x,))[1],
        "count": call("reduce", torch.tensor([3 + rank]), tp, ()),
        "tokens": call("gather", torch.tensor([7 + rank]), tp, (0,)),
        "scalar": call("shift", torch.tensor(rank), tp, (1,)),
        "flags": call("gather", torch.tensor([rank == 0]), tp, (0,)),
        "bf16": call("all_reduce", torch.tensor([0.5 + rank], dtype=torch.bfloat16), tp, ()),
        "empty": call("gather", torch.zeros(2, 0), tp, (0,)),
        "rows": vmap(lambda x: call("reduce", x, tp, ()))(torch.ones(3, 2)),
        "alone": call("gather", x, groups.dp, (0,)),
        "position": tp.position,
        "coords": (groups.rank, groups.over("dp", "cp", "tp").ranks),
    }


def test_odds_and_ends(pool: Pool) -> None:
    """By hand; ones(3, 2), reduced row by row over 2 ranks, is 12 in all (row 135)."""
    for rank, got in enumerate(pool.run(odds_and_ends)):
        sign = 1 - 2 * rank
        x = torch.tensor([[1.0, -2.0], [3.0, 5.0]])
        assert torch.equal(got["max"], x.abs())
        assert torch.equal(got["max under vmap"], x.abs())
        assert torch.equal(got["slope"], 2 * sign * x * 11)
        assert torch.equal(got["jvp of max"], torch.zeros(2, 2))
        assert got["count"].tolist() == [7]
        assert got["tokens"].tolist() == [7, 8]
        assert got["scalar"].item() == 1 - rank
        assert got["flags"].tolist() == [True, False]
        assert got["bf16"].tolist() == [2.0]
        assert got["bf16"].dtype == torch.bfloat16
        assert got["empty"].shape == (4, 0)
        assert torch.equal(got["rows"], torch.full((3, 2), 2.0))
        assert torch.equal(got["alone"], sign * x)
        assert got["position"] == rank
        assert got["coords"] == (rank, (0, 1))


def overlapped(rank: int) -> list[bool]:
    """Each started collective against the differentiable one, over every dim, counted both ways."""
    axis = distribute(Mesh(tp=2)).tp
    x = torch.arange(16.0).reshape(2, 4, 2) * (rank + 1)
    same = []
    with torch.no_grad():
        same.append(can_overlap(x, axis))
        for dim in range(-3, 3):
            a = start_gather(x, axis, dim)
            b = start_reduce_scatter(x, axis, dim)
            same.append(torch.equal(a.wait(), call("gather", x, axis, (dim,))))
            same.append(torch.equal(b.wait(), call("reduce_scatter", x, axis, (dim,))))
        want = call("reduce", x, axis, ())
        same.append(torch.equal(start_all_reduce(x.clone(), axis).wait(), want))
        # Inside a transform, whichever, only the differentiable ones are right.
        vmap(lambda x: (same.append(not can_overlap(x, axis)), x)[1])(x)
        jvp(lambda x: (same.append(not can_overlap(x, axis)), x)[1], (x,), (x,))
        with torch.autograd.forward_ad.dual_level():
            same.append(not can_overlap(torch.autograd.forward_ad.make_dual(x, x), axis))
    same.append(not can_overlap(x, axis))  # a derivative may be recorded
    same.append(not can_overlap(x, distribute(Mesh(tp=2)).dp))
    return same


def test_overlapped_collectives(pool: Pool) -> None:
    """They equal the differentiable ones and refuse to be used where those are needed."""
    for got in pool.run(overlapped):
        assert len(got) == 1 + 12 + 1 + 5
        assert all(got)


def misuse(rank: int) -> list[str]:
    """Errors that need no message, so that no rank waits."""
    out = []
    groups = distribute(Mesh(tp=2, dp=2))
    for attempt in (
        lambda: distribute(Mesh(tp=2)),
        lambda: groups.over(Factor("tp", 2)),
        lambda: groups.over("dp", stages=(0,)),
        lambda: call("split", torch.ones(3), groups.tp, (0,)),
        lambda: groups["nobody"],
    ):
        try:
            attempt()
            out.append("nothing")
        except (ValueError, KeyError) as error:
            out.append(str(error))
    return out


def test_misuse_is_refused_on_every_rank(pool: Pool) -> None:
    """A wrong world, a group that was not made, an uneven dim: named, with the way out."""
    for world, factor, joined, split, unknown in pool.run(misuse, world=4):
        assert "the mesh has 2 ranks (tp 2 x cp 1 x dp 1 x pp 1) but 4 processes" in world
        assert "--nproc-per-node" in world
        assert "group 'tp/outer2' was not made; add it to the `extra` argument" in factor
        assert "group 'dp@stages(0,)' was not made" in joined
        assert "does not divide over axis 'tp' of size 2" in split
        assert "no group 'nobody'" in unknown


# Row 127: groups are made by every rank, in one order.


def layouts_of_8() -> list[Mesh]:
    """All meshes of 8 ranks from tp, cp, dp, pp, with every ep that fits."""
    out = []
    for tp, cp, dp, pp in itertools.product((1, 2, 4, 8), repeat=4):
        if tp * cp * dp * pp == 8:
            for ep in (1, 2, 4, 8):
                if dp * cp % ep == 0:
                    out.append(Mesh(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep))
    return out


def test_all_ranks_make_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layouts of 8 ranks, `distribute` on each rank makes the same calls in one order."""
    made: list[tuple[int, ...]] = []

    def new_group(ranks: list[int], **options: Any) -> tuple[int, ...]:
        assert not options.get("use_local_synchronization")
        made.append(tuple(ranks))
        return made[-1]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "new_group", new_group)
    assert len(layouts_of_8()) > 30
    for mesh in layouts_of_8():
        sequences = set()
        for rank in range(8):
            made.clear()
            monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
            groups = distribute(mesh, extra=[(("dp",), (0, mesh.pp - 1))])
            sequences.add(tuple(made))
            for family in ("tp", "cp", "dp", "pp", "dp_cp", "mp", "tp_cp", "tp_dp_cp"):
                axis = groups[family]
                want = mesh.group_of(rank, *FAMILIES[family])
                assert axis.ranks == want
                assert axis.position == want.index(rank)
                assert axis.group == (want if len(want) > 1 else None)
            assert groups.over("tp", "cp", "dp", "pp").size == 8
            if mesh.index(rank, "pp") in (0, mesh.pp - 1):
                joined = groups.over("dp", stages=(0, mesh.pp - 1))
                assert joined.ranks == mesh.group_of(rank, "dp", stages=(0, mesh.pp - 1))
        assert len(sequences) == 1
        (sequence,) = sequences
        assert len(set(sequence)) == len(sequence)
        assert all(len(group) > 1 and list(group) == sorted(group) for group in sequence)
    assert ("tp",) in STANDARD


def step(rank: int) -> Trees:
    """`ProcessWorld`: numbers per rank, sums over axes and over the stages of a tie."""
    mesh = Mesh(dp=2, pp=2)
    groups = distribute(mesh, extra=[(("dp",), (0, 1)), ((), (0, 1))])
    world = ProcessWorld(groups)
    mine = world.build(lambda c: torch.tensor(1.0 + c["dp"] + 10 * c["pp"]))
    reduced = {
        "own": finish(world.all_reduce(mine.clone(), ("dp",))),
        "tied": finish(world.all_reduce(mine.clone(), ("dp",), stages=(0, 1))),
        "copies": finish(world.all_reduce(mine.clone(), (), stages=(0, 1), op="max")),
        "alone": finish(world.all_reduce(mine.clone(), ("tp",))),
    }
    lifted = world.lift(lambda groups, x: x * groups.dp.size)(mine)
    return {"lead": world.lead, "stage": world.stage, "lifted": lifted, **reduced}


def test_world_of_a_process(pool: Pool) -> None:
    """2 x 2 ranks by hand: rank = dp + 2 pp holds 1 + dp + 10 pp."""
    for rank, got in enumerate(pool.run(step, world=4)):
        dp, pp = rank % 2, rank // 2
        assert (got["lead"], got["stage"]) == ((), pp)
        assert got["own"] == 3 + 20 * pp
        assert got["tied"] == 3 + 23
        assert got["copies"] == 11 + dp
        assert got["alone"] == 1 + dp + 10 * pp
        assert got["lifted"] == 2 * got["alone"]
