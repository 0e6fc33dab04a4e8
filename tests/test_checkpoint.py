"""Checkpoints: bitwise, strict, whole after a stop at any point."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import threading
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from mfun import checkpoint
from mfun.checkpoint import CheckpointError, Disk, Piece, writer

LAYOUT = {"tp": 1, "pp": 1, "dp": 1, "order": "tp-cp-ep-dp-pp"}


def state(step: int) -> dict[str, torch.Tensor]:
    """A small state, different at each step."""
    g = torch.Generator().manual_seed(step)
    return {
        "params.embed.tokens": torch.randn(5, 3, generator=g),
        "opt.adam.mu.embed.tokens": torch.randn(5, 3, generator=g, dtype=torch.float64),
    }


def save(run_dir, step, tensors=None, *, disk=None, keep=0, **kw):
    """A save of one rank."""
    options = {
        "consumed": 16 * step,
        "tensors": state(step) if tensors is None else tensors,
        "scalars": {"opt.adam.count": step, "lr": 0.1},
        "layout": LAYOUT,
        "config": '[model]\nname = "ä"\n',
        "rank": 0,
        "world": 1,
        "barrier": lambda: None,
    }
    return checkpoint.save(run_dir, step=step, keep=keep, disk=disk, **(options | kw))


def expect(tensors):
    """What a model of these tensors asks for."""
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def load(folder, tensors, **kw):
    """A load of one rank."""
    options = {"rank": 0, "world": 1, "layout": LAYOUT, "expected": expect(tensors)}
    return checkpoint.load(folder, **(options | kw))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and every bit, NaN and -0 included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def is_state_of(folder: Path, step: int) -> bool:
    """Whether a folder holds exactly the state of a step."""
    loaded = load(folder, state(step))
    return loaded.step == step and all(
        same_bits(loaded.tensors[n], t) for n, t in state(step).items()
    )


# ---------------------------------------------------------------------------- round trip


def awkward() -> dict[str, torch.Tensor]:
    """bugs.md 120, and values whose bits are easily lost."""
    parent = torch.arange(4096, dtype=torch.float32)
    special = [float("nan"), -0.0, float("inf"), 5e-324]
    return {
        "params.transpose": torch.arange(6.0).view(2, 3).T,
        "params.slice": parent[100:104],
        "params.strided": parent[::1024],
        "params.expanded": torch.tensor([1.5]).expand(7),
        "params.view_a": parent[:8].view(2, 4),
        "params.view_b": parent[:8],
        "params.scalar": torch.tensor(3.25),
        "params.empty": torch.empty(0, 3),
        "params.bf16": torch.randn(3, 3).bfloat16(),
        "params.f16": torch.randn(3).half(),
        "params.bool": torch.tensor([True, False, True]),
        "params.int64": torch.tensor([2**62 + 1, -1]),
        "params.special": torch.tensor(special, dtype=torch.float64),
        "params.grad": torch.ones(2, requires_grad=True),
    }


def test_awkward_tensors_survive_bitwise_and_take_only_their_own_bytes(tmp_path):
    """The official package reads equal values, and no view drags its parent buffer along."""
    tensors = awkward()
    folder = save(tmp_path, 1, tensors)
    path = folder / "rank-00000.safetensors"
    official = load_file(path)
    loaded = load(folder, tensors).tensors
    assert list(loaded) == list(tensors)
    for name, value in tensors.items():
        assert same_bits(official[name], value), name
        assert same_bits(loaded[name], value) and not loaded[name].requires_grad, name
    data = sum(t.numel() * t.element_size() for t in tensors.values())
    header = struct.unpack("<Q", path.read_bytes()[:8])[0]
    assert path.stat().st_size == 8 + header + data


def test_whoever_may_read_the_folder_may_read_its_files(tmp_path):
    """The umask decides for all of them alike."""
    before = os.umask(0o027)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o640}


def test_a_failed_write_names_its_file(tmp_path):
    """The system's own error for a full disk has no name in it."""

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*index\.json"):
        Disk().write(tmp_path / "index.json", full)


def test_scalars_step_config_come_back(tmp_path):
    """Everything but the tensors is in the index, text in any script too."""
    folder = save(
        tmp_path, 12, scalars={"count": 12, "big": 2**70, "lr": 0.1 + 0.2, "list": [1, None]}
    )
    assert folder == tmp_path / "checkpoints" / "step-00000012"
    loaded = load(folder, state(12))
    assert loaded.scalars == {"count": 12, "big": 2**70, "lr": 0.1 + 0.2, "list": [1, None]}
    assert (loaded.step, loaded.consumed, loaded.config) == (12, 192, '[model]\nname = "ä"\n')


def test_index_is_json_that_says_what_is_where(tmp_path):
    """Fields that other tools read; hashes are blake2b of the files."""
    piece = Piece(global_shape=(10, 3), start=(5, 0), spec="P('tp', None)")
    folder = save(tmp_path, 3, pieces={"params.embed.tokens": piece})
    index = json.loads((folder / "index.json").read_text())
    file = "rank-00000.safetensors"
    contents = (folder / file).read_bytes()
    digest = blake2b(contents, digest_size=16).hexdigest()
    assert index["files"] == {file: {"bytes": len(contents), "blake2b": digest}}
    assert index["tensors"]["params.embed.tokens"] == [
        {
            "file": file,
            "dtype": "float32",
            "shape": [5, 3],
            "global_shape": [10, 3],
            "start": [5, 0],
            "spec": "P('tp', None)",
        }
    ]
    mu = index["tensors"]["opt.adam.mu.embed.tokens"][0]
    assert (mu["dtype"], mu["global_shape"], mu["start"]) == ("float64", [5, 3], [0, 0])
    assert (index["step"], index["consumed"], index["world"], index["layout"]) == (3, 48, 1, LAYOUT)
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", file]


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    """Deleting or overwriting the checkpoint later leaves what was loaded."""
    folder = save(tmp_path, 1)
    tensors = load(folder, state(1)).tensors
    (folder / "rank-00000.safetensors").write_bytes(b"\0" * 4096)
    shutil.rmtree(folder)
    assert all(same_bits(tensors[n], t) for n, t in state(1).items())


def test_order_of_names_does_not_matter(tmp_path):
    """bugs.md 97: equal shapes, asked for in another order: each value follows its name."""
    tensors = {f"params.{n}": torch.full((2,), float(i)) for i, n in enumerate("bca")}
    folder = save(tmp_path, 1, tensors)
    reverse = dict(reversed(tensors.items()))
    loaded = load(folder, reverse).tensors
    assert {n: t.tolist() for n, t in loaded.items()} == {n: t.tolist() for n, t in tensors.items()}


@pytest.mark.parametrize(
    "value", [(0.9, 0.95), float("nan"), {1: 2}, torch.tensor(1), [(1,)], {"a": (1,)}, b"x"]
)
def test_scalars_that_json_changes_are_refused_by_name(tmp_path, value):
    """Nothing of such a save is kept."""
    with pytest.raises(CheckpointError, match=r"scalars: 'opt\.bad' is"):
        save(tmp_path, 1, scalars={"good": 1, "opt.bad": value})
    assert checkpoint.latest(tmp_path) is None


def test_sparse_tensor_is_refused_by_name(tmp_path):
    """safetensors holds dense tensors only."""
    with pytest.raises(CheckpointError, match=r"params\.s is not a dense tensor"):
        save(tmp_path, 1, {"params.s": torch.eye(2).to_sparse()})


def test_header_no_reader_accepts_is_refused(tmp_path, monkeypatch):
    """bugs.md 122, with the limit lowered."""
    monkeypatch.setattr(writer, "HEADER_LIMIT", 100)
    with pytest.raises(CheckpointError, match=r"header of \d+ bytes and readers accept 100"):
        save(tmp_path, 1)
    assert checkpoint.latest(tmp_path) is None


# ---------------------------------------------------------------------------- strictness


def test_each_missing_unexpected_misshapen_and_mistyped_tensor_is_named(tmp_path):
    """bugs.md 96: one deleted, one added, one of another shape, one of another dtype."""
    stored = {f"params.{n}": torch.ones(2, 3) for n in ("kept", "extra", "shape", "dtype")}
    folder = save(tmp_path, 1, stored)
    wanted = {
        "params.kept": torch.ones(2, 3),
        "params.gone": torch.ones(2, 3),
        "params.shape": torch.ones(3, 2),
        "params.dtype": torch.ones(2, 3, dtype=torch.bfloat16),
    }
    with pytest.raises(CheckpointError) as caught:
        load(folder, wanted)
    for sentence in (
        "params.gone is missing from rank-00000.safetensors",
        "params.extra is in rank-00000.safetensors but not expected",
        "params.shape has shape (2, 3), expected (3, 2)",
        "params.dtype is float32, expected bfloat16",
    ):
        assert sentence in str(caught.value)
    assert "params.kept" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"layout": LAYOUT | {"tp": 2}}, ["tp=1", "tp=2", "differ in tp)"]),
        ({"world": 4}, ["world=1", "world=4", "differ in world)"]),
        ({"layout": LAYOUT | {"order": "dp-tp"}}, ["order=tp-cp-ep-dp-pp", "order=dp-tp"]),
        ({"layout": LAYOUT | {"cp": 1}}, ["differ in cp)"]),
    ],
)
def test_other_layout_is_refused_naming_both(tmp_path, change, names):
    """The refusal comes before any tensor is looked at."""
    folder = save(tmp_path, 1)
    with pytest.raises(CheckpointError, match="another layout is not built yet") as caught:
        load(folder, {}, **change)
    assert all(name in str(caught.value) for name in names)


def damage(path: Path, how: str) -> None:
    """Spoil a file as a bad disk or a broken copy would."""
    contents = path.read_bytes()
    middle = len(contents) // 2
    flipped = bytes([contents[middle] ^ 1])
    new = {
        "cut": contents[:-1],
        "empty": b"",
        "flip": contents[:middle] + flipped + contents[middle + 1 :],
        "longer": contents + b" x",
        "zeros": b"\0" * len(contents),
    }
    path.unlink() if how == "gone" else path.write_bytes(new[how])


@pytest.mark.parametrize("how", ["cut", "empty", "flip", "longer", "zeros", "gone"])
@pytest.mark.parametrize("file", ["rank-00000.safetensors", "index.json"])
def test_damaged_file_is_refused_by_name_and_latest_passes_over_it(tmp_path, file, how):
    """A changed bit in a tensor file shows only at loading; all else also to `latest`."""
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    damage(bad / file, how)
    with pytest.raises(CheckpointError, match=f"{file}.*resume from another"):
        load(bad, state(2))
    hidden = file.startswith("rank") and how in ("flip", "zeros")
    assert checkpoint.latest(tmp_path) == (bad if hidden else good)
    assert is_state_of(good, 1)


def rewrite_index(folder: Path, change: Callable[[dict], None]) -> None:
    """Change an index and make its hash right again, as a hostile writer would."""
    index = json.loads((folder / "index.json").read_text())
    del index["blake2b"]
    change(index)
    text = json.dumps(index, sort_keys=True, separators=(",", ":"))
    index["blake2b"] = blake2b(text.encode(), digest_size=16).hexdigest()
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "x/rank-00000.safetensors", "other"])
def test_index_cannot_name_files_outside(tmp_path, name):
    """bugs.md 121: paths in index.json do not lead anywhere."""
    folder = save(tmp_path, 1)

    def change(index):
        index["files"][name] = index["files"].pop("rank-00000.safetensors")
        index["tensors"]["params.embed.tokens"][0]["file"] = name

    rewrite_index(folder, change)
    with pytest.raises(CheckpointError, match="none of a checkpoint's"):
        load(folder, state(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(format=2), "format 2 and this version of mfun reads 1"),
        (lambda i: i.update(more=1), "unknown or misshapen fields"),
        (lambda i: i.pop("step"), "unknown or misshapen fields"),
        (lambda i: i.update(tensors=3), "unknown or misshapen fields"),
    ],
)
def test_index_of_another_form_is_refused(tmp_path, change, message):
    """A later version is named; anything else is not guessed at."""
    folder = save(tmp_path, 1)
    rewrite_index(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder, state(1))


def safetensors_bytes(header: dict | bytes, data: bytes, size: int | None = None) -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


TWIN = b'{"w":%b,"w":%b}' % tuple(json.dumps(entry([1], i, i + 4)).encode() for i in (0, 4))


@pytest.mark.parametrize(
    ("contents", "accepted"),
    [
        (safetensors_bytes({"w": entry([2], 0, 8)}, bytes(8)), True),
        (safetensors_bytes({"w": entry([4], 0, 8)}, bytes(8)), False),
        (safetensors_bytes({"w": entry([2], 0, 8)}, bytes(4)), False),
        (safetensors_bytes({"w": entry([2], 4, 12)}, bytes(12)), False),
        (safetensors_bytes({"w": entry([2], 0, 8), "v": entry([2], 4, 12)}, bytes(12)), False),
        (safetensors_bytes({"w": entry([2], 0, 8), "v": entry([2], 12, 20)}, bytes(20)), False),
        (safetensors_bytes({"w": entry([2], 0, 8)}, bytes(8), size=2**62), False),
        (safetensors_bytes({"w": entry([2**40, 2**40], 0, 8)}, bytes(8)), False),
        (safetensors_bytes(TWIN, bytes(8)), False),
        (safetensors_bytes({"v": entry([2], 0, 8)}, bytes(8)), False),
        (safetensors_bytes({"w": entry([2], 0, 8, "I32")}, bytes(8)), False),
        (safetensors_bytes(b"not json", b""), False),
    ],
)
def test_hostile_tensor_files_are_refused(tmp_path, contents, accepted):
    """bugs.md 121: even with right hashes, a crafted file is read as what it should be or not."""
    folder = save(tmp_path, 1, {"w": torch.zeros(2)})
    (folder / "rank-00000.safetensors").write_bytes(contents)
    file = {"bytes": len(contents), "blake2b": blake2b(contents, digest_size=16).hexdigest()}
    rewrite_index(folder, lambda i: i.update(files={"rank-00000.safetensors": file}))
    if accepted:
        assert load(folder, {"w": torch.zeros(2)}).tensors["w"].tolist() == [0, 0]
    else:
        with pytest.raises(CheckpointError):
            load(folder, {"w": torch.zeros(2)})


# ---------------------------------------------------------------------------- stops and retention


class Killed(BaseException):
    """What a kill is to a process: nothing after it runs, no handler either."""


def killing(at: int) -> tuple[Disk, list[str]]:
    """A disk that dies before its operation number `at`, and the operations it did."""
    done: list[str] = []

    def before(operation, path):
        if len(done) == at:
            raise Killed
        done.append(operation)

    return Disk(before), done


def operations(run_dir: Path, step: int, keep: int) -> int:
    """How many operations a save there takes."""
    disk, done = killing(-1)
    save(run_dir, step, disk=disk, keep=keep)
    return len(done)


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("steps", [(1, 2, 3), (1, 2, 2)])
def test_stopped_before_any_operation_a_whole_checkpoint_is_left(tmp_path, steps, torn):
    """Stop a save (a new step, and one that replaces) before each operation it makes.

    Before the stop steps 1 and 2 are whole. After it `latest` is the old or the new state, loads
    bitwise, and the next save works and leaves nothing of the broken one. `torn`: what was
    written and not yet synced is cut in half, as a power cut may do.
    """
    *before, last = steps
    probe = tmp_path / "probe"
    for step in before:
        save(probe, step)
    total = operations(probe, last, keep=2)
    assert total > 10
    for at in range(total):
        run_dir = tmp_path / f"{at}"
        for step in before:
            save(run_dir, step)
        disk, done = killing(at)
        with pytest.raises(Killed):
            save(run_dir, last, disk=disk, keep=2)
        if torn and done and done[-1] == "write":
            for path in run_dir.glob("checkpoints/.tmp-*/*"):
                path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        newest = checkpoint.latest(run_dir)
        assert newest is not None
        step = checkpoint.read_index(newest).step
        assert step in (before[-1], last) and is_state_of(newest, step)
        save(run_dir, 4, keep=2)
        names = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
        assert len(names) == 2 and names[-1] == "step-00000004", names
        assert is_state_of(run_dir / "checkpoints" / names[0], int(names[0][-8:]))


def test_saving_a_step_again_replaces_it(tmp_path):
    """A run resumed from an earlier step overwrites what the first one left."""
    save(tmp_path, 5, {"params.w": torch.zeros(2)})
    folder = save(tmp_path, 5, {"params.w": torch.ones(2)})
    assert load(folder, {"params.w": torch.ones(2)}).tensors["params.w"].tolist() == [1, 1]
    assert [p.name for p in folder.parent.iterdir()] == ["step-00000005"]


@settings(max_examples=15)
@given(keep=st.integers(0, 4), steps=st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_retention_keeps_the_newest_and_the_one_just_saved(tmp_path_factory, keep, steps):
    """Against a list: after each save the greatest `keep` steps stay, and the new one."""
    run_dir = tmp_path_factory.mktemp("run")
    there: list[int] = []
    for step in steps:
        save(run_dir, step, {"params.w": torch.zeros(1)}, keep=keep)
        there = sorted({*there, step})
        if keep:
            there = [s for s in there if s in there[-keep:] or s == step]
        assert list(checkpoint.saved(run_dir)) == there
    newest = checkpoint.latest(run_dir)
    assert newest is not None and newest.name == f"step-{max(there):08d}"


def test_latest_of_no_run_is_none(tmp_path):
    """Neither a missing folder nor foreign files in it are an error."""
    assert checkpoint.latest(tmp_path / "nowhere") is None
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / "notes.txt").write_text("x")
    assert checkpoint.latest(tmp_path) is None
    assert save(tmp_path, 7) == checkpoint.latest(tmp_path)


# ---------------------------------------------------------------------------- many ranks

MESH = LAYOUT | {"tp": 2, "dp": 2}


def on_ranks(world: int, work: Callable[[int, Callable[[], None]], object]) -> list:
    """Run `work(rank, barrier)` on threads; results, or the exceptions."""
    barrier = threading.Barrier(world, timeout=20)
    out: list = [None] * world

    def one(rank):
        try:
            out[rank] = work(rank, lambda: (barrier.wait(), None)[1])
        except BaseException as error:
            out[rank] = error
            if isinstance(error, Killed):
                barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return out


def rank_state(rank: int) -> dict[str, torch.Tensor]:
    """tp2 x dp2: `w` is cut over tp and equal over dp, `local` is each rank's own on tp 0 only."""
    tensors = {"params.w": torch.full((2, 2), float(rank % 2))}
    return tensors | ({"opt.local": torch.tensor(rank)} if rank % 2 == 0 else {})


def rank_save(run_dir, step, rank, barrier, disk=None):
    return checkpoint.save(
        run_dir,
        step=step,
        consumed=0,
        tensors=rank_state(rank),
        scalars={"count": rank},
        layout=MESH,
        config="",
        rank=rank,
        world=4,
        barrier=barrier,
        owners={"params.w": rank % 2},
        disk=disk,
    )


def rank_load(folder, rank):
    return checkpoint.load(
        folder,
        rank=rank,
        world=4,
        expected=expect(rank_state(rank)),
        layout=MESH,
        owners={"params.w": rank % 2},
    )


def test_ranks_write_what_they_own_and_read_from_owners(tmp_path):
    """Rank 3 owns nothing, so it has no file, and reads its copy from rank 1."""
    folders = on_ranks(4, lambda rank, barrier: rank_save(tmp_path, 1, rank, barrier))
    folder = checkpoint.latest(tmp_path)
    assert folder is not None and folders == [folder] * 4
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert files == [f"rank-0000{i}.safetensors" for i in (0, 1, 2)]
    assert set(load_file(folder / files[2])) == {"opt.local"}
    for rank in range(4):
        loaded = rank_load(folder, rank)
        assert loaded.tensors.keys() == rank_state(rank).keys()
        assert all(same_bits(loaded.tensors[n], t) for n, t in rank_state(rank).items())
        assert loaded.scalars == {"count": 0}


@pytest.mark.parametrize("failing", range(4))
def test_one_rank_that_fails_fails_all_and_hangs_none(tmp_path, failing):
    """bugs.md 89: a full disk on one rank, before each of its operations; the last save stays."""
    on_ranks(4, lambda rank, barrier: rank_save(tmp_path, 1, rank, barrier))
    counted: list[str] = []
    counting = Disk(lambda operation, path: counted.append(operation))
    on_ranks(4, lambda r, b: rank_save(tmp_path, 0, r, b, counting if r == failing else None))
    for at in range(len(counted)):
        if counted[at] == "remove" and failing == 0:
            continue  # clearing away reports is covered by the kills above
        seen: list[str] = []

        def before(operation, path, at=at, seen=seen):
            seen.append(operation)
            if len(seen) == at + 1:
                raise OSError(28, "No space left on device", str(path))

        disks = [Disk(before) if r == failing else None for r in range(4)]
        results = on_ranks(4, lambda r, b, d=disks: rank_save(tmp_path, 2, r, b, d[r]))
        committed = (tmp_path / "checkpoints" / "step-00000002").exists()
        assert isinstance(results[failing], OSError)
        if not committed:
            assert all(isinstance(r, CheckpointError | OSError) for r in results)
            newest = checkpoint.latest(tmp_path)
            assert newest is not None and rank_load(newest, 3).step == 1
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002", ignore_errors=True)


def test_rank_0_names_the_ranks_that_did_not_write(tmp_path):
    """A node that does not see the folder shows as missing ranks."""

    def before(operation, path):
        raise OSError(2, "No such file or directory")

    results = on_ranks(
        4, lambda r, b: rank_save(tmp_path, 1, r, b, Disk(before) if r > 1 else None)
    )
    assert "rank(s) 2, 3 did not write their part" in str(results[0])
    assert "another rank failed" in str(results[1])
    assert checkpoint.latest(tmp_path) is None
