"""An optimizer's state in the host's memory; of the device's, room for two leaves at a time.

While a leaf is updated, the state of the next one travels to the device and that of the one before
travels back. Leaves are whatever the optimizer sees: flat shards of buckets, or parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mfun.host import arrived, settle, to_device, to_host
from mfun.optim.transform import Leaves, State, Transform, check_match

THERE, BACK = "optimizer there", "optimizer back"
"""Names of the copies of each way, which go on at once."""


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
      >>> import torch
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
        kept = [_away(part, params) for part in parts]  # one leaf's at a time
        return _joined(kept) if kept else transform.init({})

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        check_match("with_offload", updates, params)
        donate = extra.get("donate", False)
        new: Leaves = {}
        parts: list[State] = []
        for path, near, there in _arriving(state, params):
            out, part = transform.update({path: updates[path]}, near, {path: params[path]}, **extra)
            new |= out
            parts.append(_stored(part, there, params) if donate else _away(part, params))
            del near, part  # before the next but one is asked for
        for device in {p.device for p in params.values()}:
            settle(device, BACK)
        return new, _joined(parts) if parts else transform.update({}, state, {}, **extra)[1]

    return Transform(init, update)


def _arriving(state: State, params: Leaves) -> Iterator[tuple[str, State, State]]:
    """Each leaf with its part of the state on the device, and in the host's memory.

    The next leaf's is on its way when this one's is handed out.
    """
    owned = [(path, _only(state, path, params)) for path in params]
    coming = _fetched(*owned[0], params) if owned else None
    for i, (path, there) in enumerate(owned):
        near = _ready(coming, params)
        coming = _fetched(*owned[i + 1], params) if i + 1 < len(owned) else None
        yield path, near, there


def _fetched(path: str, there: State, params: Leaves) -> State:
    """A leaf's part of a state on its way to the leaf's device."""
    device = params[path].device
    return _changed(
        params, lambda leaves: {p: to_device(x, device, THERE) for p, x in leaves.items()}, there
    )


def _ready(near: State, params: Leaves) -> State:
    """What was on its way, for what is computed next."""
    return _changed(params, lambda leaves: {p: arrived(x, THERE) for p, x in leaves.items()}, near)


def _away(near: State, params: Leaves) -> State:
    """A state with its leaves in the host's memory."""
    return _changed(
        params, lambda leaves: {p: to_host(x, copies=BACK) for p, x in leaves.items()}, near
    )


def _stored(near: State, there: State, params: Leaves) -> State:
    """A state with its leaves in the memory that they came from."""

    def store(leaves: Leaves, old: Leaves) -> Leaves:
        return {path: to_host(x, old[path], BACK) for path, x in leaves.items()}

    return _changed(params, store, near, there)


def _only(state: State, path: str, params: Leaves) -> State:
    """A state without the other leaves."""
    return _changed(params, lambda all_: {path: all_[path]} if path in all_ else {}, state)


def _changed(params: Leaves, change: Callable[..., Leaves], *states: State) -> State:
    """The first of some states with each dict of leaves, all or some, changed.

    Args:
      params: whose names say which dicts are leaves.
      change: of such dicts, one of each state.
      states: of the same structure.
    """
    first = states[0]
    if isinstance(first, Mapping):
        if first and first.keys() <= params.keys():
            return change(*states)
        return {name: _changed(params, change, *(s[name] for s in states)) for name in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        children = zip(*states, strict=True)
        return type(first)(*(_changed(params, change, *each) for each in children))
    return first


def _joined(parts: Sequence[State]) -> State:
    """One state of those of single leaves; of what is no leaf's the last one."""
    last = parts[-1]
    if isinstance(last, Mapping):
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: _joined([part[name] for part in parts if name in part]) for name in names}
    if isinstance(last, tuple) and hasattr(last, "_fields"):
        return type(last)(*(_joined(children) for children in zip(*parts, strict=True)))
    return last
