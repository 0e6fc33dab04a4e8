"""All stages of a pipeline in one process: a mailbox instead of a network.

Each stage's ranks run as one vmap; the stages' programs are generators that take turns. It is the
step that runs on processes, so what is shown here is shown of it. `Office` can also play a
transport with rendezvous (a send is not over until it is taken) or one that copies late, to catch a
buffer reused too early.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from mfun import tree
from mfun.comm.groups import single_groups
from mfun.comm.simulate import map_ranks
from mfun.comm.world import Message, Reduce, Waits
from mfun.mesh import AxisLike, Mesh
from mfun.schedule import Recv, Send

T = TypeVar("T")


class Office:
    """The letter boxes between the stages of one pipeline.

    Args:
        rendezvous: a stage that has sent waits until the message is taken before it goes on.
        late: copy a payload when it is taken, not when it is posted.
    """

    def __init__(self, *, rendezvous: bool = False, late: bool = False) -> None:
        self.rendezvous, self.late = rendezvous, late
        self.boxes: dict[Any, Message] = {}
        self.sums: dict[Any, dict[int, Tensor]] = {}
        self.moves = 0

    def moved(self) -> None:
        """Note progress, so that a standstill is noticed."""
        self.moves += 1


class MailboxWorld:
    """The `World` of one stage in the mailbox: rank-stacked tensors, one rank dim in front.

    Args:
        mesh: the mesh.
        stage: this stage.
        office: shared by all stages.
        check: assert declared types at every collective.
        plain: a stage is one rank, and its tensors have no rank dim: the code is then that of a
            process, kernels for first derivatives included.
    """

    def __init__(
        self, mesh: Mesh, stage: int, office: Office, *, check: bool = True, plain: bool = False
    ) -> None:
        if plain and mesh.stage_size > 1:
            raise ValueError(
                f"plain stages are of one rank, but this mesh's have {mesh.stage_size}"
            )
        self.mesh, self.stage, self.check = mesh, stage, check
        self.lead = () if plain else (mesh.stage_size,)
        self._office = office
        self._calls: dict[Any, int] = {}
        self._sent: list[Any] = []

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Run a rank-local function for all ranks of the stage at once."""
        if not self.lead:
            return partial(fn, single_groups())
        return map_ranks(fn, self.mesh, check=self.check)

    def build(self, make: Callable[[Mapping[str, int]], Any]) -> Any:
        """The trees of this stage's ranks, stacked leaf by leaf."""
        ranks = self.mesh.stage_ranks(self.stage)
        if not self.lead:
            return make(self.mesh.coords(ranks[0]))
        return tree.map(lambda *xs: torch.stack(xs), *(make(self.mesh.coords(r)) for r in ranks))

    def all_reduce(
        self,
        x: Tensor,
        axes: Sequence[AxisLike],
        stages: Sequence[int] | None = None,
        op: Reduce = "sum",
    ) -> Waits[Tensor]:
        """Within the stage by indexing, across stages by leaving it in the office."""
        if op == "mean":
            ranks = math.prod(map(self.mesh.size, axes)) * len(stages or (0,))
            return (yield from self.all_reduce(x, axes, stages)) / ranks
        x = self._within(x, tuple(axes), op)
        if stages is None or len(stages) == 1:
            return x
        key = self._call(frozenset(axes), tuple(stages))
        box = self._office.sums.setdefault(key, {})
        box[self.stage] = x
        self._office.moved()
        while len(box) < len(stages):
            missing = sorted(set(stages) - set(box))
            yield f"stages {missing} to join the sum over {list(axes)} of stages {list(stages)}"
        parts = torch.stack([box[s] for s in sorted(box)])
        return parts.sum(0) if op == "sum" else parts.amax(0)

    def _call(self, axes: frozenset[AxisLike], stages: tuple[int, ...]) -> Any:
        """The n-th reduction of a group is one meeting, as for a process group."""
        key = (axes, stages)
        self._calls[key] = self._calls.get(key, -1) + 1
        return (*key, self._calls[key])

    def _within(self, x: Tensor, axes: tuple[AxisLike, ...], op: str) -> Tensor:
        if not self.lead:
            return x.clone()  # the caller may write to the result while others still read x
        partition = self.mesh.stage_groups(*axes)
        out = torch.empty_like(x)
        for group in partition:
            members = list(group)
            part = x[members]
            whole = part.sum(0) if op == "sum" else part.amax(0)
            out[members] = whole.expand_as(part)
        return out

    def reduce_scatter(
        self, x: Tensor, axes: Sequence[AxisLike], op: Reduce = "sum", *, wide: bool = False
    ) -> Waits[Tensor]:
        """By indexing; the sum is that of `all_reduce`, to the bit, unless it is `wide`."""
        whole = self._within(x.float() if wide and x.itemsize < 4 else x, tuple(axes), "sum")
        whole = whole / math.prod(map(self.mesh.size, axes)) if op == "mean" else whole
        return self.shard(whole.to(x.dtype), axes)
        yield ""

    def gather(self, out: Tensor, shard: Tensor, axes: Sequence[AxisLike]) -> Waits[Tensor]:
        """By indexing, into `out`."""
        if not self.lead:
            return out.copy_(shard)
        for group in self.mesh.stage_groups(*axes):
            members = list(group)
            out[members] = shard[members].flatten().expand(len(members), -1)
        return out
        yield ""

    def together(
        self, axes: Sequence[AxisLike], stages: Sequence[int] | None = None
    ) -> AbstractContextManager[None]:
        """There are no launches."""
        return nullcontext()

    def shard(self, x: Tensor, axes: Sequence[AxisLike]) -> Tensor:
        """Each rank's piece, copied."""
        if not self.lead:
            return x.clone()
        partition = self.mesh.stage_groups(*axes)
        place = {rank: i for group in partition for i, rank in enumerate(group)}
        size = x.shape[-1] // len(partition[0])
        return torch.stack([row.narrow(-1, place[rank] * size, size) for rank, row in enumerate(x)])

    def post(
        self, batch: Sequence[Send | Recv], outgoing: Mapping[Send, Message], sizes: Any
    ) -> None:
        """Put messages into the boxes."""
        for op in batch:
            if isinstance(op, Send):
                if op.tag in self._office.boxes:
                    raise RuntimeError(f"{op} was sent twice; the first was never received")
                message = outgoing[op]
                if not self._office.late:
                    message = {k: v.clone() for k, v in message.items()}
                self._office.boxes[op.tag] = message
                self._sent.append(op.tag)
                self._office.moved()

    def take(self, op: Recv) -> Waits[Message]:
        """Wait for the box to be filled; with rendezvous, also for this stage's own sends."""
        if self._office.rendezvous:
            yield from self._taken(but=op)
        while op.tag not in self._office.boxes:
            yield str(op)
        self._office.moved()
        return {k: v.clone() for k, v in self._office.boxes.pop(op.tag).items()}

    def _taken(self, but: Recv) -> Waits[None]:
        """Wait until what this stage sent is taken, unless its own receive is due first."""
        while any(tag in self._office.boxes for tag in self._sent):
            if but.tag in self._office.boxes:
                return
            yield f"the receivers of {self._sent} (before {but})"
        self._sent.clear()

    def drain(self) -> Waits[None]:
        """Wait until everything sent was taken."""
        while any(tag in self._office.boxes for tag in self._sent):
            yield f"the receivers of {self._sent}"
        self._sent.clear()


def worlds(
    mesh: Mesh, office: Office | None = None, *, check: bool = True, plain: bool = False
) -> list[MailboxWorld]:
    """One world per stage, sharing an office."""
    office = office or Office()
    return [MailboxWorld(mesh, s, office, check=check, plain=plain) for s in range(mesh.pp)]


def run(programs: Sequence[Generator[str, None, T]], office: Office | None = None) -> list[T]:
    """Let the stages' programs take turns until all are done.

    Args:
        programs: one generator per stage.
        office: of their worlds, whose count of moves tells progress.

    Returns:
        Their results, by stage.

    Raises:
        RuntimeError: no stage can go on; the message says what each waits for.

    Example:
        >>> def program(name):
        ...     return name
        ...     yield ""
        >>> run([program("a"), program("b")])
        ['a', 'b']
    """
    results: dict[int, T] = {}
    waiting: dict[int, str] = dict.fromkeys(range(len(programs)), "its first turn")
    idle = 0
    while len(results) < len(programs):
        before = (len(results), office.moves if office else None, dict(waiting))
        for stage, program in enumerate(programs):
            if stage in results:
                continue
            try:
                waiting[stage] = next(program)
            except StopIteration as stop:
                results[stage] = stop.value
                waiting.pop(stage)
        after = (len(results), office.moves if office else None, dict(waiting))
        idle = idle + 1 if before == after else 0
        if idle > 1:
            stuck = "; ".join(f"stage {s} waits for {what}" for s, what in waiting.items())
            raise RuntimeError(f"the pipeline is stuck: {stuck}")
    return [results[s] for s in range(len(programs))]
