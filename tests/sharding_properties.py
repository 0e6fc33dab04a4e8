"""Properties of sharded runs, for tests and planted faults: the order of events, memory, states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor

from mfun import tree
from mfun.comm import ProcessWorld, finish
from mfun.comm.exchange import sum_exchanged
from mfun.comm.world import Reduce, Waits
from mfun.grads import (
    GradBuffers,
    finalize_steps,
    global_norm,
    lay_out,
    needed_groups,
    reductions,
)
from mfun.mesh import AxisLike, Mesh
from mfun.pipeline import mailbox
from mfun.spec import ParamSpec
from mfun.train.plan import Plan, plan
from mfun.train.shards import by_path
from mfun.train.step import State, Trainer
from mfun.verify.batches import rank_batches
from tests.properties import Broken, equal, named, small
from tests.threads import on_threads

# ---------------------------------------------------------------------------- order of events


class Event(NamedTuple):
    """What a rank did: a gradient is added ("grad"), a bucket's reduction is started ("start") or
    waited for ("wait"), so are its parameters ("gather", "arrive"), a layer runs ("layer")."""

    kind: str
    what: str | int


class Recorder(ProcessWorld):
    """A world that notes when collectives on the trainer's buffers start and are waited for."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.events: list[Event] = []
        self.trainer: Trainer | None = None

    def all_reduce(
        self,
        x: Tensor,
        axes: Sequence[AxisLike],
        stages: Sequence[int] | None = None,
        op: Reduce = "sum",
    ) -> Waits[Tensor]:
        """As of processes."""
        return self._noted("start", "wait", x, super().all_reduce(x, axes, stages, op))

    def reduce_scatter(
        self, x: Tensor, axes: Sequence[AxisLike], op: Reduce = "sum", *, wide: bool = False
    ) -> Waits[Tensor]:
        """As of processes."""
        return self._noted("start", "wait", x, super().reduce_scatter(x, axes, op, wide=wide))

    def gather(self, out: Tensor, shard: Tensor, axes: Sequence[AxisLike]) -> Waits[Tensor]:
        """As of processes."""
        return self._noted("gather", "arrive", out, super().gather(out, shard, axes))

    def _noted(self, start: str, end: str, x: Tensor, going: Waits[Tensor]) -> Waits[Tensor]:
        owner = self.trainer and (
            self.trainer.params.flat if start == "gather" else self.trainer.grads
        )
        for i, buffer in enumerate(owner.buffers if owner else ()):
            if x is buffer:
                self.events.append(Event(start, i))
                return self._awaited(Event(end, i), going)
        return going

    def _awaited(self, event: Event, going: Waits[Tensor]) -> Waits[Tensor]:
        self.events.append(event)
        return (yield from going)


def recorded(layout: Plan, steps: int = 1) -> list[list[Event]]:
    """The events of the last of some steps, by rank; each a thread that runs what a process would.

    Before Event("step", n) stand the gathers that the step before has started at its end.
    """

    def main(groups: Any) -> list[Event]:
        world = Recorder(groups)
        trainer = world.trainer = Trainer(layout, world)
        state = trainer.init()
        trainer.params.stage = attrs.evolve(trainer.stage, chunks=_noting(trainer, world))
        claim = trainer.buffers().claim

        def claimed(path: str) -> tuple[Tensor, int]:
            world.events.append(Event("grad", path))
            return claim(path)

        trainer.buffers().claim = claimed  # type: ignore[method-assign]
        early: list[Event] = []
        for step in range(steps):
            ends = [i for i, event in enumerate(world.events) if event.kind == "grad"]
            late = world.events[ends[-1] :] if ends else []
            early = [event for event in late if event.kind == "gather"] + [Event("step", step)]
            world.events.clear()
            state, _ = finish(trainer.step(state, rank_batches(layout.config, world.coords, step)))
        return [*early, *world.events]

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


def _noting(trainer: Trainer, world: Recorder) -> Any:
    """The stage's layers, which note that they run."""

    def noting(layer: Any) -> Any:
        def apply(*args: Any) -> Any:
            world.events.append(Event("layer", layer.name))
            return layer.apply(*args)

        return layer._replace(apply=apply)

    return tuple(tuple(map(noting, chunk)) for chunk in trainer.stage.chunks)


def layer_of(layout: Plan) -> dict[str, int]:
    """Where in the forward each parameter is used: embedding, blocks, head."""
    names = ["embed", *(f"blocks.{i}" for i in range(layout.config.model.layers)), "head"]
    out = {}
    for path in layout.specs:
        found = [i for i, name in enumerate(names) if f"{path}.".startswith(f"{name}.")]
        out[path] = found[0] if found else len(names) - 1  # the last norm goes with the head
    return out


def at(events: Sequence[Event], kind: str, what: str | int) -> list[int]:
    """Places of an event."""
    return [i for i, event in enumerate(events) if event == (kind, what)]


def hidden(layout: Plan, events: Sequence[Event]) -> int:
    """Buckets that are on their way while earlier layers run backward.

    Raises: Broken if one starts before its last gradient or after an earlier layer's last one, or
      is waited for before the last backward.
    """
    layer, behind = layer_of(layout), 0
    last = max(i for i, event in enumerate(events) if event.kind == "grad")
    for i, bucket in enumerate(layout.buckets(0)):
        (start,), (wait,) = at(events, "start", i), at(events, "wait", i)
        members = {span.path for span in bucket.spans}
        if not max(at(events, "grad", path)[-1] for path in members) < start < wait:
            raise Broken(f"bucket {i} is reduced before its last gradient")
        if wait < last:
            raise Broken(f"bucket {i} is waited for before the last backward")
        lowest = min(layer[path] for path in members)
        earlier = [path for path in layer if layer[path] < lowest]
        if not all(start < at(events, "grad", path)[-1] for path in earlier):
            raise Broken(f"bucket {i} starts after an earlier layer's backward")
        behind += bool(earlier)
    return behind


SMALL = "dp=2 layers=3 tied=false global_batch=4 bucket_size=100"


@named
def reduces_beside_backward() -> None:
    """a bucket is on its way while earlier layers run backward, and waited for at the end."""
    layout = plan(small(f"{SMALL} overlap=true"))
    for events in recorded(layout):
        if hidden(layout, events) < 3:
            raise Broken("less than three buckets are hidden")


@named
def kinds_close_together() -> None:
    """what does not decay is reduced with the layers it is of, not after the first layer."""
    layout = plan(small(f"{SMALL} sharding=optim".replace("bucket_size=100", "bucket_size=500")))
    layer = layer_of(layout)
    for bucket in layout.buckets(0):
        used_by = {layer[span.path] for span in bucket.spans}
        if max(used_by) - min(used_by) > 1:
            raise Broken(f"bucket {bucket.index} waits for layer {min(used_by)} of {used_by}")


@named
def layers_share_no_bucket() -> None:
    """where gradients are let go of, every bucket is of one layer, as its memory is."""
    layout = plan(small("dp=2 layers=3 tied=false global_batch=4 sharding=optim_grads"))
    layer = layer_of(layout)
    for bucket in layout.buckets(0):
        used_by = {layer[span.path] for span in bucket.spans}
        if len(used_by) > 1:
            raise Broken(f"bucket {bucket.index} is of the layers {used_by}")


@named
def gathers_beside_forward() -> None:
    """a layer waits for its own buckets of updated parameters, not for those of later layers."""
    layout = plan(small(f"{SMALL} sharding=optim gather_ahead=true steps=3"))
    for events in recorded(layout, 2):
        waits_by_layer(layout, events)


def waits_by_layer(layout: Plan, events: Sequence[Event]) -> None:
    """Each bucket's gather was started before the step, and is waited for by its first layer."""
    layer = layer_of(layout)
    names = [x.name for x in layout.stages[0].chunks[0]]
    (begin,) = [i for i, event in enumerate(events) if event.kind == "step"]
    for i, bucket in enumerate(layout.buckets(0)):
        first = min(layer[span.path] for span in bucket.spans)
        starts, arrives = at(events, "gather", i), at(events, "arrive", i)
        if not starts or starts[0] > begin:
            raise Broken(f"bucket {i} is not on its way when the step begins")
        if not arrives or arrives[0] > at(events, "layer", names[first])[0]:
            raise Broken(f"bucket {i} is not there when layer {names[first]} runs")
        if first and arrives[0] < at(events, "layer", names[first - 1])[0]:
            raise Broken(f"bucket {i} is waited for before layer {names[first - 1]} runs")


# ---------------------------------------------------------------------------- memory and states


@contextmanager
def dirty_memory() -> Iterator[None]:
    """What a storage grows by is full of NaN, as memory that others have used may be."""
    grow = torch.UntypedStorage.resize_

    def resize(self: torch.UntypedStorage, size: int) -> Any:
        before = self.size()
        out = grow(self, size)
        if size > before:
            everything = torch.empty(0, dtype=torch.uint8)
            everything.set_(self)[before:] = 0xFF  # type: ignore[call-overload]
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", resize)
        yield


@named
def padding_is_zero() -> None:
    """what pads a bucket is 0 in the norm, whatever its memory held before."""
    specs = {"a": ParamSpec(shape=(3,)), "b": ParamSpec(shape=(5,))}
    mesh = Mesh(dp=2)
    table = reductions([specs], mesh)
    buckets = lay_out(specs, table, mesh, torch.float64, sharded=True)
    (world,) = mailbox.worlds(mesh)
    with dirty_memory():
        grads = GradBuffers(
            specs, table, buckets, torch.float64, lead=world.lead, sharded=True, release=True
        )
        grads.start()
        grads.add({path: torch.ones(2, *spec.shape).double() for path, spec in specs.items()})
        finish(finalize_steps(world, grads))
        equal("the norm", finish(global_norm(world, grads))[0], (4 * 8) ** 0.5)


def values(trainer: Trainer, state: State) -> dict[str, Tensor]:
    """Every tensor of a state by path, copied."""
    found = finish(by_path(trainer.plan, trainer.world, state._asdict()))
    return {path: x.clone() for path, x in tree.flatten(found).items() if isinstance(x, Tensor)}


AHEAD = "dp=2 layers=1 global_batch=4 sharding=optim gather_ahead=true bucket_size=50"


def run_ahead(settings: str, main: Callable[[Trainer, Callable[[int], Any]], None]) -> None:
    """`main(trainer, batches by step)` on every rank, a thread that runs what a process would."""
    layout = plan(small(settings))

    def rank(groups: Any) -> None:
        world = ProcessWorld(groups)
        main(Trainer(layout, world), lambda step: rank_batches(layout.config, world.coords, step))

    on_threads(layout.mesh, rank, needed_groups(layout.table, layout.mesh))


@named
def states_are_values() -> None:
    """a state is what it was, however many steps were taken from it and others."""

    def main(trainer: Trainer, batches: Callable[[int], Any]) -> None:
        old, _ = finish(trainer.step(trainer.init(), batches(0)))
        before, loss = values(trainer, old), finish(trainer.evaluate(old, batches(9)))
        new, _ = finish(trainer.step(old, batches(1), donate=False))
        other = finish(trainer.evaluate(new, batches(9)))
        finish(trainer.step(new, batches(2)))
        after = values(trainer, old)
        if not all(torch.equal(x, after[path]) for path, x in before.items()):
            raise Broken("the old state has changed")
        if finish(trainer.evaluate(old, batches(9))) != loss or other == loss:
            raise Broken("another state was evaluated")

    run_ahead(f"{AHEAD} steps=9", main)


@named
def read_as_arrays() -> None:
    """a state's shards may be looked at as arrays, which gives their memory its size for good."""

    def main(trainer: Trainer, batches: Callable[[int], Any]) -> None:
        state, _ = finish(trainer.step(trainer.init(), batches(0)))
        assert sum(x.numpy().size for x in state.params.values())
        finish(trainer.step(state, batches(1)))

    run_ahead(f"{AHEAD} steps=9", main)


@named
def nothing_is_left_on_its_way() -> None:
    """after the last step all that was started is there."""

    def main(trainer: Trainer, batches: Callable[[int], Any]) -> None:
        finish(trainer.step(trainer.init(), batches(0)))
        if trainer.params.flat is None or trainer.params.flat.going:
            raise Broken("parameters are on their way when the ranks part")

    run_ahead(f"{AHEAD} steps=1", main)


@named
def wide_sums_round_once() -> None:
    """16-bit summands of several ranks are added up in fp32."""
    from mfun.comm.axis import Axis

    rows = torch.tensor([[1.0], [2.0**-9], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)
    axis = Axis("dp", 4, torch.tensor(0), at=0)
    have = sum_exchanged(rows[0], rows.clone(), axis, wide=True)
    equal("the sum of 1 and three times 2^-9", have, [1.0 + 2.0**-7])  # 1 if rounded each time


@named
def buckets_have_the_asked_padding() -> None:
    """`parallel.bucket_pad` divides the size of every sharded bucket."""
    layout = plan(small("dp=3 sharding=optim bucket_pad=65536 global_batch=6"))
    sizes = [bucket.size for bucket in layout.buckets(0)]
    if any(size % (3 * 65536) for size in sizes):
        raise Broken(f"buckets are of {sizes}, no multiples of 3 * 65536")
