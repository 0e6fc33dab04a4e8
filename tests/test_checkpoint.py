"""A checkpoint's files: bitwise, strict, and hostile ones refused."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from random import Random

import attrs
import pytest
import torch
from safetensors.torch import load_file

from mfun import checkpoint
from mfun.checkpoint import CheckpointError, Disk, Order, Piece, Rules, disk, format, source
from mfun.checkpoint.disk import BLOCK


def state(step: int) -> dict[str, torch.Tensor]:
    """A small state, different at each step."""
    g = torch.Generator().manual_seed(step)
    return {
        "params.embed.tokens": torch.randn(5, 3, generator=g),
        "opt.adam.mu.embed.tokens": torch.randn(5, 3, generator=g, dtype=torch.float64),
    }


def save(run_dir, step, tensors=None, **kw):
    """A save of one rank."""
    options = {
        "consumed": 16 * step,
        "key": (step, 2**32 - 1),
        "tensors": state(step) if tensors is None else tensors,
        "scalars": {"opt.adam.count": step, "lr": 0.1},
        "layout": {"tp": 1, "order": "tp-cp-ep-dp-pp"},
        "config": '[model]\nname = "ä"\n',
    }
    return checkpoint.save(Order(run_dir=Path(run_dir), step=step, **(options | kw)))


def expect(tensors):
    """What a model of these tensors asks for."""
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


def load(folder, tensors, *rest, **kw):
    """A load of one rank."""
    return checkpoint.load(folder, expect(tensors), *rest, **kw)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and every bit, NaN and -0 included."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = (t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def is_state_of(folder: Path | None, step: int) -> bool:
    """Whether a folder holds exactly the state of a step."""
    if folder is None or checkpoint.read_index(folder).step != step:
        return False
    loaded = load(folder, state(step))
    return all(same_bits(loaded[n], t) for n, t in state(step).items())


# ---------------------------------------------------------------------------- round trip


def awkward() -> dict[str, torch.Tensor]:
    """bugs.md 120, and values whose bits are easily lost."""
    parent = torch.arange(4096, dtype=torch.float32)
    special = [float("nan"), -0.0, float("inf"), 5e-324]
    return {
        "params.transpose": torch.arange(6.0).view(2, 3).T,
        "params.slice": parent[100:104],
        "params.strided": parent[::1024],
        "params.one_of_a_column": torch.arange(6.0).view(2, 3)[:1, 1:2].T,
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
    loaded = load(folder, tensors)
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

    def full():
        yield b"{"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*index\.json"):
        Disk().write(tmp_path / "index.json", full())


def large_parts() -> list[bytes]:
    """Of a file of several blocks: parts below, at and above a block's size, and none of a page."""
    sizes = (3, BLOCK - 3, 0, BLOCK, 2 * BLOCK + 4097, 12_345)
    return [Random(size).randbytes(size) for size in sizes]


def written(path: Path, parts: Iterable[bytes]) -> bool:
    """Whether a file that is written of some parts holds them, in order."""
    parts = [*parts]
    Disk().write(path, parts)
    return path.read_bytes() == b"".join(parts)


@pytest.mark.parametrize("how", ["as it is", "never direct", "in little", "slow"])
def test_a_large_file_is_its_parts(tmp_path, monkeypatch, how):
    """Whatever the system makes of direct writing, of long writes, and of time."""
    write, seen = os.write, []

    def odd(handle, view):
        direct = bool(fcntl.fcntl(handle, fcntl.F_GETFL) & disk.DIRECT)
        seen.append((direct, len(view)))
        if how == "never direct" and direct:
            raise OSError(22, "Invalid argument")
        if how == "slow":
            time.sleep(0.02)
        return write(handle, view[: 3 * 4096 + 5] if how == "in little" else view)

    monkeypatch.setattr(os, "write", odd)
    assert written(tmp_path / "large", large_parts())
    assert seen[0][1] == BLOCK and not seen[-1][0], "the last bytes are no block"
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1):
        assert written(tmp_path / str(size), [Random(size).randbytes(size)])


@pytest.mark.parametrize("block", range(5))
def test_a_disk_that_is_full_at_any_block_is_told(tmp_path, monkeypatch, block):
    """Also where a thread writes it."""
    write, calls = os.write, []

    def full(handle, view):
        calls.append(len(view))
        if len(calls) == block + 1:
            raise OSError(28, "No space left on device")
        return write(handle, view)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: .*large"):
        Disk().write(tmp_path / "large", large_parts())
    assert len(calls) > block


def test_scalars_step_config_come_back(tmp_path):
    """Everything but the tensors is in the index, text in any script too."""
    folder = save(
        tmp_path, 12, scalars={"count": 12, "big": 2**70, "lr": 0.1 + 0.2, "list": [1, None]}
    )
    assert folder == tmp_path / "checkpoints" / "step-00000012"
    index = checkpoint.read_index(folder)
    assert index.scalars == {"count": 12, "big": 2**70, "lr": 0.1 + 0.2, "list": [1, None]}
    assert (index.step, index.consumed, index.config) == (12, 192, '[model]\nname = "ä"\n')
    assert index.key == (12, 2**32 - 1)


def test_index_is_json_that_says_what_is_where(tmp_path):
    """Fields that other tools read, a line a tensor; the hash of a file's header is blake2b."""
    tensors = {"w": torch.arange(6.0), "v": torch.ones(5, 3).double()}
    run = Piece(global_shape=(2, 3), start=(0, 0), box=(2, 3), spec="P('tp', None)")
    pieces = {"w": attrs.evolve(run, first=0, count=6)}
    with pytest.raises(CheckpointError, match=r"w has shape \(6,\), but its piece of .* \(2, 3\)"):
        save(tmp_path, 3, tensors, pieces=pieces)
    tensors["w"] = tensors["w"].view(2, 3)
    folder = save(tmp_path, 3, tensors, pieces=pieces)
    text = (folder / "index.json").read_text()
    index, file = json.loads(text), "rank-00000.safetensors"
    contents = (folder / file).read_bytes()
    start = contents[: 8 + struct.unpack("<Q", contents[:8])[0]]
    digest = blake2b(start, digest_size=16).hexdigest()
    assert index["files"] == {file: {"bytes": len(contents), "header": digest}}
    (row,) = index["tensors"]["w"]
    assert len(row.pop("hash")) == 32 and row == {
        "file": file,
        "dtype": "float32",
        "global_shape": [2, 3],
        "start": [0, 0],
        "box": [2, 3],
        "first": 0,
        "count": 6,
        "spec": "P('tp', None)",
    }
    v = index["tensors"]["v"][0]
    assert (v["dtype"], v["global_shape"], v["start"]) == ("float64", [5, 3], [0, 0])
    assert (index["step"], index["consumed"], index["world"]) == (3, 48, 1)
    assert sum(line.startswith('  "w": ') for line in text.splitlines()) == 1
    assert sorted(p.name for p in folder.iterdir()) == ["index.json", file]
    assert (folder.parent / "latest").read_text() == "step-00000003\n"


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    """Deleting or overwriting the checkpoint later leaves what was loaded."""
    folder = save(tmp_path, 1)
    tensors = load(folder, state(1))
    (folder / "rank-00000.safetensors").write_bytes(b"\0" * 4096)
    shutil.rmtree(folder)
    assert all(same_bits(tensors[n], t) for n, t in state(1).items())


@pytest.mark.parametrize(
    ("answer", "told"), [("both", 0), ("first", 1), ("last", 1), ("none", 1), ("no such flag", 1)]
)
def test_what_the_system_has_is_not_announced(tmp_path, monkeypatch, answer, told):
    """Of a tensor, whose ends are asked for without waiting, on systems that can be asked so."""
    x = torch.arange(5000.0)
    folder = save(tmp_path, 1, {"w": x})
    size = (folder / "rank-00000.safetensors").stat().st_size
    read, advice = os.preadv, []

    def preadv(handle, views, at, flags=0):
        if not flags:
            return read(handle, views, at)
        end = {size - x.nbytes: "first", size - 1: "last"}[at]  # the only tensor ends with the file
        if answer not in ("both", end):
            raise BlockingIOError
        return 1

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    if answer == "no such flag":
        monkeypatch.delattr(os, "RWF_NOWAIT")
    monkeypatch.setattr(source, "_advise", lambda _, *rest: advice.append(rest))
    assert torch.equal(load(folder, {"w": x})["w"], x)
    assert advice == [("RANDOM",), *[("WILLNEED", size - x.nbytes, x.nbytes)] * told]


def test_order_of_names_does_not_matter(tmp_path):
    """bugs.md 97: equal shapes, asked for in another order: each value follows its name."""
    tensors = {f"params.{n}": torch.full((2,), float(i)) for i, n in enumerate("bca")}
    folder = save(tmp_path, 1, tensors)
    reverse = dict(reversed(tensors.items()))
    loaded = load(folder, reverse)
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
    monkeypatch.setattr(format, "HEADER_LIMIT", 100)
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
        "params.gone is missing",
        "params.extra is there but not expected",
        "params.shape has shape (2, 3), expected (3, 2)",
        "params.dtype is float32, expected bfloat16",
    ):
        assert sentence in str(caught.value)
    assert "params.kept" not in str(caught.value)


def test_partial_loads_and_renames_are_asked_for(tmp_path):
    """By pattern; what no pattern allows is refused as before, and two names do not become one."""
    stored = {"old.a": torch.ones(2), "old.b": torch.zeros(2), "opt.x": torch.ones(1)}
    folder = save(tmp_path, 1, stored)
    wanted = {"new.a": torch.ones(2), "new.c": torch.ones(3)}
    rename = ((r"old\.(.*)", r"new.\1"),)
    rules = Rules(rename=rename, missing=("new.c",), unexpected=("opt.*", "new.b"))
    assert {n: x.tolist() for n, x in load(folder, wanted, rules).items()} == {"new.a": [1, 1]}
    for less, message in (
        (Rules(rename=rename, missing=("new.*",)), "new.b is there .*opt.x is there"),
        (Rules(rename=rename, unexpected=("*",)), "new.c is missing"),
        (Rules(missing=("*",)), "old.a is there"),
        (Rules(rename=((r"old\..", "one"),)), "old.a and old.b would both be one"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(folder, wanted, less)


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
        for rows in index["tensors"].values():
            rows[0]["file"] = name

    rewrite_index(folder, change)
    with pytest.raises(CheckpointError, match="none of a checkpoint's"):
        load(folder, state(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.update(format=3), "format 3 and this version of mfun reads 2"),
        (lambda i: i.update(more=1), "unknown or misshapen fields"),
        (lambda i: i.pop("step"), "unknown or misshapen fields"),
        (lambda i: i.update(tensors=3), "unknown or misshapen fields"),
        (lambda i: i.update(step="1"), r"expected int @ \$\.step"),
        (lambda i: i.update(step=1.0), r"expected int @ \$\.step"),
        (lambda i: i["tensors"].update(w=[]), "w: it has no pieces"),
        (lambda i: first(i).update(count=14), "its pieces hold 14 of 15 elements"),
        (lambda i: first(i).update(count=16), "a piece is longer than its box"),
        (lambda i: first(i).update(first=-1), "negative numbers"),
        (lambda i: first(i).update(start=[1, 0]), r"reaches beyond \(5, 3\)"),
        (lambda i: first(i).update(box=[15]), r"reaches beyond \(5, 3\)"),
        (lambda i: first(i).update(global_shape=[2**40, 2**40]), "hold 15 of 12089"),
        (lambda i: first(i).update(dtype="quint8"), "the type 'quint8'"),
        (lambda i: huge(i), "holds .* bytes of tensors and has"),
        (lambda i: twice(i), "a file holds two of its pieces"),
        (lambda i: twice(i, "rank-00001.safetensors"), "two pieces overlap"),
    ],
)
def test_index_of_another_form_is_refused(tmp_path, change, message):
    """A later version is named; anything else is not guessed at."""
    folder = save(tmp_path, 1)
    rewrite_index(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder, state(1))


def first(index: dict) -> dict:
    """The row of a float32 tensor of shape (5, 3)."""
    return index["tensors"]["params.embed.tokens"][0]


def huge(index: dict) -> None:
    """A tensor that would take all memory, in a small file."""
    first(index).update(global_shape=[2**30, 3], box=[2**30, 3], count=3 * 2**30)


def twice(index: dict, file: str = "rank-00000.safetensors") -> None:
    """A tensor with a second piece that is the same elements."""
    index["files"].setdefault(file, index["files"]["rank-00000.safetensors"])
    index["tensors"]["params.embed.tokens"].append(first(index) | {"file": file})


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": 1, "a": 2}',
        b'{"step": NaN}',
        b"[" * 100_000,
        b"[1]",
        b"\xff\xfe",
        b'{"format": 2}',
    ],
)
def test_index_that_is_no_index_is_refused(tmp_path, text):
    """Keys that stand twice, numbers that are none, nesting without end, bytes that are no text."""
    folder = save(tmp_path, 1)
    (folder / "index.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"index\.json .*resume from another"):
        load(folder, state(1))


def file_of(header: dict | bytes, data: bytes, size: int | None = None) -> bytes:
    """A file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


TWIN = b'{"w":%b,"w":%b}' % tuple(json.dumps(entry([1], i, i + 4)).encode() for i in (0, 4))


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        (file_of({"w": entry([2], 0, 8)}, bytes(8)), None),
        (
            file_of({"w": entry([4], 0, 8)}, bytes(8)),
            "of shape .4. and type F32 has 8",
        ),
        (file_of({"w": entry([2], 0, 8)}, bytes(4)), "its tensors end at byte"),
        (file_of({"w": entry([2], 4, 12)}, bytes(12)), "leaves a hole before it"),
        (
            file_of({"w": entry([2], 0, 8), "v": entry([2], 4, 12)}, bytes(12)),
            "overlaps the tensor",
        ),
        (
            file_of({"w": entry([2], 0, 8), "v": entry([2], 12, 20)}, bytes(20)),
            "v leaves a hole",
        ),
        (
            file_of({"w": entry([2], 0, 8)}, bytes(8), size=2**62),
            "have 4611686018427387904 bytes",
        ),
        (file_of({"w": entry([2**40, 2**40], 0, 8)}, bytes(8)), "has 8 bytes"),
        (file_of(TWIN, bytes(8)), "'w' stands twice"),
        (file_of({"v": entry([2], 0, 8)}, bytes(8)), "w in it is not what"),
        (file_of({"w": entry([2], 0, 8, "I32")}, bytes(8)), "w in it is not what"),
        (file_of(b"not json", b""), "not JSON"),
    ],
)
def test_hostile_tensor_files_are_refused(tmp_path, contents, says):
    """bugs.md 121: even with right hashes, a crafted file is read as what it should be or not.

    Refused before anything of the size it claims is allocated.
    """
    folder = save(tmp_path, 1, {"w": torch.zeros(2)})
    (folder / "rank-00000.safetensors").write_bytes(contents)
    start = contents[: 8 + struct.unpack("<Q", contents[:8])[0]]
    digest = blake2b(start, digest_size=16).hexdigest()
    file = {"bytes": len(contents), "header": digest}
    rewrite_index(folder, lambda i: i.update(files={"rank-00000.safetensors": file}))
    tracemalloc.start()
    if says is None:
        assert load(folder, {"w": torch.zeros(2)})["w"].tolist() == [0, 0]
    else:
        with pytest.raises(CheckpointError, match=says):
            load(folder, {"w": torch.zeros(2)})
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_header_of_any_bytes_is_read_or_refused(tmp_path):
    """A few hundred damaged files: an answer or `CheckpointError`, never another end."""
    folder = save(tmp_path, 1)
    path = folder / "rank-00000.safetensors"
    good = path.read_bytes()
    random = Random(0)
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(random.randint(1, 4)):
            bad[random.randrange(200)] = random.randrange(256)
        path.write_bytes(bad)
        try:
            format.read_header(path)
        except CheckpointError:
            pass
