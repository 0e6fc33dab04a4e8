"""Flat parameter buffers: the parameters of a stage laid out as its gradients, to be sharded.

A rank owns one equal piece of every bucket, updates it, and gathers the others' pieces. The leaves
are views of the buffers, so gathering is all that an update has to move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mfun import flat
from mfun.comm.world import Waits, World
from mfun.grads.buffers import views
from mfun.grads.table import Reduction


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
        dtype: of the parameters.
        device: where.

    Attributes:
        views: the leaves by path.
    """

    def __init__(
        self,
        world: World,
        specs: Any,
        table: Mapping[str, Reduction],
        buckets: Sequence[flat.Bucket],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.world, self.buckets = world, tuple(buckets)
        self.axes = [table[bucket.spans[0].path].axes for bucket in buckets]
        self.buffers = [
            torch.zeros(*world.lead, bucket.size, dtype=dtype, device=device) for bucket in buckets
        ]
        self.views = views(self.buckets, self.buffers, specs)

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

    def fill(self, shards: Mapping[str, Tensor]) -> Waits[None]:
        """Gather every rank's shards into the buffers; all are on their way before one is awaited.

        Args:
            shards: by `shard_name`; may be views of the buffers.
        """
        going = [
            self.world.gather(buffer, shards[shard_name(i)], self.axes[i])
            for i, buffer in enumerate(self.buffers)
        ]
        for one in going:
            yield from one
