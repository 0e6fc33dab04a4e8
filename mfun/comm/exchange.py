"""Pieces gathered and exchanged by plain messages, where gloo's own collectives take twice as long.

Measured in one run with 2 ranks on CPU, 80 MB of float32: all-gather 146 to 45 ms, reduce-scatter
187 to 90 ms (all-reduce 98 ms). On other devices the backend's own collectives serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mfun.comm.axis import Axis

Rows = Sequence[Tensor] | Tensor
"""One tensor a rank."""


def start_exchange(out: Rows, x: Rows, axis: Axis) -> list[Any]:
    """Send x[i] to rank i of the axis, and receive what rank i has for this one into out[i].

    Args:
        out: contiguous, one a rank; this rank's own is left as it is.
        x: likewise; kept by the caller until the messages are over.
        axis: a process axis.

    Returns:
        Work to wait for.
    """
    receives, sends = [], []
    for step in range(1, axis.size):  # each rank begins with another peer
        to, source = (axis.position + step) % axis.size, (axis.position - step) % axis.size
        sends.append(dist.P2POp(dist.isend, x[to], axis.ranks[to], group=axis.group))
        receives.append(dist.P2POp(dist.irecv, out[source], axis.ranks[source], group=axis.group))
    return list(dist.batch_isend_irecv(receives + sends))  # a send may be over when it is taken


def wait(works: Sequence[Any]) -> None:
    """Wait for all."""
    for work in works:
        work.wait()


def sum_exchanged(
    own: Tensor, received: Rows, axis: Axis, *, over: int = 1, wide: bool = False
) -> Tensor:
    """The sum of all ranks' pieces in the order of ranks, so that it does not depend on who adds.

    Args:
        own: this rank's piece; left as it is.
        received: the others', one a rank, of which this rank's is not read; overwritten.
        axis: their axis.
        over: what the sum is divided by.
        wide: add up and divide in at least float32 and round once, not after each summand.
    """
    rows = [own if i == axis.position else received[i] for i in range(axis.size)]
    if wide and own.itemsize < 4:
        total = rows[0].float()
        for row in rows[1:]:
            total.add_(row)
        return total.div_(over).to(own.dtype)
    total = torch.add(rows[0], rows[1], out=rows[0] if rows[1] is own else rows[1])
    for row in rows[2:]:
        total.add_(row)
    return total.div_(over) if over > 1 else total
