"""`mfun inspect`: what it shows of every kind of source, by numpy and by hand; no code is run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from mfun.checkpoint import CheckpointError, Order, Piece, step_folder
from mfun.checkpoint.format import header
from mfun.cli import main
from mfun.config import load, to_toml
from mfun.inspect import SourceError, compare, open_source, statistics

CONFIG = to_toml(load("tiny"))


def inspect(*words: object) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, words)], catch_exceptions=False)


def save(run: Path, step: int, *ranks: dict[str, tuple[Tensor, Piece]], **more: Any) -> Path:
    """A checkpoint of some ranks: what each holds, and where it lies."""
    orders = [
        Order(
            run_dir=run,
            step=step,
            tensors={name: x for name, (x, _) in held.items()},
            pieces={name: piece for name, (_, piece) in held.items()},
            rank=rank,
            world=len(ranks),
            layout={"tp": len(ranks), "pp": 1},
            **{"config": CONFIG, **more},
        )
        for rank, held in enumerate(ranks)
    ]
    orders[0].prepare()
    for order in orders:
        order.write()
    orders[0].commit()
    return orders[0].folder


def piece(
    shape: tuple[int, ...], start: tuple[int, ...], box: tuple[int, ...], **run: int
) -> Piece:
    return Piece(global_shape=shape, start=start, box=box, spec="P('tp')", **run)


def three_ranks(run: Path, step: int = 7, scale: float = 1.0, **more: Any) -> Path:
    """A 4 x 6 matrix and its moments, cut by columns, the right moments again into two runs; and a
    vector in one piece."""
    w, b = torch.arange(24.0).view(4, 6) * scale, torch.tensor([1.0, 2.0])
    left, right = w[:, :3], w[:, 3:]
    at_left, at_right = (piece((4, 6), (0, column), (4, 3)) for column in (0, 3))
    run_of = partial(piece, (4, 6), (0, 3), (4, 3))
    ranks = [
        {
            "params.w": (left, at_left),
            "params.b": (b, piece((2,), (0,), (2,))),
            "opt.adam.mu.w": (left, at_left),
        },
        {
            "params.w": (right, at_right),
            "opt.adam.mu.w": (right.flatten()[2:], run_of(first=2, count=10)),
        },
        {"opt.adam.mu.w": (right.flatten()[:2], run_of(first=0, count=2))},
    ]
    return save(run, step, *ranks, **more)


# ---------------------------------------------------------------------------- numbers


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any shape, with rows of zeros, NaN and Inf in it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    x, odd = rng.normal(size=shape), rng.random(shape)
    x = np.where(odd < 0.1, np.nan, np.where(odd < 0.2, np.inf, np.where(odd > 0.9, 0.0, x)))
    if len(shape) > 1:
        x[rng.random(shape[:-1]) < 0.3] = 0.0
    return torch.from_numpy(np.asarray(x)).to(draw(st.sampled_from([torch.float64, torch.float32])))


@given(tensors(), st.integers(0, 3), st.integers(1, 9))
def test_statistics_are_numpys(
    tmp_path_factory: pytest.TempPathFactory, x: Tensor, cuts: int, chunk: int
) -> None:
    """Norm, mean, deviation, extremes of what is finite; counts; rows that are all zero; whatever
    the pieces and however little is read at a time."""
    run, shape, full = tmp_path_factory.mktemp("run"), tuple(x.shape), x.numel()
    bounds = sorted({0, full, *(full * i // (cuts + 1) for i in range(1, cuts + 1))})
    spans = [(0, full)] if len(bounds) < 3 else [*pairwise(bounds)]
    ranks = []
    for low, high in spans:
        one = piece(shape, (0,) * len(shape), shape, first=low, count=high - low)
        ranks.append({"w": (x if one.whole_box else x.flatten()[low:high], one)})
    whole = open_source(save(run, 0, *ranks)).tensors["w"]
    assert whole.read().numpy().tobytes() == x.numpy().tobytes()
    found = statistics(whole, chunk)
    a = x.double().numpy()
    fine = a[np.isfinite(a)]
    assert (found.nan, found.inf) == (int(np.isnan(a).sum()), int(np.isinf(a).sum()))
    assert found.zeros == int((fine == 0).sum())
    assert found.norm == pytest.approx(np.linalg.norm(fine), rel=1e-12)
    for mine, theirs in zip(
        (found.mean, found.std, found.least, found.most),
        (np.mean, np.std, np.min, np.max),
        strict=True,
    ):
        assert mine == pytest.approx(theirs(fine), abs=1e-12) if fine.size else math.isnan(mine)
    rows = a.reshape(-1, a.shape[-1]) if a.ndim > 1 and a.size else np.empty((0, 1))
    assert (found.rows, found.dead) == (len(rows), int((rows == 0).all(1).sum()))


def test_large_means_do_not_swallow_the_deviation(tmp_path: Path) -> None:
    """Numbers around 1e8 that deviate by 1: the squares alone would lose it."""
    x = torch.tensor([1e8, 1e8 + 2, 1e8, 1e8 + 2], dtype=torch.float64)
    save_file({"x": x}, tmp_path / "x.safetensors")
    found = statistics(open_source(tmp_path / "x.safetensors").tensors["x"], 1)
    assert found.mean == 1e8 + 1 and found.std == pytest.approx(1.0, rel=1e-8)


# ---------------------------------------------------------------------------- what is shown


def test_a_checkpoint_is_shown(tmp_path: Path) -> None:
    """Kind, step, layout, counts by what tensors are, and which file holds which part."""
    three_ranks(tmp_path)
    told = inspect(tmp_path).output
    assert f"mfun checkpoint of step 7, 0 samples: {step_folder(tmp_path, 7)}" in told
    assert "saved by 3 ranks (tp 3)" in told and "3 files of 200 B" in told
    assert "params: 26 elements in 2 tensors, 104 B, float32" in told
    assert "opt.adam.mu: 24 elements in 1 tensor, 96 B, float32" in told
    rows = {
        line.split()[0]: line for line in told.splitlines() if line.startswith(("params.", "opt."))
    }
    assert {"params.w", "params.b", "opt.adam.mu.w"} <= rows.keys()
    assert "[4, 6]" in rows["params.w"] and "P('tp')" in rows["params.w"]
    assert "2 pieces, rank-00000.safetensors .. rank-00001.safetensors" in rows["params.w"]
    told = inspect(tmp_path, "--tensors", "opt.*").output
    assert "params.b  " not in told
    start = os.stat(step_folder(tmp_path, 7) / "rank-00002.safetensors").st_size - 8
    assert f"  rank-00002.safetensors bytes {start}-{start + 8}: elements 0-2 of [0:4, 3:6]" in told
    assert "rank-00001.safetensors bytes" in told and "elements 2-12 of [0:4, 3:6]" in told
    assert re_line(told, "rank-00000.safetensors").endswith(": [0:4, 0:3]")


def re_line(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_equal_blocks_share_a_line(tmp_path: Path) -> None:
    """Of Hugging Face's names and of mfun's; what differs in shape or type has its own."""
    held = {f"model.layers.{i}.w": torch.ones(2, 3 + (i == 2)) for i in range(5)}
    save_file(held, tmp_path / "model.safetensors")
    told = inspect(tmp_path).output
    assert "hugging face: " in told
    assert "model.layers.0-1,3-4.w  float32  [2, 3]" in told
    assert "model.layers.2.w        float32  [2, 4]" in told


def test_numbers_are_shown(tmp_path: Path) -> None:
    """--stats: the norm, and what stands out."""
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, math.inf]])
    save_file({"x": x, "y": torch.ones(2)}, tmp_path / "some.safetensors")
    told = inspect(tmp_path / "some.safetensors", "--stats").output
    assert re_line(told, "x  ").split()[1:3] == ["5", "1.75"]
    assert re_line(told, "x  ").endswith("1 NaN, 1 Inf, 1 of 3 rows zero")
    assert "tensors with elements that are not finite: 1 of 2" in told


def test_for_programs(tmp_path: Path) -> None:
    """--json holds all of it; what is not finite is null, as JSON has no NaN."""
    folder = three_ranks(tmp_path)
    told = json.loads(inspect(tmp_path, "--json", "--tensors", "params.*", "--stats").output)
    assert (told["kind"], told["step"], told["world"]) == ("mfun", 7, 3)
    assert told["tensors"].keys() == {"params.w", "params.b"}
    w = told["tensors"]["params.w"]
    assert (w["dtype"], w["shape"], w["spec"]) == ("float32", [4, 6], "P('tp')")
    assert w["stats"]["norm"] == pytest.approx(math.sqrt(sum(i * i for i in range(24))))
    (first, second) = w["pieces"]
    assert (second["start"], second["box"], second["elements"]) == ([0, 3], [4, 3], [0, 12])
    data = (folder / first["file"]).read_bytes()[slice(*first["bytes"])]
    assert np.frombuffer(data, "<f4").tolist() == [0, 1, 2, 6, 7, 8, 12, 13, 14, 18, 19, 20]
    save_file({"x": torch.tensor([math.nan])}, tmp_path / "x.safetensors")
    told = json.loads(inspect(tmp_path / "x.safetensors", "--json", "--stats").output)
    assert told["tensors"]["x"]["stats"]["mean"] is None


# ---------------------------------------------------------------------------- two of them


def test_what_differs_is_shown(tmp_path: Path) -> None:
    """Values, shapes, types, tensors of one only; settings and step; exit code 1."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    same = torch.tensor([1.0, math.nan, -0.0])
    held = {"s": same, "v": torch.tensor([1.0, 2.0, 8.0]), "t": torch.ones(2)}
    save_file({**held, "h": torch.ones(2, 3), "x": torch.ones(1)}, a)
    held = {"s": same, "v": torch.tensor([1.0, 2.5, 8.0]), "t": torch.ones(2).half()}
    save_file({**held, "h": torch.ones(3, 2), "y": torch.ones(1)}, b)
    done = inspect(a, "--diff", b)
    assert done.exit_code == 1
    assert "v: 1 element not equal, by at most 0.5 (0.062 of the largest)" in done.output
    assert "h: shape: float32 [2, 3] and float32 [3, 2]" in done.output
    assert "t: float32 [2] and float16 [2]: 0 elements not equal" in done.output
    assert "x: only in the first: float32 [1]" in done.output
    assert "y: only in the second: float32 [1]" in done.output
    assert "1 equal to the bit, 5 not, of 6 tensors" in done.output
    assert inspect(a, "--diff", a).exit_code == 0
    kinds = {one.name: one.kind for one in compare(open_source(a), open_source(b))}
    assert kinds["s"] == "equal" and kinds["v"] == "values"
    told = json.loads(inspect(a, "--diff", b, "--json").output)
    assert told["equal"] == 1 and {row["name"] for row in told["differ"]} == {*"vhtxy"}


def test_layouts_do_not_differ(tmp_path: Path) -> None:
    """One rank's checkpoint and three ranks' are compared by whole tensors; settings are told."""
    three_ranks(tmp_path / "three")
    w = torch.arange(24.0).view(4, 6)
    whole = lambda x: (x, piece(tuple(x.shape), (0,) * x.ndim, tuple(x.shape)))  # noqa: E731
    held = {"params.w": whole(w), "opt.adam.mu.w": whole(w)}
    held["params.b"] = whole(torch.tensor([1.0, 2.0]))
    other = to_toml(load("tiny", ["optim.lr=0.5"]))
    save(tmp_path / "one", 9, held, config=other)
    done = inspect(tmp_path / "three", "--diff", tmp_path / "one")
    assert done.exit_code == 0 and "3 equal to the bit, 0 not, of 3 tensors" in done.output
    assert "step: 7 and 9" in done.output and "optim.lr: 0.002 and 0.5" in done.output
    three_ranks(tmp_path / "scaled", scale=1.5)
    done = inspect(tmp_path / "scaled", "--diff", tmp_path / "one", "--tensors", "params.*")
    assert "params.w: 23 elements not equal, by at most 11.5 (0.5 of the largest)" in done.output
    assert "1 equal to the bit, 1 not, of 2 tensors" in done.output


# ---------------------------------------------------------------------------- damage


def test_verify_reads_every_byte(tmp_path: Path) -> None:
    """One flipped bit anywhere in the data is found and its file named."""
    folder = three_ranks(tmp_path)
    done = inspect(tmp_path, "--verify")
    assert done.exit_code == 0 and "3 files are what was written" in done.output
    file = folder / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    done = inspect(folder, "--verify")
    assert done.exit_code == 1 and "rank-00001.safetensors" in done.output
    assert "altered after it was written" in done.output
    save_file({"x": torch.ones(2)}, tmp_path / "x.safetensors")
    done = inspect(tmp_path / "x.safetensors", "--verify")
    assert done.exit_code == 0 and "there are no hashes" in done.output


def test_nothing_is_run_and_damage_is_named(tmp_path: Path) -> None:
    """Pickles, empty and cut files, files in two of which a tensor stands, what is not there."""
    trap = tmp_path / "trap.bin"
    trap.write_bytes(b"cos\nmkdir\n(S'" + str(tmp_path / "ran").encode() + b"'\ntR.")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    start, _ = header({"x": ("float32", (4,))})
    (tmp_path / "cut.safetensors").write_bytes(start + b"123")
    for name in ("trap.bin", "empty.safetensors", "cut.safetensors"):
        done = inspect(tmp_path / name, "--stats")
        assert done.exit_code == 1 and name in done.output and "cannot be read" in done.output
    assert not (tmp_path / "ran").exists()
    notes = inspect(tmp_path / "trap.bin").output
    assert "trap.bin cannot be read as safetensors: name a run, one of its checkpoints" in notes
    (tmp_path / "none").mkdir()
    for name, says in (("absent", "does not exist: name a run"), ("none", "holds no tensors")):
        with pytest.raises(SourceError, match=says):
            open_source(tmp_path / name)
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        save_file({"x": torch.ones(2)}, tmp_path / "two" / f"{name}.safetensors")
    with pytest.raises(SourceError, match=r"x is in .*a\.safetensors and in b\.safetensors"):
        open_source(tmp_path / "two")
    done = inspect(tmp_path / "two" / "a.safetensors", "--tensors", "y*")
    assert "no name matches 'y*'" in done.output


def test_an_index_that_is_not_its_files_is_refused(tmp_path: Path) -> None:
    folder = three_ranks(tmp_path)
    save_file({"params.w": torch.ones(4, 3)}, folder / "rank-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors does not hold"):
        open_source(folder)


# ---------------------------------------------------------------------------- size


def test_a_file_larger_than_memory_is_listed_at_once(tmp_path: Path) -> None:
    """Headers only are read: 400 GB (of holes) take no time and no memory."""
    start, _ = header({"huge": ("float32", (100_000, 1_000_000)), "x": ("float32", (2,))})
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + 4 * 100_000 * 1_000_000 + 8)
    told = inspect(tmp_path / "huge.safetensors").output
    assert "1 file of 373 GiB" in told and "100 G elements in 2 tensors" in told


STREAMED = """
import re, sys
from pathlib import Path
from mfun.inspect import open_source, statistics
statistics(open_source(Path(sys.argv[1])).tensors["small"])
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
found = statistics(open_source(Path(sys.argv[1])).tensors["large"])
assert found.zeros == 160 * 250_000 and found.dead == 160
print(peak() - before)
"""


def test_statistics_of_a_large_tensor_take_little_memory(tmp_path: Path) -> None:
    """160 MB are read in 32 MB more than a chunk of it needs.

    What is freed goes back to the system at once: kept for later, in places of other sizes, it
    made the same run take between 10 and 35 MB.
    """
    shapes = {"large": ("float32", (160, 250_000)), "small": ("float32", (2, 1 << 19))}
    start, order = header(shapes)
    assert order[0] == "large"
    with (tmp_path / "some.safetensors").open("wb") as file:
        file.write(start)
        file.truncate(len(start) + 160 * 1_000_000 + (1 << 22))
    words = [sys.executable, "-c", STREAMED, str(tmp_path / "some.safetensors")]
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=given)
    assert int(done.stdout) < 32_000, done.stdout
