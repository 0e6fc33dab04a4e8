"""Flat gradient buffers: one per bucket, with a view for every leaf.

Backward adds into the views; `finalize` reduces whole buffers. Leaves share a bucket when they
share dtype and reduction groups, so a buffer is one collective. Sharded, each rank of a bucket's
shard group keeps an equal piece of the sum, whatever leaves it cuts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mfun import flat, tree
from mfun.comm.world import Waits, finish
from mfun.grads.table import Reduction
from mfun.mesh import Mesh
from mfun.spec import ParamSpec, local_shape


def lay_out(
    specs: Any,
    table: Mapping[str, Reduction],
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    bucket_size: int | None = None,
    sharded: bool = False,
    apart: Mapping[str, Hashable] = MappingProxyType({}),
    layers: Mapping[str, Hashable] = MappingProxyType({}),
    pad: int = flat.PAD,
) -> tuple[flat.Bucket, ...]:
    """The buckets of one stage's parameters.

    Buckets of all kinds are closed together, once together they hold `bucket_size` elements: what
    is small of every layer, as norms are, would else be complete only at the end of backward.

    Args:
        specs: the stage's tree of `ParamSpec`.
        table: reductions by path.
        mesh: the mesh.
        dtype: of the parameters; a wide one among 16-bit ones shares no bucket with them.
        bucket_size: elements after which buckets are closed; None for one bucket per group.
        sharded: pad, so that every shard group can cut its buckets.
        apart: leaves of different values here share no bucket.
        layers: nor do these, whose buckets are also closed without regard to the others'.
        pad: a sharded bucket's size is a multiple of it and of the shards.

    Example:
        >>> specs = {"w": ParamSpec(shape=(3, 5)), "b": ParamSpec(shape=(3,))}
        >>> table = {path: Reduction(path, ("dp",), (0,), ()) for path in specs}
        >>> buckets = lay_out(specs, table, Mesh(dp=2), torch.float32, sharded=True)
        >>> [(b.used, b.size) for b in buckets]
        [(79, 128)]
    """
    leaves: dict[str, ParamSpec] = tree.flatten(specs)
    sizes = [math.prod(map(mesh.size, table[path].shard_axes)) for path in leaves]
    shapes = {path: local_shape(spec, mesh) for path, spec in leaves.items()}
    own = [(path, x, layers.get(path)) for path, x in shapes.items() if not _tied(table[path])]
    turns = _turns(own, bucket_size, flat.ALIGN if sharded else 1)
    return flat.plan_buckets(
        [
            (
                path,
                shapes[path],
                (
                    str(spec.dtype_among(dtype)),
                    *table[path].group,
                    apart.get(path),
                    turns.get(path),
                ),
                _tied(table[path]),
            )
            for path, spec in leaves.items()
        ],
        shards=math.lcm(*sizes) if sharded else None,
        pad=pad,
    )


def _turns(
    leaves: Iterable[tuple[str, tuple[int, ...], Hashable]], bucket_size: int | None, align: int
) -> dict[str, int]:
    """Which leaves close their buckets together: those of one bucket, were they of one kind."""
    ones = [flat.Leaf(*leaf) for leaf in leaves]
    whole = flat.plan_buckets(ones, bucket_size=bucket_size, shards=1, align=align, pad=1)
    return {path: turn for path, (turn, _) in flat.locate(whole).items()}


def allocate(
    buckets: Sequence[flat.Bucket],
    dtypes: Sequence[torch.dtype],
    specs: Any,
    *,
    lead: Sequence[int] = (),
    device: torch.device | str = "cpu",
    released: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """A buffer of zeros for every bucket, and every leaf as a view, in the order of the specs.

    Args:
        buckets: from `lay_out`.
        dtypes: of each.
        specs: the tree of their leaves' specs.
        lead: dims in front of every tensor.
        device: where.
        released: each gives its memory up at once, so that never more than one has any.
    """
    buffers: list[Tensor] = []
    views: dict[str, Tensor] = {}
    for bucket, dtype in zip(buckets, dtypes, strict=True):
        buffer = torch.zeros(*lead, bucket.size, dtype=dtype, device=device)
        for span in bucket.spans:
            view = buffer[..., span.start : span.stop].unflatten(-1, span.shape or (1,))
            views[span.path] = view if span.shape else view.squeeze(-1)
        if released:
            _free(buffer)
        buffers.append(buffer)
    return buffers, {path: views[path] for path in tree.flatten(specs)}


class GradBuffers:
    """The gradients of one stage's parameters.

    Args:
        specs: the stage's tree of `ParamSpec`.
        table: reductions by path.
        buckets: from `lay_out`.
        dtype: of the gradients.
        lead: dims in front of every tensor (`World.lead`).
        device: where.
        sharded: `finalize_steps` leaves each rank its shards instead of whole gradients.
        release: a bucket's reduction ends a window of one microbatch; its shard is added to those
            before, and the buffer has memory only from the first gradient to the reduction.
        mean: of the data ranks' gradients, which seeds have made larger by the number of these;
            collectives take the mean and what they divide by too much is multiplied before.
        wide: 16-bit gradients are added up over ranks in float32, where sharded.

    Attributes:
        sums: by bucket, a reduction on its way.
        shards: by bucket, this rank's pieces of the finished sums, where sharded.
        guard: called with these and a bucket before it is reduced (`Guard.check`).
    """

    def __init__(
        self,
        specs: Any,
        table: Mapping[str, Reduction],
        buckets: Sequence[flat.Bucket],
        dtype: torch.dtype,
        *,
        lead: Sequence[int] = (),
        device: torch.device | str = "cpu",
        sharded: bool = False,
        release: bool = False,
        mean: Mesh | None = None,
        wide: bool = False,
    ) -> None:
        self.table = {path: table[path] for path in tree.flatten(specs)}
        self.buckets = tuple(buckets)
        self.buffers, self.views = allocate(
            self.buckets,
            [dtype] * len(self.buckets),
            specs,
            lead=lead,
            device=device,
            released=release,
        )
        self.sharded, self.release, self.mean, self.wide = sharded, release, mean, wide
        self.guard: Callable[[GradBuffers, int], None] | None = None
        self.shards: dict[int, Tensor] = {}
        self.bucket_of = {span.path: i for i, b in enumerate(self.buckets) for span in b.spans}
        self._fresh: set[str] = set()
        self.sums: dict[int, Waits[Tensor]] = {}
        self.start()

    def start(self) -> None:
        """Begin a window: every leaf's next gradient replaces what is there."""
        self._fresh = set(self.views)
        self.sums, self.shards = {}, {}
        for buffer in self.buffers if self.release else ():
            _free(buffer)

    def row(self, bucket: int) -> Reduction:
        """How a bucket is reduced: as any of its leaves."""
        return self.table[self.buckets[bucket].spans[0].path]

    def claim(self, path: str) -> tuple[Tensor, int]:
        """A leaf's view, for its next gradient to be added in place.

        Returns:
            (view, keep): keep is 0 for the first gradient of a window, which replaces what is
            there, and then 1.

        Raises:
            KeyError: a path that this stage does not hold.
        """
        bucket = self.bucket_of[path]
        if bucket in self.sums and not self.release:
            raise RuntimeError(
                f"{path} gets a gradient after its bucket was reduced; the stream's Reduce is early"
            )
        if self.release:
            self.settle(bucket)
            self._allocate(bucket)
        view, keep = self.views[path], int(path not in self._fresh)
        self._fresh.discard(path)
        return view, keep

    def add(self, grads: Mapping[str, Tensor | None]) -> None:
        """Add a layer's gradients, by path; None means none.

        Raises:
            KeyError: a path that this stage does not hold.
        """
        for path, grad in grads.items():
            if grad is None:
                continue
            view, keep = self.claim(path)
            view.add_(grad) if keep else view.copy_(grad)

    def close(self, bucket: int) -> None:
        """End a bucket's window: leaves that got no gradient are zero, and the weights are in."""
        if self.release:
            self._allocate(bucket)
        for span in self.buckets[bucket].spans:
            view, weight = self.views[span.path], self._weight(span.path)
            if span.path in self._fresh:
                view.zero_()
                self._fresh.discard(span.path)
            if weight != 1.0:
                view.mul_(weight)

    def _weight(self, path: str) -> float:
        """What a leaf's gradient is multiplied by before its collective."""
        row, mesh = self.table[path], self.mean
        if mesh is None:
            return row.weight
        axes, stages = (row.shard_axes, None) if self.sharded else row.group
        ranks = math.prod(map(mesh.size, axes)) * len(stages or (0,))
        return row.weight * ranks / (mesh.dp * mesh.cp)

    def reopen(self, bucket: int) -> None:
        """Begin a bucket's next window, of the next microbatch."""
        self._fresh |= {span.path for span in self.buckets[bucket].spans}

    def reduced(self, bucket: int) -> bool:
        """Whether nothing was added since the bucket's last reduction."""
        if not self.release:
            return bucket in self.sums
        done = bucket in self.sums or bucket in self.shards
        return done and all(span.path in self._fresh for span in self.buckets[bucket].spans)

    def settle(self, bucket: int) -> None:
        """Wait for a shard on its way, add it to those before, and free the buffer."""
        if bucket not in self.sums:
            return
        part, have = finish(self.sums.pop(bucket)), self.shards.get(bucket)
        # A shard of its own: what came may be a view of the buffer, or of all that was exchanged.
        self.shards[bucket] = part.clone() if have is None else have.add_(part)
        _free(self.buffers[bucket])

    def _allocate(self, bucket: int) -> None:
        """Give a bucket its memory back, with zeros where no leaf is."""
        buffer = self.buffers[bucket]
        if buffer.untyped_storage().size():
            return
        buffer.untyped_storage().resize_(buffer.nbytes)
        end = 0
        for span in self.buckets[bucket].spans:
            buffer[..., end : span.start].zero_()
            end = span.stop
        buffer[..., end:].zero_()

    def order(self) -> list[int]:
        """Buckets in the order in which every member of every group reduces them.

        Buckets of one stage first, then those that join stages, by group and name: stages that
        declare tied leaves in another order still meet in the same one.
        """

        def rank(i: int) -> tuple[Any, ...]:
            path = min(span.path for span in self.buckets[i].spans)
            joined = self.table[path].joined
            return (joined is not None, joined or (), path if joined else "", i)

        return sorted(range(len(self.buckets)), key=rank)

    def finished(self) -> dict[int, Tensor]:
        """What `finalize_steps` leaves, by bucket: whole buffers, or this rank's shards."""
        return self.shards if self.sharded else dict(enumerate(self.buffers))

    @property
    def numel(self) -> int:
        """Elements of all leaves of one rank, without padding."""
        return sum(math.prod(span.shape) for bucket in self.buckets for span in bucket.spans)


def _free(buffer: Tensor) -> None:
    """Give a buffer's memory up; its views stay, and may be used once it is back."""
    if buffer.device.type != "meta":
        buffer.untyped_storage().resize_(0)


def _tied(reduction: Reduction) -> bool:
    return reduction.joined is not None
