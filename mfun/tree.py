"""Trees of parameters: nested dicts whose leaves have dotted key paths.

A tree is a nested `dict` with string keys; tuples, lists and NamedTuples are allowed inside and
use their position or field name as key. `"blocks.3.attn.qkv"` is a *path*. Order is the order of
insertion, and a tree that is walked together with another is matched by key, never by position.
Every error names the path.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

Tree = Any


def children(node: Tree) -> dict[str, Tree] | None:
    """Key and child of each entry of an inner node, or None for a leaf.

    Raises:
        ValueError: a dict has a key that is no string, or an empty one.
    """
    match _kind(type(node)):
        case "dict":
            for key in node:
                if not isinstance(key, str) or not key:
                    raise ValueError(
                        f"tree: key {key!r} beside {[k for k in node if k != key]} cannot be part "
                        "of a dotted path; use a non-empty string"
                    )
            return dict(node)
        case "named":
            return dict(zip(node._fields, node, strict=True))
        case "sequence":
            return {str(i): child for i, child in enumerate(node)}
    return None


@functools.cache
def _kind(kind: type) -> Literal["dict", "named", "sequence", "leaf"]:
    """What nodes of a type are; asked of every node at every step, so answered once a type."""
    if issubclass(kind, Mapping):
        return "dict"
    if issubclass(kind, tuple):
        return "named" if hasattr(kind, "_fields") else "sequence"
    return "sequence" if issubclass(kind, list) else "leaf"


def _rebuild(node: Tree, below: list[Tree]) -> Tree:
    """A node of the same kind and keys as `node` with other children."""
    if isinstance(node, Mapping):
        return dict(zip(node, below, strict=True))
    if hasattr(node, "_fields"):
        return type(node)(*below)
    return type(node)(below)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def flatten(tree: Tree, path: str = "") -> dict[str, Any]:
    """Leaves by dotted path, in order.

    Raises:
        ValueError: two leaves have one path, because a key holds a dot.

    Example:
        >>> flatten({"a": {"w": 1, "b": 2}, "c": (3, 4)})
        {'a.w': 1, 'a.b': 2, 'c.0': 3, 'c.1': 4}
    """
    out: dict[str, Any] = {}
    _collect(tree, path, out)
    return out


def _collect(node: Tree, path: str, out: dict[str, Any]) -> None:
    found = children(node)
    if found is not None:
        for key, child in found.items():
            _collect(child, _join(path, key), out)
    elif path in out:
        raise ValueError(f"tree: two leaves at {[path]}, because a key holds a dot; rename the key")
    else:
        out[path] = node


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dict from leaves by dotted path; the inverse of `flatten` for trees of dicts.

    Raises:
        ValueError: a path is both a leaf and a prefix of another path.

    Example:
        >>> unflatten({"a.w": 1, "a.b": 2, "c": 3})
        {'a': {'w': 1, 'b': 2}, 'c': 3}
    """
    out: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split(".")
        node = out
        for key in parents:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise ValueError(
                    f"unflatten: {path!r} goes through a leaf at {key!r}; a path is a leaf or a "
                    "branch, so rename one"
                )
        if last in node:
            raise ValueError(
                f"unflatten: {path!r} is both a leaf and a branch; rename one of the two"
            )
        node[last] = leaf
    return out


def map_with_path(fn: Callable[..., Any], tree: Tree, *rest: Tree, path: str = "") -> Tree:
    """Apply `fn(path, leaf, *leaves of rest)` to every leaf; `rest` is matched by key.

    Raises:
        ValueError: a tree of `rest` lacks a key, has one too many, or has a leaf elsewhere.

    Example:
        >>> map_with_path(lambda p, a, b: f"{p}={a + b}", {"x": {"w": 1}}, {"x": {"w": 2}})
        {'x': {'w': 'x.w=3'}}
    """
    found = children(tree)
    if found is None:
        for other in rest:
            if children(other) is not None:
                raise ValueError(f"tree mismatch at {path or 'the root'}: a leaf against a branch")
        return fn(path, tree, *rest)
    others = [_matched(found, other, path) for other in rest]
    done = [
        map_with_path(fn, child, *(other[key] for other in others), path=_join(path, key))
        for key, child in found.items()
    ]
    return _rebuild(tree, done)


def _matched(want: dict[str, Tree], other: Tree, path: str) -> dict[str, Tree]:
    found = children(other)
    if found is None:
        raise ValueError(f"tree mismatch at {path or 'the root'}: a branch against a leaf")
    if set(want) != set(found):
        missing = sorted(_join(path, k) for k in set(want) - set(found))
        extra = sorted(_join(path, k) for k in set(found) - set(want))
        raise ValueError(f"tree mismatch: missing {missing}, unexpected {extra}")
    return found


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `fn(leaf, *leaves of rest)` to every leaf, keeping the structure.

    Example:
        >>> map(lambda a, b: a * b, {"w": 2, "b": (3, 4)}, {"w": 5, "b": (6, 7)})
        {'w': 10, 'b': (18, 28)}
    """
    if rest:
        return map_with_path(lambda _path, *leaves: fn(*leaves), tree, *rest)
    found = children(tree)
    return fn(tree) if found is None else _rebuild(tree, [map(fn, x) for x in found.values()])


def _same(a: Any, b: Any) -> bool:
    """Tensors by identity (comparing their numbers would hide a copy), other leaves by value."""
    return a is b or (not (hasattr(a, "shape") and hasattr(a, "dtype")) and bool(a == b))


def merge(*trees: Tree) -> dict[str, Any]:
    """Union of nested dicts; a leaf may stand in several if it is one tensor, or equal specs.

    This is how a pipeline stage's tree is made of its layers' trees: a tied tensor, named by two
    layers, is one leaf.

    Raises:
        ValueError: two trees hold different leaves at one path.

    Example:
        >>> merge({"a": {"w": 1}}, {"a": {"b": 2}}, {"a": {"w": 1}})
        {'a': {'w': 1, 'b': 2}}
    """
    leaves: dict[str, Any] = {}
    for tree in trees:
        for path, leaf in flatten(tree).items():
            if path in leaves and not _same(leaves[path], leaf):
                raise ValueError(
                    f"merge: two different leaves at {path!r}; what is shared must be one tensor "
                    "or equal specs, so give the other its own path"
                )
            leaves[path] = leaf
    return unflatten(leaves)


def get(tree: Tree, path: str) -> Tree:
    """The sub-tree or leaf at a dotted path.

    Raises:
        KeyError: nothing is there; the message names the first missing key and what stands beside.

    Example:
        >>> get({"a": {"w": 1}}, "a.w")
        1
    """
    node, walked = tree, ""
    for key in path.split(".") if path else []:
        found = children(node) or {}
        if key not in found:
            raise KeyError(f"no {key!r} at {walked or 'the root'}; there are {sorted(found)}")
        node, walked = found[key], _join(walked, key)
    return node


def put(tree: Tree, path: str, value: Tree) -> Tree:
    """A new tree with `value` at an existing path; everything else is shared, nothing is changed.

    Raises:
        KeyError: the path is not in the tree.

    Example:
        >>> put({"a": {"w": 1}, "b": 2}, "a.w", 7)
        {'a': {'w': 7}, 'b': 2}
    """
    if not path:
        return value
    get(tree, path)
    key, _, rest = path.partition(".")
    pairs = (children(tree) or {}).items()
    return _rebuild(tree, [put(child, rest, value) if k == key else child for k, child in pairs])


def select(tree: Tree, like: Tree) -> Tree:
    """The part of `tree` that has the paths of `like`, matched by key.

    Raises:
        KeyError: a path of `like` is not in `tree`.

    Example:
        >>> select({"a": {"w": 1, "b": 2}, "c": 3}, {"a": {"w": None}})
        {'a': {'w': 1}}
    """
    try:
        return _selected(tree, like)
    except KeyError:
        for path in flatten(like):
            get(tree, path)  # the error of the first that is missing
        raise


def _selected(node: Tree, like: Tree) -> Tree:
    want = children(like)
    if want is None:
        return node
    have = children(node) or {}
    return {key: _selected(have[key], below) for key, below in want.items()}


_SHORT = {"float": "f", "int": "i", "uint": "u", "bfloat": "bf", "complex": "c", "bool": "bool"}


def _describe(leaf: Any) -> str:
    """`f32[3,4]` for a tensor, repr otherwise: shapes and types, never numbers."""
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return repr(leaf)
    name = str(leaf.dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    return f"{_SHORT.get(kind, kind)}{name[len(kind) :]}[{','.join(str(n) for n in leaf.shape)}]"


def show(tree: Tree, specs: Tree | None = None) -> str:
    """One line a leaf: path, dtype and shape, and its spec if given. Paths can be pasted in `get`.

    Example:
        >>> import torch
        >>> print(show({"a": {"w": torch.zeros(3, 4), "b": torch.zeros(3)}}))
        a.w  f32[3,4]
        a.b  f32[3]
    """
    leaves = flatten(tree)
    notes = flatten(specs) if specs is not None else {}
    width = max((len(p) for p in leaves), default=0)
    rows = (f"{p:<{width}}  {_describe(x)}  {notes.get(p, '')}".rstrip() for p, x in leaves.items())
    return "\n".join(rows)
