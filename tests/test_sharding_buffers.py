"""Real flat buffers for any bucket size: each element owned once, views alias, padding is nowhere.

Leaves are drawn, some tied over two stages, some padded over tp, some of fp32 among bf16 ones; the
buckets are those of `lay_out`, the buffers `GradBuffers` and `ParamBuffers`, the ranks a mailbox.
What is expected is counted leaf by leaf in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mfun.comm import finish
from mfun.flat import Bucket
from mfun.grads import (
    GradBuffers,
    Guard,
    ParamBuffers,
    Reduction,
    finalize_steps,
    global_norm,
    lay_out,
    num_zeros,
    reductions,
    shard_name,
)
from mfun.mesh import Mesh
from mfun.pipeline import mailbox
from mfun.pipeline.mailbox import MailboxWorld
from mfun.spec import P, ParamSpec, local_shape, window
from mfun.train.shards import by_path, by_shard
from tests.sharding_properties import dirty_memory


@attrs.frozen
class Stage:
    """What `mfun.train.shards` asks of a stage."""

    index: int
    specs: dict[str, ParamSpec]


@attrs.frozen
class Layout:
    """What it asks of a plan, without a model."""

    mesh: Mesh
    stages: tuple[Stage, ...]
    table: dict[str, Reduction]
    dtype: torch.dtype
    bucket_size: int | None
    sharded: bool

    def buckets(self, stage: int) -> tuple[Bucket, ...]:
        """By the real rule."""
        return lay_out(
            self.stages[stage].specs,
            self.table,
            self.mesh,
            self.dtype,
            bucket_size=self.bucket_size,
            sharded=self.sharded,
        )

    def grads(self, world: MailboxWorld, *, release: bool = False) -> GradBuffers:
        """In float64, so that numpy's sums can be asked for to rounding."""
        return GradBuffers(
            self.stages[world.stage].specs,
            self.table,
            self.buckets(world.stage),
            torch.float64,
            lead=world.lead,
            sharded=self.sharded,
            release=release,
        )


@st.composite
def specs_of(draw: st.DrawFn, tp: int, wide: bool) -> ParamSpec:
    """Replicated, cut over tp, or cut with padding."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=2)))
    kind = draw(st.sampled_from(["whole", "cut", "padded"])) if shape else "whole"
    fp32 = wide and draw(st.booleans())
    if kind == "whole":
        return ParamSpec(
            shape=shape, grad={"tp": draw(st.sampled_from(["equal", "partial"]))}, wide=fp32
        )
    if kind == "cut":
        return ParamSpec(shape=(shape[0] * tp, *shape[1:]), p=P("tp"), wide=fp32)
    return ParamSpec(shape=shape, p=P("tp"), pads=(0,), wide=fp32)


@st.composite
def layouts(draw: st.DrawFn, sharded: bool | None = None) -> Layout:
    """One or two stages of one to five leaves; where two, the first leaf may be on both."""
    tp, pp = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    mesh = Mesh(tp=tp, dp=draw(st.integers(1, 5)), pp=pp)
    stages = [
        {f"s{s}.leaf{i}": draw(specs_of(tp, wide=True)) for i in range(draw(st.integers(1, 5)))}
        for s in range(pp)
    ]
    if pp == 2 and draw(st.booleans()):
        stages = [{"tied": draw(specs_of(tp, wide=False))} | specs for specs in stages]
        stages[1]["tied"] = stages[0]["tied"]
    total = sum(math.prod(local_shape(x, mesh)) for specs in stages for x in specs.values())
    return Layout(
        mesh=mesh,
        stages=tuple(Stage(i, specs) for i, specs in enumerate(stages)),
        table=reductions(stages, mesh),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float64])),
        bucket_size=draw(st.sampled_from([1, 2, 64, total, None]) | st.integers(1, total)),
        sharded=draw(st.booleans()) if sharded is None else sharded,
    )


def numbered(layout: Layout, world: MailboxWorld, seed: int = 0) -> dict[str, Tensor]:
    """Of every rank of the stage other small whole numbers, zeros among them, 0 in leaf padding."""

    def make(coords: Any) -> dict[str, Tensor]:
        out = {}
        for i, (path, spec) in enumerate(layout.stages[world.stage].specs.items()):
            rng = np.random.default_rng([seed, i, coords["tp"], coords["dp"], world.stage])
            x = np.zeros(local_shape(spec, layout.mesh))
            box = tuple(slice(b - a) for a, b in window(spec, layout.mesh, coords))
            x[box] = rng.integers(-3, 4, x[box].shape)
            out[path] = torch.from_numpy(x)
        return out

    return world.build(make)


def padding(bucket: Bucket) -> Tensor:
    """Where no leaf is."""
    out = torch.ones(bucket.size, dtype=torch.bool)
    for span in bucket.spans:
        out[span.start : span.stop] = False
    return out


def wanted(layout: Layout, given: list[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    """Each leaf's whole gradient by numpy: weighted summands of all that hold it, cut apart.

    Args:
        given: by stage, rank-stacked.
    """
    mesh, out = layout.mesh, {}
    for path, row in layout.table.items():
        spec = next(s.specs[path] for s in layout.stages if path in s.specs)
        whole = np.zeros(spec.shape)
        for stage in row.stages:
            for i, rank in enumerate(mesh.stage_ranks(stage)):
                coords = mesh.coords(rank)
                box = tuple(slice(a, b) for a, b in window(spec, mesh, coords))
                local = given[stage][path][i].numpy()
                part = local[tuple(slice(s.stop - s.start) for s in box)]
                kind = spec.grad.get("tp", "partial")
                whole[box] += part / (mesh.tp if kind == "equal" else 1)
        out[path] = whole
    return out


# ---------------------------------------------------------------------------- owners and views


@given(layouts(sharded=True))
@settings(max_examples=40)
def test_every_element_is_owned_once(layout: Layout) -> None:
    """Of the shards of all data ranks: each element of each leaf in exactly one."""
    for world in mailbox.worlds(layout.mesh):
        buckets, stage = layout.buckets(world.stage), layout.stages[world.stage]
        ids, at = {}, 1
        for path, spec in stage.specs.items():
            n = math.prod(local_shape(spec, layout.mesh))
            ids[path] = torch.arange(at, at + n).reshape(local_shape(spec, layout.mesh))
            at += n
        params = ParamBuffers(
            world, stage.specs, layout.table, buckets, [torch.int64] * len(buckets)
        )
        params.load({path: x.expand(*world.lead, *x.shape) for path, x in ids.items()})
        assert sorted(params.bucket_of) == sorted(stage.specs)
        owners = np.zeros(at, int)
        held = {i: params.shards()[shard_name(i)] for i in range(len(buckets))}
        for i, bucket in enumerate(buckets):
            axes = layout.table[bucket.spans[0].path].shard_axes
            for group in layout.mesh.stage_groups(*axes):
                found = torch.cat([held[i][rank] for rank in group]).numpy()
                mine = found[found > 0]
                if group == layout.mesh.stage_groups(*axes)[0]:
                    np.add.at(owners, mine, 1)
                whole = torch.cat([ids[span.path].flatten() for span in bucket.spans]).numpy()
                assert sorted(mine) == sorted(whole)
        assert (owners[1:] == 1).all()


@given(layouts())
@settings(max_examples=40)
def test_views_alias_their_buffer(layout: Layout) -> None:
    """What is written to the buffer is in the views, at the places that spans say, and back."""
    for world in mailbox.worlds(layout.mesh):
        grads, stage = layout.grads(world), layout.stages[world.stage]
        assert list(grads.views) == list(stage.specs)
        for buffer, bucket in zip(grads.buffers, grads.buckets, strict=True):
            buffer.copy_(torch.arange(bucket.size, dtype=buffer.dtype).expand_as(buffer))
            for span in bucket.spans:
                view, n = grads.views[span.path], span.stop - span.start
                assert view.shape == (
                    *world.lead,
                    *local_shape(stage.specs[span.path], layout.mesh),
                )
                assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                want = torch.arange(span.start, span.start + n, dtype=buffer.dtype)
                assert torch.equal(view.reshape(*world.lead, n), want.expand(*world.lead, n))
                view.fill_(-1.0)
            assert torch.equal((buffer[0] == -1), ~padding(bucket))


@given(layouts())
@settings(max_examples=40)
def test_types_and_groups_share_no_bucket(layout: Layout) -> None:
    """A bucket is of one type and one group; a leaf that two stages hold is alone in its own."""
    for stage in layout.stages:
        for bucket in layout.buckets(stage.index):
            members = [span.path for span in bucket.spans]
            assert len({stage.specs[path].dtype_among(layout.dtype) for path in members}) == 1
            assert len({layout.table[path].group for path in members}) == 1
            assert len(members) == 1 or "tied" not in members


def turns(layout: Layout, stage: Stage) -> dict[str, int]:
    """Leaves of one stage only, backward; a turn ends when they fill a bucket of any type."""
    out, turn, used = {}, 0, 0
    for path, spec in reversed(stage.specs.items()):
        if path == "tied":
            continue
        out[path] = turn
        start = math.ceil(used / 64) * 64 if layout.sharded else used
        used = start + math.prod(local_shape(spec, layout.mesh))
        if layout.bucket_size is not None and used >= layout.bucket_size:
            turn, used = turn + 1, 0
    return out


@given(layouts())
@settings(max_examples=40)
def test_buckets_of_all_types_and_groups_close_together(layout: Layout) -> None:
    """So what is small of every layer, as norms are, does not wait for the first layer."""
    for stage in layout.stages:
        turn = turns(layout, stage)
        kinds = []
        for bucket in layout.buckets(stage.index):
            members = [span.path for span in bucket.spans]
            if members == ["tied"]:
                continue
            assert len({turn[path] for path in members}) == 1
            spec = stage.specs[members[0]]
            kinds.append(
                (
                    turn[members[0]],
                    spec.dtype_among(layout.dtype),
                    layout.table[members[0]].group,
                )
            )
        assert len(set(kinds)) == len(kinds)


# ---------------------------------------------------------------------------- padding


def reduced(
    layout: Layout,
    world: MailboxWorld,
    grads: GradBuffers,
    given: dict[str, Tensor],
    leave: set[str],
) -> Generator[str, None, tuple[float, float, Any]]:
    """Give gradients to all but some leaves, reduce: the norm, the zeros, and leaves by path."""
    grads.start()
    grads.guard = Guard(0).check
    grads.add({path: x for path, x in given.items() if path not in leave})
    yield from finalize_steps(world, grads)
    norm = yield from global_norm(world, grads)
    zeros = yield from num_zeros(world, grads, layout.stages[world.stage].specs)
    if not layout.sharded:
        return float(norm[0]), float(zeros[0]), grads.views
    shards = {shard_name(i): x for i, x in grads.shards.items()}
    whole = yield from by_path(layout, world, {"mu": shards, "count": 3})  # type: ignore[arg-type]
    assert whole["count"] == 3
    return float(norm[0]), float(zeros[0]), whole["mu"]


@given(layouts(), st.booleans(), st.data())
@settings(max_examples=40)
def test_padding_reaches_no_sum(layout: Layout, release: bool, data: st.DataObject) -> None:
    """Norm, zeros, the check for NaN and the leaves are numpy's, whatever memory held before."""
    release = release and layout.sharded
    worlds = mailbox.worlds(layout.mesh)
    paths = sorted({path for stage in layout.stages for path in stage.specs} - {"tied"})
    leave = set(data.draw(st.lists(st.sampled_from(paths), max_size=2)))
    given_ = [numbered(layout, world) for world in worlds]
    with dirty_memory():
        buffers = [layout.grads(world, release=release) for world in worlds]
        for turn in range(2):  # the second after the buffers have been used and given up
            office = worlds[0]._office
            parts = zip(worlds, buffers, given_, strict=True)
            done = mailbox.run([reduced(layout, *part, leave) for part in parts], office)
            want = wanted(layout, [
                {p: x * (p not in leave) for p, x in given.items()} for given in given_
            ])  # fmt: skip
            norm = math.sqrt(math.fsum(float(x) ** 2 for g in want.values() for x in g.flat))
            count = sum(int((g == 0).sum()) for g in want.values())
            for (have, zeros, leaves), stage in zip(done, layout.stages, strict=True):
                assert have == pytest.approx(norm, rel=1e-13, abs=1e-300), turn
                assert zeros == count, turn
                assert list(sorted(leaves)) == sorted(stage.specs)
                for path, x in leaves.items():
                    assert_pieces(layout, stage, path, x, want[path])
    for world, grads in zip(worlds, buffers, strict=True):
        for i, bucket in enumerate(grads.buckets):
            if not layout.sharded:
                assert bucket.size == bucket.used
                continue
            pad = padding(bucket).expand(*world.lead, bucket.size)
            axes = grads.row(i).shard_axes
            assert not grads.shards[i][world.shard(pad, axes)].any()


def assert_pieces(layout: Layout, stage: Stage, path: str, x: Tensor, want: np.ndarray) -> None:
    """Every rank's piece of a leaf is that of the whole, exactly, with 0 in the leaf's padding."""
    spec = stage.specs[path]
    for i, rank in enumerate(layout.mesh.stage_ranks(stage.index)):
        ranges = window(spec, layout.mesh, layout.mesh.coords(rank))
        local = np.zeros(local_shape(spec, layout.mesh))
        local[tuple(slice(b - a) for a, b in ranges)] = want[tuple(slice(a, b) for a, b in ranges)]
        assert np.allclose(x[i].numpy(), local, rtol=1e-13, atol=1e-13), (path, rank)


@given(layouts(sharded=True))
@settings(max_examples=25)
def test_shards_and_leaves_are_each_others_inverse(layout: Layout) -> None:
    """An optimizer's state through its shards and back, to the bit; shards' padding is 0."""
    for world in mailbox.worlds(layout.mesh):
        leaves = {
            path: x[:1].expand_as(x).to(
                layout.stages[world.stage].specs[path].dtype_among(layout.dtype)
            )
            for path, x in numbered(layout, world).items()
        }  # fmt: skip
        state = {"adamw": {"count": 2, "mu": leaves}, "clip": {"norm": torch.ones(world.lead)}}
        cut = by_shard(layout, world, state)  # type: ignore[arg-type]
        names = [shard_name(i) for i in range(len(layout.buckets(world.stage)))]
        assert sorted(cut["adamw"]["mu"]) == sorted(names)
        back = finish(by_path(layout, world, cut))  # type: ignore[arg-type]
        assert back["adamw"]["count"] == 2 and torch.equal(
            back["clip"]["norm"], torch.ones(world.lead)
        )
        assert sorted(back["adamw"]["mu"]) == sorted(leaves)
        for path, x in back["adamw"]["mu"].items():
            assert torch.equal(x, leaves[path]) and x.dtype == leaves[path].dtype
        for i, bucket in enumerate(layout.buckets(world.stage)):
            pad = padding(bucket).expand(*world.lead, bucket.size)
            axes = layout.table[bucket.spans[0].path].shard_axes
            assert not cut["adamw"]["mu"][shard_name(i)][world.shard(pad, axes)].any()
