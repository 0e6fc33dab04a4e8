"""Bytes that a run really holds: of given values, and the most that is alive while something runs.

Counts storages, each once, whoever views them, by their size at the moment: a buffer that was given
up counts nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mfun.comm.world import World, finish
from mfun.train.plan import Plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested dicts, lists and tuples.

    Example:
        >>> len([*tensors({"a": torch.ones(2), "b": [torch.ones(3), 4]})])
        2
    """
    if isinstance(value, Tensor):
        yield value
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, list | tuple):
        children = value
    for child in children:
        yield from tensors(child)


def held_bytes(*values: Any) -> int:
    """Bytes of the storages of all tensors in some values, each storage once.

    Example:
        >>> x = torch.zeros(10)
        >>> held_bytes({"x": x, "view": x[:3]}, torch.zeros(2))
        48
    """
    storages = {x.untyped_storage()._cdata: x.untyped_storage() for x in tensors(values)}
    return sum(storage.nbytes() for storage in storages.values())


class Live(TorchDispatchMode):
    """Bytes of the storages that are alive, looked at after each operation under the mode.

    Args:
        known: values that were there before.

    Attributes:
        most: the largest sum seen.

    Example:
        >>> with Live() as live:
        ...     for _ in range(3):
        ...         x = torch.zeros(10)
        >>> live.most  # the old x is there until the new one has taken its name
        80
    """

    def __init__(self, *known: Any) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.most = 0
        for x in tensors(known):
            self._add(x)
        self.look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, note what it returns, and look."""
        out = func(*args, **(kwargs or {}))
        for x in tensors(out):
            self._add(x)
        self.look()
        return out

    def look(self) -> int:
        """Bytes alive now."""
        alive = {i: s for i, ref in self._storages.items() if (s := ref()) is not None}
        self._storages = {i: self._storages[i] for i in alive}
        now = sum(storage.nbytes() for storage in alive.values())
        self.most = max(self.most, now)
        return now

    def _add(self, x: Tensor) -> None:
        if x.device.type != "meta":
            storage = x.untyped_storage()
            self._storages[storage._cdata] = weakref.ref(storage)


class Measured(NamedTuple):
    """Bytes of one rank of a real run.

    Args:
        params, grads, opt: between steps, of the state and the gradient buffers.
        held: all that is there between steps, each storage once.
        peak: the most that is alive in a step, batches left out.
    """

    params: int
    grads: int
    opt: int
    held: int
    peak: int


def measure(plan: Plan, world: World) -> Measured:
    """Train a step, then measure one more, on made-up batches.

    Args:
        plan: the layout.
        world: of this rank; all ranks measure together. Of the mailbox, one without pipeline
            stages, whose bytes are those of all its ranks.

    Example:
        >>> from mfun.comm import ProcessWorld, distribute
        >>> from mfun.config import load, resolve
        >>> from mfun.train.plan import plan
        >>> one = ["parallel.tp=1", "parallel.pp=1", "train.microbatches=16"]
        >>> layout = plan(resolve(load("tiny", one), 1))
        >>> m = measure(layout, ProcessWorld(distribute(layout.mesh)))
        >>> m.params == m.grads, m.held == m.params + m.grads + m.opt, m.peak > m.held
        (True, True, True)
    """
    trainer = Trainer(plan, world)
    count = plan.config.train.microbatches
    batches = [
        world.build(lambda coords, i=i: rank_batches(plan.config, coords, 0)[i])
        for i in range(count)
    ]
    state, _ = finish(trainer.step(trainer.init(), batches))
    grads = trainer.buffers()
    flat = trainer.params.flat.buffers if trainer.params.flat else []
    with Live(state.params, state.opt, flat, grads.buffers, grads.shards) as live:
        state, _ = finish(trainer.step(state, batches))
    return Measured(
        params=held_bytes(state.params, flat),
        grads=held_bytes(grads.buffers, grads.shards),
        opt=held_bytes(state.opt),
        held=held_bytes(state.params, state.opt, flat, grads.buffers, grads.shards),
        peak=live.most,
    )
