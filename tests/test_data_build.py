"""`mfun data`: text to a dataset, what is in it, and its samples as text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from mfun import data
from mfun.cli.data import command
from mfun.data import DataError, build, open_tokenizer
from mfun.data.indexed import content_hash
from mfun.data.tokenizer import END, Bytes, train_bpe

TEXTS = ["the first document", "zweites Dokument: äöü €", "three", "the first of the last"]


def jsonl(path: Path, texts, key: str = "text") -> Path:
    """A line for each text."""
    path.write_text("".join(json.dumps({key: text, "n": 1}) + "\n" for text in texts))
    return path


def mfun(*words: object) -> Result:
    """`mfun data WORDS`."""
    return CliRunner().invoke(command, [str(word) for word in words])


def built(out: Path, *words: object) -> data.Indexed:
    """The dataset that `mfun data build` makes of these words."""
    result = mfun("build", *words[:-1], words[-1], out) if words else mfun("build", out)
    assert result.exit_code == 0, result.output
    return data.open_indexed(out)


def contents(dataset: data.Indexed) -> list[list[int]]:
    """Every document."""
    return [dataset.document(i).tolist() for i in range(len(dataset))]


# ---------------------------------------------------------------------------- building


def test_bytes_of_lines_and_files(tmp_path):
    """A document a line, each other file one, in order; each ends in byte 0; empty texts left."""
    lines = jsonl(tmp_path / "a.jsonl", [*TEXTS, ""])
    (tmp_path / "b.txt").write_text("two\nlines\n")
    dataset = built(tmp_path / "x", lines, tmp_path / "b.txt")
    expected = [[*text.encode(), 0] for text in [*TEXTS, "two\nlines\n"]]
    assert contents(dataset) == expected and dataset.dtype == np.uint16
    about = data.read_about(tmp_path / "x")
    largest = max(max(document) for document in expected)
    assert about == data.About(tokenizer="bytes", vocab=256, eod=0, largest=largest)
    swapped = built(tmp_path / "y", tmp_path / "b.txt", lines)
    assert contents(swapped) == expected[-1:] + expected[:-1]


def test_without_an_end_of_document(tmp_path):
    """--eod '' adds nothing."""
    lines = jsonl(tmp_path / "a.jsonl", TEXTS)
    dataset = built(tmp_path / "x", "--eod", "", lines)
    assert contents(dataset) == [[*text.encode()] for text in TEXTS]
    assert data.read_about(tmp_path / "x").eod == -1


def test_a_learned_vocabulary_reads_what_it_wrote(tmp_path):
    """bpe:300 of the inputs: kept beside the dataset, decodes to the texts, ends in one token."""
    lines = jsonl(tmp_path / "a.jsonl", TEXTS * 30, key="body")
    dataset = built(tmp_path / "x", "--tokenizer", "bpe:300", "--key", "body", lines)
    words = data.tokenizer_of(tmp_path / "x")
    about = data.read_about(tmp_path / "x")
    assert about.tokenizer == "x.tokenizer.json" and 257 < about.vocab <= 300
    assert [words.decode(d) for d in contents(dataset)] == [text + END for text in TEXTS * 30]
    assert all(document.count(about.eod) == 1 for document in contents(dataset))
    assert dataset.tokens < sum(len(text.encode()) for text in TEXTS * 30) / 2
    given = tmp_path / "x.tokenizer.json"
    again = built(tmp_path / "y", "--tokenizer", given, "--key", "body", lines)
    assert contents(again) == contents(dataset)
    (tmp_path / "z").mkdir()
    moved = tmp_path / "z/y"
    for ending in (".idx", ".bin", ".json", ".tokenizer.json"):
        Path(f"{tmp_path}/y{ending}").rename(f"{moved}{ending}")
    assert data.tokenizer_of(moved).decode(contents(data.open_indexed(moved))[0]) == TEXTS[0] + END


def test_learning_a_vocabulary_is_repeatable(tmp_path):
    """The same texts, the same file."""
    for name in "ab":
        train_bpe(iter(TEXTS * 20), 290, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(DataError, match="a vocabulary of bytes has at least 257"):
        train_bpe(iter(TEXTS), 256, tmp_path / "c")


def test_building_starts_without_torch():
    """What each process imports is imported in a moment."""
    code = "import sys, mfun.data.build, mfun.cli.data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_processes_change_nothing(tmp_path, monkeypatch):
    """Two processes and pieces of a few lines write the files that one process writes."""
    monkeypatch.setattr(build, "PIECE", 200)
    lines = jsonl(tmp_path / "a.jsonl", [f"{text} {n}" for n in range(40) for text in TEXTS])
    (tmp_path / "b.txt").write_text("whole")
    made = {}
    for workers in (1, 2):
        built(tmp_path / f"x{workers}", "--workers", workers, lines, tmp_path / "b.txt")
        made[workers] = [Path(f"{tmp_path}/x{workers}{e}").read_bytes() for e in (".idx", ".bin")]
    assert made[1] == made[2]


@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=6), size=st.integers(1, 60))
def test_pieces_hold_every_text_once(texts, size, tmp_path_factory):
    """Whatever the size of a piece, blank lines and strange characters: all texts, in order."""
    path = tmp_path_factory.mktemp("p") / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) + "\n" for text in texts))
    pieces = [*build.pieces([path], size)]
    assert [t for piece in pieces for t in build.texts_of(piece, "text")] == texts
    assert b"".join(piece.raw for piece in pieces) == path.read_bytes()


def test_what_cannot_be_built_is_refused_by_line(tmp_path):
    """File, line and fix; nothing is left behind, and an older dataset stays."""
    bad = tmp_path / "bad.jsonl"
    good = json.dumps({"text": "x"}) + "\n"
    nul = json.dumps({"text": "a\0b"}) + "\n"
    for contents_, words, message in (
        (good + '{"text": "y"\n', (), "bad.jsonl line 2 is no JSON"),
        (good + '{"txt": "y"}\n', (), "line 2 has txt, and no text 'text': name its key by --key"),
        (good + "[1]\n", (), "line 2 is no object, and no text 'text'"),
        (good + '{"text": 3}\n', (), "line 2 has text, and no text 'text'"),
        (good + nul, (), "the character U+0000"),
        ("\n\n", (), "no text in"),
        (good, ("--tokenizer", "bpe:many"), "give a number of tokens, as bpe:8000"),
        (good, ("--tokenizer", tmp_path / "none.json"), "no such file"),
        (good, ("--tokenizer", bad), "is no tokenizer of the `tokenizers` library"),
        (good, ("--eod", "</s>"), "documents of bytes end in byte 0"),
    ):
        bad.write_text(contents_)
        result = mfun("build", *words, bad, tmp_path / "x")
        assert result.exit_code == 1 and message in result.output, (message, result.output)
        assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"], message
    bad.write_bytes(b'{"text": "\xff"}\n')
    assert "bad.jsonl line 1 is not UTF-8" in mfun("build", bad, tmp_path / "x").output
    assert f"{tmp_path} is a folder" in mfun("build", tmp_path, tmp_path / "x").output
    assert "none cannot be read" in mfun("build", tmp_path / "none", tmp_path / "x").output


def test_an_older_dataset_is_not_replaced_unasked(tmp_path):
    """--overwrite does."""
    lines = jsonl(tmp_path / "a.jsonl", TEXTS)
    built(tmp_path / "x", lines)
    jsonl(lines, ["new"])
    refused = mfun("build", lines, tmp_path / "x")
    assert refused.exit_code == 1 and "replace it by --overwrite" in refused.output
    assert len(data.open_indexed(tmp_path / "x")) == len(TEXTS)
    assert len(built(tmp_path / "x", "--overwrite", lines)) == 1


# ---------------------------------------------------------------------------- tokenizers


@given(text=st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=30))
def test_bytes_there_and_back(text):
    """Any text without U+0000."""
    (ids,) = Bytes().encode([text])
    assert ids.tolist() == [*text.encode()] and Bytes().decode(ids.tolist()) == text


def test_the_end_token_of_a_vocabulary(tmp_path):
    """Found by its usual names, or given; a name it does not have is refused."""
    path = tmp_path / "t.json"
    train_bpe(iter(TEXTS * 9), 280, path)
    assert open_tokenizer(str(path)).eod == 0 and open_tokenizer(str(path), "").eod == -1
    assert open_tokenizer(str(path), "a").eod > 0
    with pytest.raises(DataError, match="has no token '</s>': name the token"):
        open_tokenizer(str(path), "</s>")
    path.write_text(path.read_text().replace(END, "<|other|>"))
    with pytest.raises(DataError, match=r"has none of <\|endoftext\|>"):
        open_tokenizer(str(path))


def test_templates_add_nothing(tmp_path):
    """Special tokens that a tokenizer would put around a text are not part of a document."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    path = tmp_path / "t.json"
    train_bpe(iter(TEXTS * 9), 280, path)
    plain = open_tokenizer(str(path)).encode(["three"])[0].tolist()
    model = Tokenizer.from_file(str(path))
    model.post_processor = TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    model.save(str(path))
    assert model.encode("three").ids == [0, *plain]
    assert open_tokenizer(str(path)).encode(["three"])[0].tolist() == plain


# ---------------------------------------------------------------------------- looking


def test_info(tmp_path):
    """Counts by hand, as text and as JSON."""
    lines = jsonl(tmp_path / "a.jsonl", ["ab", "abcd", "abc"])
    dataset = built(tmp_path / "x", lines)
    facts = json.loads(mfun("info", "--json", tmp_path / "x").output)
    assert facts == {
        "dataset": str(tmp_path / "x"),
        "documents": 3,
        "sequences": 3,
        "tokens": 12,
        "token_type": "uint16",
        "bytes": 24,
        "shortest": 3,
        "median": 4.0,
        "longest": 5,
        "modes": False,
        "tokenizer": "bytes",
        "vocab": 256,
        "eod": 0,
        "largest": 100,
        "hash": content_hash(dataset),
    }
    shown = mfun("info", tmp_path / "x.idx").output
    assert "token type       uint16" in shown and "bytes            24 B" in shown
    (tmp_path / "x.json").unlink()
    assert "vocab            not known" in mfun("info", tmp_path / "x").output
    assert "none.idx cannot be read" in mfun("info", tmp_path / "none").output


def test_samples_as_text(tmp_path):
    """Samples in order, each piece under its document; an epoch's samples hold every byte once."""
    lines = jsonl(tmp_path / "a.jsonl", ["abcdefg", "hi", "jklmnop"])
    built(tmp_path / "x", lines)
    shown = mfun("sample", tmp_path / "x", "--count", 4, "--seq-len", 4, "--seed", 1)
    assert shown.exit_code == 0
    rows = shown.output.splitlines()
    letters = "".join(row for row in rows if not row.startswith("--"))
    assert set(letters) - {"\0"} <= set("abcdefghijklmnop") and len(letters) == 4 * 5
    heads = [row for row in rows if row.startswith("--")]
    assert [head.split()[2] for head in heads] == sorted(head.split()[2] for head in heads)
    texts = ["abcdefg\0", "hi\0", "jklmnop\0"]
    for head, body in zip(rows[::2], rows[1::2], strict=True):
        words = head.replace(",", "").split()
        document, start, size = int(words[4]), int(words[7]), int(words[8])
        assert texts[document][start : start + size] == body
    assert mfun("sample", tmp_path / "x", "--document", 1).output == "hi\0\n"
    assert "has 3 documents" in mfun("sample", tmp_path / "x", "--document", 3).output
    beyond = mfun("sample", tmp_path / "x", "--seq-len", 4, "--first", 9)
    assert "has 4 samples of 4 + 1 tokens" in beyond.output
    assert "lower --seq-len" in mfun("sample", tmp_path / "x").output
    (tmp_path / "x.json").unlink()
    assert "does not say its vocabulary" in mfun("sample", tmp_path / "x").output
    named = mfun("sample", tmp_path / "x", "--tokenizer", "bytes", "--document", 1)
    assert named.output == "hi\0\n"
