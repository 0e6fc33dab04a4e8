"""Datasets as the parts a run trains on: rounds, blends, caches, resets, and what is refused."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mfun import data
from mfun.config import Config, ConfigError, DataConfig, load, resolve
from mfun.data import About, Built, DataError, Share, Writer, cache
from mfun.train.feed import feed, open_data, with_hash

SMALL = (
    "model.layers=1",
    "model.hidden=16",
    "model.heads=2",
    "model.seq_len=4",
    "parallel.tp=1",
    "parallel.pp=1",
    "train.global_batch=4",
    "train.microbatches=2",
    "train.steps=10",
    "train.eval_batches=2",
)


def write(path: Path, docs, about: About | None = None) -> str:
    """A dataset of these documents; its name."""
    with Writer(path, np.dtype("<u2")) as out:
        for doc in docs:
            out.add(doc)
    if about is not None:
        data.write_about(path, about)
    return str(path)


def numbered(path: Path, documents: int, length: int, base: int = 0) -> str:
    """Documents whose tokens all differ, up to 65,000."""
    stream = np.arange(base, base + documents * length)
    return write(path, stream.reshape(documents, length))


def small(*overrides: str) -> Config:
    """A small configuration with room for every token."""
    return resolve(load("tiny", [*SMALL, "model.vocab=65500", *overrides]), None)


def drawn(source: Built, numbers, seed=0, seq_len=4) -> list[list[int]]:
    """The tokens of some samples."""
    return source.draw(np.array(numbers), seed, seq_len)[0].tolist()


# ---------------------------------------------------------------------------- samples


def test_samples_are_those_of_the_index(tmp_path):
    """Sample n is that of the index; after the last one a round with the next seed begins."""
    path = numbered(tmp_path / "x", 10, 7)
    source = Built(shares=(Share(data.open_indexed(path), range(10), "x"),), samples=20)
    lengths, documents = np.full(10, 7, np.int32), np.arange(10)
    got, expected = [], []
    for seed in (3, 4):
        index = data.build_index(lengths, documents, seq_len=4, samples=20, seed=seed)
        for j in index.shuffle.tolist():
            stream = np.concatenate([np.arange(7 * d, 7 * d + 7) for d in index.document.tolist()])
            expected.append(stream[4 * j : 4 * j + 5].tolist())
    got = drawn(source, range(len(expected)), seed=3)
    assert got == expected
    assert drawn(source, [0, 30, 5], seed=3) == [expected[0], expected[30], expected[5]]


def test_a_longer_run_takes_the_same_samples_first(tmp_path):
    """`data.samples` is kept by the run's configuration, so more steps do not change the order."""
    path = numbered(tmp_path / "x", 30, 5)
    config = with_hash(small(f"data.path={path}"))
    assert config.data.samples == 40
    longer = attrs.evolve(config, train=attrs.evolve(config.train, steps=25))
    assert with_hash(longer) == longer
    short, long = feed(config, {"dp": 0}), feed(longer, {"dp": 0})
    for step in range(10):
        for a, b in zip(short.step(step), long.step(step), strict=True):
            assert torch.equal(a["tokens"], b["tokens"])
    assert len(long.step(24)) == 2


def test_dp_ranks_cover_and_any_dp_goes_on(tmp_path):
    """bugs.md 101, 104: dp 1, 2, 4 give the same rows; a round holds each sample once."""
    path = numbered(tmp_path / "x", 41, 4)
    rows = {}
    for dp in (1, 2, 4):
        whole = (f"data.path={path}", "data.val_fraction=0", "train.microbatches=1")
        config = small(*whole, f"parallel.dp={dp}")
        ranks = [feed(config, {"dp": i}) for i in range(dp)]
        rows[dp] = [
            row
            for step in range(10)
            for one in ranks
            for batch in one.step(step)
            for row in batch["tokens"].tolist()
        ]
    assert rows[1] == rows[2] == rows[4]
    assert Counter(map(tuple, rows[1])).most_common(1)[0][1] == 1  # 40 samples of 40


def test_validation_documents_are_no_training_documents(tmp_path):
    """By val_fraction, by split, and by datasets of its own; always the same samples."""
    one, two = numbered(tmp_path / "x", 40, 6), numbered(tmp_path / "y", 5, 6, base=1000)
    for overrides, train, val in (
        ((f"data.path={one}", "data.val_fraction=0.25"), range(180), range(180, 240)),
        ((f"data.path={one}", "data.split=6,2,2"), range(144), range(144, 192)),
        ((f"data.path={one}", f"data.val_path={two}"), range(240), range(1000, 1030)),
    ):
        config = small(*overrides, "train.steps=30")
        here = feed(config, {"dp": 0})
        seen = {
            t for step in range(30) for b in here.step(step) for t in b["tokens"].unique().tolist()
        }
        assert seen <= {*train} and len(seen) > 0.9 * len(train)
        held = [b["tokens"].tolist() for b in here.evaluation()]
        assert {t for batch in held for row in batch for t in row} <= {*val}
        other = attrs.evolve(config, train=attrs.evolve(config.train, seed=5, steps=90))
        assert [b["tokens"].tolist() for b in feed(other, {"dp": 0}).evaluation()] == held


@pytest.mark.parametrize("weights", ["0.001,0.999", "0,1", "1,3", ""])
def test_blends_have_their_shares_and_no_index_past_the_end(weights, tmp_path):
    """bugs.md 110: two sets of 10 samples, 50 wanted: shares within one sample at each prefix."""
    one, two = numbered(tmp_path / "x", 1, 41), numbered(tmp_path / "y", 1, 41, base=1000)
    config = small(f"data.path={one},{two}", f"data.weights={weights}", "data.val_fraction=0")
    config = attrs.evolve(config, data=attrs.evolve(config.data, samples=50))
    source, _ = open_data(config)
    first = [row[0] < 1000 for row in source.draw(np.arange(50), 0, 4)[0].tolist()]
    given = [float(w) for w in weights.split(",")] if weights else [1.0, 1.0]
    share = given[0] / sum(given)
    counts = np.cumsum(first)
    size = 20 if not weights else 50  # without weights a round is one epoch of both
    assert np.abs(counts[:size] - share * np.arange(1, size + 1)).max() <= 1
    assert (
        source.draw(np.arange(50), 0, 4)[0].tolist() == source.draw(np.arange(50), 0, 4)[0].tolist()
    )
    if not weights:
        assert counts[19] == 10 and counts[39] == 20
        rows = source.draw(np.arange(20), 0, 4)[0].tolist()
        starts = sorted(row[0] for row in rows)
        assert starts == [*range(0, 40, 4), *range(1000, 1040, 4)]


def test_datasets_too_short_for_validation_are_left_out_there(tmp_path):
    """A blend whose second set has no validation sample still validates on the first."""
    one, two = numbered(tmp_path / "x", 40, 6), numbered(tmp_path / "y", 4, 6, base=1000)
    config = small(f"data.path={one},{two}", "data.weights=1,1", "data.val_fraction=0.2")
    here = feed(config, {"dp": 0})
    assert here.evaluates and len(here.evaluation()) == 4
    none = feed(small(f"data.path={two}", "data.val_fraction=0.1"), {"dp": 0})
    assert not none.evaluates


def test_the_partial_sample_is_padded_and_masked(tmp_path):
    """Eight tokens, S = 4: samples 1..5 and 5..8, whose last label is not there; for validation."""
    path = write(tmp_path / "x", [[1, 2, 3, 4, 5, 6, 7, 8]])
    overrides = [f"data.path={path}", f"data.val_path={path}", "train.eval_batches=1"]
    one = ["train.global_batch=1", "train.microbatches=1", "data.keep_partial=true"]
    training, validation = open_data(small(*overrides, *one))
    assert validation.draw(np.arange(1), None, 4)[0].shape == (1, 5)
    got = data.batch(validation, seed=None, first=0, count=2, seq_len=4, vocab=9)
    rows = {
        tuple(tokens): (labels, mask)
        for tokens, labels, mask in zip(
            *(got[name].tolist() for name in ("tokens", "labels", "mask")), strict=True
        )
    }
    assert rows == {
        (1, 2, 3, 4): ([2, 3, 4, 5], [1, 1, 1, 1]),
        (5, 6, 7, 8): ([6, 7, 8, 0], [1, 1, 1, 0]),
    }
    assert isinstance(training, Built)
    assert len(training.order(0, 4)) == (6 * 8 - 1) // 4  # six epochs for 10 samples
    _, plain = open_data(small(*overrides, *one[:2]))
    assert plain.draw(np.arange(3), None, 4)[0][:, 0].tolist() == [1, 1, 1]


# ---------------------------------------------------------------------------- resets


def expected_resets(tokens, eod):
    """Positions, documents' starts and mask of S + 1 tokens, by a walk."""
    positions, starts, mask, begin = [], [], [], 0
    for i, token in enumerate(tokens[:-1]):
        positions.append(i - begin)
        starts.append(begin)
        mask.append(float(token != eod))
        if token == eod:
            begin = i + 1
    return positions, starts, mask


@given(
    docs=st.lists(st.lists(st.integers(1, 9), max_size=7), min_size=2, max_size=9),
    resets=st.sets(st.sampled_from(["positions", "attention", "loss"])),
)
def test_end_of_document_resets_equal_a_walk(docs, resets, tmp_path_factory):
    """As Megatron's reset_position_ids, reset_attention_mask and eod_mask_loss; each by itself."""
    path = write(tmp_path_factory.mktemp("eod") / "x", [[*doc, 0] for doc in docs])
    if sum(len(doc) + 1 for doc in docs) < 6:
        return
    share = Share(data.open_indexed(path), range(len(docs)), "x")
    source = Built(shares=(share,), eod=(0,))
    got = data.batch(source, seed=0, first=0, count=3, seq_len=5, resets=sorted(resets))
    for row, tokens in enumerate(drawn(source, range(3), seq_len=5)):
        positions, starts, mask = expected_resets(tokens, 0)
        assert got["mask"][row].tolist() == (mask if "loss" in resets else [1.0] * 5)
        if resets & {"positions", "attention"}:
            straight = [*range(5)]
            assert got["positions"][row].tolist() == (
                positions if "positions" in resets else straight
            )
        if "attention" in resets:
            number = got["documents"][row].tolist()
            same = [[a == b for b in number] for a in number]
            assert same == [[a == b for b in starts] for a in starts]
    assert ("positions" in got) == bool(resets & {"positions", "attention"})
    assert ("documents" in got) == ("attention" in resets)


def test_without_an_end_token_each_sequence_is_a_document(tmp_path):
    """Two documents of other tokens: positions restart where the second begins."""
    path = write(tmp_path / "x", [[1, 2, 3], [4, 5, 6]])
    config = small(f"data.path={path}", "data.val_fraction=0", "data.packed=true")
    got = feed(config, {"dp": 0}).step(0)[0]
    row = got["tokens"][0].tolist()
    at = [token > 3 for token in row].index(row[0] <= 3)
    assert got["positions"][0].tolist() == [*range(at), *range(4 - at)]
    assert got["mask"][0].tolist()[at - 1] == 0


def ends(*overrides: str) -> tuple[int, ...]:
    """The tokens that end documents of the training part."""
    source, _ = open_data(small(*overrides, "data.val_fraction=0"))
    assert isinstance(source, Built)
    return source.eod


def test_the_end_of_a_document_is_the_datasets_own_or_given(tmp_path):
    """X.json says 9; data.eod goes before it; datasets that differ are refused."""
    docs = [[1, 9, 2, 3, 9, 4, 5, 6, 7, 9]]
    one = write(tmp_path / "x", docs, About(eod=9))
    two = write(tmp_path / "y", docs, About(eod=8))
    assert ends(f"data.path={one}") == (9,)
    both = f"data.path={one},{two}"
    with pytest.raises(DataError, match=r"end documents by different tokens, \[8, 9\]"):
        open_data(small(both))
    assert ends(both, "data.eod=3,9") == (3, 9)


def test_made_up_data_needs_no_file():
    """Samples of the made-up documents, which end in the vocabulary's last token."""
    config = with_hash(
        small("data.mock=true", "model.vocab=5000", "data.reset=loss", "model.seq_len=500")
    )
    batch = feed(config, {"dp": 0}).step(0)[0]
    assert config.data.hash == "mock-100000-0"
    steps = batch["labels"] - batch["tokens"]
    assert ((steps == 1) | (batch["tokens"] == 4999) | (batch["labels"] == 4999)).all()
    assert torch.equal(batch["mask"] == 0, batch["tokens"] == 4999)


# ---------------------------------------------------------------------------- caches


def key_for(n: int) -> str:
    return cache.key_of({"n": n}, {})


def test_arrays_are_computed_once(tmp_path):
    """The second call reads; the arrays are read-only, equal, of the same type."""
    made = {"a": np.arange(5, dtype=np.int32), "b": np.arange(6.0).reshape(3, 2)}
    first = cache.cached(tmp_path / "c", key_for(0), lambda: made)

    def never():
        raise AssertionError("computed twice")

    second = cache.cached(tmp_path / "c", key_for(0), never)
    for got in (first, second):
        assert {k: (v.dtype, v.tolist()) for k, v in got.items()} == {
            k: (v.dtype, v.tolist()) for k, v in made.items()
        }
        with pytest.raises(ValueError, match="read-only"):
            got["a"][0] = 1
    assert cache.cached(None, "", lambda: made)["a"] is made["a"]


def test_keys_are_of_contents():
    """Values, and the contents, type and name of arrays."""
    a = np.arange(4, dtype=np.int32)
    keys = {
        cache.key_of({"x": 1}, {"a": a}),
        cache.key_of({"x": 2}, {"a": a}),
        cache.key_of({"x": 1}, {"b": a}),
        cache.key_of({"x": 1}, {"a": a.astype(np.int64)}),
        cache.key_of({"x": 1}, {"a": a + 1}),
    }
    assert len(keys) == 5 and cache.key_of({"x": 1}, {"a": a.copy()}) in keys


@pytest.mark.parametrize("damage", ["cut", "gone", "list", "other"])
def test_a_torn_folder_is_made_again(damage, tmp_path):
    """bugs.md 112: a cut or missing array, or a list of other shapes, is not taken for whole."""
    folder = tmp_path / "c"
    cache.cached(folder, key_for(1), lambda: {"a": np.arange(100)})
    file = folder / key_for(1) / "a.npy"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif damage == "gone":
        file.unlink()
    elif damage == "list":
        (folder / key_for(1) / "contents.json").write_text("[")
    else:
        np.save(file, np.arange(99))
    got = cache.cached(folder, key_for(1), lambda: {"a": np.arange(100)})
    assert got["a"].tolist() == [*range(100)]
    assert [p.name for p in folder.iterdir() if not p.name.startswith(".")] == [key_for(1)]


def test_an_error_while_computing_leaves_nothing(tmp_path):
    """The next one computes."""

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cache.cached(tmp_path / "c", key_for(2), fails)
    assert [p.name for p in (tmp_path / "c").iterdir()] == [f".{key_for(2)}.lock"]
    assert cache.cached(tmp_path / "c", key_for(2), lambda: {"a": np.arange(2)})["a"].size == 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """With the setting that names another."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"data\.cache: .*file/c cannot be written"):
        cache.cached(tmp_path / "file" / "c", key_for(0), dict)


def reader(rank: int, folder: str, path: str, seq_len: int) -> list[list[int]]:
    """A rank of one of two jobs: all samples of an epoch, begun together."""
    folder = folder.replace("RANK", str(rank))
    share = Share(data.open_indexed(path), range(50), "x")
    source = Built(shares=(share,), samples=60, cache=Path(folder))
    dist.barrier()
    return drawn(source, range(60), seq_len=seq_len)


def test_jobs_that_start_together_on_one_cache(tmp_path, pool):
    """bugs.md 112: two jobs of two ranks at once, 20 times, with other lengths among them."""
    path = numbered(tmp_path / "x", 50, 9)
    share = Share(data.open_indexed(path), range(50), "x")
    right = {n: drawn(Built(shares=(share,), samples=60), range(60), seq_len=n) for n in (4, 8)}
    for attempt in range(20):
        seq_len = (4, 8)[attempt % 2]
        folder = str(tmp_path / "c" / str(attempt // 2))
        assert pool.run(reader, folder, path, seq_len, world=4) == [right[seq_len]] * 4
        kept = [p.name for p in Path(folder).iterdir() if not p.name.startswith(".")]
        assert len(kept) == 1 + attempt % 2
    own = str(tmp_path / "own-RANK")  # folders of the nodes' own
    assert pool.run(reader, own, path, 4, world=4) == [right[4]] * 4
    assert len([*tmp_path.glob("own-*/*/contents.json")]) == 4


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from mfun.data import Writer, cache

calls, fatal, what, folder = 0, int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def counted(original):
    def call(*args, **rest):
        global calls
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return original(*args, **rest)
    return call

os.fsync = counted(os.fsync)
for name in ("replace", "rename", "unlink"):
    setattr(Path, name, counted(getattr(Path, name)))
if what == "cache":
    cache.cached(folder, "key", lambda: {"a": np.arange(9), "b": np.arange(3)})
else:
    with Writer(folder / "x", np.dtype("<u2")) as out:
        out.add([7, 8])
print(calls)
"""


def killed(fatal: int, what: str, folder: Path) -> int | None:
    """Write a cache or a dataset and die at a call; how many calls there were, None if it died."""
    words = [sys.executable, "-c", KILLED, str(fatal), what, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return int(done.stdout) if done.returncode == 0 else None


def test_a_kill_while_a_cache_is_written(tmp_path):
    """At every fsync and rename: whoever comes next has all of it, and waits for nobody."""
    calls, fatal = None, 0
    for fatal in range(20):
        folder = tmp_path / str(fatal)
        calls = killed(fatal, "cache", folder)
        got = cache.cached(folder, "key", lambda: {"a": np.arange(9), "b": np.arange(3)})
        assert (got["a"].tolist(), got["b"].tolist()) == ([*range(9)], [0, 1, 2])
        if calls is not None:
            break
    assert calls == fatal == 5  # three files, the folder's rename and its fsync


def test_a_kill_while_a_dataset_is_written(tmp_path):
    """At every fsync, removal and rename: the old one, the new one or none, never half of each."""
    found = []
    for fatal in range(20):
        folder = tmp_path / str(fatal)
        folder.mkdir()
        write(folder / "x", [[1, 2, 3], [4]])
        calls = killed(fatal, "dataset", folder)
        try:
            dataset = data.open_indexed(folder / "x")
            found.append([dataset.document(i).tolist() for i in range(len(dataset))])
        except DataError as error:
            assert "x.idx cannot be read" in str(error)
            found.append([])
        write(folder / "x", [[5]])  # what is left hinders nobody
        assert len(data.open_indexed(folder / "x")) == 1
        if calls is not None:
            break
    old, new = [[1, 2, 3], [4]], [[7, 8]]
    assert found == [old, old, old, [], [], new, new, new, new]


def test_a_source_that_changed_is_not_taken_for_the_old_one(tmp_path):
    """bugs.md 112: other lengths under the same name: new indices, and a run is refused."""
    path = numbered(tmp_path / "x", 20, 8)
    config = with_hash(small(f"data.path={path}", "data.val_fraction=0"))
    feed(config, {"dp": 0}).step(0)
    write(tmp_path / "x", [range(5)] * 32)
    with pytest.raises(DataError, match=r"data\.hash: .*\(documents 20 -> 32\)"):
        feed(config, {"dp": 0})
    fresh = attrs.evolve(config, data=attrs.evolve(config.data, hash=""))
    rows = [row for b in feed(fresh, {"dp": 0}).step(0) for row in b["tokens"].tolist()]
    assert all(max(row) < 5 for row in rows)
    assert len([p for p in (tmp_path / "x-cache").iterdir() if p.is_dir()]) == 2


# ---------------------------------------------------------------------------- refusals


def test_what_a_run_cannot_use_is_refused(tmp_path):
    """Each with the setting, the numbers and what to do."""
    one, two = numbered(tmp_path / "x", 10, 9), numbered(tmp_path / "y", 1, 3)
    text = tmp_path / "text.txt"
    text.write_text("plain " * 40)
    for overrides, message in (
        ([f"data.path={one},{text}"], rf"{one} is a dataset and .*text\.txt is not"),
        ([f"data.path={text}", "data.split=1,1"], r"data\.split is for datasets"),
        (["data.weights="], None),
        ([f"data.path={two}"], r"part has 3 tokens and one window needs .* = 5"),
        ([f"data.path={one}", "model.vocab=80"], r"token id 8\d in .*/x, and model\.vocab is 80"),
    ):
        config = small(*overrides)
        if message is None:
            open_data(config)
            continue
        with pytest.raises(DataError, match=message):
            here = feed(config, {"dp": 0})
            for step in range(10):
                here.step(step)
    write(tmp_path / "z", [[1, 2, 3, 4, 5, 6]], About(largest=90))
    with pytest.raises(DataError, match=r"token id 90 and model\.vocab is 80"):
        open_data(small(f"data.path={tmp_path}/z", "data.val_fraction=0", "model.vocab=80"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.path=a,b", "data.weights=1"],
            r"data\.weights has 1 numbers and data\.path names 2",
        ),
        (["data.val_path=a", "data.val_weights=1,2"], r"data\.val_weights has 2 numbers"),
        (["data.path=a", "data.weights=0"], r"give at least one number above 0"),
        (["data.split=1,2,3,4"], "give up to three numbers"),
        (["data.split=0,1"], "the first above 0"),
        (["data.split=1,1", "data.val_path=a"], "both say what validation uses"),
        (["data.mock=true", "data.path=a"], r"data\.mock is true and data\.path names data"),
        (["data.reset=loss,loss"], "give each once"),
        (["data.reset=mask"], "some of positions, attention, loss"),
        (["data.weights=-1"], "finite numbers of at least 0"),
        (["data.read=all"], "one of each, first"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides, message):
    """When the configuration is built, before any file is opened."""
    with pytest.raises(ConfigError, match=message):
        small(*overrides)


def test_packed_is_all_resets():
    """And alone the resets are what is listed."""
    assert DataConfig(packed=True).resets == ("positions", "attention", "loss")
    assert DataConfig(reset=("loss",)).resets == ("loss",) and DataConfig().resets == ()


@pytest.mark.parametrize(
    "contents",
    [
        "[1]",
        "{",
        '{"vocab": "many"}',
        '{"other": 1}',
        '{"eod": 1.5}',
        '{"vocab": true}',
        '{"tokenizer": "../x.json"}',
    ],
)
def test_a_damaged_description_is_named(contents, tmp_path):
    """X.json that something else wrote."""
    (tmp_path / "x.json").write_text(contents)
    with pytest.raises(DataError, match=r"x\.json is not what `mfun data build` writes"):
        data.read_about(tmp_path / "x")
    (tmp_path / "x.json").write_text(json.dumps({"eod": 4}))
    assert data.read_about(tmp_path / "x") == About(eod=4)
