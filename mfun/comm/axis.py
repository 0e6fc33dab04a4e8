"""`Axis`: what a collective takes: one axis of the mesh, several, or part of one, at one rank."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from mfun.comm.memory import HostMemory


@attrs.define(eq=False)
class Scope:
    """Whether the `simulate` call that made an axis still runs.

    A vmap level is known by its depth only: without this mark, an axis kept from a finished run
    would take the samples of a later vmap for its ranks.
    """

    open: bool = True


@attrs.frozen(eq=False)
class Axis:
    """A communication axis from the point of view of one rank.

    Args:
        name: for messages, as `tp` or `dp_cp`.
        size: number of ranks on it.
        index: this rank's position on it; a 0-dim int64 tensor. Inside `simulate` it is batched
            over all ranks, and that vmap level *is* the ranks.
        group: the process group, where ranks are processes; None for size 1 and in `simulate`.
        partition: in `simulate`, the groups of this axis as positions on the rank dim.
        ranks: global ranks of this group in order, where ranks are processes.
        check: in `simulate`, assert that values declared equal over the axis are equal.
        scope: in `simulate`, the run that this axis belongs to.
        at: `index` as a Python integer, where ranks are processes.
        memory: what ranks of one host share, where they are processes on CPU.
    """

    name: str
    size: int
    index: Tensor
    group: Any = None
    partition: tuple[tuple[int, ...], ...] | None = None
    ranks: tuple[int, ...] = ()
    check: bool = False
    scope: Scope | None = None
    at: int | None = None
    memory: HostMemory | None = None

    @property
    def position(self) -> int:
        """`index` as a Python integer; only where ranks are processes.

        Raises:
            RuntimeError: the ranks are simulated, so that one number would be all of theirs.
        """
        if self.at is None:
            raise RuntimeError(
                f"axis {self.name!r} is simulated: its position is a tensor over all ranks; use "
                "`axis.index`"
            )
        return self.at
