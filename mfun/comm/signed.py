"""What makes an autograd Function with a `setup_context` cheap to call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Forward = TypeVar("Forward", bound=Callable[..., object])


def signed(forward: Forward) -> Forward:
    """Give a Function's forward its signature, which torch otherwise works out at every `apply`.

    Measured on `ColumnLinear`: 25 microseconds, against 2 with it.

    Example:
        >>> signed(lambda x, axis: x).__signature__
        <Signature (x, axis)>
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward
