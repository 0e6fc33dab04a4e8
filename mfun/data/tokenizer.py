"""Text as token ids and back: bytes, or a vocabulary of the `tokenizers` library.

A dataset X keeps its vocabulary beside it, as `X.tokenizer.json`, so what was written can be read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np

from mfun.data.corpus import VOCAB, DataError

BYTES = "bytes"
END = "<|endoftext|>"
"""The end of a document in vocabularies that are made here."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<end_of_turn>", "[SEP]")
"""Names that known vocabularies have for it, the first that is found."""


class Tokenizer(Protocol):
    """A vocabulary."""

    @property
    def vocab(self) -> int:
        """Token ids are 0 .. vocab - 1."""
        ...

    @property
    def eod(self) -> int:
        """The id that ends a document, -1 for none."""
        ...

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without an end of document."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        ...


@attrs.frozen
class Bytes:
    """UTF-8: id = byte. A document ends in byte 0, which text does not have.

    Example:
        >>> Bytes().encode(["hé"])[0].tolist(), Bytes().decode([104, 195, 169])
        ([104, 195, 169], 'hé')
    """

    eod: int = 0
    vocab: int = VOCAB

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text.

        Raises: DataError for one that has the character U+0000.
        """
        for text in texts:
            if "\0" in text:
                raise DataError(
                    f"a text has the character U+0000 ({text[:40]!r} ...), which ends documents of "
                    "bytes: remove it, or use another tokenizer"
                )
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Their text; bytes that are not UTF-8 show as U+FFFD."""
        return bytes(ids).decode(errors="replace")


@attrs.frozen(eq=False)
class Vocabulary:
    """A tokenizer of the `tokenizers` library.

    Args:
        model: the library's.
        eod: id that ends a document, -1 for none.
    """

    model: Any
    eod: int

    @property
    def vocab(self) -> int:
        """Token ids are 0 .. vocab - 1."""
        return max(self.model.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without the special tokens that a template would add."""
        found = self.model.encode_batch_fast([*texts], add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in found]

    def decode(self, ids: Sequence[int]) -> str:
        """Their text, special tokens included."""
        return self.model.decode([*ids], skip_special_tokens=False)


def open_tokenizer(name: str, end: str | None = None) -> Tokenizer:
    """The tokenizer of a name.

    Args:
        name: `bytes`, or a JSON file of the `tokenizers` library.
        end: token that ends a document; None looks for one of `ENDS`, "" has none.

    Raises: DataError for a file that is none, or a token that it does not have.
    """
    if name == BYTES:
        if end:
            raise DataError(f"--eod {end}: documents of bytes end in byte 0; leave it out")
        return Bytes() if end is None else Bytes(eod=-1)
    path = Path(name).expanduser()
    if not path.is_file():
        raise DataError(
            f"--tokenizer {name}: no such file; name a tokenizer.json, `bytes`, or `bpe:SIZE`"
        )
    try:
        model = _library().Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{path} is no tokenizer of the `tokenizers` library: {error}") from error
    return Vocabulary(model, _end(model, path, end))


def _end(model: Any, path: Path, end: str | None) -> int:
    if end == "":
        return -1
    names = ENDS if end is None else (end,)
    found = [i for i in map(model.token_to_id, names) if i is not None]
    if not found:
        what = "none of " + ", ".join(ENDS) if end is None else f"no token {end!r}"
        raise DataError(
            f"{path} has {what}: name the token that ends a document by --eod, or --eod '' for none"
        )
    return found[0]


def train_bpe(texts: Iterable[str], size: int, path: Path) -> None:
    """Learn byte pair encoding from texts and write it, with `END` as id 0.

    Args:
        texts: to learn from.
        size: token ids; at least 257, for every byte and `END`.
        path: of the JSON file.

    Source: Sennrich et al. 2016 (arXiv 1508.07909), on bytes as Radford et al. 2019.
    """
    if size < VOCAB + 1:
        raise DataError(f"--tokenizer bpe:{size}: a vocabulary of bytes has at least {VOCAB + 1}")
    library = _library()
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    draft.write_text(model.to_str(pretty=True), encoding="utf-8")
    draft.replace(path)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            "tokenizers other than `bytes` need the library of that name: pip install 'mfun[hf]'"
        ) from error
    return tokenizers
