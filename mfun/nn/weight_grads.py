"""Where a linear layer's backward leaves its weight's gradient: in the flat buffer, now or later.

A weight's gradient is a product dy^T x, half of a backward's work, and nothing in the backward
waits for it. Handed to a `WeightGrads` instead of to autograd, it is added into the gradient's view
by the product itself, without a tensor of its own; and it can wait, which is the split of a
backward into I (to the inputs) and W (to the weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Claim = Callable[[str], tuple[Tensor, int]]
"""path -> (the view to add into, how often what is there counts: 0 or 1)."""
Paths = Mapping[tuple[int, int], str]


def paths_by_memory(leaves: Mapping[str, Tensor]) -> Paths:
    """Which parameter lies where, so that a reshaped view of it is known for what it is.

    Args:
        leaves: parameters by path.

    Example:
        >>> w = torch.zeros(3, 2, 4)
        >>> paths_by_memory({"qkv": w})[place(w.flatten(0, 1))]
        'qkv'
    """
    return {place(x): path for path, x in leaves.items() if x.numel() and x.is_contiguous()}


def place(x: Tensor) -> tuple[int, int]:
    """Where a contiguous tensor's elements begin, and how many they are."""
    return x.data_ptr(), x.numel()


class WeightGrads:
    """Takes the weights' gradients of one forward's backward. First order only.

    Args:
        paths: from `paths_by_memory`.
        claim: gives the view of a path's gradient.

    Attributes:
        later: keep the products until `run` (the op W) instead of adding them at once.
    """

    def __init__(self, paths: Paths, claim: Claim) -> None:
        self._paths, self._claim = paths, claim
        self._kept: list[tuple[str, torch.Size, Tensor, Tensor]] = []
        self._stacked: dict[tuple[int, int], Sequence[Tensor]] = {}
        self.later = False

    def stacked(self, w: Tensor, parts: Sequence[Tensor]) -> None:
        """Say that the weight w is these parameters one under the other; its product is theirs."""
        self._stacked[place(w)] = parts

    def product(self, w: Tensor, dy_no: Tensor, x_ni: Tensor) -> bool:
        """Take the gradient dy^T x of a weight w (o, i).

        Args:
            w: the weight as the layer uses it: a parameter, or all of one in another shape.
            dy_no: gradient of the output, n tokens.
            x_ni: the input.

        Returns:
            False where w is not a parameter's memory (say, two put together), or a second
            derivative is wanted: the gradient is then the caller's to return.
        """
        if parts := self._stacked.pop(place(w), None):
            columns = dy_no.split([len(part) for part in parts], -1)
            taken = [self.product(*one, x_ni) for one in zip(parts, columns, strict=True)]
            assert all(taken), "stacked weights are parameters' memory"
            return True
        path = self._path(w)
        if path is None:
            return False
        if self.later:
            self._kept.append((path, w.shape, dy_no, x_ni))
        else:
            self._add(path, w.shape, dy_no, x_ni)
        return True

    def scaled(self, w: Tensor, dw: Tensor, by: Tensor) -> bool:
        """Take the gradient by * dw of a weight, where dw (as w) is there already.

        Returns:
            As `product`.
        """
        path = self._path(w)
        if path is None:
            return False
        view, keep = self._claim(path)
        view = view.view(w.shape)
        by, dw = by.to(view.dtype), dw.to(view.dtype)
        view.addcmul_(dw, by) if keep else torch.mul(dw, by, out=view)
        return True

    @torch.no_grad()
    def run(self) -> None:
        """Add the products that were kept, and let go of their inputs."""
        while self._kept:
            self._add(*self._kept.pop())

    def _path(self, w: Tensor) -> str | None:
        if torch.is_grad_enabled() or not w.is_contiguous():
            return None
        return self._paths.get(place(w))

    def _add(self, path: str, shape: torch.Size, dy_no: Tensor, x_ni: Tensor) -> None:
        view, keep = self._claim(path)
        view = view.view(shape)
        if view.dtype == dy_no.dtype == x_ni.dtype:
            view.addmm_(dy_no.T, x_ni, beta=keep)
        else:  # gradients of more bits: the product itself has them
            view.addmm_(dy_no.to(view.dtype).T, x_ni.to(view.dtype), beta=keep)
