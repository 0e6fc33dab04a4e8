"""A checkpoint of any layout is loaded into any other: bitwise, and training goes on alike."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import attrs
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mfun import checkpoint, optim
from mfun.checkpoint import CheckpointError, Order, Rules, pieces, source
from mfun.checkpoint.pieces import Piece
from mfun.comm import ProcessWorld, finish
from mfun.config import Config, ConfigError, load, resolve
from mfun.grads import needed_groups
from mfun.spec import unshard_leaf
from mfun.train import saving
from mfun.train.plan import Plan, plan
from mfun.train.replicas import owner, state_leaves
from mfun.train.shards import by_path
from mfun.train.step import Metrics, Trainer
from mfun.verify.batches import rank_batches
from tests.threads import on_threads

MODEL = (
    "model.layers=4 model.hidden=16 model.heads=4 model.kv_heads=2 model.ffn=24 model.vocab=37 "
    "model.seq_len=8 model.init_std=0.3 train.global_batch=12 optim.lr=0.01 optim.warmup=2 "
    "optim.eps=1e-4 optim.clip=0.05 parallel.tp=1 parallel.pp=1 parallel.dp=1 "
)


def config_of(text: str) -> Config:
    """A small configuration."""
    return resolve(load("tiny", [*MODEL.split(), *text.split()]), None)


class ThreadPeers:
    """`Peers` of the threads of one world.

    Args:
        world: how many there are.
    """

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=60)
        self.said: dict[int, bool] = {}
        self.world = world

    def of(self, rank: int) -> Any:
        """Those of one rank."""

        def agree(flag: bool) -> bool:
            self.said[rank] = flag
            self.barrier.wait()
            answer = any(self.said.values())
            self.barrier.wait()
            return answer

        place = SimpleNamespace(rank=rank, world=self.world)
        return SimpleNamespace(place=place, any=agree, device=torch.device("cpu"))


class Run(NamedTuple):
    """What a rank did: losses and norms, its state when it was saved, and the numbers of it.

    The state is gathered over data ranks, by path.
    """

    seen: list[Metrics]
    leaves: dict[str, Tensor]
    scalars: dict[str, Any]


def run(
    config: Config,
    before: int,
    after: int = 0,
    *,
    resume: Path | None = None,
    save: Path | None = None,
    rules: Rules = saving.STRICT,
) -> list[Run]:
    """Train on threads from a checkpoint or from nothing, save after so many steps, go on."""
    layout = plan(config)
    peers = ThreadPeers(layout.mesh.world)

    def main(groups: Any) -> Run:
        world, mine = ProcessWorld(groups), peers.of(int(groups.rank))
        trainer = Trainer(layout, world)
        state = saving.load(trainer, resume, mine, rules) if resume else trainer.init()
        seen, kept, numbers = [], {}, {}
        for step in range(before + after + 1):
            if step == before:
                if save:
                    saving.save(trainer, state, save, mine)
                leaves = state_leaves(finish(by_path(layout, trainer.world, state)))
                kept = {n: x.clone() for n, x in leaves.items()}
                numbers = optim.state_scalars(state.opt)
            if step < before + after:
                batches = rank_batches(config, world.coords, state.step)
                state, metrics = finish(trainer.step(state, batches))
                seen.append(metrics)
        return Run(seen, kept, numbers)

    return on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


def gathered(layout: Plan, runs: list[Run]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' leaves, without the checkpoint's code; replicas are equal."""
    parts: dict[str, list[tuple[Mapping[str, int], Tensor]]] = {}
    for rank, one in enumerate(runs):
        for name, x in one.leaves.items():
            parts.setdefault(name, []).append((layout.mesh.coords(rank), x))
    out = {}
    for name, held in parts.items():
        path = owner(name, layout.table)
        if path is None:
            out[name] = held[0][1].double()
            assert all(torch.equal(x.double(), out[name]) for _, x in held), name
            continue
        out[name] = unshard_leaf(held, layout.specs[path], layout.mesh)
        for coords, x in held:
            box = saving.box_of(layout.specs[path], layout.mesh, coords)
            place = tuple(slice(a, a + n) for a, n in zip(box.start, box.box, strict=True))
            inside = tuple(slice(0, n) for n in box.box)
            assert torch.equal(x[inside], out[name][place]), name
            assert not x[box.box[0] :].any(), f"{name}: padding is zero"
    return out


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Equal names, types and bits."""
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert x.dtype == b[name].dtype and torch.equal(x, b[name]), name


SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@st.composite
def layouts(draw: Any, most: int = 8) -> str:
    """A layout of at most so many ranks, as settings."""
    tp, pp, dp = draw(
        st.sampled_from(
            [
                (tp, pp, dp)
                for tp in (1, 2, 4)
                for pp in (1, 2, 3, 4)
                for dp in (1, 2, 3, 4, 6)
                if tp * pp * dp <= most
            ]
        )
    )
    rows = {"tp": tp, "pp": pp, "dp": dp}
    rows["order"] = draw(st.sampled_from(("tp-cp-ep-dp-pp", "dp-pp-tp", "pp-dp-tp")))
    rows["sequence_parallel"] = draw(st.sampled_from(("true", "false")))
    sharding = rows["sharding"] = draw(st.sampled_from(SHARDING))
    if pp > 1:
        pipeline = draw(st.sampled_from(("1f1b", "interleaved", "zbv", "uneven")))
        if pipeline == "uneven":
            rows["layers_per_stage"] = {2: "1,3", 3: "1,2,1", 4: "2,0,1,1"}[pp]
        elif pp == 2 or pipeline == "1f1b":
            rows["schedule"] = pipeline
    if sharding != "no_shard":
        rows["bucket_size"] = draw(st.sampled_from((0, 1, 300)))
        rows["overlap"] = "true" if rows["bucket_size"] else "false"
        if dp == 4:
            rows["shard_copies"] = draw(st.sampled_from((1, 2)))
    text = " ".join(f"parallel.{key}={value}" for key, value in rows.items())
    return f"{text} train.microbatches={draw(st.sampled_from((1, 2)))}"


def usable(text: str, model: str) -> bool:
    """Whether the sizes fit together; a few combinations do not."""
    try:
        plan(config_of(f"{model} {text}"))
    except ConfigError:
        return False
    return True


MODELS = (
    "precision.policy=fp64 model.tied=true",
    "precision.policy=fp64 model.tied=false optim.name=muon",
    "precision.policy=bf16 model.tied=true model.norm=layernorm model.bias=all",
    "precision.policy=fp16 model.tied=false optim.name=lion precision.initial_scale=1024",
)


def check(a: str, b: str, model: str, folder: Path, more: int) -> None:
    """Two steps in A, saved, loaded in B: all bits; then as many steps as an uninterrupted run."""
    first, second = config_of(f"{model} {a}"), config_of(f"{model} {b}")
    saved = run(first, 2, more, save=folder)
    loaded = run(second, 0, more, resume=checkpoint.step_folder(folder, 2), save=folder / "again")
    want, found = (gathered(plan(c), r) for c, r in ((first, saved), (second, loaded)))
    same(want, found)
    assert {str(one.scalars) for one in (*saved, *loaded)} == {str(saved[0].scalars)}
    expected = {n: (tuple(x.shape), x.dtype) for n, x in want.items()}
    same(want, checkpoint.load(checkpoint.step_folder(folder / "again", 2), expected))
    if "fp64" not in model and a != b:
        return  # sums of other roundings
    whole, rest = saved[0].seen[2:], loaded[0].seen
    if a == b:
        assert rest == whole
    assert [m.loss for m in rest] == pytest.approx([m.loss for m in whole], rel=1e-10)
    assert [m.grad_norm for m in rest] == pytest.approx([m.grad_norm for m in whole], rel=1e-9)
    assert [m.lr for m in rest] == [m.lr for m in whole]


def checked(a: str, b: str, model: str, folder: Path, more: int) -> None:
    """`check`, for layouts whose sizes fit."""
    if usable(a, model) and usable(b, model):
        check(a, b, model, folder, more)


ZERO3 = "parallel.dp=2 parallel.sharding=optim_grads_params train.microbatches=1"


@settings(max_examples=3)
@given(a=layouts(4), b=layouts(4), model=st.sampled_from(MODELS), more=st.just(1))
@example(a=ZERO3, b=ZERO3.replace("dp=2", "dp=4"), model=MODELS[0], more=5)  # bugs.md 67, 91
@example(  # bugs.md 95: into chunks, tied, with a padded vocabulary that is padded otherwise
    a="parallel.pp=2 parallel.tp=2 train.microbatches=2",
    b="parallel.pp=2 parallel.schedule=interleaved parallel.tp=1 parallel.dp=2 "
    "parallel.sharding=optim train.microbatches=2",
    model=MODELS[0],
    more=5,
)
@example(  # the second stage has no layers
    a="parallel.tp=1 parallel.sharding=optim train.microbatches=1",
    b="parallel.tp=2 parallel.pp=4 parallel.layers_per_stage=2,0,1,1 train.microbatches=1",
    model=MODELS[0],
    more=2,
)
@example(  # bugs.md 94
    a="parallel.tp=2 parallel.sequence_parallel=true train.microbatches=1",
    b="parallel.tp=4 train.microbatches=1",
    model=MODELS[2],
    more=5,
)
def test_pairs_of_layouts(a: str, b: str, model: str, more: int, tmp_path_factory: Any) -> None:
    """Parameters, masters and moments are those that were saved; the next steps follow."""
    checked(a, b, model, tmp_path_factory.mktemp("run"), more)


@pytest.mark.full
@pytest.mark.timeout(3600)
@settings(max_examples=150)
@given(a=layouts(), b=layouts(), model=st.sampled_from(MODELS))
def test_pairs_of_layouts_of_eight_ranks(a: str, b: str, model: str, tmp_path_factory: Any) -> None:
    """The same up to eight ranks, and five steps."""
    checked(a, b, model, tmp_path_factory.mktemp("run"), 5)


@pytest.mark.parametrize(
    ("model", "sharding"),
    [
        pytest.param(model, sharding, marks=() if i == j else pytest.mark.full)
        for i, model in enumerate(MODELS)
        for j, sharding in enumerate(SHARDING)
    ],
)
def test_the_same_layout_goes_on_to_the_bit(model: str, sharding: str, tmp_path: Path) -> None:
    """Any precision, five steps."""
    tp = 1 if sharding == "optim" else 2
    layout = f"parallel.dp=2 parallel.tp={tp} parallel.sharding={sharding} train.microbatches=1"
    check(layout, layout, model, tmp_path, 5)


@pytest.mark.parametrize("sharding", ["no_shard", "optim", "optim_grads_params"])
def test_going_back_takes_no_new_memory(sharding: str, tmp_path: Path) -> None:
    """Two steps after a checkpoint its state is back, bitwise, where the later one was."""
    text = f"parallel.dp=2 parallel.tp=2 parallel.sharding={sharding} train.microbatches=1"
    config = config_of(text)
    layout = plan(config)
    peers = ThreadPeers(layout.mesh.world)

    def main(groups: Any) -> None:
        world, mine = ProcessWorld(groups), peers.of(int(groups.rank))
        trainer = Trainer(layout, world)
        state, first = trainer.init(), tmp_path / "run"
        saving.save(trainer, state, first, mine)
        kept = {name: x.clone() for name, x in state_leaves(state).items()}
        for step in range(2):
            state, _ = finish(trainer.step(state, rank_batches(config, world.coords, step)))
        later = state_leaves(state)
        assert any(not torch.equal(x, kept[name]) for name, x in later.items())
        at = checkpoint.latest(first)
        assert at is not None
        back = saving.load(trainer, at, mine, into=state)
        found = state_leaves(back)
        assert back.step == 0 and found.keys() == kept.keys()
        for name, x in found.items():
            assert torch.equal(x.to(kept[name].dtype), kept[name]), name
            assert not x.ndim or x.data_ptr() == later[name].data_ptr(), name

    on_threads(layout.mesh, main, needed_groups(layout.table, layout.mesh))


def test_ranks_share_the_writing(tmp_path: Path) -> None:
    """Each element once, and no rank that could write writes nothing."""
    for number, sharding in enumerate(SHARDING):
        folder = tmp_path / str(number)
        run(
            config_of(f"parallel.dp=4 parallel.sharding={sharding} train.microbatches=1"),
            0,
            save=folder,
        )
        index = checkpoint.read_index(checkpoint.step_folder(folder, 0))
        sizes = [file.bytes for file in index.files.values()]
        assert len(sizes) == 4 and max(sizes) < 1.6 * min(sizes), sizes


def test_other_data_positions_are_refused(tmp_path: Path) -> None:
    """Another batch size or seed would repeat samples or random numbers."""
    run(config_of(""), 2, save=tmp_path)
    at = checkpoint.step_folder(tmp_path, 2)
    for change in ("train.global_batch=8", "train.seed=1"):
        with pytest.raises(CheckpointError, match=r"saved after 24 samples, .* comes after"):
            run(config_of(change), 0, resume=at)


def test_all_ranks_name_what_does_not_fit(tmp_path: Path) -> None:
    """Also what another stage would hold: each rank knows the whole model."""
    run(config_of("parallel.pp=2"), 0, save=tmp_path)
    at = checkpoint.step_folder(tmp_path, 0)
    with pytest.raises(CheckpointError) as caught:
        run(config_of("model.layers=5 model.ffn=32 model.position=none"), 0, resume=at)
    said = str(caught.value)
    assert "params.blocks.4.attn.q is missing" in said
    assert "opt.adamw.nu.blocks.0.mlp.up has shape (24, 16), expected (32, 16)" in said
    with pytest.raises(CheckpointError, match=r"params\.blocks\.3\.attn\.q is there but not exp"):
        run(config_of("model.layers=3"), 0, resume=at)
    with pytest.raises(CheckpointError, match=r"params\.embed\.tokens is float32, expected float6"):
        run(config_of("precision.policy=fp64"), 0, resume=at)


def test_parameters_alone(tmp_path: Path) -> None:
    """By rules: moments and counts stay as a fresh run has them, in another layout."""
    first = config_of("parallel.tp=2 optim.name=sgd")
    saved = run(first, 1, save=tmp_path)
    second = config_of("parallel.dp=2 parallel.sharding=optim")
    rules = Rules(missing=("opt.*",), unexpected=("opt.*",))
    loaded = run(second, 0, resume=checkpoint.step_folder(tmp_path, 1), rules=rules)
    want, found = (gathered(plan(c), r) for c, r in ((first, saved), (second, loaded)))
    params = {n: x for n, x in want.items() if n.startswith("params.")}
    same(params, {n: x for n, x in found.items() if n.startswith("params.")})
    assert not any(x.any() for n, x in found.items() if n.startswith("opt.adamw."))
    assert loaded[0].scalars["adamw.count"] == 0


def test_a_flipped_bit_is_found_in_every_layout(tmp_path: Path) -> None:
    """Where pieces are read in part, ranks share the reading of the files."""
    run(config_of("parallel.tp=2"), 0, save=tmp_path)
    at = checkpoint.step_folder(tmp_path, 0)
    file = at / "rank-00001.safetensors"
    contents = bytearray(file.read_bytes())
    contents[-1000] ^= 4
    file.write_bytes(contents)
    for layout in ("parallel.tp=2", "parallel.dp=3 parallel.sharding=optim", "parallel.tp=4"):
        with pytest.raises(CheckpointError, match=r"rank-00001.*was altered|another rank failed"):
            run(config_of(layout), 0, resume=at)


# pieces


@st.composite
def cuts(draw: Any, shape: tuple[int, ...]) -> list[Piece]:
    """A tensor cut in boxes along every dim, and the boxes in runs."""
    edges = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, max(size - 1, 1)), max_size=2))
        edges.append(sorted({0, size, *(n for n in inner if n < size)}))
    out: list[Piece] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for edge in edges:
        spans = [*pairwise(edge)]
        boxes = [((*s, a), (*n, b - a)) for s, n in boxes for a, b in spans]
    for start, box in boxes:
        whole = Piece(global_shape=shape, start=start, box=box)
        marks = draw(st.sets(st.integers(0, whole.count), max_size=3))
        ends = sorted({0, whole.count, *marks})
        for a, b in pairwise(ends):
            out.append(attrs.evolve(whole, first=a, count=b - a))
    return out


def taken(whole: Tensor, piece: Piece) -> Tensor:
    """A piece's elements, by plain indexing."""
    box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.box, strict=True))
    return whole[box].reshape(-1)[piece.first : piece.first + piece.count]


@settings(max_examples=150)
@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=4))
def test_any_cut_is_brought_into_any_other(data: Any, shape: list[int]) -> None:
    """By copies between pieces; each element once; blocks are few and in order."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    sources, targets = (data.draw(cuts(tuple(shape))) for _ in range(2))
    assert pieces.problem_of(sources) is None
    for piece in targets:
        out = torch.full((piece.count,), -1)
        for one in sources:
            held = taken(whole, one)
            for a, shape_a, box_a, b, shape_b, box_b, count in pieces.common(one, piece):
                x = held[a : a + torch.Size(shape_a).numel()].view(shape_a)[box_a]
                y = out[b : b + torch.Size(shape_b).numel()].view(shape_b)[box_b]
                assert x.numel() == count and bool((y == -1).all())
                y.copy_(x)
        assert torch.equal(out, taken(whole, piece))
        assert len([*pieces.blocks(piece)]) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=60)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 6), max_size=4),
    dtype=st.sampled_from((torch.uint8, torch.bfloat16, torch.float64)),
    gap=st.sampled_from((1, 3, 8, 512)),
)
def test_any_cut_is_read_from_files_of_any_other(
    data: Any, shape: list[int], dtype: torch.dtype, gap: int
) -> None:
    """Whichever gaps are worth a read of their own; each file is a rank's."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    sources, targets = (data.draw(cuts(tuple(shape))) for _ in range(2))
    with (
        TemporaryDirectory() as folder,
        patch.object(source, "GAP", gap),
        patch.object(os, "fsync", lambda handle: None),  # no power is cut here
    ):
        at = save_pieces(Path(folder), whole, sources)
        for piece in targets:
            found = checkpoint.load(at, {"w": (shape, dtype)}, pieces={"w": piece})["w"]
            assert found.shape == piece.shape
            assert torch.equal(found.reshape(-1), taken(whole, piece))


def save_pieces(folder: Path, x: Tensor, cut: list[Piece]) -> Path:
    """A checkpoint of a tensor whose pieces are of a rank each."""
    orders = [
        Order(
            run_dir=folder,
            step=1,
            tensors={"w": taken(x, piece).view(piece.shape)},
            pieces={"w": piece},
            rank=rank,
            world=len(cut),
        )
        for rank, piece in enumerate(cut)
    ]
    orders[0].prepare()
    for order in orders:
        order.write()
    orders[0].commit()
    return orders[0].folder


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tensor_parallel_shard_reads_its_own_bytes(
    precision: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 1.05 of them, index and header included, where half a row is no page."""
    sizes = "model.hidden=1024 model.layers=1 model.heads=8 model.kv_heads=8 model.ffn=2048"
    layout = plan(config_of(f"{sizes} model.vocab=512 parallel.tp={tp} train.microbatches=1"))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    tensors = {name: torch.randn(spec.shape, dtype=dtype) for name, spec in layout.specs.items()}
    at = checkpoint.save(Order(run_dir=tmp_path, step=1, tensors=tensors))
    expected = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    asked, read = [], os.preadv

    def counted(handle: int, views: list[memoryview], place: int, flags: int = 0) -> int:
        asked.append(sum(map(len, views)))
        return read(handle, views, place, flags)

    monkeypatch.setattr(os, "preadv", counted)
    file = at / "rank-00000.safetensors"
    start = (at / "index.json").stat().st_size + int.from_bytes(file.read_bytes()[:8], "little")
    for rank in range(tp):
        own = {n: saving.box_of(s, layout.mesh, {"tp": rank}) for n, s in layout.specs.items()}
        asked.clear()
        found = checkpoint.load(at, expected, pieces=own)
        assert all(torch.equal(found[n].view(-1), taken(x, own[n])) for n, x in tensors.items())
        size = sum(x.nbytes for x in found.values())
        assert size <= sum(asked) + start <= 1.05 * size, (sum(asked), start, size)


@settings(max_examples=100)
@given(data=st.data(), shape=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_holes_and_overlaps_are_found(data: Any, shape: list[int]) -> None:
    """A cut with one piece less, twice, longer or moved is no whole tensor."""
    found = data.draw(cuts(tuple(shape)))
    at = data.draw(st.integers(0, len(found) - 1))
    one = found[at]
    rest = found[:at] + found[at + 1 :]
    assert rest == [] or pieces.problem_of(rest) is not None
    for bad in (one, attrs.evolve(one, count=one.count + 1)):
        assert pieces.problem_of([*rest, bad, one]) is not None
    moved = attrs.evolve(one, start=(one.start[0] + 1, *one.start[1:]))
    assert pieces.problem_of([*rest, moved]) is not None


def test_a_tree_of_many_ranks_is_read_in_time() -> None:
    """Runs of 4000 data ranks in one box: sorted, not compared each with each."""
    size, ranks = 4_000_000, 4000
    step = size // ranks
    runs = [
        Piece(global_shape=(size,), start=(0,), box=(size,), first=i * step, count=step)
        for i in range(ranks)
    ]
    Random(0).shuffle(runs)
    assert pieces.problem_of(runs) is None
    wanted = Piece(global_shape=(size,), start=(0,), box=(size,), first=step // 2, count=step)
    assert sum(len([*pieces.common(one, wanted)]) for one in runs) == 2
