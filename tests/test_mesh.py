"""Ranks, coordinates and groups against printed lists, brute force and counting."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.mesh import (
    FAMILIES,
    Factor,
    Mesh,
    embedding_groups,
    partial_optimizer_groups,
    position_embedding_groups,
)


def g(*lists: str) -> tuple[tuple[int, ...], ...]:
    """Groups written as strings of ranks."""
    return tuple(tuple(int(rank) for rank in text.split()) for text in lists)


def test_eight_ranks_of_tp2() -> None:
    """Spec A1: 8 ranks with tp 2 form the four TP and two DP groups printed there."""
    mesh = Mesh(tp=2, dp=4)
    assert mesh.world == 8
    assert mesh.groups("tp") == g("0 1", "2 3", "4 5", "6 7")
    assert mesh.groups("dp") == g("0 2 4 6", "1 3 5 7")


def test_sixteen_ranks_of_tp2_pp4() -> None:
    """Spec A1: the worked case of 16 ranks, tp 2 and pp 4 (the last MP group ends 10 11 14 15)."""
    mesh = Mesh(tp=2, dp=2, pp=4)
    dp = g("0 2", "1 3", "4 6", "5 7", "8 10", "9 11", "12 14", "13 15")
    assert mesh.groups(*FAMILIES["dp"]) == dp
    tp = g("0 1", "2 3", "4 5", "6 7", "8 9", "10 11", "12 13", "14 15")
    assert mesh.groups(*FAMILIES["tp"]) == tp
    pp = g("0 4 8 12", "1 5 9 13", "2 6 10 14", "3 7 11 15")
    assert mesh.groups(*FAMILIES["pp"]) == pp
    assert mesh.groups(*FAMILIES["mp"]) == g("0 1 4 5 8 9 12 13", "2 3 6 7 10 11 14 15")
    assert embedding_groups(mesh) == g("0 12", "1 13", "2 14", "3 15")
    assert position_embedding_groups(mesh) == g("0", "1", "2", "3")


def test_order_strings() -> None:
    """The worked orders of Megatron's rank generator: tp-pp-dp and tp-dp-pp."""
    mesh = Mesh(tp=2, pp=2, dp=2, order="tp-pp-dp")
    assert mesh.groups("dp") == g("0 4", "1 5", "2 6", "3 7")
    assert mesh.groups("pp") == g("0 2", "1 3", "4 6", "5 7")
    mesh = Mesh(tp=2, dp=3, pp=4, order="tp-dp-pp")
    dp = mesh.groups("dp")
    assert dp[:2] == g("0 2 4", "1 3 5")
    assert dp[-1] == (19, 21, 23)


def test_dp_cp_groups_of_sixteen_ranks() -> None:
    """tp2 cp2 dp2 pp2: the dp-cp and pp groups that megatron-core 0.16.1 makes."""
    mesh = Mesh(tp=2, cp=2, dp=2, pp=2)
    assert mesh.groups(*FAMILIES["dp_cp"]) == g("0 2 4 6", "1 3 5 7", "8 10 12 14", "9 11 13 15")
    assert mesh.groups("pp") == tuple((i, i + 8) for i in range(8))
    assert mesh.groups("cp")[:2] == g("0 2", "1 3")
    assert mesh.groups(*FAMILIES["tp_cp"])[0] == (0, 1, 2, 3)
    assert mesh.groups(*FAMILIES["tp_dp_cp"]) == g("0 1 2 3 4 5 6 7", "8 9 10 11 12 13 14 15")


def test_expert_view_by_hand() -> None:
    """tp4 dp2 refolded as etp1 ep4: consecutive ranks hold different experts, 4 apart the same."""
    mesh = Mesh(tp=4, dp=2, pp=2, ep=4, etp=1)
    assert mesh.edp == 2
    assert mesh.groups("ep") == g("0 1 2 3", "4 5 6 7", "8 9 10 11", "12 13 14 15")
    assert mesh.groups("edp") == g("0 4", "1 5", "2 6", "3 7", "8 12", "9 13", "10 14", "11 15")
    assert mesh.groups("etp") == tuple((rank,) for rank in range(16))
    mesh = Mesh(tp=2, dp=4, ep=2)
    assert mesh.groups("etp") == g("0 1", "2 3", "4 5", "6 7")
    assert mesh.groups("ep") == g("0 2", "1 3", "4 6", "5 7")
    assert mesh.groups(*FAMILIES["tp_ep"]) == g("0 1 2 3", "4 5 6 7")
    assert mesh.expert_coords(6) == {"etp": 0, "ep": 1, "edp": 1, "pp": 0}


def test_expert_view_that_does_not_fold() -> None:
    """etp * ep must divide the ranks of a stage, and the message has both numbers."""
    with pytest.raises(ValueError, match=r"2 \* 3 = 6 does not divide the 8 ranks"):
        Mesh(tp=2, dp=4, ep=3)


def test_expert_stages_must_be_the_dense_stages() -> None:
    """An order that does not end in pp needs edp = dp when pp > 1; otherwise pp groups differ."""
    with pytest.raises(ValueError, match="edp is 2 and dp is 4"):
        Mesh(tp=2, dp=4, pp=2, ep=2, order="tp-cp-ep-pp-dp")
    mesh = Mesh(tp=2, cp=2, dp=2, pp=2, ep=2, order="tp-cp-ep-pp-dp")
    assert mesh.edp == mesh.dp
    with pytest.raises(ValueError, match="put pp last"):
        Mesh(tp=2, cp=2, dp=2, pp=2, ep=4, etp=1, order="tp-pp-cp-ep-dp")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "mesh.tp is 0"),
        ({"dp": -2}, "mesh.dp is -2"),
        ({"pp": 2.0}, "mesh.pp is 2.0"),
        ({"cp": True}, "mesh.cp is True"),
        ({"etp": 0}, "mesh.etp is 0"),
        ({"order": "tp-xp"}, "'xp'"),
        ({"order": "tp-tp-dp"}, "repeated"),
        ({"order": "tp-pp", "dp": 2}, "without 'dp'"),
    ],
)
def test_refused_meshes(sizes: dict, message: str) -> None:
    """A size below one or an order with a wrong name is refused when the mesh is made."""
    with pytest.raises(ValueError, match=message):
        Mesh(**sizes)


def test_factor() -> None:
    """Two kv heads on tp 4: ranks 0, 1 share head 0; the holders of one head are an inner group."""
    mesh = Mesh(tp=4, dp=2)
    kv = Factor("tp", 2)
    assert (mesh.size(kv), mesh.size(kv.inner)) == (2, 2)
    assert [mesh.index(rank, kv) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [mesh.index(rank, kv.inner) for rank in range(8)] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert mesh.groups(kv.inner) == g("0 1", "2 3", "4 5", "6 7")
    assert mesh.groups(kv) == g("0 2", "1 3", "4 6", "5 7")
    assert mesh.groups(kv, kv.inner) == mesh.groups("tp")
    assert mesh.groups("dp", kv.inner) == g("0 1 4 5", "2 3 6 7")
    assert mesh.group_of(7, "dp", kv.inner) == (2, 3, 6, 7)
    assert mesh.stage_groups("dp", kv.inner) == g("0 1 4 5", "2 3 6 7")
    with pytest.raises(ValueError, match=r"size 4 cannot be split in 3"):
        mesh.size(Factor("tp", 3))
    with pytest.raises(ValueError, match=r"2 and in 4|4 and in 2"):
        mesh.groups(kv, Factor("tp", 4))


def test_stages_join_groups() -> None:
    """A dp group that spans the first and last stage has dp x 2 ranks, other stages have none."""
    mesh = Mesh(tp=2, dp=2, pp=4)
    assert mesh.groups("dp", stages=(0, 3)) == g("0 2 12 14", "1 3 13 15")
    assert mesh.group_of(13, "dp", stages=(3, 0)) == (1, 3, 13, 15)
    assert mesh.groups("tp", stages=(1,)) == g("4 5", "6 7")
    assert mesh.groups(stages=(1, 2)) == g("4 8", "5 9", "6 10", "7 11")
    assert embedding_groups(Mesh(tp=2)) == g("0", "1")
    assert embedding_groups(mesh, stages=(0, 1, 3))[0] == (0, 4, 12)
    with pytest.raises(ValueError, match="pp is 4"):
        mesh.groups("dp", stages=(0, 4))
    with pytest.raises(ValueError, match="rank 4 is on pipeline stage 1"):
        mesh.group_of(4, "dp", stages=(0, 3))


def test_partial_optimizer_groups() -> None:
    """dp 8 in two instances: runs of 4 shard, places 4 apart hold the same shard."""
    intra, inter = partial_optimizer_groups(Mesh(dp=8), 2)
    assert intra == g("0 1 2 3", "4 5 6 7")
    assert inter == g("0 4", "1 5", "2 6", "3 7")
    with pytest.raises(ValueError, match=r"3 optimizer instances cannot share dp \* cp = 8"):
        partial_optimizer_groups(Mesh(dp=4, cp=2), 3)


def test_partial_optimizer_inter_groups_serve_dense_and_expert() -> None:
    """Megatron uses one inter group for dense and expert shards; both derivations agree."""
    mesh = Mesh(tp=2, cp=2, dp=4, pp=2, ep=2)
    dense, expert = (partial_optimizer_groups(mesh, 2, expert=e)[1] for e in (False, True))
    assert sorted(dense) == sorted(expert)


def test_wrong_axes_are_named() -> None:
    """A misspelt axis, axes of two views and a rank outside the world are refused by name."""
    mesh = Mesh(tp=2, dp=2, pp=2)
    with pytest.raises(ValueError, match="unknown axis 'tpp'"):
        mesh.groups("tpp")
    with pytest.raises(ValueError, match="unknown axis 'world'"):
        mesh.size("world")
    with pytest.raises(ValueError, match="two views"):
        mesh.groups("dp", "ep")
    with pytest.raises(ValueError, match="rank 8 is outside"):
        mesh.coords(8)
    with pytest.raises(ValueError, match="rank -1 is outside"):
        mesh.index(-1, "tp")
    with pytest.raises(ValueError, match="coordinate tp=2"):
        mesh.rank(tp=2)
    with pytest.raises(ValueError, match="one stage"):
        mesh.stage_groups("pp")


def test_neighbours() -> None:
    """The next stage's rank is one pp stride away, and nothing lies past the ends."""
    mesh = Mesh(tp=2, dp=2, pp=3)
    assert [mesh.neighbours(rank) for rank in (1, 5, 9)] == [(None, 5), (1, 9), (5, None)]
    assert Mesh(tp=2).neighbours(1) == (None, None)


def test_hashable_and_equal() -> None:
    """Meshes with equal sizes are one key of a dictionary."""
    assert {Mesh(tp=2): 1}[Mesh(tp=2)] == 1


def all_orders() -> st.SearchStrategy[str]:
    return st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Any mesh the checks let through: any order, expert folds that divide."""
    sizes = {axis: draw(st.integers(1, 4)) for axis in ("tp", "cp", "dp", "pp")}
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % (n * etp) == 0]))
    order = draw(all_orders())
    try:
        return Mesh(**sizes, etp=etp, ep=ep, order=order)
    except ValueError:
        rest = [token for token in order.split("-") if token != "pp"]
        return Mesh(**sizes, etp=etp, ep=ep, order="-".join([*rest, "pp"]))


def brute_coords(mesh: Mesh, tokens: dict[str, str]) -> list[dict[str, int]]:
    """Coordinates by counting like an odometer whose fastest wheel is the leftmost token."""
    names = [tokens[t] for t in mesh.order.split("-") if t in tokens]
    wheels = [range(mesh.size(name)) for name in reversed(names)]
    return [
        dict(zip(reversed(names), places, strict=True)) for places in itertools.product(*wheels)
    ]


VIEWS = [
    {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"},
    {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"},
]


@given(mesh=meshes())
def test_coordinates_are_an_odometer(mesh: Mesh) -> None:
    """Both views number the ranks like an odometer, rank() is the inverse, stages coincide."""
    for tokens, coords in zip(VIEWS, (mesh.coords, mesh.expert_coords), strict=True):
        expected = brute_coords(mesh, tokens)
        assert len(expected) == mesh.world
        for rank, places in enumerate(expected):
            assert coords(rank) == places
            assert mesh.rank(**places) == rank
            assert all(mesh.index(rank, axis) == place for axis, place in places.items())
    for rank in range(mesh.world):
        assert mesh.coords(rank)["pp"] == mesh.expert_coords(rank)["pp"]


@given(mesh=meshes(), data=st.data())
def test_groups_are_classes_of_equal_other_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    """groups() equals grouping ranks by all other coordinates; group_of and stages agree."""
    view = data.draw(st.sampled_from(VIEWS))
    axes = data.draw(st.lists(st.sampled_from(sorted(view.values())), unique=True))
    stages = data.draw(st.none() | st.sets(st.integers(0, mesh.pp - 1), min_size=1))
    if not set(axes) - {"pp"}:
        view = VIEWS[0]
    moving = {*axes, "pp"} if stages is not None else set(axes)
    classes: dict[tuple, list[int]] = {}
    for rank, places in enumerate(brute_coords(mesh, view)):
        if stages is None or places["pp"] in stages:
            key = tuple(sorted((a, c) for a, c in places.items() if a not in moving))
            classes.setdefault(key, []).append(rank)
    groups = mesh.groups(*axes, stages=stages)
    assert sorted(groups) == sorted(map(tuple, classes.values()))
    for group in groups:
        assert mesh.group_of(group[-1], *axes, stages=stages) == group


@given(mesh=meshes(), data=st.data())
def test_stage_groups_are_every_stages_groups(mesh: Mesh, data: st.DataObject) -> None:
    """Stage positions mapped through stage_ranks give the groups of every stage."""
    axes = data.draw(st.sampled_from([("tp",), ("dp", "cp"), ("ep",), ("edp", "etp"), ()]))
    found = []
    for stage in range(mesh.pp):
        ranks = mesh.stage_ranks(stage)
        assert len(ranks) == mesh.stage_size
        assert all(mesh.index(rank, "pp") == stage for rank in ranks)
        found += [tuple(ranks[i] for i in group) for group in mesh.stage_groups(*axes)]
    assert sorted(found) == sorted(mesh.groups(*axes))


def test_one_hundred_thousand_ranks_in_a_second() -> None:
    """Spec A3: coordinates and every group list of 102,400 ranks in less than a second.

    Processor time, best of three: on a shared machine the wall clock measures the others too.
    """
    mesh = Mesh(tp=8, cp=4, dp=200, pp=16, ep=8, etp=2)
    assert mesh.world == 102_400

    def once() -> tuple[float, dict, dict]:
        start = time.process_time()
        lists = {name: mesh.groups(*axes) for name, axes in FAMILIES.items()}
        lists["embedding"] = embedding_groups(mesh)
        lists["intra"], lists["inter"] = partial_optimizer_groups(mesh, 4)
        coords = mesh.table()
        return time.process_time() - start, lists, coords

    runs = [once() for _ in range(3)]
    lists, coords = runs[0][1:]
    assert min(seconds for seconds, _, _ in runs) < 1.0
    assert all(sum(map(len, lists[name])) == mesh.world for name in [*FAMILIES, "intra", "inter"])
    assert {axis: int(column[77_777]) for axis, column in coords.items()} == mesh.coords(77_777)
