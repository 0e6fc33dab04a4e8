"""Tensors' memory: made in large pages, since each page costs a fault, and seen as bytes."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from mfun.checkpoint.hashing import as_bytes

HUGE = 1 << 21
_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Memory for a tensor; on the CPU in pages of 2 MiB, where the system has them.

    Example:
        >>> empty((2, 3), torch.float32).shape
        torch.Size([2, 3])
    """
    x = torch.empty(tuple(shape), dtype=dtype, device=device)
    if _ADVICE is not None and x.device.type == "cpu" and x.nbytes >= 2 * HUGE:
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        pages = ctypes.c_void_p(start), ctypes.c_size_t(length)
        ctypes.CDLL(None).madvise(*pages, _ADVICE)  # a wish: what it says does not matter
    return x


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The same, of zeros.

    Example:
        >>> zeros((2,), torch.int64)
        tensor([0, 0])
    """
    return empty(shape, dtype, device).zero_()


def memory(x: Tensor) -> memoryview:
    """The bytes of a dense tensor on the CPU, to be read and written.

    Example: of one element, whose stride says nothing
        >>> x = torch.zeros(2, 3, dtype=torch.int16)[:1, 1:2].T
        >>> memory(x)[0] = 1
        >>> x
        tensor([[1]], dtype=torch.int16)
    """
    assert x.is_contiguous(), "bytes of a dense tensor only"
    return as_bytes(x.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy())
