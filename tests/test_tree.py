"""Trees by dotted path: inverses, matching by key, and errors that name the path."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfun import tree

KEYS = st.text("abc_0123", min_size=1, max_size=3)
DICTS: Any = st.recursive(
    st.dictionaries(KEYS, st.integers(), min_size=1, max_size=3),
    lambda inner: st.dictionaries(KEYS, st.integers() | inner, min_size=1, max_size=3),
    max_leaves=12,
)


class Pair(NamedTuple):
    """A node with named fields."""

    left: Any
    right: Any


MIXED = {"a": {"w": 1}, "b": (2, [3, {"c": 4}]), "p": Pair(5, {"d": 6})}
PATHS = ["a.w", "b.0", "b.1.0", "b.1.1.c", "p.left", "p.right.d"]


@given(DICTS)
def test_flatten_and_unflatten_are_inverse(x: dict[str, Any]) -> None:
    """For trees of dicts; the leaves come in the order of insertion, and get finds each."""
    leaves = tree.flatten(x)
    assert tree.unflatten(leaves) == x
    assert list(tree.flatten(tree.unflatten(leaves))) == list(leaves)
    for path, leaf in leaves.items():
        assert tree.get(x, path) == leaf

    def count(node: Any) -> int:
        return sum(map(count, node.values())) if isinstance(node, dict) else 1

    assert len(leaves) == count(x)


@given(DICTS)
def test_map_keeps_structure(x: dict[str, Any]) -> None:
    """map applies to every leaf, with others matched by key in any order."""
    doubled = tree.map(lambda n: 2 * n, x)
    assert tree.flatten(doubled) == {path: 2 * n for path, n in tree.flatten(x).items()}

    def turned(node: Any) -> Any:
        return {k: turned(node[k]) for k in reversed(node)} if isinstance(node, dict) else -node

    zero = tree.map(lambda a, b: a + b, x, turned(x))
    assert set(tree.flatten(zero).values()) == {0}
    assert list(tree.flatten(zero)) == list(tree.flatten(x))


def test_paths_of_every_kind_of_node() -> None:
    """Dicts, tuples, lists and NamedTuples: keys, positions and field names; kinds are kept."""
    assert list(tree.flatten(MIXED)) == PATHS
    assert tree.map(lambda n: n, MIXED) == MIXED
    out = tree.map_with_path(lambda path, n: f"{path}: {n}", MIXED)
    assert isinstance(out["p"], Pair)
    assert isinstance(out["b"], tuple)
    assert isinstance(out["b"][1], list)
    assert list(tree.flatten(out).values()) == [f"{p}: {i}" for i, p in enumerate(PATHS, 1)]
    assert tree.map(lambda n: n + 1, MappingProxyType({"a": 1})) == {"a": 2}
    assert tree.flatten(7) == {"": 7}
    assert tree.map(lambda n: n + 1, 7) == 8
    assert tree.map(lambda a, b: a if b is None else b, {"x": 1, "y": 2}, {"x": None, "y": 3}) == {
        "x": 1,
        "y": 3,
    }


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": {"w": 1}}, "missing ['b'], unexpected []"),
        ({"a": {"v": 1}, "b": 2}, "missing ['a.w'], unexpected ['a.v']"),
        ({"a": {"w": 1}, "b": 2, "c": 3}, "missing [], unexpected ['c']"),
        ({"a": 1, "b": 2}, "tree mismatch at a: a branch against a leaf"),
        ({"a": {"w": 1}, "b": (2,)}, "tree mismatch at b: a leaf against a branch"),
        (3, "tree mismatch at the root: a branch against a leaf"),
    ],
)
def test_mismatch_names_the_path(other: Any, message: str) -> None:
    """Never a silent zip."""
    with pytest.raises(ValueError, match=re.escape(message)):
        tree.map(lambda a, b: a, {"a": {"w": 1}, "b": 2}, other)


@pytest.mark.parametrize("bad", [{0: 1}, {"": 1}, {None: 1}, {"a": {1.5: 2}}])
def test_key_that_makes_no_path_is_refused(bad: Any) -> None:
    """Keys are non-empty strings."""
    with pytest.raises(ValueError, match="cannot be part of a dotted path"):
        tree.flatten(bad)


def test_clashing_paths_are_refused() -> None:
    """No leaf is lost where a key holds a dot, or a path is both a leaf and a branch."""
    with pytest.raises(ValueError, match=r"two leaves at \['a\.b'\]"):
        tree.flatten({"a": {"b": 1}, "a.b": 2})
    with pytest.raises(ValueError, match=r"'a\.b' goes through a leaf at 'a'"):
        tree.unflatten({"a": 1, "a.b": 2})
    with pytest.raises(ValueError, match="'a' is both a leaf and a branch"):
        tree.unflatten({"a.b": 1, "a": 2})


def test_merge() -> None:
    """A union; one tensor may stand twice if it is the same object, a spec if it is equal."""
    w = torch.ones(2)
    merged = tree.merge({"a": {"w": w}}, {"b": 1}, {"a": {"w": w, "v": 2}})
    assert list(tree.flatten(merged)) == ["a.w", "a.v", "b"]
    assert merged["a"]["w"] is w
    assert tree.merge() == {}
    assert tree.merge({"s": (1, 2)}, {"s": (1, 2)}) == {"s": {"0": 1, "1": 2}}
    for other in (torch.ones(2), torch.zeros(2), torch.ones(3), 5):
        with pytest.raises(ValueError, match=r"two different leaves at 'a\.w'"):
            tree.merge({"a": {"w": w}}, {"a": {"w": other}})
    with pytest.raises(ValueError, match="goes through a leaf"):
        tree.merge({"a": 1}, {"a": {"w": 2}})


def test_get_names_what_is_there() -> None:
    """The first missing key, where, and its neighbours."""
    assert tree.get(MIXED, "") is MIXED
    assert tree.get(MIXED, "b.1") == [3, {"c": 4}]
    with pytest.raises(KeyError, match=r"no 'x' at p\.right; there are \['d'\]"):
        tree.get(MIXED, "p.right.x.y")
    with pytest.raises(KeyError, match=r"no '2' at b; there are \['0', '1'\]"):
        tree.get(MIXED, "b.2")
    with pytest.raises(KeyError, match=r"no 'z' at a\.w; there are \[\]"):
        tree.get(MIXED, "a.w.z")


@given(DICTS, st.data())
def test_put_changes_one_leaf_of_a_new_tree(x: dict[str, Any], data: st.DataObject) -> None:
    """The old tree stays, and every branch off the path is shared."""
    path = data.draw(st.sampled_from(list(tree.flatten(x))))
    before = tree.flatten(x)
    new = tree.put(x, path, "new")
    assert tree.flatten(x) == before
    assert tree.flatten(new) == {**before, path: "new"}
    first = path.split(".")[0]
    for key in x:
        if key != first:
            assert new[key] is x[key]


def test_put_into_every_kind_of_node() -> None:
    """Also a whole branch, or the root; a path that is not there is refused."""
    new = tree.put(MIXED, "p.right", 0)
    assert new["p"] == Pair(5, 0)
    assert tree.put(MIXED, "b.1.1.c", 9)["b"] == (2, [3, {"c": 9}])
    assert tree.put(MIXED, "", 3) == 3
    with pytest.raises(KeyError, match="no 'v' at a; there are"):
        tree.put(MIXED, "a.v", 1)


def test_select() -> None:
    """The part of a tree that another one names."""
    x = {"a": {"w": 1, "b": 2}, "c": 3}
    assert tree.select(x, {"c": None, "a": {"b": None}}) == {"c": 3, "a": {"b": 2}}
    with pytest.raises(KeyError, match="no 'v' at a"):
        tree.select(x, {"a": {"v": None}})


def test_show_prints_shapes_not_numbers() -> None:
    """A line a leaf: path, dtype, shape, and the spec beside it."""
    x = {"a": {"w": torch.zeros(2, 3, dtype=torch.bfloat16), "flag": torch.zeros(1) > 0},
         "long": {"name": torch.zeros((), dtype=torch.int64)}, "n": 3}  # fmt: skip
    assert tree.show(x).split("\n") == [
        "a.w        bf16[2,3]",
        "a.flag     bool[1]",
        "long.name  i64[]",
        "n          3",
    ]
    spec = {"a": {"w": "P('tp')"}}
    assert tree.show({"a": {"w": torch.zeros(2)}}, spec) == "a.w  f32[2]  P('tp')"
    assert tree.show({}) == ""
