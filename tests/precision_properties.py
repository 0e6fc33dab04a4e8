"""Properties of 16-bit training, for planted faults (tests/faults.py)."""

from __future__ import annotations

import math
from typing import Any

import torch

from mfun import optim, rng, tree
from mfun.comm import ProcessWorld, finish, single_groups
from mfun.grads import needed_groups
from mfun.nn import linear_cross_entropy
from mfun.optim.masters import round_by_chance
from mfun.train.plan import plan
from mfun.train.rounding import words_by_shard
from mfun.train.step import Trainer
from mfun.verify import reference
from mfun.verify.batches import rank_batches
from mfun.verify.reference.optim import decayed
from mfun.verify.run import settings_of
from tests import plain16
from tests.properties import Broken, Property, named, small
from tests.threads import on_threads

TINY = (
    "position=learned norm=layernorm activation=gelu tied=true bias=none dropout=0 layers=1 "
    "hidden=16 heads=2 kv_heads=0 ffn=24 seq_len=8 vocab=19 lr=0.01 weight_decay=0.1 b2=0.95 "
)


def as_plain_torch(settings: str, steps: int = 3) -> Property:
    """A run of threads has the bits of plain torch: weights, loss scales, skipped steps."""

    def check() -> None:
        config = small(TINY + settings)
        layout, precision, all_of = plan(config), config.precision, settings_of(config)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision.policy]
        data = [
            [rank_batches(config, {"dp": dp}, s) for dp in range(config.parallel.dp)]
            for s in range(steps)
        ]
        right = plain16.train(
            reference.init(all_of, config.train.seed, dtype),
            data,
            all_of["model"],
            lambda n: reference.learning_rate(all_of, n),
            decayed,
            eps=config.optim.eps,
            scale=None if precision.scaling == "none" else plain16.Scale(precision.initial_scale),
            rule={
                "every": precision.growth_every,
                "hysteresis": precision.hysteresis,
                "minimum": 1.0,
            },
        )

        def main(groups: Any) -> Any:
            trainer = Trainer(layout, ProcessWorld(groups))
            state, seen, dp = trainer.init(), [], int(groups.rank)
            for step in range(steps):
                state, metrics = finish(trainer.step(state, data[step][dp]))
                seen.append(metrics)
            return tree.flatten(state.params), seen

        for found, seen in on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh)):
            _compare(found, seen, right)

    return Property(f"as plain torch: {settings}", check)


def _compare(found: dict[str, Any], seen: list[Any], right: plain16.Run) -> None:
    if [m.skipped for m in seen] != right.skipped:
        raise Broken(f"skipped: {[m.skipped for m in seen]}, not {right.skipped}")
    scales = [m.loss_scale or 1.0 for m in seen]
    if scales != right.scales:
        raise Broken(f"loss scales: {scales}, not {right.scales}")
    for path, x in right.params.items():
        if not torch.equal(found[path], x):
            raise Broken(f"{path} is another weight than plain torch's")


@named
def one_decision() -> None:
    """an overflow on any rank is known on all."""
    layout = plan(small("tp=2 dp=2 pp=2 layers=2 global_batch=4 policy=fp16"))

    def decide(groups: Any, on: int) -> bool:
        trainer = Trainer(layout, ProcessWorld(groups))
        grads = trainer.buffers()
        for buffer in grads.buffers:
            buffer.fill_(4.0)
        if int(groups.rank) == on:
            grads.buffers[-1][0] = math.inf
        found = finish(trainer._unscaled(grads, 4.0))
        if float(grads.buffers[0][-1]) != 1.0:
            raise Broken("gradients are not divided by the loss scale")
        return found

    for on in (0, 3, 5, 6):
        extra = needed_groups(layout.table, layout.mesh)
        said = on_threads(layout.mesh, lambda groups, on=on: decide(groups, on), extra)
        if said != [True] * 8:
            raise Broken(f"rank {on} overflows, but the ranks decide {said}")


@named
def tied_alike() -> None:
    """the stages of a tied table round it alike."""
    text = "policy=bf16 stochastic_rounding=true pp=2 dp=2 layers=2 sharding=optim global_batch=4"
    layout = plan(small(text))

    def main(groups: Any) -> dict[str, Any]:
        world = ProcessWorld(groups)
        words = words_by_shard(layout, world)
        found = {}
        for bucket in layout.buckets(world.stage):
            leaf = torch.empty(bucket.size // 2)
            found[bucket.spans[0].path] = words(rng.key(0), f"bucket.{bucket.index}", leaf)
        return {"dp": world.coords["dp"], "words": found}

    tied: dict[int, list[Any]] = {}
    for one in on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh)):
        tied.setdefault(one["dp"], []).append(one["words"]["embed.tokens"])
    if not all(torch.equal(*words) for words in tied.values()):
        raise Broken("the tied table has other words on another stage")
    if torch.equal(tied[0][0], tied[1][0]):
        raise Broken("two shards have the same words")


@named
def unbiased() -> None:
    """rounding by chance has the right mean."""
    words = torch.arange(2**16) << 16
    for x in (1.0 + 2.0**-9, -0.3):
        value = torch.full((2**16,), x)
        mean = float(round_by_chance(value, words).double().mean())
        if mean != float(value[0]):
            raise Broken(f"the mean rounding of {x} is {mean}")


@named
def resumes() -> None:
    """masters and the scale's counters go on where they were."""
    opt = optim.with_loss_scale(
        optim.with_masters(optim.sgd(1.0, momentum=0.0)), optim.dynamic_scale(8.0, growth_every=2)
    )
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    state = opt.init(params)
    for step in range(6):
        gradient = {"w": torch.full((1,), 6e-4)}
        params, state = opt.update(gradient, state, params, overflow=step == 1, donate=True)
        tensors, numbers = optim.state_tensors(state), optim.state_scalars(state)
        state = optim.restore_state(opt.init(params), tensors, numbers)
    if abs(float(state["inner"]["master"]["w"]) - (1 - 5 * 6e-4)) > 1e-6:
        raise Broken(f"after five small updates the master is {state['inner']['master']['w']}")
    if state["loss_scale"] != (32.0, 0, 2, 1):
        raise Broken(f"the loss scale is {state['loss_scale']}")


@named
def rare_tokens() -> None:
    """a token of probability 1e-7 has its gradient in fp16."""
    h, w = torch.ones(1, 12, 16).half(), torch.full((20, 16), -4.0).half()
    w[0], w[1] = 1.0, 1.0 + math.log(1e-7) / 16
    labels, weights = torch.zeros(1, 12, dtype=torch.int64), torch.ones(1, 12)
    leaf = w.clone().requires_grad_()
    loss = linear_cross_entropy(h, leaf, labels, weights, single_groups().tp, vocab=20)
    (dw,) = torch.autograd.grad(loss, leaf)
    right = 12 * torch.softmax((h.double() @ w.double().T)[0, 0], -1)[1]
    if not abs(float(dw[1, 0]) / float(right) - 1) < 0.05:
        raise Broken(f"the gradient of a rare token is {float(dw[1, 0])}, not {float(right)}")
