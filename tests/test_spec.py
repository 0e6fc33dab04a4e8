"""Specs: which piece a rank holds, what it is filled with, and what cannot be meant."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mfun import rng
from mfun.mesh import Factor, Mesh
from mfun.spec import (
    Init,
    P,
    ParamSpec,
    init_leaf,
    init_params,
    local_shape,
    others,
    pad_to,
    replicated,
    shard,
    shard_leaf,
    unshard_leaf,
    window,
)

F64 = torch.float64
UNTYPED: Any = P


def ranks(mesh: Mesh) -> list[dict[str, int]]:
    """Coordinates of all ranks, in both views."""
    return [{**mesh.coords(r), **mesh.expert_coords(r)} for r in range(mesh.world)]


def gathered(path: str, spec: ParamSpec, mesh: Mesh, seed: int = 0, dtype: Any = F64) -> Any:
    """The whole initial weight from all ranks' pieces."""
    parts = [(c, init_leaf(path, spec, seed, mesh, c, dtype)) for c in ranks(mesh)]
    assert all(tuple(x.shape) == local_shape(spec, mesh) for _, x in parts)
    return unshard_leaf(parts, spec, mesh)


INITS = [
    Init("normal", 0.02), Init("truncated_normal", 0.5), Init("uniform", 2.0), Init("zeros"),
    Init("ones"),
]  # fmt: skip
CUTS = [
    ((16, 16), P("tp"), ()), ((16, 16), P(None, "tp"), ()), ((3, 8, 5), P(None, "tp"), ()),
    ((37, 6), P("tp"), (0,)), ((5, 3), P("tp"), (0,)), ((6, 8), P(("dp", "tp")), (0,)),
    ((4, 12), P("dp", "tp"), ()), ((8,), P(), ()), ((), P(), ()),
]  # fmt: skip


@pytest.mark.parametrize("init", INITS, ids=lambda init: init.kind)
@pytest.mark.parametrize(("shape", "p", "pads"), CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_initial_weights_do_not_depend_on_the_layout(
    init: Init, shape: Any, p: P, pads: Any, dtype: Any
) -> None:
    """Row 84: gathered weights of tp 1, 2, 4 (and pp 2, dp 2) are bitwise the same."""
    spec = ParamSpec(shape=shape, p=p, init=init, pads=pads)
    whole = init_leaf("w", spec, 3, Mesh(), {"tp": 0, "dp": 0}, dtype)
    assert whole.dtype == dtype
    assert tuple(whole.shape) == shape
    for mesh in (Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, dp=2), Mesh(dp=2), Mesh(tp=2, pp=2)):
        assert torch.equal(gathered("w", spec, mesh, 3, dtype), whole)


def test_initial_weights_are_the_documented_draws() -> None:
    """The whole is rng's normal of key (seed, init, path) over the unpadded global shape."""
    spec = ParamSpec(shape=(37, 6), p=P("tp"), init=Init("normal", 0.25), pads=(0,))
    draw = rng.normal(rng.key(5, "init", "a.b"), rng.Grid.whole((37, 6)), dtype=F64, std=0.25)
    assert torch.equal(gathered("a.b", spec, Mesh(tp=4), seed=5), draw)
    flat = ParamSpec(shape=(4,), init=Init("uniform", 2.0))
    box = rng.uniform(rng.key(5, "init", "a"), rng.Grid.whole((4,)), dtype=F64, low=-2, high=2)
    assert torch.equal(init_leaf("a", flat, 5, Mesh(), {}, F64), box)
    for kind, value in (("zeros", 0.0), ("ones", 1.0)):
        constant = ParamSpec(shape=(2, 2), init=Init(kind))
        assert torch.equal(init_leaf("a", constant, 5, Mesh(), {}, F64), torch.full((2, 2), value))


def test_shards_are_not_copies() -> None:
    """Row 86: column shards of a tp 2 weight differ, and the whole 16 x 16 has full rank."""
    spec = ParamSpec(shape=(16, 16), p=P(None, "tp"))
    first, second = (init_leaf("w", spec, 0, Mesh(tp=2), {"tp": i}, F64) for i in (0, 1))
    assert not (first == second).any()
    assert np.linalg.matrix_rank(gathered("w", spec, Mesh(tp=2)).numpy()) == 16
    assert not torch.equal(gathered("v", spec, Mesh(tp=2)), gathered("w", spec, Mesh(tp=2)))
    assert not torch.equal(gathered("w", spec, Mesh(tp=2), seed=1), gathered("w", spec, Mesh(tp=2)))


def test_replicas_start_equal() -> None:
    """Ranks that hold one piece draw the same numbers, whatever else their coordinates are."""
    mesh, spec = Mesh(tp=4, dp=2, pp=2), ParamSpec(shape=(8, 3), p=P(Factor("tp", 2)))
    pieces: dict[int, Any] = {}
    for c in ranks(mesh):
        x = init_leaf("w", spec, 0, mesh, c, F64)
        assert torch.equal(pieces.setdefault(c["tp"] // 2, x), x)
    assert not torch.equal(pieces[0], pieces[1])


def test_padding() -> None:
    """37 rows over 4 ranks: 10 each; rows 37 to 39 are zero on the last rank, in every rule."""
    mesh = Mesh(tp=4)
    for init in INITS:
        spec = ParamSpec(shape=(37, 2), p=P("tp"), init=init, pads=(0,))
        assert local_shape(spec, mesh) == (10, 2)
        assert [window(spec, mesh, {"tp": i})[0] for i in range(4)] == [
            (0, 10), (10, 20), (20, 30), (30, 37),
        ]  # fmt: skip
        last = init_leaf("w", spec, 0, mesh, {"tp": 3}, F64)
        assert torch.equal(last[7:], torch.zeros(3, 2, dtype=F64))
        assert init.kind == "zeros" or bool((last[:7] != 0).all())
    # A rank may hold nothing but padding.
    tiny = ParamSpec(shape=(5,), p=P("tp"), init=Init("ones"), pads=(0,))
    assert window(tiny, mesh, {"tp": 3}) == ((5, 5),)
    assert init_leaf("w", tiny, 0, mesh, {"tp": 2}, F64).tolist() == [1, 0]
    assert init_leaf("w", tiny, 0, mesh, {"tp": 3}, F64).tolist() == [0, 0]


@settings(max_examples=60)
@given(st.data())
def test_pieces_against_numpy(data: st.DataObject) -> None:
    """shard is numpy's split by mixed-radix coordinates; unshard undoes it; windows tile."""
    tp, cp, dp = (data.draw(st.sampled_from((1, 2, 3))) for _ in range(3))
    mesh = Mesh(tp=tp, cp=cp, dp=dp)
    sizes = {"tp": tp, "cp": cp, "dp": dp}
    names = data.draw(st.permutations(sorted(sizes)))
    ndim = data.draw(st.integers(1, 3))
    entries: list[Any] = [() for _ in range(ndim)]
    for name in names[: data.draw(st.integers(0, 3))]:
        dim = data.draw(st.integers(0, ndim - 1))
        entries[dim] = (*entries[dim], name)
    cuts = [int(np.prod([sizes[a] for a in entry], initial=1)) for entry in entries]
    padded = data.draw(st.booleans())
    shape = tuple(data.draw(st.integers(1, 7)) if padded else 2 * cut for cut in cuts)
    spec = ParamSpec(
        shape=shape, p=P(*(e or None for e in entries)), pads=tuple(range(ndim)) if padded else ()
    )
    x = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    full = np.pad(x, [(0, -n % cut) for n, cut in zip(shape, cuts, strict=True)])
    parts = []
    for coords in ranks(mesh):
        want = full
        for dim, entry in enumerate(entries):
            for axis in entry:  # slowest first: cut, then cut the piece
                want = np.split(want, sizes[axis], dim)[coords[axis]]
        got = shard_leaf(torch.from_numpy(x), spec, mesh, coords)
        np.testing.assert_array_equal(got.numpy(), want)
        parts.append((coords, got))
    assert torch.equal(unshard_leaf(parts, spec, mesh), torch.from_numpy(x))


def test_experts_are_cut_in_the_expert_view() -> None:
    """ep and etp index by the expert coordinates."""
    mesh = Mesh(tp=2, dp=4, ep=2, etp=2)
    spec = ParamSpec(shape=(4, 6), p=P("ep", "etp"))
    x = torch.arange(24.0).reshape(4, 6)
    for c in ranks(mesh):
        e, t = 2 * c["ep"], 3 * c["etp"]
        assert torch.equal(shard_leaf(x, spec, mesh, c), x[e : e + 2, t : t + 3])


def test_trees_of_specs() -> None:
    """init_params and shard walk the specs, matching whole tensors by key."""
    specs = {"a": {"w": ParamSpec(shape=(4, 2), p=P("tp"))}, "b": ParamSpec(shape=(3,))}
    mesh, coords = Mesh(tp=2), {"tp": 1}
    whole = init_params(specs, 0, Mesh(), {"tp": 0}, F64)
    local = init_params(specs, 0, mesh, coords, F64)
    assert list(local) == ["a", "b"]
    assert torch.equal(local["a"]["w"], whole["a"]["w"][2:])
    cut = shard({"b": whole["b"], "a": whole["a"]}, specs, mesh, coords)
    assert torch.equal(cut["a"]["w"], local["a"]["w"])
    with pytest.raises(ValueError, match=r"missing \['b'\]"):
        shard({"a": whole["a"]}, specs, mesh, coords)


def test_what_ranks_share() -> None:
    """The axes, or halves of axes, over which ranks hold the same piece."""
    mesh, axes = Mesh(tp=4, dp=2), ("tp", "cp", "dp")
    outer = Factor("tp", 2)
    assert replicated(P(), mesh, axes) == ("tp", "dp")
    assert replicated(P("tp"), mesh, axes) == ("dp",)
    assert replicated(P(None, ("dp", "tp")), mesh, axes) == ()
    assert replicated(P(outer), mesh, axes) == (outer.inner, "dp")
    assert replicated(P(outer.inner), mesh, axes) == (outer, "dp")
    assert replicated(P(outer, outer.inner), mesh, axes) == ("dp",)
    assert replicated(P(Factor("tp", 4)), mesh, axes) == ("dp",)
    assert replicated(P(Factor("tp", 1)), mesh, ("tp",)) == (Factor("tp", 1, "inner"),)
    assert others(("tp", outer), mesh, axes) == ("dp",)


def test_equal_specs_are_equal() -> None:
    """By value, in any order of axes; so that a tied leaf is one, and specs are keys."""
    one = ParamSpec(shape=(2,), grad={"tp": "partial", "cp": "equal"})
    two = ParamSpec(shape=(2,), grad={"cp": "equal", "tp": "partial"})
    assert one == two
    assert hash(one) == hash(two)
    assert one != ParamSpec(shape=(2,), grad={"tp": "equal", "cp": "equal"})
    assert {P("tp", sums=("dp",)): 1}[P("tp", sums=["dp"])] == 1
    with pytest.raises(TypeError):
        one.grad["tp"] = "equal"  # type: ignore[index]
    assert repr(one) == "[2] P() partial over tp equal over cp"
    assert repr(P("tp", None, ("dp", "cp"), sums=("tp",))) == (
        "P('tp', None, ('dp', 'cp'), sums=('tp',))"
    )
    assert P("tp").cuts(0) == ("tp",)
    assert P("tp").cuts(3) == ()
    assert ParamSpec(shape=(3, 4)).numel == 12


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED(3), "entry 3 is not None, an axis name"),
        (lambda: UNTYPED(["tp"]), "entry ['tp'] is not None"),
        (lambda: UNTYPED(("tp", None)), "entry ('tp', None) is not None"),
        (lambda: P("tp", sums="dp"), "sums='dp' is one axis; write sums=('dp',)"),
        (lambda: P("tp", "tp"), "axis 'tp' cuts twice"),
        (lambda: P(("dp", "tp", "dp")), "axis 'dp' cuts twice"),
        (lambda: P("tp", Factor("tp", 2)), "axis 'tp' cuts twice"),
        (lambda: P(Factor("tp", 2), Factor("tp", 2)), "axis 'tp' cuts twice"),
        (lambda: ParamSpec(shape=(2,), grad={"tp": "sum"}), "grad over 'tp' is 'sum'; use one of"),
        (lambda: local_shape(ParamSpec(shape=(4, 5), p=P("dp", "tp")), Mesh(tp=2, dp=2)),
         "dim 1 of a parameter of shape [4, 5] does not divide into 2 pieces over ('tp',)"),
        (lambda: local_shape(ParamSpec(shape=(4, 6), p=P(("tp", "dp"), None), pads=(1,)),
                             Mesh(tp=2, dp=4)), "dim 0 of a parameter of shape [4, 6]"),
        (lambda: init_leaf("w", ParamSpec(shape=(2,), init=Init("xavier")), 0, Mesh(), {}, F64),
         "init rule 'xavier' of 'w' is not known"),
        (lambda: shard_leaf(torch.ones(3), ParamSpec(shape=(4,)), Mesh(), {}),
         "a tensor of shape [3] for a spec of shape [4]"),
        (lambda: pad_to(torch.ones(3), (2,)), "shape [3] does not fit into [2]"),
        (lambda: pad_to(torch.ones(3), (3, 1)), "shape [3] does not fit into [3, 1]"),
        (lambda: unshard_leaf([({"tp": 0}, torch.ones(2))], ParamSpec(shape=(4,), p=P("tp")),
                              Mesh(tp=2)), "the pieces do not cover a tensor of shape [4]"),
        (lambda: unshard_leaf([({"tp": 0}, torch.ones(1))], ParamSpec(shape=(4,), p=P("tp")),
                              Mesh(tp=2)), "the piece at {'tp': 0} has shape [1]; every piece of"),
    ],
)  # fmt: skip
def test_refusals(make: Any, message: str) -> None:
    """What cannot be meant is refused with the entry, the dim and the numbers."""
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
