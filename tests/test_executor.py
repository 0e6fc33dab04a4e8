"""What the executor costs: operations of F, I and W, and activations alive at once."""

from __future__ import annotations

import weakref

import attrs
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mfun import tree
from mfun.grads import start_reduce
from mfun.pipeline import executor, mailbox
from mfun.pipeline.flight import Flight
from mfun.pipeline.pullback import autograd_layer
from mfun.schedule import SCHEDULES, I, ScheduleError, Send, check, dress
from mfun.schedule.ops import Recompute, Reduce, tag_text
from mfun.schedule.transforms import Extras
from mfun.train.memory import in_flight
from mfun.train.plan import plan
from mfun.train.step import Trainer
from mfun.verify.batches import rank_batches
from mfun.verify.run import in_mailbox
from tests.properties import small


def products(self, a, b, **kwargs):
    """Twice rows x columns x inner, from the shapes."""
    return 2 * a[0] * a[1] * b[1]


IN_PLACE = {torch.ops.aten.addmm_: products}
"""The counter does not know the product that adds in place."""

DENSE = "hidden=16 heads=2 ffn=64 seq_len=8 tied=false vocab=23 "


def middle(settings: str):
    """A trainer whose stage holds blocks only, its state and a microbatch's input."""
    config = small(DENSE + settings)
    layout = plan(config)
    world = mailbox.worlds(layout.mesh, plain=True)[1]
    trainer = Trainer(layout, world)
    batch = rank_batches(config, {"dp": 0, "cp": 0}, 0)[0]
    x = {"h": torch.randn(*batch["tokens"].shape, 16, dtype=torch.float64)}
    return trainer, trainer.init(), batch, x


@pytest.mark.parametrize("model", ["", "kv_heads=1", "activation=swiglu bias=all"])
def test_forward_inputs_and_weights_cost_one_forward_each(model):
    """2 n (products of the blocks' matrices) each, by hand; attention's scores are in F and I."""
    trainer, state, batch, x = middle(f"pp=3 layers=6 global_batch=2 microbatches=1 {model}")
    run, grads = trainer.params.program(state.params), trainer.buffers()
    kv, up = (1 if "kv" in model else 2), (2 if "swiglu" in model else 1)
    matrices = 16 * 16 * 2 + 2 * kv * 8 * 16 + (up + 1) * 64 * 16
    tokens = batch["tokens"].numel()
    layers = trainer.stage.layers
    flight = Flight(grads, run.paths(), len(layers))
    flight.value = x
    counted = []
    steps = (
        lambda: [flight.forward(i, run, layers[i], batch, None) for i in (0, 1)],
        lambda: [flight.backward(i, later=True) for i in (1, 0)],
        lambda: [flight.weights(i) for i in (1, 0)],
    )
    for step in steps:
        with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
            step()
        by_op = counter.get_flop_counts()["Global"]
        counted.append(sum(n for op, n in by_op.items() if "attention" not in str(op)))
    assert counted == [2 * tokens * 2 * matrices] * 3


class Alive:
    """Bytes that the graphs of one stage keep alive, apart from its parameters."""

    def __init__(self, parameters) -> None:
        self.own = {x.untyped_storage().data_ptr() for x in parameters}
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def pack(self, x):
        """A saved-tensor hook that counts a storage from its first save to its end."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self.own and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return x

    def _gone(self, name, size):
        self.seen.discard(name)
        self.now -= size


def peaks(settings: str) -> list[int]:
    """Each stage's most bytes alive in graphs at once, over a step in the mailbox."""
    layout = plan(small(DENSE + settings))
    office = mailbox.Office()
    worlds = mailbox.worlds(layout.mesh, office, plain=True)
    alive = {}

    def one(world):
        trainer = Trainer(layout, world)
        state = trainer.init()
        mine = alive[world.stage] = Alive(tree.flatten(state.params).values())
        batches = [rank_batches(layout.config, {"dp": 0, "cp": 0}, 0)[i] for i in range(M)]
        step = trainer.gradients(state, batches)
        while True:
            with torch.autograd.graph.saved_tensors_hooks(mine.pack, lambda x: x):
                try:
                    waiting = next(step)
                except StopIteration:
                    return
            yield waiting

    mailbox.run([one(world) for world in worlds], office)
    return [alive[s].peak for s in range(layout.mesh.pp)]


M = 6


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
def test_peak_activations_are_the_schedules_in_flight_times_a_chunks(name):
    """On stages of equal blocks, against the same stage with one microbatch at a time."""
    row = SCHEDULES[name]
    slices = 4 * (row.chunks or 2) // row.replicas
    sizes = f"pp=4 parallel.schedule={name} parallel.split_backward=false "
    sizes += f"parallel.layers_per_stage={','.join(['1'] * slices)} layers={slices} "
    config = small(DENSE + sizes + f"global_batch={M} microbatches={M}")
    layout = plan(config)
    chunk = peaks("pp=3 layers=3 global_batch=6 microbatches=6 parallel.schedule=1f1b")
    have = peaks(sizes + f"global_batch={M} microbatches={M}")
    for stage in layout.stages:
        if not stage.first and not stage.last:
            assert have[stage.index] == max(in_flight(layout, stage.index)) * chunk[1] // 2


def test_an_output_does_not_outlive_its_message():
    """Between F and B the graph keeps what the products need, not the stage's output."""
    params, x = {"w": torch.ones(3)}, {"h": torch.ones(3)}
    y, pull = autograd_layer(lambda p, x: {"h": p["w"] * x["h"]}, params, x)
    freed = []
    weakref.finalize(y["h"].untyped_storage(), freed.append, True)
    del y
    assert freed
    grads, dx = pull({"h": torch.full((3,), 2.0)})
    assert grads["w"] is not None and torch.equal(grads["w"], dx["h"])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "none"])
def test_split_and_whole_backwards_give_the_same_bits(name):
    """I and W apart only move the products: every gradient is bitwise that of B."""
    grads = {}
    for split in ("true", "false"):
        settings = f"pp=2 layers=4 microbatches=4 global_batch=4 parallel.split_backward={split}"
        layout = plan(small(DENSE + settings + f" parallel.schedule={name}"))
        kinds = {type(op) for stream in layout.streams for op in stream}
        assert (I in kinds) == (split == "true")
        grads[split] = [result.grads for result in in_mailbox(layout, plain=True)]
    for split, whole in zip(grads["true"], grads["false"], strict=True):
        assert all(torch.equal(split[path], whole[path]) for path in whole)


def extras_of(layout, **asked):
    """Each stage's buckets, reduced in the stream, layer by layer, and more."""
    extras = []
    for stage in layout.stages:
        grads = layout.buffers(stage.index)
        paths = [[span.path for span in bucket.spans] for bucket in grads.buckets]
        joined = [i for i in grads.order() if layout.table[paths[i][0]].joined is not None]
        extras.append(
            Extras(
                layers=tuple(map(len, stage.chunks)),
                reduce=tuple(map(stage.holders, paths)),
                joined=tuple((i, min(paths[i])) for i in joined),
                **asked,
            )
        )
    return extras


def dressed(layout, **asked):
    """The plan with these in its streams."""
    return attrs.evolve(layout, streams=dress(layout.streams, extras_of(layout, **asked)))


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "vmap"])
@pytest.mark.parametrize("recompute", [None, 1])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv", "dualpipe"])
def test_ops_of_layers_reductions_and_recomputation_change_no_bit(name, recompute, plain):
    """A stream with everything inserted gives bitwise the gradients of the plain one."""
    settings = "pp=2 layers=4 microbatches=5 global_batch=10 dropout=0.1 tied=true bucket_size=600"
    settings += f" parallel.schedule={name}" + ("" if plain else " dp=2")
    layout = plan(small(DENSE.replace("tied=false", "") + settings))
    more = dressed(layout, recompute=recompute)
    kinds = {type(op) for stream in more.streams for op in stream}
    assert Reduce in kinds and (Recompute in kinds) == (recompute is not None)
    for a, b in zip(in_mailbox(layout, plain=plain), in_mailbox(more, plain=plain), strict=True):
        assert all(torch.equal(a.grads[path], b.grads[path]) for path in a.grads)


def test_an_unchecked_stream_is_refused():
    """The executor runs what `check` returned, nothing else."""
    layout = plan(small("pp=2 layers=2"))
    bare = attrs.evolve(layout, streams=tuple(map(tuple, layout.streams)))
    with pytest.raises(ScheduleError, match="was not checked"):
        in_mailbox(bare)


@pytest.mark.parametrize("fault", ["lost", "swapped", "early"])
def test_a_wrong_stream_never_runs(fault):
    """One message removed, one pair swapped, one early reduction: `check` names the ops."""
    layout = plan(small(DENSE + "pp=2 layers=4 microbatches=4 global_batch=4"))
    streams = [list(stream) for stream in layout.streams]
    first = streams[0]
    sends = [i for i, op in enumerate(first) if isinstance(op, Send)]
    extras = None
    if fault == "lost":
        lost = first.pop(sends[1])
        assert isinstance(lost, Send)
        says = f"never sends {tag_text(lost.tag)}"
    elif fault == "swapped":
        first[sends[0]], first[sends[1]] = first[sends[1]], first[sends[0]]
        says = "act1>1"
    else:
        streams, extras = [list(stream) for stream in dressed(layout).streams], extras_of(layout)
        at = next(i for i, op in enumerate(streams[0]) if isinstance(op, Reduce))
        streams[0].insert(0, streams[0].pop(at))
        says = "Reduce"
    with pytest.raises(ScheduleError, match=says):
        check(streams, extras=extras)


def test_reductions_of_the_stream_are_its_own(monkeypatch):
    """Each Reduce starts its bucket's sum; `finalize` would hide a forgotten one."""
    layout = plan(small(DENSE + "pp=2 dp=2 layers=2 microbatches=2 global_batch=4"))
    more, started = dressed(layout), []

    def start(world, grads, bucket):
        started.append((world.stage, bucket))
        start_reduce(world, grads, bucket)

    monkeypatch.setattr(executor, "start_reduce", start)
    in_mailbox(more)
    wanted = [
        (stage, op.bucket)
        for stage, stream in enumerate(more.streams)
        for op in stream
        if isinstance(op, Reduce)
    ]
    steps = layout.config.train.steps + 1  # the first gradients are taken twice
    assert wanted and sorted(started) == sorted(wanted * steps)


def test_a_bucket_is_reduced_once_and_when_complete():
    """A second sum, and a gradient after the sum, are errors that name the bucket or the leaf."""
    trainer, *_ = middle("pp=3 layers=3 global_batch=2 microbatches=1")
    grads = trainer.buffers()
    start_reduce(trainer.world, grads, 0)
    with pytest.raises(RuntimeError, match="bucket 0 is reduced twice"):
        start_reduce(trainer.world, grads, 0)
    path = grads.buckets[0].spans[0].path
    with pytest.raises(RuntimeError, match=f"{path} gets a gradient after its bucket"):
        grads.claim(path)
