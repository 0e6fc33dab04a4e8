"""Parallel layers next to their definitions on one device, and derivatives to put both through.

A `Case` is a rank-local program, the same thing in a few lines of dense torch, and how each
argument is cut. `OUTSIDE` and `INSIDE` are tables of derivatives: taken of the whole simulated
mesh, and taken by each rank within it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from mfun import nn
from mfun.comm import Groups, simulate
from mfun.mesh import Mesh
from mfun.nn.head import HeadLoss
from mfun.spec import P


@attrs.frozen(eq=False)
class Case:
    """A layer on a mesh, and on one device.

    Args:
        local: (groups, *pieces) -> piece of the result.
        dense: (*wholes) -> the whole result.
        args: whole tensors, all differentiable.
        specs: how each is cut; `sums` where each rank's gradient is a summand.
        out: how the result is cut.
        power: the result is raised to it and summed, to make a nonlinear scalar.
    """

    local: Callable[..., Tensor]
    dense: Callable[..., Tensor]
    args: tuple[Tensor, ...]
    specs: tuple[P, ...]
    out: P
    power: int = 3

    def simulated(self, mesh: Mesh) -> Callable[..., Tensor]:
        """The layer on a whole mesh."""
        return simulate(self.local, mesh, self.specs, self.out)

    def scalar(self, f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The sum of powers of what f returns."""
        return lambda *args: f(*args).pow(self.power).sum()


def near(a: Any, b: Any, bound: float = 1e-10) -> None:
    """Every tensor of a tree equal, relative to the largest value of its counterpart."""
    if isinstance(a, Tensor):
        assert a.shape == b.shape
        a, b = a.detach(), b.detach()
        assert float((a - b).abs().max()) <= bound * max(float(b.abs().max()), 1e-3)
    else:
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            near(one, other, bound)


def cubes(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The sum of the cubes of what f returns."""
    return lambda *args: f(*args).pow(3).sum()


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Float64 normals."""
    generator = torch.Generator().manual_seed(seed + 97 * sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    """Integers in [0, high)."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------- layers

TOKENS, SHARDED = P("dp"), P("dp", "tp")  # activations (b, s, ..), whole and cut along s
ROWS, COLUMNS = P("tp", sums=("dp",)), P(None, "tp", sums=("dp",))


def activations(sp: bool) -> P:
    """How activations between layers are cut."""
    return SHARDED if sp else TOKENS


def replicated(sp: bool) -> P:
    """A parameter every rank holds: its gradients are summands of the ranks' own tokens."""
    return P(sums=("dp", "tp") if sp else ("dp",))


def column(mesh: Mesh, sp: bool, gather: bool = False) -> Case:
    """column_linear."""

    def local(groups: Groups, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return nn.column_linear(x, w, b, groups.tp, sequence_parallel=sp, gather_output=gather)

    args = (randn(2 * mesh.dp, 2 * mesh.tp, 3), randn(2 * mesh.tp, 3), randn(2 * mesh.tp))
    out = TOKENS if gather else P("dp", None, "tp")
    return Case(local, F.linear, args, (activations(sp), ROWS, ROWS), out)


def row(mesh: Mesh, sp: bool, cut_here: bool = False) -> Case:
    """row_linear."""

    def local(groups: Groups, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return nn.row_linear(
            x, w, b, groups.tp, sequence_parallel=sp, input_is_parallel=not cut_here
        )

    args = (randn(2 * mesh.dp, 2 * mesh.tp, 2 * mesh.tp), randn(3, 2 * mesh.tp), randn(3))
    into = TOKENS if cut_here else P("dp", None, "tp")
    return Case(local, F.linear, args, (into, COLUMNS, replicated(sp)), activations(sp))


def feed_forward(mesh: Mesh, sp: bool) -> Case:
    """A gated mlp with biases."""

    def local(groups: Groups, x: Tensor, up: Tensor, c: Tensor, down: Tensor, b: Tensor) -> Tensor:
        params = {"up": up, "up_bias": c, "down": down, "down_bias": b}
        return nn.mlp(params, x, groups.tp, activation="swiglu", sequence_parallel=sp)

    def dense(x: Tensor, up: Tensor, c: Tensor, down: Tensor, b: Tensor) -> Tensor:
        gate, value = x @ up[0].T + c[0], x @ up[1].T + c[1]
        return (gate * gate.sigmoid() * value) @ down.T + b

    f = 2 * mesh.tp
    args = (randn(mesh.dp, mesh.tp, 3), randn(2, f, 3), randn(2, f), randn(3, f), randn(3))
    specs = (activations(sp), COLUMNS, COLUMNS, COLUMNS, replicated(sp))
    return Case(local, dense, args, specs, activations(sp))


def embedding(mesh: Mesh, sp: bool) -> Case:
    """vocab_embedding plus learned positions."""
    v, s = 3 * mesh.tp, 2 * mesh.tp
    tokens = randint(v, 2, s)

    def local(groups: Groups, w: Tensor, table: Tensor) -> Tensor:
        h = nn.vocab_embedding(tokens, w, groups.tp, sequence_parallel=sp)
        return h + nn.position_embedding(table, s, groups.tp, sequence_parallel=sp)

    def dense(w: Tensor, table: Tensor) -> Tensor:
        return w[tokens] + table[:s]

    out = P(None, "tp") if sp else P()
    specs = (P("tp"), P(sums=("tp",)) if sp else P())
    return Case(local, dense, (randn(v, 3), randn(s + 1, 3)), specs, out)


def dense_loss(z: Tensor, labels: Tensor, weights: Tensor, smoothing: float, zeta: float) -> Tensor:
    """torch's own cross entropy, plus z-loss, weighted."""
    flat = z.flatten(0, -2)
    loss = F.cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=smoothing)
    return (weights.flatten() * (loss + zeta * flat.logsumexp(-1).square())).sum()


def loss(mesh: Mesh, sp: bool) -> Case:
    """vocab_cross_entropy with smoothing and z-loss."""
    del sp
    v, s = 3 * mesh.tp, 3
    labels, weights = randint(v, 2, s), randn(2, s).abs()

    def local(groups: Groups, z: Tensor) -> Tensor:
        token_losses = nn.vocab_cross_entropy(
            z, labels, groups.tp, vocab=v, label_smoothing=0.2, z_loss=0.1
        )
        return (weights * token_losses).sum()

    def dense(z: Tensor) -> Tensor:
        return dense_loss(z, labels, weights, 0.2, 0.1)

    return Case(local, dense, (randn(2, s, v),), (P(None, None, "tp"),), P(), power=1)


def head(mesh: Mesh, sp: bool, chunk: int = 0) -> Case:
    """linear_cross_entropy; with a chunk, the Function that computes gradients beside the loss."""
    v, s, d = 3 * mesh.tp, 2 * mesh.tp, 3
    labels, weights = randint(v, 2, s), randn(2, s).abs()
    rule = nn.TokenLoss(vocab=v, label_smoothing=0.2, z_loss=0.1)

    def local(groups: Groups, h: Tensor, w: Tensor) -> Tensor:
        tp = groups.tp
        if chunk:
            how = (tp, rule, sp, chunk, None, False)
            return HeadLoss.apply(h, w, labels, weights, tp.index, *how)[0]
        return nn.linear_cross_entropy(
            h, w, labels, weights, tp, vocab=v, label_smoothing=0.2, z_loss=0.1,
            sequence_parallel=sp, chunk=0,
        )  # fmt: skip

    def dense(h: Tensor, w: Tensor) -> Tensor:
        return dense_loss(h @ w.T, labels, weights, 0.2, 0.1)

    cut = P(None, "tp") if sp else P()
    return Case(local, dense, (randn(2, s, d), randn(v, d)), (cut, P("tp")), P(), power=1)


LAYERS: dict[str, Callable[[Mesh, bool], Case]] = {
    "column": column,
    "column, gathered": lambda mesh, sp: column(mesh, sp, gather=True),
    "row": row,
    "row, cut here": lambda mesh, sp: row(mesh, sp, cut_here=True),
    "mlp": feed_forward,
    "embedding": embedding,
    "loss": loss,
    "head": head,
    "head, in chunks": lambda mesh, sp: head(mesh, sp, chunk=3),
}


# ---------------------------------------------------------------------------- derivatives

Fn = Callable[..., Tensor]
Args = tuple[Tensor, ...]


def every(args: Args) -> tuple[int, ...]:
    """The numbers of all arguments."""
    return tuple(range(len(args)))


def tangents(args: Args) -> Args:
    """One direction for each argument."""
    return tuple(randn(*x.shape, seed=5) for x in args)


def batched(args: Args) -> Args:
    """Three versions of the first argument; the rest unbatched."""
    return torch.stack([args[0], args[0].sin(), args[0] * 0.5]), *args[1:]


def first(args: Args) -> tuple[int | None, ...]:
    """in_dims of `batched`."""
    return 0, *[None] * (len(args) - 1)


def squares(grads: Any) -> Tensor:
    """The sum of squares of all gradients."""
    return sum((g.square().sum() for g in grads), torch.zeros((), dtype=torch.float64))


OUTSIDE: dict[str, Callable[[Fn, Fn, Args], Any]] = {
    "value": lambda f, _, a: f(*a),
    "vjp": lambda f, _, a: vjp(f, *a)[1](randn(*f(*a).shape)),
    "jvp": lambda f, _, a: jvp(f, a, tangents(a))[1],
    "jvp of one argument": lambda f, _, a: jvp(lambda x: f(*a[:-1], x), a[-1:], a[-1:])[1],
    "grad": lambda _, s, a: grad(s, every(a))(*a),
    "vmap": lambda f, _, a: vmap(f, first(a))(*batched(a)),
    "vmap of grad": lambda _, s, a: vmap(grad(s, every(a)), first(a))(*batched(a)),
    "grad of vmap": lambda _, s, a: grad(
        lambda *b: vmap(s, first(a))(*b).square().sum(), every(a)
    )(*batched(a)),
    "jvp of grad": lambda _, s, a: jvp(grad(s, every(a)), a, tangents(a))[1],
    "jvp of jvp": lambda _, s, a: jvp(lambda *b: jvp(s, b, tangents(a))[1], a, a)[1],
    "grad of jvp": lambda _, s, a: grad(lambda *b: jvp(s, b, tangents(a))[1], every(a))(*a),
    "grad of grad": lambda _, s, a: grad(
        lambda *b: squares(grad(s, every(a))(*b)), every(a)
    )(*a),
}  # fmt: skip

INSIDE: dict[str, Callable[[Fn, Args, Args], Any]] = {
    "grad": lambda s, a, _: grad(s, every(a))(*a),
    "jvp of grad": lambda s, a, t: jvp(grad(s, every(a)), a, t)[1],
    "jvp of jvp of grad": lambda s, a, t: jvp(lambda *b: jvp(grad(s, every(a)), b, t)[1], a, t)[1],
}
