"""What holds of mfun, each as a function of about a second that raises where it does not.

`train(...)` trains a tiny model and compares it with the independent reference. Where "mailbox",
all ranks run as one vmap a stage, stages by a mailbox: code for derivatives of every order. Where
"threads", each rank is a thread and runs what it would run as a process: fused kernels, overlapped
communication, messages. The other properties compare with arithmetic, or mfun with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from mfun import config as cfg
from mfun import data, nn, rng, spec, tree
from mfun.comm import DUALS, collectives, p2p, simulate, single_groups
from mfun.config import Config
from mfun.grads import GradBuffers, finalize, reductions
from mfun.grads.finalize import NORM_CHUNK, sum_of_squares
from mfun.mesh import Mesh
from mfun.nn.layer import Layer
from mfun.pipeline import mailbox
from mfun.schedule import (
    SCHEDULES,
    B,
    F,
    I,
    Recv,
    ScheduleError,
    Send,
    Sizes,
    W,
    check,
    merge,
    sends_first,
    simulate_time,
    split,
)
from mfun.schedule import plan as plan_schedule
from mfun.schedule.streams import Placement
from mfun.spec import P, ParamSpec
from mfun.train.feed import Feed
from mfun.train.plan import plan
from mfun.train.step import Trainer
from mfun.verify import reference
from mfun.verify.batches import all_batches, rank_batches
from mfun.verify.compare import judge
from mfun.verify.run import in_mailbox, reference_history, settings_of
from tests import toys
from tests.threads import in_threads, on_threads

SMALL = (
    "model.position=learned model.norm=layernorm model.tied=true model.bias=none model.dropout=0 "
    "model.layers=1 model.hidden=8 model.heads=2 model.ffn=8 model.vocab=19 model.seq_len=6 "
    "model.init_std=0.3 parallel.tp=1 parallel.pp=1 precision.policy=fp64 optim.schedule=constant "
    "optim.warmup=0 optim.clip=0 optim.eps=1e-4 optim.name=adamw optim.lr=1e-3 train.steps=1 "
    "train.global_batch=4 train.microbatches=2"
)
SECTIONS = {
    field: name
    for name, section in cfg.SECTIONS.items()
    for field in section.__annotations__
    if field not in ("section", "schedule")  # two sections have a schedule
}


class Broken(AssertionError):
    """A property does not hold; the message says what is wrong."""


class Property(NamedTuple):
    """A named check that raises where mfun is broken."""

    name: str
    check: Callable[[], None]


@cache
def small(settings: str) -> Config:
    """The smallest model with fields changed, "tp=2 dropout=0.1"; sections may be left out."""
    given = (item.split("=")[0] for item in settings.split())
    sections = ("" if "." in field else f"{SECTIONS[field]}." for field in given)
    changes = [f"{a}{b}" for a, b in zip(sections, settings.split(), strict=True)]
    return cfg.resolve(cfg.override(Config(), [*SMALL.split(), *changes]), None)


history = cache(reference_history)

WHERE = {"mailbox": in_mailbox, "threads": in_threads, "plain": partial(in_mailbox, plain=True)}


def train(settings: str, where: str = "mailbox") -> Property:
    """Losses, norms, gradients, parameters and replicas are those of one device."""

    def check() -> None:
        config = small(settings)
        layout = plan(config)
        results = WHERE[where](layout)
        report = judge(layout, results, history(config))
        if not report.ok:
            raise Broken("\n".join(report.notes))

    return Property(f"{where}: {settings}", check)


def train_all(*settings: str) -> Property:
    """Several at once."""

    def check() -> None:
        for one in settings:
            train(one).check()

    return Property(f"mailbox: {' | '.join(settings)}", check)


def named(check: Callable[[], None]) -> Property:
    """A property with its docstring as name."""
    assert check.__doc__
    return Property(check.__doc__.rstrip("."), check)


def equal(what: str, have: Any, want: Any) -> None:
    """Equal to rounding."""
    have, want = (torch.as_tensor(x, dtype=torch.float64) for x in (have, want))
    if have.shape != want.shape or not torch.allclose(have, want, rtol=1e-11, atol=1e-12):
        raise Broken(f"{what} is {have.tolist()}, not {want.tolist()}")


def refused(what: str, error: type[Exception], call: Callable[[], Any]) -> None:
    """The call raises this error."""
    try:
        call()
    except error:
        return
    raise Broken(f"{what} was not refused")


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------- collectives and layers

IN, OUT = P("tp"), P("tp")  # rank-local values stacked along dim 0
WHOLE = P()  # one value, equal on all ranks
Pieces = list[Tensor]


def total(xs: Pieces) -> Tensor:
    return torch.stack(xs).sum(0)


COLLECTIVES: dict[str, tuple[P, P, tuple[int, ...], Callable[[Pieces], Pieces]]] = {
    # name: type in, type out, parameters, what every rank gets from what all three ranks have
    "copy": (WHOLE, OUT, (), lambda xs: xs),
    "reduce": (IN, WHOLE, (), lambda xs: [total(xs)] * 3),
    "all_reduce": (IN, OUT, (), lambda xs: [total(xs)] * 3),
    "gather": (IN, OUT, (0,), lambda xs: [torch.cat(xs)] * 3),
    "reduce_scatter": (IN, OUT, (0,), lambda xs: [*total(xs).chunk(3)]),
    "split": (WHOLE, OUT, (0,), lambda xs: [*xs[0].chunk(3)]),
    "unsplit": (IN, WHOLE, (0,), lambda xs: [torch.cat(xs)] * 3),
    "all_to_all": (
        IN,
        OUT,
        (0, 1),
        lambda xs: [torch.cat([x[r : r + 1] for x in xs], 1) for r in range(3)],
    ),
    "shift": (IN, OUT, (1,), lambda xs: [xs[2], xs[0], xs[1]]),
    "broadcast": (IN, OUT, (1,), lambda xs: [xs[1]] * 3),
    "collect": (IN, OUT, (1,), lambda xs: [xs[0] * 0, total(xs), xs[0] * 0]),
}


@named
def every_collective() -> None:
    """every collective is its definition, its derivative the transpose, in both modes."""
    assert COLLECTIVES.keys() == DUALS.keys()
    for name, (enter, leave, params, definition) in COLLECTIVES.items():
        call = getattr(collectives, name)
        local = lambda groups, x, c=call, p=params: c(x, groups.tp, *p)  # noqa: E731
        run = simulate(local, Mesh(tp=3), (enter,), leave, check=False)
        x = randn(1, 3 if enter == WHOLE else 9, 2)
        want = definition([x] * 3 if enter == WHOLE else [*x.chunk(3)])
        y, pull, *_ = vjp(run, x)
        equal(f"{name}", y, want[0] if leave == WHOLE else torch.cat(want))
        equal(f"{name}'s forward derivative", jvp(run, (x,), (x,))[1], y)
        columns = vmap(run)(torch.eye(x.numel()).double().unflatten(1, x.shape)).flatten(1)
        rows = vmap(pull)(torch.eye(y.numel()).double().unflatten(1, y.shape))[0].flatten(1)
        equal(f"{name}'s dual ({DUALS[name].dual})", rows, columns.T)


@named
def second_derivatives() -> None:
    """a Hessian-vector product through tensor-parallel layers is the dense one."""
    x, up, down, v = randn(0, 1, 2, 4), randn(1, 6, 4), randn(2, 4, 6), randn(3, 1, 2, 4)

    def product(layer: Callable[..., Tensor]) -> Tensor:
        slope = grad(lambda x: layer(x, up, down).square().sum())
        return grad(lambda x: (slope(x) * v).sum())(x)

    want = product(lambda x, up, down: torch.nn.functional.gelu(x @ up.T) @ down.T)
    for sp in (False, True):
        local = lambda groups, x, up, down, sp=sp: nn.mlp(  # noqa: E731
            {"up": up, "down": down}, x, groups.tp, activation="gelu", sequence_parallel=sp
        )
        tokens = P(None, "tp") if sp else P()
        specs = (tokens, P("tp"), P(None, "tp"))
        run = simulate(local, Mesh(tp=2), specs, tokens, check=False)
        equal(f"the product{', cut along the sequence' if sp else ''}", product(run), want)


@named
def linear_variants() -> None:
    """a row layer that cuts its own input and a column layer that gathers equal the dense ones."""
    x, w, v = randn(0, 1, 2, 4), randn(1, 6, 4), randn(2, 1, 2, 6)
    column = lambda g, x, w: nn.column_linear(x, w, None, g.tp, gather_output=True)  # noqa: E731
    row = lambda g, x, w: nn.row_linear(x, w, None, g.tp, input_is_parallel=False)  # noqa: E731
    want, pull, *_ = vjp(lambda x, w: x @ w.T, x, w)
    for name, layer, cut in (("column", column, P("tp")), ("row", row, P(None, "tp"))):
        have, back, *_ = vjp(simulate(layer, Mesh(tp=2), (P(), cut), P(), check=False), x, w)
        equal(name, have, want)
        for leaf, a, b in zip("xw", back(v), pull(v), strict=True):
            equal(f"{name}: gradient of {leaf}", a, b)


@named
def head_in_chunks() -> None:
    """the chunked head's loss and gradients are those of cross entropy on whole logits."""
    h, w = randn(0, 2, 5, 4).requires_grad_(), randn(1, 7, 4).requires_grad_()
    labels, weights = torch.arange(10).view(2, 5) % 7, randn(2, 2, 5).abs()
    tp = single_groups().tp
    loss = nn.linear_cross_entropy(
        h, w, labels, weights, tp, vocab=7, label_smoothing=0.1, z_loss=0.01, chunk=3
    )
    z = (h @ w.T).flatten(0, 1)
    each = torch.nn.functional.cross_entropy(
        z, labels.flatten(), label_smoothing=0.1, reduction="none"
    )
    want = (weights.flatten() * (each + 0.01 * z.logsumexp(-1).square())).sum()
    equal("loss", loss.detach(), want.detach())
    leaves = (h, w)
    slopes = (torch.autograd.grad(y, leaves) for y in (loss, want))
    for leaf, a, b in zip("hw", *slopes, strict=True):
        equal(f"gradient of {leaf}", a, b)


# ---------------------------------------------------------------------- the trainer


def _mailbox(config: Config, head: Any, program: Callable[[Trainer, Any], Any]) -> list[Any]:
    """What `program(trainer, batches)` returns on each stage."""
    layout, office = plan(config, head), mailbox.Office()

    def one(world: Any) -> Any:
        batches = [
            world.build(lambda c, i=i: rank_batches(config, c, 0)[i])
            for i in range(config.train.microbatches)
        ]
        return (yield from program(Trainer(layout, world), batches))

    return mailbox.run([one(w) for w in mailbox.worlds(layout.mesh, office)], office)


@named
def evaluation() -> None:
    """evaluation is the mean over all tokens, without dropout, on every stage."""
    config = small("pp=2 layers=2 dp=2 dropout=0.5 global_batch=6")

    def program(trainer: Trainer, batches: Any) -> Any:
        return (yield from trainer.evaluate(trainer.init(), batches))

    settings = settings_of(config)
    params = reference.init(settings, config.train.seed)
    want, *_ = reference.loss(settings, params, all_batches(config, 0))
    for have in _mailbox(config, "loss", program):
        equal("the validation loss", have, want)


@named
def whole_logits() -> None:
    """logits of a cut vocabulary are whole, and without padding."""
    config = small("tp=2 sequence_parallel=true")

    def program(trainer: Trainer, batches: Any) -> Any:
        return (yield from trainer.logits(trainer.init(), batches))

    settings = settings_of(config)
    params = reference.init(settings, config.train.seed)
    (parts,) = _mailbox(config, "logits", program)
    for have, batch in zip(parts, all_batches(config, 0), strict=True):
        equal("logits", have[1], reference.forward(settings, params, batch))


@named
def old_state_stays() -> None:
    """with donate=False the old state keeps its bits, parameters and moments alike."""

    def program(trainer: Trainer, batches: Any) -> Any:
        state, _ = yield from trainer.step(trainer.init(), batches)
        leaves = lambda: [*tree.flatten(state.params).values(), *moments(state)]  # noqa: E731
        before = [x.clone() for x in leaves()]
        yield from trainer.step(state, batches, donate=False)
        for old, now in zip(before, leaves(), strict=True):
            if not torch.equal(old, now):
                raise Broken("the old state was written to")

    for name in ("adamw", "sgd"):
        _mailbox(small(f"name={name} clip=0.1"), "loss", program)


@named
def zeros_counted() -> None:
    """zeros of the gradient are counted once, without padding, in every layout and sharded."""
    for layout in ("tp=2", "tp=2 pp=2 layers=2 dp=2", "dp=2 tp=2 sharding=optim"):
        config = small(f"count_zeros=true tied=false {layout}")  # 19 rows on two ranks

        def program(trainer: Trainer, batches: Any) -> Any:
            return (yield from trainer.step(trainer.init(), batches))[1].num_zeros

        settings = settings_of(config)
        params = reference.init(settings, config.train.seed)
        whole = reference.loss_and_grads(
            settings, params, all_batches(config, 0), config.train.seed, 0
        )
        want = sum(int((g == 0).sum()) for g in whole.grads.values())
        for have in _mailbox(config, "loss", program):
            equal(f"num_zeros of {layout}", have, want)


@named
def growing_batches() -> None:
    """while the batch grows, each step takes up where the one before stopped."""
    config = small("dp=2 global_batch=8 microbatches=4 rampup=2,2,12")
    corpus = data.join([("a", bytes(range(19)) * 40)])
    taken: list[list[int]] = []
    for step in range(7):
        own = [Feed(config, corpus, corpus, dp, torch.device("cpu")).step(step) for dp in (0, 1)]
        taken.append([n for batches in own for b in batches for n in b["sample"].tolist()])
        if {len(b["sample"]) for batches in own for b in batches} != {1}:
            raise Broken("a microbatch changed its size")
    # batches of 2 up to sample 4, of 4 up to 8, of 6 up to 12, then of 8
    equal("the sizes", [len(samples) for samples in taken], [2, 2, 4, 6, 8, 8, 8])
    equal("the samples", [n for samples in taken for n in samples], [*range(38)])


def moments(state: Any) -> list[Tensor]:
    from mfun.optim import state_tensors

    return list(state_tensors(state.opt).values())


# ---------------------------------------------------------------------- gradients of toy models

ONES = (1.0, 1.0), (1, 1)


@named
def tied_in_any_order() -> None:
    """two tied leaves declared in opposite order on two stages get each its own sum."""
    leaf = ParamSpec(shape=(1,), grad={"tp": "equal"})
    first = Layer("a", {"u": leaf, "v": leaf}, lambda p, x, c: {"h": p["u"] + 0 * p["v"]})
    last = Layer("b", {"v": leaf, "u": leaf}, lambda p, x, c: {"h": x["h"] + 10 * p["v"]})
    result = toys.run([first, last, toys.sum_loss()], [1, 2], [[ONES]], mesh=Mesh(pp=2))
    for grads in result.grads:
        equal("the gradient of u", grads["u"].flatten(), [1.0])
        equal("the gradient of v", grads["v"].flatten(), [10.0])


@named
def unused_leaves() -> None:
    """a leaf that no layer uses has gradient 0, whatever its buffer held."""
    unused = Layer("z", {"z": ParamSpec(shape=(1,))}, lambda p, x, c: x)
    layers = [*toys.scalar_model()[:1], unused, toys.sum_loss()]

    def poison(grads: GradBuffers) -> None:
        for buffer in grads.buffers:
            buffer.fill_(7.0)

    result = toys.run(layers, [3], [[ONES]], mesh=Mesh(), hook=poison)
    equal("the gradient of z", result.grad("z"), [0.0])


@named
def no_tokens() -> None:
    """a microbatch, or a batch, without a valid token adds exactly 0."""
    nothing, one = ((1.0, 1.0), (0, 0)), ((1.0, 1.0), (1, 0))
    run = lambda *rows, norm: toys.run(  # noqa: E731
        toys.scalar_model(), [2], [rows], mesh=Mesh(), norm=norm
    ).grad("w")
    equal("the gradient of an empty batch", run(nothing, nothing, norm="tokens"), [0.0])
    for norm in ("tokens", "microbatch"):
        equal("the gradient of a lone token", run(one, norm=norm), [1.0])
    for norm, want in (("tokens", 1.0), ("microbatch", 0.5)):
        equal(f"the gradient by {norm}", run(nothing, ONES, norm=norm), [want])


@named
def finalized_tree() -> None:
    """research code's gradients, finalized as a tree under simulate, are whole."""
    mesh = Mesh(tp=2, dp=2)
    leaves = {k: ParamSpec(shape=(1,), grad={"tp": k}) for k in ("equal", "partial")}
    table = reductions([leaves], mesh)
    whole = simulate(
        lambda groups, x: finalize({k: x for k in leaves}, groups, table),
        mesh,
        (P(("dp", "tp")),),
        P(),
        check=False,
    )(torch.tensor([1.0, 1.0, 10.0, 10.0]))
    equal("the gradient of equal", whole["equal"], [11.0])
    equal("the gradient of partial", whole["partial"], [22.0])


@named
def unused_message() -> None:
    """a tensor that crosses stages and is not used sends a gradient of 0 back."""
    leaf = {"w": ParamSpec(shape=(1,), grad={"tp": "equal"})}
    first = Layer("w", leaf, lambda p, x, c: {"h": p["w"] * c.batch["values"], "r": p["w"] * 9})
    result = toys.run([first, toys.sum_loss()], [1, 1], [[ONES]], mesh=Mesh(pp=2))
    equal("the gradient of w", result.grad("w"), [1.0])


@named
def norm_of_long_buffers() -> None:
    """the sum of squares of a buffer is that of its elements, whatever its length."""
    for size in (0, 3, NORM_CHUNK, 2 * NORM_CHUNK + 5):
        x = randn(size, 2, size)
        equal(f"the sum over {size} elements", sum_of_squares(x), (x * x).sum(-1))


@named
def recompute_runs_twice() -> None:
    """with recompute="full" every layer runs again for its backward, otherwise once."""
    for settings, times in (("recompute=none", 1), ("recompute=full", 2)):
        config = small(settings)
        layout, calls = plan(config), []

        def counted(layer: Layer, calls: list[str] = calls) -> Layer:
            def apply(params: Any, x: Any, ctx: Any) -> Any:
                calls.append(layer.name)
                return layer.apply(params, x, ctx)

            return layer._replace(apply=apply)

        stages = tuple(
            attrs.evolve(stage, chunks=(tuple(map(counted, stage.layers)),))
            for stage in layout.stages
        )
        in_mailbox(attrs.evolve(layout, stages=stages))
        steps = config.train.steps + 1  # the first gradients are taken twice
        equal("the calls", len(calls), 3 * times * steps * config.train.microbatches)


@named
def declared_mean() -> None:
    """a gradient declared `mean` over tp is the ranks' mean."""
    spec = {"w": ParamSpec(shape=(1,), grad={"tp": "mean"})}
    layer = Layer("w", spec, lambda p, x, c: {"h": p["w"] * (1.0 + c.groups.tp.index)})
    result = toys.run([layer, toys.sum_loss()], [2], [[ONES]], mesh=Mesh(tp=2))
    equal("the gradient of w", result.grad("w"), [1.5])


@named
def undeclared() -> None:
    """a leaf replicated over tp without a declaration is refused."""
    call = lambda: reductions([{"w": ParamSpec(shape=(4,))}], Mesh(tp=2))  # noqa: E731
    refused("the leaf", ValueError, call)


@named
def unequal_values() -> None:
    """values declared equal over an axis that are not are refused, inside and at the exit."""
    inside = simulate(lambda g, x: collectives.copy(x, g.tp), Mesh(tp=2), (P("tp"),), P("tp"))
    refused("an input", ValueError, lambda: inside(torch.arange(4.0)))
    exit_ = simulate(lambda g, x: x, Mesh(tp=2), (P("tp"),), P())
    refused("a result", ValueError, lambda: exit_(torch.arange(4.0)))


# ---------------------------------------------------------------------- pipeline and data


ENDS: dict[str, Callable[[int, int, int], int | None]] = {
    "none": lambda p, v, m: 3 * m if p == v == 1 else None,
    "gpipe": lambda p, v, m: 3 * (m + p - 1) if v == 1 else None,
    "1f1b": lambda p, v, m: 3 * (m + p - 1) if v == 1 else None,
    "interleaved": lambda p, v, m: 3 * (m * v + p - 1) if m >= p else None,
    "looped-bfs": lambda p, v, m: 3 * (m * v + p - 1) if m >= p else None,
    "dualpipev": lambda p, v, m: 6 * m + p - 1 if v == 2 and m >= 2 * p else None,
    "dualpipe": lambda p, v, m: (
        3 * m + p // 2 - 1 if v == 2 and m >= 2 * p and p % 2 == m % 2 == 0 else None
    ),
}
"""When a step ends if F = I = W = 1, where the published forms say it."""


@named
def schedules() -> None:
    """every schedule is accepted for small sizes, in the time and memory that it says."""
    for name, ends in ENDS.items():
        row = SCHEDULES[name]
        for p, v, m in product(range(1, 5), [row.chunks] if row.chunks else [1, 2], range(1, 9)):
            if name == "none" and p > 1:
                continue
            streams = plan_schedule.__wrapped__(name, p, m, chunks=v)
            plan_schedule.__wrapped__(name, p, m, forward_only=True, chunks=v)
            have = simulate_time(streams, place=row.place(Sizes(p, m, v))).makespan
            want = ends(p, v, m)
            if want is not None and have != want:
                raise Broken(f"{name}: {p} stages, {v} chunks, {m} microbatches end at {have}")


@named
def split_backwards() -> None:
    """weights come `delay` backwards later, and merging what stands together undoes it."""
    ops = list(SCHEDULES["1f1b"].ops(1, Sizes(3, 4)))
    late = "[F0, F1, I0, F2, I1, W0, F3, I2, W1, I3, W2, W3]"
    if (have := str(list(split(ops, delay=1)))) != late:
        raise Broken(f"split by one is {have}")
    first = str(list(sends_first([*ops[:2], B(0)], 1, Placement(3))))
    if first != "[F0, F1, I0, W0]":
        raise Broken(f"of a gradient that is sent the backward is {first}")
    lonely = [I(0), F(1), W(0), I(2)]
    for apart, whole in ((split(ops), ops), (lonely, lonely)):
        if (have := list(merge(apart))) != whole:
            raise Broken(f"merged it is {have}, not {whole}")


@named
def bad_schedules() -> None:
    """streams that lack, repeat, misplace or misaddress an op are refused."""
    good = plan_schedule("1f1b", 2, 2)
    check(good)
    apart = [[F(0), I(0), W(0)]]
    check(apart)
    wrong = {
        "a missing backward": (good[0][:-1], good[1]),
        "a backward before its forward": (good[0], (good[1][0], good[1][2], good[1][1])),
        "a swapped pair of messages": (swapped(good[0]), good[1]),
        "a deadlock": (early(good[0]), good[1]),
        "weights before inputs": [[F(0), W(0), I(0)]],
        "weights without inputs": [[F(0), W(0)]],
        "missing weights": [[F(0), I(0)]],
        "a backward twice": [[F(0), I(0), W(0), W(0)]],
        "a message for another stage": ([F(0), Send(0, 1, "act", 0)], [Recv(0, 1, "act", 0), F(0)]),
    }
    for what, streams in wrong.items():
        forwards = not any(isinstance(op, B | I | W) for ops in streams for op in ops)
        refused(what, ScheduleError, lambda s=streams, f=forwards: check(s, f))


def swapped(ops: tuple[Any, ...]) -> tuple[Any, ...]:
    """The stream with its first two sends exchanged."""
    a, b, *_ = (i for i, op in enumerate(ops) if isinstance(op, Send))
    out = [*ops]
    out[a], out[b] = out[b], out[a]
    return tuple(out)


@named
def foreign_message() -> None:
    """a message in the place of another is refused, naming both."""

    def main(groups: Any) -> None:
        way = p2p.Transport(groups.pp.group, groups.pp.ranks, torch.device("cpu"))
        for sent, due in ((0, 0), (2, 1)):  # a good one, by which shapes are known, and another's
            if int(groups.rank) == 0:
                send = Send(sent, 1, "act", 1)
                way.post([send], {send: {"h": torch.ones(2)}}, [0, 0, 0])
            else:
                recv = Recv(due, 1, "act", 0)
                way.post([recv], {}, [0, 0, 0])
                if sent == due:
                    way.take(recv)
                else:
                    refused("the message", RuntimeError, lambda r=recv: way.take(r))

    on_threads(Mesh(pp=2), main)


def early(ops: tuple[Any, ...]) -> tuple[Any, ...]:
    """The stream with its first receive before its first send, and a compute op between."""
    take = next(op for op in ops if isinstance(op, Recv))
    return (ops[0], take, *(op for op in ops[2:3]), ops[1], *(op for op in ops[3:] if op != take))


@named
def rows_of_ranks() -> None:
    """data ranks and their microbatches hold every sample of a batch once, in any layout."""
    corpus = data.join([("text", bytes(range(97, 123)) * 12)])
    for dp in (1, 2, 3):
        samples: list[int] = []
        for index in range(dp):
            sizes = (12 // dp - 1, 1)
            parts = data.rank_batch(
                corpus,
                seed=0,
                consumed=24,
                dp_index=index,
                dp=dp,
                global_batch=12,
                microbatch_sizes=sizes,
                seq_len=4,
            )
            samples += [n for part in parts for n in part["sample"].tolist()]
            for part in parts:
                equal("the labels", part["labels"][:, :-1], part["tokens"][:, 1:])
            if tuple(len(part["sample"]) for part in parts) != sizes:
                raise Broken("microbatches of other sizes")
        if samples != list(range(24, 36)):
            raise Broken(f"dp={dp}: the ranks hold the samples {samples}")


@named
def padding_is_zero() -> None:
    """rows that pad the vocabulary start as zeros, next to bitwise slices of the whole."""
    leaf = ParamSpec(shape=(5, 2), p=P("tp"), pads=(0,))
    piece = spec.init_leaf("w", leaf, 0, Mesh(tp=2), {"tp": 1}, torch.float64)
    whole = rng.normal(rng.key(0, "init", "w"), rng.Grid.whole((5, 2)), torch.float64, std=0.02)
    equal("the piece", piece, torch.cat([whole[3:], torch.zeros(1, 2)]))
