"""Copies between the memory of a device and the host's; of a GPU beside what it computes.

Copies of one name are made one after the other, on a side stream of the device; those of different
names at once. The CUDA branches have not been run yet: they follow the allocator's rules for side
streams. Elsewhere a copy is there when the call returns.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def to_host(x: Tensor, host: Tensor | None = None, copies: str = "copies") -> Tensor:
    """A copy in the host's memory, pinned where it comes from a GPU.

    Args:
      x: what was computed last on its device, or before.
      host: memory for it, of its shape and dtype; None is new memory.
      copies: name of the side stream.
    Returns: the copy; the host may read it after `settle`, and `to_device` of this name.
    """
    if x.device.type != "cuda":
        return x.clone() if host is None else host.copy_(x)
    if host is None:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    copying = _side(x.device, copies)
    copying.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(copying):
        host.copy_(x, non_blocking=True)
    x.record_stream(copying)  # its memory is not given away before the copy has ended
    return host


def to_device(host: Tensor, device: torch.device, copies: str = "copies") -> Tensor:
    """A copy on the device, on its way beside what was computed before.

    Args:
      host: pinned, or the call waits.
      device: where to.
      copies: name of the side stream.
    Returns: the copy, for `arrived`.
    """
    if device.type != "cuda":
        return host.clone()
    with torch.cuda.stream(_side(device, copies)):
        return host.to(device, non_blocking=True)


def arrived(x: Tensor, copies: str = "copies") -> Tensor:
    """The same tensor, ready for what is computed next on its device.

    Args:
      x: from `to_device`.
      copies: the name given there.
    """
    if x.device.type == "cuda":
        computing = torch.cuda.current_stream(x.device)
        computing.wait_stream(_side(x.device, copies))
        x.record_stream(computing)
    return x


def settle(device: torch.device, copies: str = "copies") -> None:
    """Wait until all copies of a device of one name are there, so that the host may read them."""
    if device.type == "cuda":
        _side(device, copies).synchronize()


@cache
def _side(device: torch.device, copies: str) -> torch.cuda.Stream:
    """The stream of a device's copies of one name."""
    del copies
    return torch.cuda.Stream(device)
