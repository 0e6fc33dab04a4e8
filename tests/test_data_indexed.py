"""Megatron's .bin and .idx: golden bytes, whatever was written is read, hostile files are named."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.data import DataError, Indexed, Writer, indexed, open_indexed, token_dtype, writer

DOCS = ([1, 2, 3], [4, 5], [6, 7, 8, 9])


def write(path: Path, docs=DOCS, dtype: Any = "<u2", **how) -> Path:
    """A dataset of these documents."""
    with Writer(path, np.dtype(dtype), **how) as out:
        for doc in docs:
            out.add(doc)
    return path


def contents(data: Indexed) -> list[list[int]]:
    """Every document."""
    return [data.document(i).tolist() for i in range(len(data.documents) - 1)]


# ---------------------------------------------------------------------------- bytes


def test_golden_bytes(tmp_path):
    """Three documents as Megatron-Core 0.16.1 wrote them: 102 bytes of index, 18 of tokens."""
    write(tmp_path / "x")
    index = (tmp_path / "x.idx").read_bytes()
    assert len(index) == 102
    assert index[:34].hex() == (
        "4d4d494449445800000100000000000000080300000000000000" + "0400000000000000"
    )
    assert index[34:] == struct.pack("<3i3q4q", 3, 2, 4, 0, 6, 10, 0, 1, 2, 3)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<9H", *range(1, 10))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


@pytest.mark.parametrize(
    ("code", "name"),
    [(1, "uint8"), (2, "int8"), (3, "int16"), (4, "int32"), (5, "int64"), (8, "uint16")],
)
def test_codes_of_types(code, name, tmp_path):
    """Byte 17 is the type's code, and values of either end of the type survive."""
    room = np.iinfo(name)
    write(tmp_path / "x", [[room.max, 0, room.min]], name)
    assert (tmp_path / "x.idx").read_bytes()[17] == code
    assert contents(open_indexed(tmp_path / "x")) == [[room.max, 0, room.min]]


@pytest.mark.parametrize("vocab", [65499, 65500, 65535, 65536, 65537, 65544])
def test_the_last_token_of_a_vocabulary_survives(vocab, tmp_path):
    """bugs.md 108: 16 bits below 65500 ids and 32 from there on, as Megatron; nothing wraps."""
    assert token_dtype(vocab).name == ("uint16" if vocab < 65500 else "int32")
    write(tmp_path / "x", [[vocab - 1]], token_dtype(vocab))
    assert contents(open_indexed(tmp_path / "x")) == [[vocab - 1]]


@pytest.mark.parametrize("bad", [65536, 65543, -1, 2**40])
def test_a_token_that_does_not_fit_is_refused(bad, tmp_path):
    """bugs.md 108: 65543 in 16 bits would become 7; an error leaves nothing behind."""
    with pytest.raises(DataError, match=rf"token {bad} .* does not fit into uint16"):
        write(tmp_path / "x", [[1], [2, bad]])
    assert list(tmp_path.iterdir()) == []


@given(
    docs=st.lists(
        st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=6), min_size=1, max_size=3),
        max_size=8,
    ),
    modes=st.booleans(),
)
def test_what_is_written_is_read(docs, modes):
    """Documents of several sequences, empty ones too, with and without modes; pieces of them."""
    with tempfile.TemporaryDirectory() as folder:
        with Writer(f"{folder}/a.b", np.dtype("<u2"), modes=modes) as out:
            for number, doc in enumerate(docs):
                flat = [token for sequence in doc for token in sequence]
                out.add(flat, [*map(len, doc)], [number % 3] * len(doc) if modes else None)
        data = open_indexed(f"{folder}/a.b")
        assert contents(data) == [[t for s in doc for t in s] for doc in docs]
        sequences = [sequence for doc in docs for sequence in doc]
        assert data.lengths.tolist() == [*map(len, sequences)]
        assert data.tokens == sum(map(len, sequences))
        for i, sequence in enumerate(sequences):
            for start in range(len(sequence) + 1):
                assert data.read(i, start, len(sequence)).tolist() == sequence[start:]
        expected = [n % 3 for n, doc in enumerate(docs) for _ in doc] if modes and docs else None
        assert (data.modes.tolist() if data.modes is not None else None) == expected


def test_many_documents_at_once_are_the_same_bytes(tmp_path):
    """`add_all` of two pieces and `add` of each document."""
    write(tmp_path / "x")
    with Writer(tmp_path / "y", np.dtype("<u2")) as out:
        out.add_all(np.arange(1, 6), np.array([3, 2]))
        out.add_all(np.arange(6, 10), np.array([4]))
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"x{ending}").read_bytes() == (tmp_path / f"y{ending}").read_bytes()


def test_merged_documents_are_shifted(tmp_path):
    """bugs.md 109: 2 and 3 documents, one of several sequences: contents and bounds of both."""
    write(tmp_path / "a", [[1, 2], [3]])
    with Writer(tmp_path / "b", np.dtype("<u2")) as out:
        out.add([4])
        out.add([5, 6, 7], [1, 2])
        out.add([8])
    with Writer(tmp_path / "c", np.dtype("<u2")) as out:
        for name in "ab":
            out.extend(open_indexed(tmp_path / name))
    data = open_indexed(tmp_path / "c")
    assert contents(data) == [[1, 2], [3], [4], [5, 6, 7], [8]]
    assert data.documents.tolist() == [0, 1, 2, 3, 5, 6] and len(data) == 6
    assert data.pointers.tolist() == [0, 4, 6, 8, 10, 14]
    write(tmp_path / "d", [[1]], "<i4")
    with pytest.raises(DataError, match="d holds int32 tokens"):
        with Writer(tmp_path / "e", np.dtype("<u2")) as out:
            out.extend(open_indexed(tmp_path / "d"))


def test_places_are_in_64_bits(tmp_path):
    """bugs.md 106: 4 sequences of 600,000,000 two-byte tokens over a file with a hole, and one."""
    lengths, ends = np.array([*[600_000_000] * 4, 1], np.int32), 4_800_000_000
    with (tmp_path / "x.bin").open("wb") as file:
        file.truncate(ends)
        file.seek(ends - 2)
        file.write(struct.pack("<2H", 77, 78))
    pieces = writer.index_bytes(lengths, np.arange(6), np.dtype("<u2"))
    (tmp_path / "x.idx").write_bytes(b"".join(pieces))
    data = open_indexed(tmp_path / "x")
    places = [0, 1_200_000_000, 2_400_000_000, 3_600_000_000, 4_800_000_000]
    assert data.pointers.tolist() == places and data.tokens == 2_400_000_001
    assert data.read(4).tolist() == [78]
    assert data.read(3, 599_999_998).tolist() == [0, 77]


def test_an_older_dataset_stays_until_the_new_one_is_whole(tmp_path):
    """An error while writing leaves the old one; success replaces both files."""
    write(tmp_path / "x")
    with pytest.raises(RuntimeError, match="stop"), Writer(tmp_path / "x", np.dtype("<u2")) as out:
        out.add([9])
        raise RuntimeError("stop")
    assert contents(open_indexed(tmp_path / "x")) == [*map(list, DOCS)]
    kept = open_indexed(tmp_path / "x")
    write(tmp_path / "x", [[9]])
    assert contents(open_indexed(tmp_path / "x")) == [[9]]
    assert contents(kept) == [*map(list, DOCS)]  # who has it open goes on with what it opened
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_names_of_a_dataset(tmp_path):
    """X, X.idx and X.bin, with dots in X."""
    write(tmp_path / "wiki.v2")
    for name in ("wiki.v2", "wiki.v2.idx", "wiki.v2.bin"):
        assert contents(open_indexed(tmp_path / name)) == [*map(list, DOCS)]
        assert indexed.is_indexed(tmp_path / name)
    assert not indexed.is_indexed(tmp_path / "wiki")


def test_the_hash_is_of_contents(tmp_path):
    """Not of the place; a change of a token, of a bound, or at the end of a large file shows."""
    one = indexed.content_hash(open_indexed(write(tmp_path / "a")))
    assert indexed.content_hash(open_indexed(write(tmp_path / "b"))) == one
    assert one.split("-")[1:] == ["3", "9"]
    changed = [
        ([[1, 2, 3], [4, 5], [6, 7, 8, 10]], "3-9"),
        ([[1, 2], [3, 4, 5], [6, 7, 8, 9]], "3-9"),
    ]
    for docs, counts in changed:
        other = indexed.content_hash(open_indexed(write(tmp_path / "c", docs)))
        assert other != one and other.endswith(counts)
    large = np.zeros(3 << 20, np.uint16)
    first = indexed.content_hash(open_indexed(write(tmp_path / "d", [large])))
    large[-1] = 1
    assert indexed.content_hash(open_indexed(write(tmp_path / "d", [large]))) != first


# ---------------------------------------------------------------------------- hostile files


def damaged(name: str, at: int, fmt: str, value: int | bytes):
    """A change of one field of x.idx."""

    def change(folder: Path) -> None:
        raw = bytearray((folder / "x.idx").read_bytes())
        raw[at : at + struct.calcsize(fmt)] = struct.pack(fmt, value)
        (folder / "x.idx").write_bytes(raw)

    change.__name__ = name
    return change


def cut(name: str, size: int):
    """A file cut to so many bytes."""
    return lambda folder: os.truncate(folder / name, size)


HOSTILE = [
    (damaged("magic", 0, "<9s", b"MMIDIDY\0\0"), r"x\.idx is no index: it begins with b'MMIDIDY"),
    (damaged("version", 9, "<Q", 2), "is of version 2"),
    (damaged("type 0", 17, "<B", 0), "has token type 0, which is none of"),
    (damaged("type 9", 17, "<B", 9), "has token type 9"),
    (damaged("type float", 17, "<B", 7), "holds float32 numbers, which are no tokens"),
    (damaged("sequences", 18, "<Q", 4), "has 102 bytes, but 4 sequences and 4 bounds .* take 114"),
    (damaged("vast sequences", 18, "<Q", 2**63), "but 9223372036854775808 sequences"),
    (damaged("wrapping", 18, "<Q", (2**64 + 68 - 32) // 12 + 1), "has 102 bytes, but"),
    (damaged("bounds", 26, "<Q", 3), "3 sequences and 3 bounds .* take 94 "),
    (damaged("vast bounds", 26, "<Q", 2**61), "2305843009213693952 bounds"),
    (damaged("negative length", 38, "<i", -2), "sequence 1 a negative length"),
    (damaged("length past the end", 42, "<i", 5), r"sequence 2 an end that x\.bin of 18 bytes"),
    (damaged("pointer past the end", 54, "<q", 16), r"sequence 1 an end .* at byte 16"),
    (damaged("vast pointer", 62, "<q", 2**63 - 1), "sequence 2 an end"),
    (damaged("negative pointer", 46, "<q", -8), "sequence 0 a negative place"),
    (damaged("first document", 70, "<q", 1), r"bounds its documents by \[1, 3\], not 0 and 3"),
    (damaged("last document", 94, "<q", 2), r"bounds its documents by \[0, 2\], not 0 and 3"),
    (damaged("falling documents", 78, "<q", 3), "ends document 1 before it begins"),
    (cut("x.idx", 0), r"x\.idx is no index: it begins with b''"),
    (cut("x.idx", 20), "ends inside its header, after 20 of 34 bytes"),
    (cut("x.idx", 100), "has 100 bytes, but"),
    (cut("x.bin", 17), "sequence 2 an end"),
    (cut("x.bin", 0), r"x\.bin of 0 bytes"),
    (lambda folder: (folder / "x.bin").unlink(), r"x\.bin cannot be read \(No such file"),
    (lambda folder: (folder / "x.idx").unlink(), r"x\.idx cannot be read \(No such file"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_a_hostile_file_is_refused_by_name(change, message, tmp_path):
    """bugs.md 109: each field, cut files and places outside: a sentence with the file in it."""
    write(tmp_path / "x")
    change(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        open_indexed(tmp_path / "x")
    assert str(tmp_path) in str(caught.value)


@given(at=st.integers(0, 101), value=st.integers(0, 255))
def test_no_byte_of_an_index_does_harm(at, value):
    """Any byte changed: refused by name, or every document it gives lies inside the file."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "x")
        raw = bytearray((Path(folder) / "x.idx").read_bytes())
        raw[at] = value
        (Path(folder) / "x.idx").write_bytes(raw)
        try:
            data = open_indexed(f"{folder}/x")
        except DataError:
            return
        assert data.tokens == sum(map(len, contents(data)))


def test_nothing_is_allocated_for_what_a_header_claims(tmp_path, monkeypatch):
    """A count of 2^40 in a file of 102 bytes is refused before any array is made."""
    write(tmp_path / "x")
    damaged("vast", 18, "<Q", 2**40)(tmp_path)

    def no_array(*args, **rest):
        raise AssertionError("an array was made")

    for name in ("memmap", "empty", "zeros", "frombuffer"):
        monkeypatch.setattr(np, name, no_array)
    with pytest.raises(DataError, match="1099511627776 sequences"):
        open_indexed(tmp_path / "x")


def test_a_file_cut_in_use_is_an_error_and_no_crash(tmp_path):
    """The tokens are read by calls that say how much came, not through mapped memory."""
    data = open_indexed(write(tmp_path / "x"))
    os.truncate(tmp_path / "x.bin", 8)
    assert data.read(0).tolist() == [1, 2, 3]
    with pytest.raises(DataError, match=r"x\.bin was cut while it was in use: sequence 2"):
        data.read(2)


def test_pieces_outside_a_sequence_are_refused(tmp_path):
    """Never the tokens of the next sequence."""
    data = open_indexed(write(tmp_path / "x"))
    for start, stop in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(IndexError, match=f"no tokens {start}..{stop} of 2 in 1"):
            data.read(1, start, stop)
