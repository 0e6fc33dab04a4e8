"""An optimizer is a pair of pure functions; optimizers are built by chaining such pairs.

A `Transform` turns gradients into updates, carrying a state that the caller holds. Trees here are
flat: `dict[path, Tensor]`. Everything is elementwise, so a leaf may carry leading dims (the ranks
of a mailbox world) and may be a shard.

Donation. `update(..., donate=True)` may overwrite the buffers of the updates, the state and the
parameters it is given, as JAX's donation does; the caller keeps only what is returned. So an
update that is handed on never shares memory with a state. With `donate=False` nothing that was
given is written to.

A *terminal* transform returns new parameters in place of updates, and ends a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Leaves = dict[str, Tensor]
State = Any  # nested dicts or NamedTuples of tensors, ints and floats


class Update(Protocol):
    """The second function of a `Transform`."""

    def __call__(
        self, updates: Leaves, state: State, params: Leaves, **extra: Any
    ) -> tuple[Leaves, State]:
        """New updates (a terminal transform: new parameters) and the new state."""
        ...


class Transform(NamedTuple):
    """A pair of pure functions over trees of leaves.

    Args:
      init: params -> state.
      update: (updates, state, params, **extra) -> (updates, state). Each transform takes from
        `extra` what it needs and ignores the rest: `norm`, the global norm of the gradients, of
        the shape of the world's leading dims; `donate`, a bool (see the module's docstring).
    Example:
      >>> halve = Transform(lambda p: {}, lambda u, s, p, **extra: ({k: u[k] / 2 for k in u}, s))
      >>> params = {"w": torch.tensor(1.0)}
      >>> halve.update({"w": torch.tensor(3.0)}, halve.init(params), params)
      ({'w': tensor(1.5000)}, {})
    """

    init: Callable[[Leaves], State]
    update: Update


def named_chain(**transforms: Transform) -> Transform:
    """Transforms one after another; the state is a dict of their states, by their names.

    Args:
      transforms: in the order of application. A terminal one may only be the last.
    Returns: a transform, terminal if the last one is.
    Raises: ValueError if a state does not have these names.
    Example:
      >>> from mfun.optim import scale_by_learning_rate, trace
      >>> opt = named_chain(momentum=trace(0.9), schedule=scale_by_learning_rate(0.1))
      >>> params = {"w": torch.tensor([1.0])}
      >>> updates, state = opt.update({"w": torch.tensor([2.0])}, opt.init(params), params)
      >>> updates["w"], state["schedule"]["lr"], state["momentum"]["trace"]["w"]
      (tensor([-0.2000]), 0.1, tensor([2.]))

    Source: optax `named_chain`.
    """

    def init(params: Leaves) -> State:
        return {name: transform.init(params) for name, transform in transforms.items()}

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        if list(state) != list(transforms):
            raise ValueError(
                f"named_chain: the state holds {list(state)}, the chain {list(transforms)}; "
                "use the state that this chain's init or update returned"
            )
        new = {}
        for name, transform in transforms.items():
            updates, new[name] = transform.update(updates, state[name], params, **extra)
        return updates, new

    return Transform(init, update)


def partition(label: Callable[[str], str], **transforms: Transform) -> Transform:
    """Each leaf to the transform that its label names; the state is a dict of their states.

    Args:
      label: leaf -> one of the names.
      transforms: all terminal, or none.
    Returns: a transform, terminal if these are.
    Raises: KeyError for a label that names none; ValueError as `check_match`.
    Example:
      >>> from mfun.optim import sgd
      >>> opt = partition(lambda path: path[0], a=sgd(0.5, momentum=0.0), b=sgd(0.0, momentum=0.0))
      >>> params = {"a.w": torch.ones(1), "b.w": torch.ones(1)}
      >>> opt.update(params, opt.init(params), params)[0]
      {'a.w': tensor([0.5000]), 'b.w': tensor([1.])}

    Source: optax `partition`.
    """

    def parts(leaves: Leaves) -> dict[str, Leaves]:
        out: dict[str, Leaves] = {name: {} for name in transforms}
        for path, x in leaves.items():
            out[label(path)][path] = x
        return out

    def init(params: Leaves) -> State:
        return {name: transforms[name].init(part) for name, part in parts(params).items()}

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        check_match("partition", updates, params)
        new, done, given = {}, {}, parts(updates)
        for name, part in parts(params).items():
            out, new[name] = transforms[name].update(given[name], state[name], part, **extra)
            done |= out
        return {path: done[path] for path in params}, new

    return Transform(init, update)


def terminal(transform: Transform) -> Transform:
    """The transform that returns params + updates in place of the updates.

    Example:
      >>> from mfun.optim import scale_by_learning_rate
      >>> descent = terminal(scale_by_learning_rate(0.5))
      >>> params = {"w": torch.tensor([1.0])}
      >>> descent.update({"w": torch.tensor([4.0])}, descent.init(params), params)[0]
      {'w': tensor([-1.])}
    """

    def update(updates: Leaves, state: State, params: Leaves, **extra: Any) -> tuple[Leaves, State]:
        updates, state = transform.update(updates, state, params, **extra)
        return apply_updates(params, updates, donate=extra.get("donate", False)), state

    return Transform(transform.init, update)


def apply_updates(params: Leaves, updates: Leaves, *, donate: bool = False) -> Leaves:
    """New parameters, params + updates, each of its parameter's dtype.

    Args:
      params, updates: leaves of equal paths and shapes.
      donate: add into the buffers of `params`.
    Raises: ValueError naming the paths or shapes that differ.
    Example:
      >>> apply_updates({"w": torch.tensor([1.0])}, {"w": torch.tensor([-0.25])})
      {'w': tensor([0.7500])}
    """
    check_match("apply_updates", updates, params)
    if donate:
        return {path: p.add_(updates[path]) for path, p in params.items()}
    return {path: (p + updates[path]).to(p.dtype) for path, p in params.items()}


def check_match(who: str, updates: Leaves, params: Leaves) -> None:
    """Refuse updates whose paths or shapes are not those of the parameters.

    Raises: ValueError naming the first offending paths. A parameter that was not used has a
      gradient of zeros, never an absent one.
    """
    if updates.keys() != params.keys():
        missing, extra = sorted(params.keys() - updates), sorted(updates.keys() - params)
        raise ValueError(
            f"{who}: the updates lack {missing[:5]} and have {extra[:5]} that are no parameters; "
            "give one update per parameter, zeros where it was not used"
        )
    for path, p in params.items():
        if updates[path].shape != p.shape:
            raise ValueError(
                f"{who}: the update of {path!r} has shape {tuple(updates[path].shape)}, "
                f"the parameter {tuple(p.shape)}"
            )


def state_tensors(state: State) -> Leaves:
    """The tensors of an optimizer's state by path, for a checkpoint.

    Example:
      >>> from mfun.optim import adamw
      >>> list(state_tensors(adamw(0.1).init({"embed.tokens": torch.ones(2)})))
      ['mu.embed.tokens', 'nu.embed.tokens']
    """
    return {path: x for path, x in _entries(state) if isinstance(x, Tensor)}


def state_scalars(state: State) -> dict[str, int | float]:
    """The numbers of an optimizer's state by path: step counts and reported values.

    Example:
      >>> from mfun.optim import adamw
      >>> state_scalars(adamw(0.1).init({"w": torch.ones(2)}))
      {'count': 0, 'lr': 0.0}
    """
    return {path: x for path, x in _entries(state) if not isinstance(x, Tensor)}


def restore_state(
    like: State, tensors: Mapping[str, Tensor], scalars: Mapping[str, int | float]
) -> State:
    """The state whose tensors and numbers these are: inverse of `state_tensors`, `state_scalars`.

    Args:
      like: a state of the same transform and parameters, such as `init` returns.
      tensors, scalars: by path. A tensor of no dims in `like` is a reported value (a norm), and
        takes whatever shape was saved.
    Raises: ValueError naming every path that is missing, unexpected or of another shape.
    Example:
      >>> state = {"mu": {"a.b": torch.ones(2)}, "count": 3}
      >>> restore_state({"mu": {"a.b": torch.zeros(2)}, "count": 0},
      ...               state_tensors(state), state_scalars(state))
      {'mu': {'a.b': tensor([1., 1.])}, 'count': 3}
    """
    want, have = dict(_entries(like)), {**tensors, **scalars}
    missing, extra = sorted(want.keys() - have), sorted(have.keys() - want)
    misshapen = [
        f"{path} {tuple(tensors[path].shape)} for {tuple(x.shape)}"
        for path, x in want.items()
        if isinstance(x, Tensor) and path in tensors and x.ndim and x.shape != tensors[path].shape
    ]
    if missing or extra or misshapen:
        raise ValueError(
            f"restore_state: missing {missing}, unexpected {extra}, misshapen {misshapen}"
        )
    return _replaced(like, have, "")


def _children(node: State) -> list[tuple[str, State]] | None:
    """Names and values of a dict or NamedTuple; a name may hold dots, as a leaf's path does."""
    if isinstance(node, Tensor):
        return None
    if isinstance(node, Mapping):
        return list(node.items())
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))  # type: ignore[attr-defined]
    return None


def _entries(node: State, path: str = "") -> Iterator[tuple[str, Any]]:
    children = _children(node)
    if children is None:
        yield path, node
    for name, child in children or []:
        yield from _entries(child, f"{path}.{name}" if path else name)


def _replaced(node: State, have: Mapping[str, Any], path: str) -> State:
    children = _children(node)
    if children is None:
        return have[path]
    new = {n: _replaced(child, have, f"{path}.{n}" if path else n) for n, child in children}
    return new if isinstance(node, Mapping) else type(node)(**new)


def zeros_like(params: Leaves) -> Leaves:
    """A contiguous zero for every parameter."""
    layout = torch.contiguous_format
    return {path: torch.zeros_like(p, memory_format=layout) for path, p in params.items()}
