"""Ranks as processes: the process groups of a mesh, made once in one order, and their `World`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing

from mfun import tree
from mfun.comm import overlap
from mfun.comm.groups import GroupKey, Groups, group_key, process_groups
from mfun.comm.p2p import Transport
from mfun.comm.world import Message, Reduce, Waits
from mfun.mesh import DENSE, FAMILIES, AxisLike, Mesh
from mfun.schedule import Recv, Send

STANDARD = (*(axes for axes in FAMILIES.values() if set(axes) <= set(DENSE)), DENSE)
"""The groups that are made for every mesh: the families of the dense view, and all ranks."""
KINDS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
Extra = Sequence[tuple[tuple[AxisLike, ...], tuple[int, ...] | None]]


def make_groups(
    mesh: Mesh, extra: Extra = (), new_group: Callable[[list[int]], Any] | None = None
) -> dict[GroupKey, dict[int, Any]]:
    """Call `new_group` for every group of every family, in the same order on every rank.

    Groups of one rank are not made, and groups with the same ranks are made once.

    Args:
        mesh: the mesh.
        extra: further (axes, stages) that a reduction table needs, the same on all ranks.
        new_group: makes a group from its global ranks; by default torch's.

    Returns:
        For each key, the group of every rank that is in one.
    """
    new_group = dist.new_group if new_group is None else new_group
    by_ranks: dict[tuple[int, ...], Any] = {}
    made: dict[GroupKey, dict[int, Any]] = {}
    for axes, stages in [*((axes, None) for axes in STANDARD), *extra]:
        members: dict[int, Any] = {}
        for ranks in mesh.groups(*axes, stages=stages):
            if len(ranks) == 1:
                continue
            if ranks not in by_ranks:
                by_ranks[ranks] = new_group(list(ranks))
            members.update(dict.fromkeys(ranks, by_ranks[ranks]))
        made[group_key(axes, stages)] = members
    return made


def distribute(
    mesh: Mesh, extra: Extra = (), timeout_s: float | None = None, *, on_host: bool = True
) -> Groups:
    """The groups of this process; torch.distributed must be initialised (by torchrun or mfun).

    Args:
        mesh: the mesh; its world must be the number of processes.
        extra: further (axes, stages) that will be asked for, the same on all ranks.
        timeout_s: after which a collective that does not finish is an error; None is torch's.
        on_host: large pieces on CPU go through memory that ranks of one host share (32 MiB a rank
            of each group that has such pieces), not sockets.

    Returns:
        This rank's `Groups`.

    Raises:
        ValueError: the world has another size than the mesh.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != mesh.world:
        raise ValueError(
            f"the mesh has {mesh.world} ranks (tp {mesh.tp} x cp {mesh.cp} x dp {mesh.dp} x pp "
            f"{mesh.pp}) but {world} processes were started; change the mesh or --nproc-per-node"
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    timeout = timedelta(seconds=timeout_s) if timeout_s is not None else None
    new_group = functools.partial(dist.new_group, timeout=timeout)  # not inherited from the world's
    made = make_groups(mesh, extra, new_group) if world > 1 else {}
    mine = {key: members[rank] for key, members in made.items() if rank in members}
    gloo = world > 1 and dist.get_backend() == "gloo"  # whose messages say what was written
    return process_groups(mesh, rank, mine, on_host=on_host and gloo)


class ProcessWorld:
    """The `World` of one process: local tensors, process groups, point-to-point messages.

    Args:
        groups: from `distribute`.
        device: where this rank computes.
    """

    lead: tuple[int, ...] = ()

    def __init__(self, groups: Groups, device: torch.device | str = "cpu") -> None:
        self.groups = groups
        self.mesh = groups.mesh
        self.rank = int(groups.rank)
        self.coords = self.mesh.coords(self.rank)
        self.stage = self.coords["pp"]
        self.device = torch.device(device)
        self.coalesces = self.device.type != "cpu"
        self._launch: Any = None
        pipeline = groups.pp
        self._transport = Transport(pipeline.group, pipeline.ranks, self.device)

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Give the function this rank's groups."""

        def lifted(*trees: Any) -> Any:
            return fn(self.groups, *trees)

        return lifted

    def build(self, make: Callable[[Mapping[str, int]], Any]) -> Any:
        """This rank's tree, on its device."""
        return tree.map(lambda x: x.to(self.device), make(self.coords))

    def all_reduce(
        self,
        x: Tensor,
        axes: Sequence[AxisLike],
        stages: Sequence[int] | None = None,
        op: Reduce = "sum",
    ) -> Waits[Tensor]:
        """One all-reduce over the joint group, in place: started by the call, then waited for."""
        axis = self.groups.over(*axes, stages=tuple(stages) if stages is not None else None)
        if axis.size == 1:
            return _waited(None, x)
        assert x.is_contiguous(), "all_reduce in place needs a contiguous buffer"
        if op == "sum":
            return self._pending(overlap.start_all_reduce(x, axis))
        work = dist.all_reduce(x, op=KINDS[op], group=axis.group, async_op=True)
        return _waited(self._launch or work, x)

    def reduce_scatter(
        self, x: Tensor, axes: Sequence[AxisLike], op: Reduce = "sum", *, wide: bool = False
    ) -> Waits[Tensor]:
        """One reduce-scatter (on CPU an exchange and a local sum), started by the call."""
        axis = self.groups.over(*axes)
        if axis.size == 1:
            return _waited(None, x)
        over = axis.size if op == "mean" else 1
        return self._pending(overlap.start_reduce_scatter(x, axis, 0, over=over, wide=wide))

    def gather(self, out: Tensor, shard: Tensor, axes: Sequence[AxisLike]) -> Waits[Tensor]:
        """One all-gather into `out`, started by the call."""
        axis = self.groups.over(*axes)
        if axis.size == 1:
            return _waited(None, out if shard.data_ptr() == out.data_ptr() else out.copy_(shard))
        works = overlap.start_all_gather(out.unflatten(0, (axis.size, -1)), shard, axis)
        return self._pending(overlap.Pending(works, lambda: out))

    @contextmanager
    def together(
        self, axes: Sequence[AxisLike], stages: Sequence[int] | None = None
    ) -> Iterator[None]:
        """One call of the backend for all; not yet run with NCCL. On CPU, as many as there are:
        gloo would copy all into one buffer first, and messages are no collectives.
        """
        axis = self.groups.over(*axes, stages=tuple(stages) if stages is not None else None)
        if axis.size == 1 or not self.coalesces:
            yield
            return
        with coalescing(axis.group, async_ops=True) as self._launch:
            yield
        self._launch = None

    def shard(self, x: Tensor, axes: Sequence[AxisLike]) -> Tensor:
        """A view of this rank's piece."""
        axis = self.groups.over(*axes)
        return x.chunk(axis.size)[axis.position] if axis.size > 1 else x

    def _pending(self, pending: overlap.Pending) -> Waits[Tensor]:
        """The result once it is there; of a common launch, once all are."""
        return _finished(pending._replace(works=[self._launch]) if self._launch else pending)

    def post(
        self, batch: Sequence[Send | Recv], outgoing: Mapping[Send, Message], sizes: Any
    ) -> None:
        """Start a batch of isend and irecv together."""
        self._transport.post(batch, outgoing, sizes)

    def take(self, op: Recv) -> Waits[Message]:
        """Wait for a posted receive."""
        return self._transport.take(op)
        yield ""

    def drain(self) -> Waits[None]:
        """Wait for all sends; their buffers may be freed after."""
        self._transport.drain()
        return
        yield ""


def _finished(pending: overlap.Pending) -> Waits[Tensor]:
    return pending.wait()
    yield ""


def _waited(work: Any, x: Tensor) -> Waits[Tensor]:
    if work is not None:
        work.wait()
    return x
    yield ""  # a generator that never waits for another stage
