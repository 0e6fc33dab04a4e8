"""Megatron's order of samples and its blends: golden values, plain loops, and Megatron itself."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mfun import data
from mfun.config import DataConfig
from mfun.data import DataError, Mock, blend, megatron

# ---------------------------------------------------------------------------- indices


class Documents:
    """Documents in memory; token k of the whole has the value k."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.array(lengths, np.int32)
        self.begin = np.cumsum([0, *lengths])

    def read(self, sequence: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        length = int(self.lengths[sequence])
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise IndexError(sequence)
        return np.arange(self.begin[sequence] + start, self.begin[sequence] + stop)


def walked(lengths, document, seq_len, count):
    """Where samples begin, by a walk: a sample needs S + 1 tokens, its last opens the next."""
    rows, at, offset = [[0, 0]], 0, 0
    for _ in range(count):
        wanted = seq_len + 1
        while True:
            here = lengths[document[at]] - offset
            if here >= wanted:
                offset += wanted - 1
                break
            wanted -= here
            if at == len(document) - 1:  # the stream ends before the sample does
                offset = lengths[document[at]] - 1
                break
            at, offset = at + 1, 0
        rows.append([at, offset])
    return rows


def samples_of(source, index, seq_len):
    """The tokens of every sample in order."""
    return [
        np.concatenate(data.read_sample(source, index, n, seq_len)).tolist()
        for n in range(len(index))
    ]


def test_golden_sample_index():
    """As Megatron-Core 0.16.1 gave it for lengths 3, 2, 4 in order and S = 2."""
    got = data.sample_index(np.array([3, 2, 4], np.int32), np.arange(3), 2, 9)
    assert got.tolist() == [[0, 0], [0, 2], [1, 1], [2, 1], [2, 3]] and got.dtype == np.int32


@pytest.mark.parametrize(
    ("seed", "document", "shuffle"),
    [
        (0, [2, 2, 1, 0, 0, 1, 2, 0, 1], [3, 1, 2, 7, 5, 0, 6, 4, 12, 10, 11, 9, 8]),
        (1234, [2, 1, 2, 0, 1, 0, 0, 2, 1], [7, 5, 6, 0, 4, 3, 2, 1, 9, 12, 11, 8, 10]),
    ],
)
def test_golden_order_of_three_epochs(seed, document, shuffle):
    """As Megatron-Core 0.16.1 gave it for lengths 3, 2, 4, S = 2 and 10 samples.

    Nine tokens an epoch, so three epochs, and the third, of which 2 of 4 samples are wanted, apart.
    """
    lengths = np.array([3, 2, 4], np.int32)
    index = data.build_index(lengths, np.arange(3), seq_len=2, samples=10, seed=seed)
    assert index.document.tolist() == document and index.document.dtype == np.int32
    assert index.shuffle.tolist() == shuffle and index.shuffle.dtype == np.uint32
    assert index.sample.tolist() == walked([3, 2, 4], document, 2, 13)


lengths_of = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(lengths=lengths_of, seq_len=st.integers(1, 7), chunk=st.integers(1, 5), seed=st.integers(0))
def test_sample_index_equals_a_walk(lengths, seq_len, chunk, seed):
    """Whole samples, and with the shorter last one, in chunks of any size; empty documents too."""
    tokens = sum(lengths)
    assume(tokens > seq_len)
    document = np.random.RandomState(seed % 2**32).permutation(len(lengths))
    sizes = np.array(lengths, np.int32)
    whole, all_ = (tokens - 1) // seq_len, -(-(tokens - 1) // seq_len)
    for count in (whole, all_):
        got = megatron.sample_index(sizes, document, seq_len, tokens, count, chunk=chunk)
        assert got.tolist() == walked(lengths, document, seq_len, count)


@given(lengths=lengths_of, seq_len=st.integers(1, 6), asked=st.integers(1, 60), seed=st.integers(0))
def test_every_token_of_an_epoch_is_a_label_once(lengths, seq_len, asked, seed):
    """bugs.md 111: inputs and labels laid end to end are the shuffled stream, its tail excepted.

    The first token of the stream is no label, and the last (E * tokens - 1) % S are in no sample.
    In E epochs each token occurs E times in the stream.
    """
    tokens, seed = sum(lengths), seed % 2**32
    assume(tokens > seq_len)
    source = Documents(*lengths)
    how = {"seq_len": seq_len, "samples": asked, "seed": seed}
    index = data.build_index(source.lengths, np.arange(len(lengths)), **how)
    epochs = max(1, math.ceil((asked * seq_len + 1) / tokens))
    stream = [t for i in index.document.tolist() for t in source.read(i).tolist()]
    assert sorted(stream) == sorted([*range(tokens)] * epochs)
    assert len(index) == (epochs * tokens - 1) // seq_len >= asked
    assert sorted(index.shuffle.tolist()) == [*range(len(index))]
    drawn = samples_of(source, index, seq_len)
    in_order = [drawn[n] for n in np.argsort(index.shuffle)]
    assert [len(sample) for sample in drawn] == [seq_len + 1] * len(index)
    inputs = [t for sample in in_order for t in sample[:-1]]
    labels = [t for sample in in_order for t in sample[1:]]
    used = len(index) * seq_len
    assert inputs == stream[:used] and labels == stream[1 : used + 1]
    assert 0 <= len(stream) - 1 - used < seq_len


@given(lengths=lengths_of, seq_len=st.integers(1, 6), seed=st.integers(0, 99))
def test_a_partial_sample_keeps_the_end(lengths, seq_len, seed):
    """With it no token of the stream is left out; only the last sample of the stream is shorter."""
    assume(sum(lengths) > seq_len)
    source = Documents(*lengths)
    how = {"seq_len": seq_len, "samples": None, "seed": seed, "keep_partial": True}
    index = data.build_index(source.lengths, np.arange(len(lengths)), **how)
    stream = [t for i in index.document.tolist() for t in source.read(i).tolist()]
    drawn = samples_of(source, index, seq_len)
    in_order = [drawn[n] for n in np.argsort(index.shuffle)]
    assert [t for sample in in_order for t in sample[1:]] == stream[1:]
    assert all(len(sample) == seq_len + 1 for sample in in_order[:-1])


def test_documents_1_0_5_2_9():
    """bugs.md 111 as written: S = 4, an empty document, samples that begin inside documents."""
    source = Documents(1, 0, 5, 2, 9)
    index = data.build_index(source.lengths, np.arange(5), seq_len=4, samples=None, seed=0)
    assert len(index) == 4
    stream = [t for i in index.document.tolist() for t in source.read(i).tolist()]
    drawn = sorted(samples_of(source, index, 4), key=lambda s: stream.index(s[0]))
    assert drawn == [stream[k : k + 5] for k in (0, 4, 8, 12)]


@pytest.mark.parametrize(
    ("asked", "epochs", "apart"),
    # 10 documents of 10 tokens, S = 3: 33 samples an epoch, int(0.8 * 33) = 26
    [
        (None, 1, None),
        (33, 1, None),
        (34, 2, 33),
        (33 + 25, 2, 33),
        (33 + 26, 2, None),
        (66, 2, None),
        (67, 3, 66),
        (66 + 26, 3, None),
    ],
)
def test_a_last_epoch_that_is_hardly_used_is_shuffled_apart(asked, epochs, apart):
    """All draws in order from RandomState(seed): documents, of the last epoch apart, samples."""
    how = {"seq_len": 3, "samples": asked, "seed": 7}
    index = data.build_index(np.full(10, 10, np.int32), np.arange(100, 110) - 100, **how)
    random, total = np.random.RandomState(7), (epochs * 100 - 1) // 3
    together = epochs - (apart is not None)
    document = np.array([*range(10)] * together, np.int32)
    random.shuffle(document)
    if apart is not None:
        last = np.arange(10, dtype=np.int32)
        random.shuffle(last)
        document = np.concatenate([document, last])
    shuffle = np.arange(total if apart is None else apart, dtype=np.uint32)
    random.shuffle(shuffle)
    if apart is not None:
        assert apart == ((epochs - 1) * 100 - 1) // 3
        rest = np.arange(apart, total, dtype=np.uint32)
        random.shuffle(rest)
        shuffle = np.concatenate([shuffle, rest])
    assert index.document.tolist() == document.tolist() and index.document.dtype == np.int32
    assert index.shuffle.tolist() == shuffle.tolist() and index.shuffle.dtype == np.uint32


def test_only_the_given_documents_are_used():
    """Documents 2, 3, 5 of seven."""
    source = Documents(4, 4, 4, 4, 4, 4, 4)
    index = data.build_index(source.lengths, np.array([2, 3, 5]), seq_len=3, samples=9, seed=1)
    assert set(index.document.tolist()) == {2, 3, 5}


def test_global_generators_are_left_alone():
    """bugs.md 103: equal indices after other draws, and the global generator is not moved."""
    how: Any = {"seq_len": 3, "samples": 70, "seed": 5}
    one = data.build_index(np.full(10, 10), np.arange(10), **how)
    np.random.seed(3)
    np.random.rand(17)
    before = np.random.get_state()[1].tolist()  # type: ignore[index]
    two = data.build_index(np.full(10, 10), np.arange(10), **how)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index]
    assert one.document.tolist() == two.document.tolist()
    assert one.shuffle.tolist() == two.shuffle.tolist()


def test_counts_that_32_bits_do_not_hold():
    """bugs.md 107: the chooser is asked with the counts of 3 documents of 2 tokens, no allocation.

    2^31 entries of documents at S = 1 need more than 2^31 samples: 64 bits, in both indices.
    """
    assert megatron.index_dtype(2**31 - 1) == np.int32
    samples = 2**32
    epochs = megatron.epochs_of(6, samples, 1)
    assert epochs == math.ceil((2**32 + 1) / 6)
    assert 3 * epochs > 2**31 and megatron.index_dtype(3 * epochs) == np.int64
    assert megatron.separate_last(6, epochs, samples, 1) is None or samples > 2**31
    got = megatron.sample_index(np.array([2**31 + 5]), np.zeros(1, int), 2**30, 2**31 + 5)
    assert got.tolist() == [[0, 0], [0, 2**30], [0, 2**31]] and got.dtype == np.int64


def test_a_set_shorter_than_a_sample_is_refused():
    """bugs.md 111: four tokens hold no sample of 4 + 1, however many epochs."""
    for documents in ([4], [2, 2], []):
        with pytest.raises(DataError, match=r"one sample needs model\.seq_len \+ 1 = 5"):
            lengths = np.array(documents, np.int32)
            data.build_index(lengths, np.arange(len(documents)), seq_len=4, samples=3, seed=0)
    data.build_index(np.array([5]), np.arange(1), seq_len=4, samples=3, seed=0)


# ---------------------------------------------------------------------------- blends and splits


def greedy(weights, size, limits=None):
    """The blend's rule, one sample after the other, in Python's own floats."""
    counts, out = [0] * len(weights), []
    for i in range(size):
        best, most = -1, -math.inf
        for d, weight in enumerate(weights):
            lag = weight * max(float(i), 1.0) - counts[d]
            if lag > most and (limits is None or counts[d] < limits[d]):
                best, most = d, lag
        out.append((best, counts[best]))
        counts[best] += 1
    return out


def both(pair):
    """Rows of (dataset, sample)."""
    return [*zip(*(x.tolist() for x in pair), strict=True)]


def test_golden_blend():
    """As Megatron-Core 0.16.1 gave it for .5, .25, .25 and size 8."""
    dataset, sample = data.blend_index([0.5, 0.25, 0.25], 8)
    assert dataset.tolist() == [0, 1, 2, 0, 0, 1, 2, 0] and dataset.dtype == np.int16
    assert sample.tolist() == [0, 0, 0, 1, 2, 1, 1, 3] and sample.dtype == np.int64


@pytest.mark.parametrize("datasets", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("kind", ["random", "round", "skewed"])
def test_blocks_side_by_side_equal_one_sample_after_the_other(datasets, kind, monkeypatch):
    """Random, round (many ties) and very unequal weights, in 30 blocks that start from guesses."""
    monkeypatch.setattr(blend, "BLOCKS", 30)
    random = np.random.RandomState(datasets)
    weights = {
        "random": random.rand(datasets),
        "round": random.randint(1, 5, datasets),
        "skewed": 10.0 ** -np.arange(datasets).clip(0, 5),
    }[kind]
    share = (weights / weights.sum()).tolist()
    assert both(data.blend_index(weights.tolist(), 3000)) == greedy(share, 3000)


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6), size=st.integers(0, 200))
def test_no_dataset_gets_ahead_of_its_share(weights, size):
    """By a sample, at any point; nor falls behind, of two. Its samples come in order, each once."""
    dataset, sample = data.blend_index(weights, size)
    share = np.array(weights) / sum(weights)
    for d in range(len(weights)):
        assert sample[dataset == d].tolist() == [*range((dataset == d).sum())]
        given = np.concatenate([[0], (dataset == d).cumsum()])
        ahead = given - share[d] * np.arange(size + 1)
        assert ahead.max() <= 1 + 1e-9 and ahead.min() >= -max(1, len(weights) - 1) - 1e-9


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_exhaustive_blend_gives_every_sample_once(sizes):
    """In the order of the rule with shares of the sizes."""
    rows = both(data.exhaustive_index(sizes))
    assert rows == greedy([n / float(sum(sizes)) for n in sizes], sum(sizes), sizes)
    assert sorted(rows) == [(d, n) for d, size in enumerate(sizes) for n in range(size)]


def test_three_hundred_datasets():
    """bugs.md 113: dataset numbers go beyond 255; too many are refused by number."""
    dataset, _ = data.blend_index([1.0] * 300, 300)
    assert sorted(dataset.tolist()) == [*range(300)]
    with pytest.raises(DataError, match="a blend of 32768 datasets: give 1 to 32767"):
        data.blend_index([1.0] * 32768, 1)


@pytest.mark.parametrize("bad", [[-1.0, 2.0], [math.nan, 1.0], [math.inf], [0.0, 0.0]])
def test_bad_weights_are_refused(bad):
    """Negative, not finite, none above 0."""
    with pytest.raises(DataError, match=r"data\.weights: .* is no weight of a dataset"):
        data.blend_index(bad, 4)


def test_sizes_and_surplus():
    """ceil(ceil(N w) 1.005), by hand: 1000 of .3 and .7; 7 of a third."""
    assert data.sizes_of([0.3, 0.7], 1000) == [300, 700]
    assert data.sizes_of([0.3, 0.7], 1000, 0.005) == [302, 704]
    assert data.sizes_of([1 / 3] * 3, 7) == [3, 3, 3]


@pytest.mark.parametrize(
    ("weights", "sequences", "ends"),
    [
        ([969, 30, 1], 1000, [969, 999, 1000]),
        ([99, 1, 0], 10, [10, 10, 10]),
        ([1, 1], 5, [2, 5]),  # half of 5 is rounded to the even 2
        ([0.95, 0.05], 100, [95, 100]),
        ([1], 3, [3]),
    ],
)
def test_splits(weights, sequences, ends):
    """Each part begins where the one before ends; rounded as Python rounds."""
    parts = data.split_bounds(weights, sequences)
    assert [part.stop for part in parts] == ends
    assert [part.start for part in parts] == [0, *ends[:-1]]


# ---------------------------------------------------------------------------- made-up data


def test_made_up_documents():
    """Lengths of default_rng(0), tokens 1, 2, 3 ... and the end; a small vocabulary wraps."""
    mock = Mock(9999)
    lengths = np.random.default_rng(0).integers(1, 4096, 100_000, dtype=np.int32)
    assert mock.lengths.tolist() == lengths.tolist() and mock.tokens == int(lengths.sum())
    for i in (0, 17, int(lengths.argmin()), int(lengths.argmax())):
        assert mock.read(i).tolist() == [*range(1, lengths[i]), 9999]
    long = int(lengths.argmax())
    assert set(Mock(5).read(long).tolist()) == {1, 2, 3, 4, 5}
    assert mock.read(long, 3, 6).tolist() == [4, 5, 6]
    with pytest.raises(IndexError):
        mock.read(long, 0, 5000)


# ---------------------------------------------------------------------------- Megatron itself


def installed() -> bool:
    """Whether Megatron-Core is there, with its compiled helpers; found without importing it."""
    spec = importlib.util.find_spec("megatron")
    places = spec.submodule_search_locations or [] if spec else []
    return any([*Path(place).glob("core/datasets/helpers_cpp*.so")] for place in places)


if installed():
    # Where Megatron-Core is: pip install --no-deps megatron-core==0.16.1

    @pytest.fixture(scope="module")
    def peer():
        """Megatron's side; importing it takes seconds."""
        from tests import megatron_peer

        return megatron_peer

    @pytest.mark.parametrize("asked", [None, 1, 60, 300, 410, 900])
    @pytest.mark.parametrize("seed", [0, 1234])
    def test_indices_equal_megatrons(asked, seed, peer):
        """GPTDataset's own three indices of 42 of 50 documents, empty ones among them, S = 7."""
        lengths = np.random.RandomState(3).randint(0, 100, 50).astype(np.int32)
        how = {"seq_len": 7, "samples": asked, "seed": seed}
        ours = data.build_index(lengths, np.arange(4, 46), **how)
        theirs = peer.gpt_indices(lengths, np.arange(4, 46, dtype=np.int32), **how)
        for mine, other in zip((ours.document, ours.sample, ours.shuffle), theirs, strict=True):
            assert mine.dtype == other.dtype and mine.tolist() == other.tolist()

    @pytest.mark.parametrize("weights", [[0.5, 0.25, 0.25], [3, 1, 4, 1, 5], [0.001, 0.999]])
    def test_blends_equal_megatrons(weights, peer):
        """build_blending_indices and build_exhaustive_blending_indices."""
        assert both(data.blend_index(weights, 5000)) == peer.blend(weights, 5000)
        sizes = [10, 300, 7]
        assert both(data.exhaustive_index(sizes)) == peer.exhaustive(sizes)

    @pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint8])
    def test_files_equal_megatrons(dtype, peer, tmp_path):
        """The same bytes of both files, an empty document among them."""
        documents = [[1, 2, 3], [], [200, 5], [6]]
        peer.write(tmp_path / "theirs", documents, dtype)
        with data.Writer(tmp_path / "ours", np.dtype(dtype)) as out:
            for document in documents:
                out.add(document)
        for ending in (".idx", ".bin"):
            ours = (tmp_path / f"ours{ending}").read_bytes()
            assert ours == (tmp_path / f"theirs{ending}").read_bytes()
        assert data.open_indexed(tmp_path / "theirs").document(2).tolist() == [200, 5]

    def test_samples_equal_megatrons(peer, tmp_path):
        """Tokens, labels, loss mask and positions of 40 samples, all resets on; who sees whom."""
        random = np.random.RandomState(5)
        with data.Writer(tmp_path / "x", np.dtype("<u2")) as out:
            for length in random.randint(0, 12, 30):
                out.add([*random.randint(1, 50, length), 0])
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        how = {"seq_len": 9, "samples": 40, "seed": 3}
        numbers = np.arange(30, dtype=np.int32)
        theirs = peer.dataset(tmp_path / "x", numbers, **how, **dict.fromkeys(names, True))
        share = data.Share(data.open_indexed(tmp_path / "x"), range(30), "x")
        source = data.Built(shares=(share,), samples=40, eod=(0,))
        ours = data.batch(source, seed=3, first=0, count=40, seq_len=9, packed=True)
        for n in range(40):
            other = {name: x.tolist() for name, x in theirs[n].items()}
            mine = {name: x[n].tolist() for name, x in ours.items()}
            assert mine["tokens"] == other["tokens"] and mine["labels"] == other["labels"]
            assert mine["mask"] == other["loss_mask"] and mine["positions"] == other["position_ids"]
            document = mine["documents"]
            hidden = [[j > i or document[i] != document[j] for j in range(9)] for i in range(9)]
            assert [hidden] == other["attention_mask"]

    @pytest.mark.parametrize("weights", [[0.3, 0.7], [5, 1], None])
    def test_parts_of_a_blend_equal_megatrons(weights, peer, tmp_path):
        """Both parts of two datasets, split 8 to 2, as its builder makes them: every token."""
        random = np.random.RandomState(6)
        for name in "xy":
            with data.Writer(tmp_path / name, np.dtype("<u2")) as out:
                for length in random.randint(5, 40, 40):
                    out.add(random.randint(1, 60000, length))
        sizes = [150, 24]
        if weights is None:
            sizes = [90, 12]  # without weights it has one epoch
        prefixes = [tmp_path / name for name in "xy"]
        how = {"seq_len": 8, "seed": 3}
        theirs = peer.parts(prefixes, weights, "8,2", sizes, **how)
        config = DataConfig(
            path=tuple(map(str, prefixes)), weights=tuple(weights or ()), split=(8, 2)
        )
        ours = data.open_built(
            config, training=sizes[0], validation=sizes[1], seq_len=8, vocab=60000
        )
        for source, size, other in zip(ours, sizes, theirs, strict=True):
            assert source.draw(np.arange(size), 3, 8)[0].tolist() == other
