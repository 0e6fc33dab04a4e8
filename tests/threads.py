"""Ranks as threads: the code that runs on processes, in one process, without a network.

`Wire` stands in for `torch.distributed` in the modules of `mfun.comm` that talk to it. It is strict
where a network may be: a message is read when it is taken and not before, a send is over when it
was taken, an asynchronous collective gives its result at `wait` only. Ranks that wait for each
other for ever are an error, at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mfun.comm import ProcessWorld, distribute, exchange, finish, kernels, overlap, p2p, process
from mfun.grads import needed_groups
from mfun.train.plan import Plan
from mfun.verify.compare import RankResult
from mfun.verify.run import program


class Group(NamedTuple):
    """A process group: its global ranks in order."""

    ranks: tuple[int, ...]


class P2POp(NamedTuple):
    """A send or receive to be posted."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: Group
    tag: int = 0


class Stopped(RuntimeError):
    """Another rank failed first, or all wait for each other."""


class Work:
    """Something under way: `end` is called once, by the first wait."""

    def __init__(self, end: Callable[[], None], done: Callable[[], bool] = lambda: False) -> None:
        self._end, self._done, self._over = end, done, False

    def wait(self) -> bool:
        """Block until it is over."""
        if not self._over:
            self._over = True
            self._end()
        return True

    def is_completed(self) -> bool:
        """Whether it is over, without waiting."""
        return self._over or self._done()


class Wire:
    """What `torch.distributed` does for the threads of one world."""

    ReduceOp = dist.ReduceOp
    P2POp = P2POp

    def __init__(self, world: int) -> None:
        self.world = world
        self._here = threading.local()
        self._changed = threading.Condition()
        self._meetings: dict[Any, dict[int, Tensor]] = {}
        self._calls: dict[Any, int] = {}
        self._letters: dict[Any, Tensor | None] = {}
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._alive = set(range(world))
        self._broken = ""

    # ------------------------------------------------------------------ who is here

    def new_group(self, ranks: list[int], timeout: object = None) -> Group:
        """A group of these ranks, the same value on each."""
        return Group(tuple(ranks))

    def is_initialized(self) -> bool:
        """Always."""
        return True

    def get_backend(self) -> str:
        """Not gloo: threads need no memory to share."""
        return "threads"

    def get_world_size(self) -> int:
        """How many threads there are."""
        return self.world

    def get_rank(self) -> int:
        """Which thread this is."""
        return self._here.rank

    def _number(self, *key: Any) -> int:
        """How often this thread has asked for the key before."""
        with self._changed:
            at = (self.get_rank(), *key)
            self._calls[at] = self._calls.get(at, -1) + 1
            return self._calls[at]

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait (holding the lock) until it is ready or the world is broken."""
        self._waiting[self.get_rank()] = (ready, what)
        self._look_for_deadlock()
        self._changed.wait_for(lambda: bool(self._broken) or ready())
        del self._waiting[self.get_rank()]
        if not ready():
            raise Stopped(self._broken)

    def _look_for_deadlock(self) -> None:
        """Break the world if all that still run wait for what is not there."""
        stuck = self._waiting.keys() == self._alive
        if self._alive and stuck and not any(ready() for ready, _ in self._waiting.values()):
            waits = (f"rank {r} waits for {what}" for r, (_, what) in sorted(self._waiting.items()))
            self._broken = f"deadlock: {'; '.join(waits)}"
            self._changed.notify_all()

    # ------------------------------------------------------------------ collectives

    def _start(self, x: Tensor, group: Group, name: str) -> Callable[[], list[Tensor]]:
        """Hand in x; the returned function gives what all ranks of the group handed in."""
        key = (group, name, self._number(group, name))
        with self._changed:
            box = self._meetings.setdefault(key, {})
            box[self.get_rank()] = x.detach().clone()
            self._changed.notify_all()

        def parts() -> list[Tensor]:
            with self._changed:
                everyone = lambda: len(box) == len(group.ranks)  # noqa: E731
                self._until(everyone, f"{name} number {key[-1]} of ranks {group.ranks}")
            return [box[rank] for rank in group.ranks]

        return parts

    def _run(
        self,
        name: str,
        out: Tensor,
        x: Tensor,
        group: Group,
        join: Callable[[list[Tensor]], Tensor],
        async_op: bool,
    ) -> Work | None:
        parts = self._start(x, group, name)

        def end() -> None:
            whole = join(parts())
            assert whole.numel() == out.numel(), f"{name}: {whole.shape} into {out.shape}"
            with torch.no_grad():
                out.copy_(whole.reshape(out.shape))

        work = Work(end)
        if async_op:
            return work
        work.wait()
        return None

    def all_reduce(
        self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Sum, in the order of ranks, mean or maximum; in place."""
        two = torch.maximum if op == dist.ReduceOp.MAX else torch.add
        over = len(group.ranks) if op == dist.ReduceOp.AVG else 1
        join = lambda parts: reduce(two, parts) / over  # noqa: E731
        return self._run(f"all_reduce {op}", x, x, group, join, async_op)

    def all_gather_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Any:
        """All pieces, one after the other."""
        join = lambda parts: torch.cat([p.flatten() for p in parts])  # noqa: E731
        return self._run("all_gather", out, x, group, join, async_op)

    def all_to_all_single(self, out: Tensor, x: Tensor, group: Any, async_op: bool = False) -> Any:
        """Row i goes to rank i."""
        at = group.ranks.index(self.get_rank())
        join = lambda parts: torch.stack([p[at] for p in parts])  # noqa: E731
        return self._run("all_to_all", out, x, group, join, async_op)

    # ------------------------------------------------------------------ messages

    def isend(self, x: Tensor, to: int, group: Any = None, tag: int = 0) -> Work:
        """Leave a reference to x; over when the receiver has copied it."""
        way = (self.get_rank(), to, group, tag)
        key = (*way, self._number("send", way))
        with self._changed:
            self._letters[key] = x
            self._changed.notify_all()
        taken = lambda: self._letters[key] is None  # noqa: E731

        def end() -> None:
            with self._changed:
                self._until(taken, f"rank {to} to take its message")

        return Work(end, taken)

    def irecv(self, x: Tensor, source: int, group: Any = None, tag: int = 0) -> Work:
        """Copy the next message of `source` with this tag into x, at `wait`."""
        way = (source, self.get_rank(), group, tag)
        key = (*way, self._number("recv", way))

        def end() -> None:
            with self._changed:
                there = lambda: self._letters.get(key) is not None  # noqa: E731
                self._until(there, f"a message of rank {source}")
                letter = self._letters[key]
                assert letter is not None and letter.shape == x.shape, (
                    f"a message of shape {letter.shape if letter is not None else None} was "
                    f"received as {tuple(x.shape)}"
                )
                x.copy_(letter)
                self._letters[key] = None
                self._changed.notify_all()

        return Work(end)

    def recv(self, x: Tensor, source: int, group: Any = None) -> None:
        """Receive and wait."""
        self.irecv(x, source, group).wait()

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[Work]:
        """Post all; one handle each, as gloo."""
        return [op.op(op.tensor, op.peer, group=op.group, tag=op.tag) for op in ops]

    # ------------------------------------------------------------------ threads

    def run(self, main: Callable[[int], Any]) -> list[Any]:
        """`main(rank)` in a thread for each rank; the first error is raised here."""
        results: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._here.rank = rank
            try:
                results[rank] = main(rank)
            except BaseException as error:
                with self._changed:
                    errors.append(error)
                    self._broken = self._broken or f"rank {rank} failed"
                    self._changed.notify_all()
            with self._changed:
                self._alive.discard(rank)
                self._look_for_deadlock()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, Stopped)), errors[0])
        return results


@contextmanager
def wired(wire: Wire) -> Iterator[None]:
    """mfun.comm talks to the wire instead of torch.distributed."""
    modules = (exchange, kernels, overlap, p2p, process)
    try:
        for module in modules:
            module.dist = wire  # type: ignore[attr-defined]
        yield
    finally:
        for module in modules:
            module.dist = dist  # type: ignore[attr-defined]


def on_threads(mesh: Any, main: Callable[[Any], Any], extra: Any = ()) -> list[Any]:
    """`main(groups)` on every rank of a mesh."""
    wire = Wire(mesh.world)
    with wired(wire):
        return wire.run(lambda rank: main(distribute(mesh, extra)))


def in_threads(layout: Plan) -> list[RankResult]:
    """All ranks in this process, by the code that they run as processes."""

    def main(groups: Any) -> RankResult:
        result = finish(program(layout, ProcessWorld(groups)))
        return RankResult(coords=layout.mesh.coords(int(groups.rank)), **result)

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))
