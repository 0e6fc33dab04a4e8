"""Data: what is read, how it is split, and that the order of samples is a pure function."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from hashlib import blake2b
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfun import data
from mfun.mesh import Mesh

# ---------------------------------------------------------------------------- reading


def write(folder, **files):
    """Files of the given bytes; `__` in a name is a folder separator and `_txt` a suffix."""
    for name, contents in files.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)


def test_default_is_the_standard_library_without_tests_and_installed_packages():
    """Known modules are there byte for byte; tests, site-packages and build products are not."""
    corpus = data.load()
    parts = {part for name in corpus.names for part in name.split("/")}
    assert {"this.py", "json/decoder.py"} <= set(corpus.names)
    assert not parts & {"site-packages", "__pycache__", "test", "tests"}
    assert not [p for p in parts if p.startswith("_sysconfigdata")]
    assert all(name.endswith(".py") for name in corpus.names)
    text = corpus.document(corpus.names.index("this.py"))
    assert text == Path(os.__file__).with_name("this.py").read_bytes()
    assert corpus.tokens.size > 5_000_000


def test_folder_is_read_sorted_recursive_without_hidden_binary_and_empty_files(tmp_path):
    """Names are relative to the folder and sorted, so where the folder lies does not matter."""
    write(tmp_path, b_txt=b"bb", a__c_txt="ä".encode(), a__empty_txt=b"", image=b"\xff\xfe\x00")
    write(tmp_path / ".git", x_txt=b"no")
    write(tmp_path, **{".hidden": b"no"})
    corpus = data.load([str(tmp_path)])
    assert corpus.names == ("a/c.txt", "b.txt")
    assert corpus.tokens.tobytes() == "äbb".encode()
    assert corpus.bounds.tolist() == [0, 2, 4]
    moved = tmp_path.with_name("moved")
    shutil.copytree(tmp_path, moved)
    assert data.load([str(moved)]).hash == corpus.hash


def test_paths_in_any_order_and_overlapping_give_the_same_corpus(tmp_path):
    """A file that a folder and a path name both is one document."""
    write(tmp_path / "x", one_txt=b"1", two_txt=b"22")
    write(tmp_path / "y", three_txt=b"333")
    x, y, one = (str(tmp_path / p) for p in ("x", "y", "x/one.txt"))
    corpus = data.load([x, y])
    assert corpus.names == ("one.txt", "three.txt", "two.txt")
    assert data.load([y, one, x, one]).hash == corpus.hash
    inner = str(tmp_path / "x/../x/sub")
    write(tmp_path / "x" / "sub", four_txt=b"4")
    assert data.load([x, inner]).names == data.load([inner, x]).names


def test_links_are_followed_and_each_file_is_read_once(tmp_path):
    """To a file, to a folder, back to a folder above, and to nothing."""
    write(tmp_path / "far", deep_txt=b"deep")
    write(tmp_path / "here", b_txt=b"b")
    links = {"a.txt": "b.txt", "far": "../far", "loop": ".", "none": "nowhere"}
    for name, target in links.items():
        (tmp_path / "here" / name).symlink_to(target)
    corpus = data.load([str(tmp_path / "here")])
    assert corpus.names == ("a.txt", "far/deep.txt")
    (tmp_path / "link").symlink_to("here")
    assert data.load([str(tmp_path / "link")]).hash == corpus.hash


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere", "does not exist"), ("empty", "no text in"), ("binary", "is not UTF-8 text")],
)
def test_unusable_path_is_refused_by_name(tmp_path, name, reason):
    """Missing, empty and binary paths each have their own sentence, with the path in it."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(data.DataError, match=f"{name}.*{reason}|{reason}.*{name}"):
        data.load([str(tmp_path / name)])


def test_unreadable_file_is_refused_by_name(tmp_path, monkeypatch):
    """A file without read permission is not left out silently."""
    write(tmp_path, a_txt=b"a")

    def denied(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(data.DataError, match=r"a\.txt cannot be read \(Permission denied\)"):
        data.load([str(tmp_path)])


@given(text=st.text())
def test_decode_inverts_encode(text):
    """Any text, emoji and NUL included, survives."""
    tokens = data.encode(text)
    assert tokens.dtype == torch.int64
    assert data.decode(tokens) == text
    assert data.decode(tokens.numpy()) == data.decode(tokens.tolist()) == text


def test_decode_shows_broken_bytes():
    """A cut character becomes U+FFFD instead of an error: models emit such bytes."""
    assert data.decode([104, 195]) == "h�"


# ---------------------------------------------------------------------------- hash and split

documents = st.lists(
    st.tuples(st.text(max_size=6), st.binary(max_size=12)), max_size=12, unique_by=lambda d: d[0]
)


@given(docs=documents, seed=st.integers(0, 99))
def test_hash_depends_on_contents_and_names_only(docs, seed):
    """Shuffling changes nothing; moving one byte across a boundary does."""
    corpus = data.join(docs)
    shuffled = random.Random(seed).sample(docs, len(docs))
    assert data.join(shuffled).hash == corpus.hash
    assert [corpus.document(i) for i in range(len(corpus))] == [t for _, t in sorted(docs) if t]


def test_hash_sees_every_change_and_says_what_changed():
    """Both hashes are named, with the counts that moved."""
    before = data.join([("a", b"xy"), ("b", b"z")])
    data.check_hash(before, before.hash)
    data.check_hash(before, "")
    cases = {
        "documents 2 -> 1": [("a", b"xyz")],
        "bytes 3 -> 4": [("a", b"xyz"), ("b", b"z")],
        "names or contents differ": [("a", b"x"), ("b", b"yz")],
        "as many documents and bytes": [("a", b"xy"), ("c", b"z")],
    }
    for reason, docs in cases.items():
        after = data.join(docs)
        with pytest.raises(data.DataError, match=reason) as caught:
            data.check_hash(after, before.hash)
        assert before.hash in str(caught.value) and after.hash in str(caught.value)


def test_hash_sees_where_names_end():
    """The same bytes in a row, cut otherwise into as many names and contents, hash otherwise."""
    one = data.join([("a", b"bcd"), ("ef", b"g")])
    two = data.join([("ab", b"cd"), ("e", b"fg")])
    assert one.hash.split("-")[1:] == two.hash.split("-")[1:] == ["2", "4"]
    assert one.hash != two.hash


@given(docs=documents, fraction=st.floats(0, 0.99), at_least=st.integers(1, 30))
def test_split_keeps_every_token_once(docs, fraction, at_least):
    """The parts hold each document once; both are non-empty from two documents on."""
    corpus = data.join(docs)
    train, val = data.split(corpus, fraction, at_least=at_least)
    if len(corpus) == 1:
        assert train.tokens.tobytes() + val.tokens.tobytes() == corpus.tokens.tobytes()
        assert len(train) == 1
    else:
        assert sorted(train.names + val.names) == sorted(corpus.names)
        assert train.tokens.size + val.tokens.size == corpus.tokens.size
    if fraction == 0:
        assert len(val) == 0
    elif len(corpus) >= 2:
        assert len(train) >= 1 and len(val) >= 1
        assert val.tokens.size >= at_least or len(train) == 1


def test_split_is_by_the_names_hash_and_stable():
    """u = first 8 bytes of blake2b(name) / 2^64; another document's arrival moves nothing."""
    names = [f"{i}.txt" for i in range(400)]
    expected = {
        n
        for n in names
        if int.from_bytes(blake2b(n.encode(), digest_size=8).digest(), "little") < 0.25 * 2**64
    }
    _, val = data.split(data.join((n, b"text") for n in names), 0.25)
    assert set(val.names) == expected
    assert 70 <= len(expected) <= 130
    _, more = data.split(data.join((n, b"other") for n in [*names, "new"]), 0.25)
    assert set(more.names) - {"new"} == expected


def test_split_of_one_document_is_its_tail():
    """20 bytes at 0.1: the last two; at least one window where asked for."""
    corpus = data.join([("a", bytes(range(20)))])
    assert data.split(corpus, 0.1)[1].tokens.tolist() == [18, 19]
    assert data.split(corpus, 0.1, at_least=5)[1].tokens.tolist() == [15, 16, 17, 18, 19]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_a_bad_fraction(fraction):
    """1 leaves nothing to train on."""
    with pytest.raises(data.DataError, match=r"data\.val_fraction is"):
        data.split(data.join([("a", b"xy")]), fraction)


# ---------------------------------------------------------------------------- order


def scalar_permute(index: int, size: int, text: str) -> int:
    """The network of data.shuffle in plain Python integers, written from its docstring."""
    rows = isqrt(size - 1) + 1 if size > 1 else 1
    cols = (size + rows - 1) // rows
    words = []
    for part in range(3):
        digest = blake2b(f"{text}\x1f{part}".encode(), digest_size=64).digest()
        words += [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(8)]

    def mix(x):
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    while True:
        left, right = divmod(index, cols)
        for i, word in enumerate(words):
            if i % 2 == 0:
                left = (left + mix(right + word)) % rows
            else:
                right = (right + mix(left + word)) % cols
        index = left * cols + right
        if index < size:
            return index


@given(size=st.integers(1, 300), seed=st.integers(-5, 2**40), epoch=st.integers(0, 10**6))
def test_epoch_is_a_permutation_and_equals_plain_integers(size, seed, epoch):
    """Bijective for every size, and the numbers are those of the written definition for ever."""
    got = data.permute(np.arange(size), size, ("train", seed, epoch)).tolist()
    assert sorted(got) == list(range(size))
    text = "\x1f".join(("order", "train", str(seed), str(epoch)))
    assert got == [scalar_permute(i, size, text) for i in range(size)]


def test_permutations_are_spread_evenly():
    """All 120 orders of five windows appear over 3000 epochs, 25 each within chance.

    Pearson's statistic has 119 degrees of freedom: above 200 has probability 5e-6.
    """
    counts = Counter(
        tuple(data.permute(np.arange(5), 5, ("train", 0, e)).tolist()) for e in range(3000)
    )
    assert len(counts) == 120
    assert sum((c - 25) ** 2 / 25 for c in counts.values()) < 200


def test_large_epoch_is_mixed():
    """No neighbours stay neighbours and rank correlation is nil over 100,000 windows."""
    order = data.permute(np.arange(100_000), 100_000, ("train", 0, 0))
    assert (np.abs(np.diff(order)) == 1).sum() < 20  # 2 expected
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.016  # five standard deviations


@given(
    windows=st.integers(1, 12),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    first=st.integers(0, 60),
    count=st.integers(1, 20),
)
def test_order_is_pointwise(windows, seed, first, count):
    """A run of samples equals its samples one by one, also across the end of an epoch."""
    whole = data.order(np.arange(first, first + count), windows, seed).tolist()
    each = [data.order(np.array([n]), windows, seed)[0] for n in range(first, first + count)]
    assert whole == each


def test_epochs_and_seeds_differ_and_validation_does_not():
    """Training reshuffles each epoch; the validation order is the same in every epoch."""
    epoch = [data.order(np.arange(50 * e, 50 * e + 50), 50, 3).tolist() for e in range(3)]
    assert epoch[0] != epoch[1] != epoch[2]
    assert data.order(np.arange(50), 50, 4).tolist() != epoch[0]
    fixed = [data.order(np.arange(50 * e, 50 * e + 50), 50, None).tolist() for e in range(2)]
    assert fixed[0] == fixed[1] and sorted(fixed[0]) == list(range(50))


# ---------------------------------------------------------------------------- batches


def corpus_of(*lengths: int) -> data.Corpus:
    """Documents 000, 001 ... of these lengths; tokens count up through the whole corpus mod 251."""
    stream = np.arange(sum(lengths)) % 251
    pieces = np.split(stream.astype(np.uint8), np.cumsum(lengths)[:-1])
    return data.join((f"{i:03}", p.tobytes()) for i, p in enumerate(pieces))


@given(tokens=st.integers(2, 200), seq_len=st.integers(1, 20), seed=st.integers(0, 3))
def test_every_window_once_an_epoch(tokens, seq_len, seed):
    """Labels of an epoch are tokens 1.. of the corpus, each once, but for less than a window."""
    corpus = corpus_of(tokens)
    windows = (tokens - 1) // seq_len
    if windows == 0:
        return
    assert data.windows(corpus, seq_len) == windows
    got = data.batch(corpus, seed=seed, first=2 * windows, count=windows, seq_len=seq_len)
    rows = sorted(zip(got["tokens"].tolist(), got["labels"].tolist(), strict=True))
    stream = corpus.tokens.tolist()
    starts = range(0, windows * seq_len, seq_len)
    expected = [(stream[s : s + seq_len], stream[s + 1 : s + seq_len + 1]) for s in starts]
    assert rows == sorted(expected)
    assert 0 <= tokens - 1 - windows * seq_len < seq_len


def test_batch_types_and_shapes():
    """What the model and the executor rely on."""
    got = data.batch(corpus_of(90), seed=0, first=3, count=4, seq_len=8, packed=True)
    shapes = {name: (tuple(t.shape), t.dtype, t.is_contiguous()) for name, t in got.items()}
    ints = ((4, 8), torch.int64, True)
    assert shapes == {
        "tokens": ints,
        "labels": ints,
        "mask": ((4, 8), torch.float32, True),
        "sample": ((4,), torch.int64, True),
        "positions": ints,
        "documents": ints,
    }
    assert got["sample"].tolist() == [3, 4, 5, 6]


def test_packed_restarts_and_masks_by_hand():
    """Lengths 1, 0, 5, 2, 4 and windows of 4+1: every position, document and masked label."""
    corpus = corpus_of(1, 0, 5, 2, 4)  # tokens 0 | 1 2 3 4 5 | 6 7 | 8 9 10 11
    got = data.batch(corpus, seed=None, first=0, count=2, seq_len=4, packed=True)
    rows = {row[0]: i for i, row in enumerate(got["tokens"].tolist())}
    a, b = rows[0], rows[4]
    assert got["tokens"][[a, b]].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert got["labels"][[a, b]].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert got["documents"][[a, b]].tolist() == [[0, 1, 1, 1], [1, 1, 2, 2]]
    assert got["positions"][[a, b]].tolist() == [[0, 0, 1, 2], [0, 1, 0, 1]]
    assert got["mask"][[a, b]].tolist() == [[0, 1, 1, 1], [1, 0, 1, 0]]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), seq_len=st.integers(1, 7))
def test_packed_equals_a_loop(lengths, seq_len):
    """Positions, documents and mask against a plain walk over each window."""
    if sum(lengths) <= seq_len:
        return
    corpus = corpus_of(*lengths)
    owner = [i for i, n in enumerate(n for n in lengths if n) for _ in range(n)]
    windows = (sum(lengths) - 1) // seq_len
    got = data.batch(corpus, seed=1, first=0, count=windows, seq_len=seq_len, packed=True)
    place = {
        tuple(corpus.tokens[s * seq_len : s * seq_len + seq_len].tolist()): s * seq_len
        for s in range(windows)
    }
    for row in range(windows):
        start = place[tuple(got["tokens"][row].tolist())]
        seen: list[int] = []
        for i in range(seq_len):
            seen = [*seen, 0] if i and owner[start + i] == owner[start + i - 1] else [0]
            assert got["positions"][row, i] == len(seen) - 1
            assert got["documents"][row, i] == owner[start + i]
            assert got["mask"][row, i] == (owner[start + i] == owner[start + i + 1])


def test_no_tail_is_dropped_five_microbatches_window_two():
    """bugs.md 13: five samples, two an update. Two epochs are five updates of two samples each.

    The order goes on into the next epoch, so no update is short: over ten samples each of
    x = 1..5 is used twice, once an epoch, every update divides by its two, and the mean of the
    updates is the mean of x, 3. State after the five updates has used ten samples.
    """
    corpus = data.join([("x", bytes(range(6)))])  # seq 1: labels 1..5
    updates = []
    for step in range(5):
        micro = data.rank_batch(
            corpus,
            seed=7,
            consumed=2 * step,
            dp_index=0,
            dp=1,
            global_batch=2,
            microbatch_sizes=(1, 1),
            seq_len=1,
        )
        updates.append([int(m["labels"]) for m in micro])
    used = [x for update in updates for x in update]
    assert sorted(used[:5]) == sorted(used[5:]) == [1, 2, 3, 4, 5]
    assert [len(u) for u in updates] == [2] * 5
    assert np.mean([np.mean(u) for u in updates]) == 3


def rank(corpus, consumed, dp_index, dp, **kw):
    """One rank's rows of a global batch of 4, windows of 4."""
    sizes = (4 // dp,) if dp == 4 else (4 // dp - 1, 1)
    return data.rank_batch(
        corpus,
        seed=5,
        consumed=consumed,
        dp_index=dp_index,
        dp=dp,
        global_batch=4,
        microbatch_sizes=sizes,
        seq_len=4,
        **kw,
    )


def sequence(corpus, dp, steps):
    """All samples of some steps in global order, from every dp rank's own batches."""
    return [
        (int(n), *row)
        for step in steps
        for i in range(dp)
        for micro in rank(corpus, 4 * step, i, dp)
        for n, row in zip(micro["sample"], micro["tokens"].tolist(), strict=True)
    ]


def test_dp_ranks_are_disjoint_and_cover_and_any_dp_resumes_the_sequence():
    """bugs.md 101, 102, 104: 20 windows, batch 4, two epochs, stop after each update, other dp."""
    corpus = corpus_of(81)
    whole = sequence(corpus, 1, range(10))
    assert [row[0] for row in whole] == list(range(40))
    for epoch in (whole[:20], whole[20:]):
        assert sorted(row[1] for row in epoch) == list(range(0, 80, 4))
    for stop in range(11):
        for before, after in [(1, 4), (4, 2), (2, 1), (4, 4)]:
            resumed = sequence(corpus, before, range(stop)) + sequence(
                corpus, after, range(stop, 10)
            )
            assert resumed == whole


def test_batches_depend_on_the_dp_coordinate_only():
    """bugs.md 104: the 8 ranks of tp2 dp2 pp2 make two different batches, one for each dp index."""
    corpus, mesh = corpus_of(81), Mesh(tp=2, dp=2, pp=2)
    seen: dict[int, set] = {0: set(), 1: set()}
    for r in range(mesh.world):
        dp_index = mesh.coords(r)["dp"]
        micro = rank(corpus, 8, dp_index, mesh.dp)
        seen[dp_index].add(str([m["tokens"].tolist() for m in micro]))
    assert len(seen[0]) == len(seen[1]) == 1 and seen[0] != seen[1]


def test_global_generators_do_not_matter_and_are_not_touched():
    """bugs.md 103: other draws from the global generators leave the batch, and the batch them."""
    corpus = corpus_of(400)

    def draw(n):
        torch.manual_seed(n)
        np.random.seed(n)
        random.seed(n)
        return torch.rand(n), np.random.rand(n), random.random()

    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    draw(3)
    a, before = data.batch(corpus, seed=0, first=0, count=30, seq_len=8), state()
    draw(17)
    b = data.batch(corpus, seed=0, first=0, count=30, seq_len=8)
    draw(3)
    data.batch(corpus, seed=1, first=0, count=30, seq_len=8)
    assert state() == before
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("seed", "part"), [(0, "training"), (None, "validation")])
def test_set_shorter_than_a_window_is_refused(seed, part):
    """Four tokens hold no window of 4 + 1; five do."""
    data.batch(corpus_of(5), seed=seed, first=0, count=1, seq_len=4)
    with pytest.raises(data.DataError, match=f"the {part} part has 4 tokens .* = 5"):
        data.batch(corpus_of(4), seed=seed, first=0, count=1, seq_len=4)


def test_token_beyond_the_vocabulary_is_refused():
    """Byte 200 needs 201 rows."""
    corpus = data.join([("a", bytes([1, 200, 3]))])
    data.batch(corpus, seed=0, first=0, count=1, seq_len=2, vocab=201)
    with pytest.raises(data.DataError, match=r"token id 200 and model\.vocab is 200"):
        data.batch(corpus, seed=0, first=0, count=1, seq_len=2, vocab=200)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp_index": 2}, "dp_index 2 is outside 0..1"),
        ({"global_batch": 5}, "global_batch 5 is not a multiple of dp 2"),
        ({"microbatch_sizes": (1, 2)}, r"\(1, 2\) .* = 2"),
        ({"microbatch_sizes": (2, 0)}, r"\(2, 0\) must each be at least 1"),
        ({"consumed": -4}, "first -4 must be at least 0"),
    ],
)
def test_cut_that_does_not_fit_is_refused(change, message):
    """Each message names the numbers."""
    good = {
        "seed": 0,
        "consumed": 0,
        "dp_index": 0,
        "dp": 2,
        "global_batch": 4,
        "microbatch_sizes": (1, 1),
        "seq_len": 4,
    }
    data.rank_batch(corpus_of(50), **good)
    with pytest.raises(ValueError, match=message):
        data.rank_batch(corpus_of(50), **(good | change))
