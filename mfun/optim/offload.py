"""An optimizer's state in the host's memory; of the device's, room for two leaves at a time.

While a leaf is updated, the state of the next one travels to the device and that of the one before
travels back. Leaves are whatever the optimizer sees: flat shards of buckets, or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mfun.optim.transform import Leaves, State, Transform, check_match

Tensors = Callable[[Tensor], Tensor]


def with_offload(transform: Transform) -> Transform:
    """The transform with its state in the host's memory, run leaf by leaf.

    new[leaf], state[leaf] = transform(update[leaf], state[leaf], param[leaf])

    For transforms that treat every leaf by itself, as all of `mfun.optim` do (what they need of the
    others, the gradient's norm, is given): the result is theirs to the bit. Numbers that are no
    leaf's, as counts and the norm, stay where they are.

    Args:
      transform: updates leaves one by one or all at once, to the same values.
    Returns: a transform whose state is `transform`'s, with leaves in the host's memory, which is
      pinned where parameters are on a GPU. That branch has not been run yet.
    Example:
      >>> from mfun.optim import adamw
      >>> params = {"a": torch.ones(2), "b": torch.ones(3)}
      >>> gradient = {path: torch.full_like(p, 0.5) for path, p in params.items()}
      >>> plain, away = adamw(0.1), with_offload(adamw(0.1))
      >>> new, state = away.update(gradient, away.init(params), params)
      >>> want, _ = plain.update(gradient, plain.init(params), params)
      >>> torch.equal(new["b"], want["b"]), state["count"], list(state["mu"])
      (True, 1, ['a', 'b'])

    Source: Ren et al. 2021 (arXiv 2101.06840), whose update runs on the host; here it does not.
    """

    def init(params: Leaves) -> State:
        parts = [transform.init({path: p}) for path, p in params.items()]
        kept = [_mapped(part, params, _to_host) for part in parts]  # one leaf's at a time
        return _joined(kept) if kept else transform.init({})

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        check_match("with_offload", updates, params)
        donate = extra.get("donate", False)
        new: Leaves = {}
        parts: list[State] = []
        for path, near, there in _arriving(state, params):
            out, part = transform.update({path: updates[path]}, near, {path: params[path]}, **extra)
            new |= out
            parts.append(
                _stored(part, there, params) if donate else _mapped(part, params, _to_host)
            )
            del near, part  # before the next but one is asked for
        _finish(params)
        return new, _joined(parts) if parts else transform.update({}, state, {}, **extra)[1]

    return Transform(init, update)


def _arriving(state: State, params: Leaves) -> Iterator[tuple[str, State, State]]:
    """Each leaf with its part of the state on the device, and in the host's memory.

    The next leaf's is on its way when this one's is handed out.
    """
    owned = [(path, _only(state, path, params)) for path in params]
    coming = _fetched(*owned[0], params) if owned else None
    for i, (path, there) in enumerate(owned):
        near = _ready(coming, params[path].device, params)
        coming = _fetched(*owned[i + 1], params) if i + 1 < len(owned) else None
        yield path, near, there


def _fetched(path: str, there: State, params: Leaves) -> State:
    """A leaf's part of a state on its way to the leaf's device."""
    device = params[path].device
    return _mapped(there, params, lambda x: _to_device(x, device))


def _is_leaves(node: State, names: Mapping[str, Tensor]) -> bool:
    """Whether a part of a state is a dict of leaves, all or some."""
    return isinstance(node, Mapping) and bool(node) and node.keys() <= names.keys()


def _only(node: State, path: str, names: Mapping[str, Tensor]) -> State:
    """A state without the other leaves."""
    if _is_leaves(node, names):
        return {path: node[path]} if path in node else {}
    if isinstance(node, Mapping):
        return {name: _only(child, path, names) for name, child in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_only(child, path, names) for child in node))
    return node


def _joined(parts: Sequence[State]) -> State:
    """One state of those of single leaves; of what is no leaf's the last one."""
    last = parts[-1]
    if isinstance(last, Mapping):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _joined([part[name] for part in parts if name in part]) for name in names}
    if isinstance(last, tuple) and hasattr(last, "_fields"):
        return type(last)(*(_joined(children) for children in zip(*parts, strict=True)))
    return last


def _mapped(node: State, names: Mapping[str, Tensor], move: Tensors) -> State:
    """A state with its leaves moved."""
    if _is_leaves(node, names):
        return {path: move(x) for path, x in node.items()}
    if isinstance(node, Mapping):
        return {name: _mapped(child, names, move) for name, child in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(_mapped(child, names, move) for child in node))
    return node


def _stored(node: State, there: State, names: Mapping[str, Tensor]) -> State:
    """A state with its leaves moved into the memory that they came from."""
    if _is_leaves(node, names):
        return {path: _to_host(x, there[path]) for path, x in node.items()}
    if isinstance(node, Mapping):
        return {name: _stored(child, there[name], names) for name, child in node.items()}
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        pairs = zip(node, there, strict=True)
        return type(node)(*(_stored(child, old, names) for child, old in pairs))
    return node


# ---------------------------------------------------- copies; of a GPU beside what it computes


def _to_host(x: Tensor, host: Tensor | None = None) -> Tensor:
    """A copy in the host's memory: in that of `host`, or new."""
    if x.device.type != "cuda":
        return x.clone() if host is None else host.copy_(x)
    if host is None:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copying = _side(x.device, "back")
    copying.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(copying):
        host.copy_(x, non_blocking=True)
    x.record_stream(copying)  # its memory is not given away before the copy has ended
    return host


def _to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, there once `_ready` has been called."""
    if device.type != "cuda":
        return host.clone()
    with torch.cuda.stream(_side(device, "there")):
        return host.to(device, non_blocking=True)


def _ready(near: State, device: torch.device, params: Leaves) -> State:
    """What was on its way, for what is computed next."""
    if device.type != "cuda":
        return near
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(_side(device, "there"))

    def used(x: Tensor) -> Tensor:
        x.record_stream(computing)
        return x

    return _mapped(near, params, used)


def _finish(params: Leaves) -> None:
    """Wait until all is in the host's memory, where others may read it."""
    for device in {p.device for p in params.values() if p.device.type == "cuda"}:
        _side(device, "back").synchronize()


@cache
def _side(device: torch.device, way: str) -> torch.cuda.Stream:
    """The stream of one way's copies: there and back at once."""
    del way
    return torch.cuda.Stream(device)
