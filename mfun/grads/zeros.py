"""How many elements of the gradient are exactly 0: dead units, unused rows, underflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mfun import tree
from mfun.comm.world import Waits, World
from mfun.flat import Bucket
from mfun.grads.buffers import GradBuffers
from mfun.grads.finalize import owns
from mfun.mesh import Mesh
from mfun.spec import ParamSpec, window


def num_zeros(world: World, grads: GradBuffers, specs: Any) -> Waits[Tensor]:
    """Zeros of the whole gradient, each logical element counted once in any layout.

    Args:
        world: of this rank.
        grads: finalized buffers, or shards.
        specs: the stage's tree of `ParamSpec`. Padding, of leaves and of buckets, does not count.

    Returns:
        The number, float64, of shape `world.lead`; the same on all ranks.

    Source: Megatron-LM core/optimizer/clip_grads.py, count_zeros_fp32.
    """
    total = torch.zeros(world.lead, dtype=torch.float64)
    leaves: dict[str, ParamSpec] = tree.flatten(specs)
    for i, buffer in grads.finished().items():
        row = grads.row(i)
        real = world.build(_real(grads.buckets[i], leaves, world.mesh))
        if grads.sharded:
            real = world.shard(real, row.shard_axes)
        own = world.build(owns(row, world.mesh, world.stage, grads.sharded))
        found = ((buffer == 0) & real).sum(-1).double()
        total = total.to(buffer.device) + found * own
    everywhere = tuple(range(world.mesh.pp))
    axes = ("tp", "dp", "cp") if grads.sharded else ("tp",)
    return (yield from world.all_reduce(total, axes, everywhere))


def _real(
    bucket: Bucket, leaves: Mapping[str, ParamSpec], mesh: Mesh
) -> Callable[[Mapping[str, int]], Tensor]:
    """Which elements of a bucket are elements of the model, on the rank at some coordinates."""

    def mask(coords: Mapping[str, int]) -> Tensor:
        out = torch.zeros(bucket.size, dtype=torch.bool)
        for span in bucket.spans:
            box = tuple(slice(b - a) for a, b in window(leaves[span.path], mesh, coords))
            out[span.start : span.stop].view(span.shape)[box] = True
        return out

    return mask
