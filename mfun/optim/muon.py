"""Muon: hidden matrices move along their orthogonalised momentum, everything else by AdamW.

Which matrices. A leaf's trailing dims are `Matrix(rows, columns)` dims of one matrix, dims before
them count separate matrices (`ParamSpec.matrix` says so for each parameter): q, k and v each one
matrix (h k, d) over all heads, the output (d, h k), gate and up each (f, d), down (d, f).
Embeddings, heads, norms, biases and position tables are not hidden matrices and go by AdamW.

The same update in every layout. The momentum is elementwise, so it is kept in pieces as parameters
are. Newton-Schulz is not: it runs on whole matrices, which `whole` makes of the pieces and `cut`
cuts again. Cut over tp, every rank computes all of its stage's matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mfun.optim.adam import adamw
from mfun.optim.decay import add_decayed_weights, scale_by_learning_rate
from mfun.optim.groups import Groups
from mfun.optim.schedule import Schedule
from mfun.optim.transform import (
    Leaves,
    State,
    Transform,
    check_match,
    named_chain,
    partition,
    terminal,
    zeros_like,
)

Scale = Literal["match_rms", "original"]
Hook = Callable[[Leaves], Leaves]
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic; chosen for its slope at 0, so that five steps suffice."""
EPS = 1e-7
"""Least Frobenius norm that a matrix is divided by."""


class Matrix(NamedTuple):
    """How many of a leaf's last dims are a matrix's rows and columns; those before count matrices.

    Example:
      >>> Matrix(2, 1).view(torch.zeros(3, 4, 5, 6)).shape  # q, k, v: (3, h, k, d)
      torch.Size([3, 20, 6])
    """

    rows: int = 1
    columns: int = 1

    def view(self, x: Tensor) -> Tensor:
        """The matrices of a leaf, (count, rows, columns); further leading dims count too."""
        x = x.flatten(-self.columns) if self.columns else x[..., None]
        x = x.flatten(-1 - self.rows, -2) if self.rows else x[..., None, :]
        return x.flatten(0, -3) if x.ndim > 2 else x[None]


def orthogonalise(x: Tensor, steps: int = 5) -> Tensor:
    """Matrices with singular values near 1 in place of theirs, by the Newton-Schulz iteration.

    X = x / |x|,  then `steps` times X = a X + (b G + c G^2) X with G = X X^T

    A singular value s goes where s -> a s + b s^3 + c s^5 takes it: after five steps, all that
    were at least 0.002 of the norm lie in [0.68, 1.21]. Singular vectors stay.

    Args:
      x: (..., rows, columns). 16-bit matrices are computed in float32.
      steps: of the iteration.
    Returns: the same shape and type.
    Example:
      >>> x = orthogonalise(torch.diag(torch.tensor([5.0, 1.0])))
      >>> torch.linalg.svdvals(x).round(decimals=2)
      tensor([0.8000, 0.7200])

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon), as torch.optim.Muon but for
    its bfloat16.
    """
    a, b, c = COEFFICIENTS
    dtype, shape = x.dtype, x.shape
    y = x.reshape(-1, *shape[-2:]).to(torch.promote_types(dtype, torch.float32))
    wide = shape[-2] <= shape[-1]
    y = y if wide else y.mT
    y = y / torch.linalg.matrix_norm(y, keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return (y if wide else y.mT).reshape(shape).to(dtype)


def scale_of(rows: int, columns: int, scale: Scale) -> float:
    """The factor of an orthogonalised matrix.

    match_rms: 0.2 sqrt(max(rows, columns)): the root mean square of AdamW's updates, so that one
      learning rate serves both.
    original: sqrt(max(1, rows / columns)).

    Example:
      >>> scale_of(400, 100, "match_rms"), scale_of(400, 100, "original")
      (4.0, 2.0)

    Source: Liu et al. 2025 (arXiv 2502.16982), equation 4; Jordan et al. 2024.
    """
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def _same(leaves: Leaves) -> Leaves:
    return leaves


def scale_by_muon(
    matrices: Mapping[str, Matrix],
    *,
    momentum: float = 0.95,
    steps: int = 5,
    scale: Scale = "match_rms",
    whole: Hook = _same,
    cut: Hook = _same,
) -> Transform:
    """Orthogonalised Nesterov momentum.

    mu = momentum mu + (1 - momentum) u,  v = momentum mu + (1 - momentum) u,
    update = cut(s * orthogonalise(whole(v))), s of each matrix's shape

    Args:
      matrices: path -> how a whole leaf is matrices; knows all that `whole` returns.
      momentum: of the mean gradient.
      steps: of Newton-Schulz.
      scale: as `scale_of`.
      whole: leaves, as the updates are, -> whole leaves by path. May communicate: it is called
        once an update, with the same leaves in the same order on all ranks.
      cut: back from whole leaves to leaves as the updates are.
    Returns: a transform with the state {"mu": {leaf: mu}}.
    Example: a matrix of rank one stays one, and its size no longer matters
      >>> block = scale_by_muon({"w": Matrix()}, scale="original")
      >>> params = {"w": torch.zeros(2, 2)}
      >>> u = {"w": torch.tensor([[0.0, 300.0], [0.0, 0.0]])}
      >>> block.update(u, block.init(params), params)[0]["w"].round(decimals=3)
      tensor([[0.0000, 0.6960], [0.0000, 0.0000]])

    Source: Jordan et al. 2024; torch.optim.Muon.
    """

    def update(
        updates: Leaves, state: State, params: Leaves, *, donate: bool = False, **extra: Any
    ) -> tuple[Leaves, State]:
        del extra
        check_match("scale_by_muon", updates, params)

        def keep(old: Tensor, u: Tensor) -> Tensor:
            return (old.lerp_ if donate else old.lerp)(u, 1 - momentum)

        mu = {path: keep(state["mu"][path], u) for path, u in updates.items()}
        ahead = {path: u.lerp(mu[path], momentum) for path, u in updates.items()}
        done = {path: _direction(path, x) for path, x in whole(ahead).items()}
        return cut(done), {"mu": mu}

    def _direction(path: str, x: Tensor) -> Tensor:
        matrix = matrices[path].view(x)
        factor = scale_of(matrix.shape[-2], matrix.shape[-1], scale)
        return (orthogonalise(matrix, steps) * factor).reshape(x.shape)

    return Transform(lambda params: {"mu": zeros_like(params)}, update)


def muon(
    learning_rate: float | Schedule,
    matrices: Mapping[str, Matrix],
    *,
    momentum: float = 0.95,
    steps: int = 5,
    scale: Scale = "match_rms",
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    groups: Groups | None = None,
    whole: Hook = _same,
    cut: Hook = _same,
) -> Transform:
    """Muon for hidden matrices and AdamW for the rest, a terminal transform.

    p = p - lr weight_decay p - lr update

    with the update of `scale_by_muon` for leaves in `matrices`, else of AdamW.

    Args:
      learning_rate: a number or a schedule, of both.
      matrices: path -> `Matrix`, of the leaves that are hidden matrices.
      momentum, steps, scale, whole, cut: as `scale_by_muon`.
      b1, b2, eps: as `adamw`.
      weight_decay: decoupled, of both.
      groups: path -> (lr, decay) multipliers, or whether the leaf decays; None decays all.
    Returns: a transform with the state {"matrices": {"muon": {"mu"}, "decay", "schedule": {"count",
      "lr"}}, "others": adamw's}.
    Raises: ValueError naming a parameter that the groups do not know.
    Example:
      >>> opt = muon(0.1, {"w": Matrix()})
      >>> params = {"w": torch.eye(2), "b": torch.ones(2)}
      >>> params, state = opt.update(params, opt.init(params), params)
      >>> [*state["matrices"]["muon"]["mu"]], [*state["others"]["mu"]]
      (['w'], ['b'])

    Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon).
    """
    chain = named_chain(
        muon=scale_by_muon(
            matrices, momentum=momentum, steps=steps, scale=scale, whole=whole, cut=cut
        ),
        decay=add_decayed_weights(weight_decay, groups),
        schedule=scale_by_learning_rate(learning_rate, groups),
    )
    rest = adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, groups=groups)
    return partition(
        lambda path: "matrices" if path in matrices else "others",
        matrices=terminal(chain),
        others=rest,
    )
