"""`World`: how one rank-local training program meets its peers, in processes or in one process.

A training step is a generator: whatever must wait for another pipeline stage is written
`x = yield from world....`. On processes these calls never yield; in the mailbox
(`mfun.pipeline.mailbox`) a yield hands the turn to the other stages. Tensors carry `lead` dims in
front: none on processes, one rank dim in the mailbox, where a stage's ranks run as one vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor

from mfun.mesh import AxisLike, Mesh
from mfun.schedule import Recv, Send

T = TypeVar("T")
Waits = Generator[str, None, T]
"""A computation that may wait; each yielded string says what for."""
Message = dict[str, Tensor]
Reduce = Literal["sum", "mean", "max"]


class World(Protocol):
    """One stage's ranks, and the means to reach the others."""

    mesh: Mesh
    stage: int
    lead: tuple[int, ...]

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn(groups, *local_trees)` as a function of trees whose tensors have the `lead` dims."""
        ...

    def build(self, make: Callable[[Mapping[str, int]], Any]) -> Any:
        """A tree of tensors made per rank from its coordinates, with the `lead` dims in front."""
        ...

    def all_reduce(
        self,
        x: Tensor,
        axes: Sequence[AxisLike],
        stages: Sequence[int] | None = None,
        op: Reduce = "sum",
    ) -> Waits[Tensor]:
        """Sum, mean or maximum over `axes`, and over the listed stages; may reuse x. No derivative.

        On processes it is on its way when the call returns; iterating waits for it.
        """
        ...

    def reduce_scatter(
        self, x: Tensor, axes: Sequence[AxisLike], op: Reduce = "sum", *, wide: bool = False
    ) -> Waits[Tensor]:
        """Sum or mean over `axes`; of its last dim each rank keeps its equal piece. No derivative.

        On processes it is on its way when the call returns; x must stay as it is until then. Where
        `wide`, 16-bit summands are added up in float32 and the sum is rounded once.
        """
        ...

    def gather(self, out: Tensor, shard: Tensor, axes: Sequence[AxisLike]) -> Waits[Tensor]:
        """Fill `out` with the ranks' shards, one after the other along the last dim.

        The shard may be this rank's place in `out`. On processes as `reduce_scatter`.
        """
        ...

    def together(
        self, axes: Sequence[AxisLike], stages: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """Collectives of one kind over this group that start inside go out in one launch.

        Where that is worth it: on a GPU. They are waited for outside.
        """
        ...

    def shard(self, x: Tensor, axes: Sequence[AxisLike]) -> Tensor:
        """This rank's piece of the last dim; on processes a view."""
        ...

    def post(
        self, batch: Sequence[Send | Recv], outgoing: Mapping[Send, Message], sizes: Any
    ) -> None:
        """Start a batch of messages together. `sizes` identifies the shapes they have."""
        ...

    def take(self, op: Recv) -> Waits[Message]:
        """The message of a posted receive, its tag checked."""
        ...

    def drain(self) -> Waits[None]:
        """Wait for every message still on its way out."""
        ...


def finish(steps: Generator[str, None, T]) -> T:
    """Run a generator that has nothing to wait for (a program on processes) to its result.

    Raises:
        RuntimeError: it waits, so it belongs into the mailbox.

    Example:
        >>> def program():
        ...     return 3
        ...     yield ""
        >>> finish(program())
        3
    """
    try:
        waiting = next(steps)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError(f"this program waits for {waiting}; run it with mfun.pipeline.mailbox.run")
