"""Where a layer's backward leaves its weight's gradient: in the flat buffer, now or later.

A weight's gradient is a product dy^T x, half of a backward's work, and nothing in the backward
waits for it. Handed to a `WeightGrads` instead of to autograd, it is added into the gradient's view
by the product itself, without a tensor of its own; and it can wait, which is the split of a
backward into I (to the inputs) and W (to the weights). So can the rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial

import torch
from torch import Tensor

Claim = Callable[[str], tuple[Tensor, int]]
"""path -> (the view to add into, how often what is there counts: 0 or 1)."""
Paths = MutableMapping[tuple[int, int], str]
Add = Callable[[Tensor, int], None]
"""Adds a gradient to the view, of which `keep` (0 or 1) times what is there counts."""


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
        self._kept: list[tuple[str, Add]] = []
        self._stacked: dict[tuple[int, int], Sequence[Tensor]] = {}
        self.later = False

    def stacked(self, w: Tensor, parts: Sequence[Tensor]) -> None:
        """Say that the weight w is these parameters one under the other; its product is theirs."""
        self._stacked[place(w)] = parts

    def product(self, w: Tensor, dy_no: Tensor, x_ni: Tensor, by: Tensor | None = None) -> bool:
        """Take the gradient dy^T x of a weight w (o, i), or by times that.

        Args:
            w: the weight as the layer uses it: a parameter, or all of one in another shape.
            dy_no: gradient of the output, n tokens.
            x_ni: the input.
            by: a factor without dims, in at least float32; it may be beyond the range of fp16.

        Returns:
            False where w is not a parameter's memory (say, two put together), or a second
            derivative is wanted: the gradient is then the caller's to return.
        """
        # A forward that kept nothing has named memory that a gathered parameter may have by now.
        if not self.takes(w) and (parts := self._stacked.pop(place(w), None)):
            columns = dy_no.split([len(part) for part in parts], -1)
            taken = [self.product(*one, x_ni, by) for one in zip(parts, columns, strict=True)]
            assert all(taken), "stacked weights are parameters' memory"
            return True
        return self._take(w, partial(_add_product, w.shape, dy_no, x_ni, by))

    def rows(self, w: Tensor, index_n: Tensor, dy_nd: Tensor) -> bool:
        """Take the gradient of a table w (v, d) of which the rows index_n were looked up.

        Args:
            w: as `product`.
            index_n: the rows.
            dy_nd: gradient of what was looked up.

        Returns:
            As `product`.
        """
        return self._take(w, partial(_add_rows, w.shape, index_n, dy_nd))

    def scaled(self, w: Tensor, dw: Tensor, by: Tensor) -> bool:
        """Take the gradient by * dw of a weight, where dw (as w) is there already.

        Returns:
            As `product`.
        """
        return self._take(w, partial(_add_scaled, dw, by))

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor is a weight put together of parameters, which it finds by its memory."""
        return x.is_contiguous() and place(x) in self._stacked

    def takes(self, w: Tensor) -> bool:
        """Whether the gradient of w would be taken in a backward of first order."""
        return w.is_contiguous() and place(w) in self._paths

    @torch.no_grad()
    def run(self) -> None:
        """Add what was kept, and let go of it."""
        while self._kept:
            path, add = self._kept.pop()
            add(*self._claim(path))

    def _path(self, w: Tensor) -> str | None:
        return self._paths[place(w)] if self.takes(w) and not torch.is_grad_enabled() else None

    def _take(self, w: Tensor, add: Add) -> bool:
        path = self._path(w)
        if path is None:
            return False
        if self.later:
            self._kept.append((path, add))
        else:
            add(*self._claim(path))
        return True


def _add_product(
    shape: torch.Size, dy_no: Tensor, x_ni: Tensor, by: Tensor | None, view: Tensor, keep: int
) -> None:
    if by is None:
        add_product_(view.view(shape), dy_no, x_ni, keep)
    elif x_ni.dtype == by.dtype:
        add_product_(view.view(shape), dy_no, by * x_ni, keep)
    else:  # of 16 bits: the product of the narrow ones, which is wide, is what can be scaled
        product = torch.empty(shape, dtype=by.dtype, device=view.device)
        add_product_(product, dy_no, x_ni, 0)
        _add_scaled(product, by, view, keep)


def add_product_(dw_oi: Tensor, dy_no: Tensor, x_ni: Tensor, keep: int) -> None:
    """dw = keep dw + dy^T x, in place; the product itself has the bits of dw, where those are more.

    Args:
        dw_oi: what is added to.
        dy_no: gradient of the output.
        x_ni: the input.
        keep: 1 adds, 0 overwrites.
    """
    if dw_oi.dtype == dy_no.dtype == x_ni.dtype:
        dw_oi.addmm_(dy_no.T, x_ni, beta=keep)
    elif dy_no.is_cuda and dy_no.dtype == x_ni.dtype and dw_oi.dtype == torch.float32:
        product = torch.mm(dy_no.T, x_ni, out_dtype=torch.float32)  # by the 16-bit units
        dw_oi.add_(product) if keep else dw_oi.copy_(product)
    else:
        dw_oi.addmm_(dy_no.to(dw_oi.dtype).T, x_ni.to(dw_oi.dtype), beta=keep)


def _add_scaled(dw: Tensor, by: Tensor, view: Tensor, keep: int) -> None:
    view = view.view(dw.shape)
    if view.dtype == dw.dtype == by.dtype:
        view.addcmul_(dw, by) if keep else torch.mul(dw, by, out=view)
    else:
        view.add_(dw * by) if keep else view.copy_(dw * by)


def _add_rows(shape: torch.Size, index_n: Tensor, dy_nd: Tensor, view: Tensor, keep: int) -> None:
    view, dy_nd = view.view(shape), dy_nd.to(view.dtype)
    if not keep:
        view.zero_()
    if view.device.type == "cpu":
        view.index_add_(0, index_n, dy_nd)
    else:  # sorted, so the same bits every time; index_add_ is atomic there
        view.index_put_((index_n,), dy_nd, accumulate=True)
