"""Flat parameter buffers: the parameters of a stage laid out as its gradients, to be sharded.

A rank owns one equal piece of every bucket, updates it, and gathers the others' pieces. The leaves
are views of the buffers, so gathering is all that an update has to move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from mfun import flat
from mfun.comm.world import Waits, World
from mfun.grads.buffers import allocate
from mfun.grads.table import Reduction

_set_version = torch._C._autograd._unsafe_set_version_counter  # pyright: ignore


def shard_name(bucket: int) -> str:
    """The name of a bucket's shard among the optimizer's leaves."""
    return f"bucket.{bucket}"


class ParamBuffers:
    """The parameters of one stage.

    Args:
        world: of this rank.
        specs: the stage's tree of `ParamSpec`.
        table: reductions by path.
        buckets: from `lay_out`, sharded; the gradients' own.
        dtypes: of the parameters of each bucket.
        device: where.
        released: none has memory until it is gathered.

    Attributes:
        views: the leaves by path.
    """

    def __init__(
        self,
        world: World,
        specs: Any,
        table: Mapping[str, Reduction],
        buckets: Sequence[flat.Bucket],
        dtypes: Sequence[torch.dtype],
        device: torch.device | str = "cpu",
        released: bool = False,
    ) -> None:
        self.world, self.buckets = world, tuple(buckets)
        self.axes = [table[bucket.spans[0].path].shard_axes for bucket in buckets]
        self.buffers, self.views = allocate(
            self.buckets, dtypes, specs, lead=world.lead, device=device, released=released
        )
        self.bucket_of = {span.path: b.index for b in self.buckets for span in b.spans}
        self.going: dict[int, tuple[int, Waits[Tensor]]] = {}

    def load(self, leaves: Mapping[str, Tensor]) -> None:
        """Copy leaves in, all of them."""
        for path, view in self.views.items():
            view.copy_(leaves[path])

    def holds(self, leaves: Mapping[str, Tensor]) -> bool:
        """Whether these leaves are the views."""
        return leaves.keys() == self.views.keys() and all(
            leaves[path].data_ptr() == view.data_ptr() for path, view in self.views.items()
        )

    def shards(self) -> dict[str, Tensor]:
        """This rank's piece of every bucket, by `shard_name`; on processes views."""
        return {
            shard_name(i): self.world.shard(buffer, self.axes[i])
            for i, buffer in enumerate(self.buffers)
        }

    def start(self, bucket: int, shard: Tensor) -> None:
        """Give a bucket its memory and start to gather it; `ready` waits for it.

        The gathered bits are those that were there before, so the version is kept: a backward may
        use what its forward has saved. (The backend writes, and counts versions, when it likes.)
        """
        buffer = self.buffers[bucket]
        if not buffer.untyped_storage().size():  # who has seen it as numpy's may not resize it
            buffer.untyped_storage().resize_(buffer.nbytes)
        version = buffer._version
        self.going[bucket] = version, self.world.gather(buffer, shard, self.axes[bucket])

    def start_all(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to gather every bucket, in the order in which a forward uses them.

        Args:
            shards: by `shard_name`, of all buckets; may be views of the buffers.

        Returns:
            The shards in their places: on processes views of the buffers.
        """
        own = self.shards()
        for i in reversed(range(len(self.buffers))):
            place, shard = own[shard_name(i)], shards[shard_name(i)]
            if place.data_ptr() != shard.data_ptr():
                place.copy_(shard)
            self.start(i, place)
        return own

    def ready(self, paths: Iterable[str]) -> Waits[list[str]]:
        """Wait for the buckets of these leaves.

        Returns:
            The leaves that have just become usable.

        Raises:
            RuntimeError: a leaf's bucket was not gathered.
        """
        arrived: list[str] = []
        for bucket in dict.fromkeys(self.bucket_of[path] for path in paths):
            if bucket in self.going:
                version, waits = self.going.pop(bucket)
                yield from waits
                _set_version((self.buffers[bucket],), (version,))
                arrived += [span.path for span in self.buckets[bucket].spans]
            elif not self.buffers[bucket].untyped_storage().size():
                raise RuntimeError(
                    f"{self.buckets[bucket].spans[0].path} is used before its bucket {bucket} was "
                    "gathered; the stream's Gather is missing or its Release is early"
                )
        return arrived

    def settle(self) -> Waits[None]:
        """Wait for all that is on its way."""
        for bucket in list(self.going):
            yield from self.ready([self.buckets[bucket].spans[0].path])

    def release(self, bucket: int) -> list[str]:
        """Give a bucket's memory up.

        Returns:
            The leaves that are gone.
        """
        self.buffers[bucket].untyped_storage().resize_(0)
        return [span.path for span in self.buckets[bucket].spans]

    def fill(self, shards: Mapping[str, Tensor]) -> Waits[None]:
        """Gather every rank's shards into the buffers; all are on their way before one is awaited.

        Args:
            shards: by `shard_name`, of all buckets or some; may be views of the buffers.
        """
        going: list[Waits[Tensor]] = []
        given = (i for i in range(len(self.buffers)) if shard_name(i) in shards)
        for axes, buckets in groupby(given, key=self.axes.__getitem__):
            with self.world.together(axes):
                going += [
                    self.world.gather(self.buffers[i], shards[shard_name(i)], axes) for i in buckets
                ]
        for one in going:
            yield from one
