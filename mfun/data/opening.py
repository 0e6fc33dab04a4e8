"""Datasets as `data.path` names them: what is known about one, and both parts of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs

from mfun.config import DataConfig
from mfun.data.blend import split_bounds
from mfun.data.built import Built, Share
from mfun.data.corpus import DataError
from mfun.data.indexed import Indexed, content_hash, file_of, is_indexed, open_indexed, prefix_of
from mfun.data.megatron import Sequences
from mfun.data.mock import DOCUMENTS, Mock
from mfun.data.tokenizer import BYTES, Tokenizer, open_tokenizer


@attrs.frozen(kw_only=True)
class About:
    """What `mfun data build` says about a dataset X, in X.json; a dataset without it has defaults.

    Args:
        tokenizer: `bytes`, the name of a file beside it, or empty for unknown.
        vocab: token ids, 0 for unknown.
        eod: id that ends a document, -1 for none.
        largest: the greatest id, -1 for unknown.
    """

    tokenizer: str = ""
    vocab: int = 0
    eod: int = -1
    largest: int = -1


def write_about(prefix: Path, about: About) -> None:
    """Write X.json."""
    text = json.dumps(attrs.asdict(about), indent=1)
    file_of(prefix, ".json").write_text(text + "\n", encoding="utf-8")


def read_about(path: str | Path) -> About:
    """What X.json says, or nothing where there is none.

    Raises: DataError for one that says something else.
    """
    file = file_of(prefix_of(path), ".json")
    if not file.is_file():
        return About()
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        about = About(**values)
        kinds = {key: type(value) for key, value in attrs.asdict(about).items()}
        if kinds != {"tokenizer": str, "vocab": int, "eod": int, "largest": int}:
            raise TypeError(f"values of other types than text and whole numbers: {values}")
        if about.tokenizer != Path(about.tokenizer).name:
            raise ValueError(f"the tokenizer {about.tokenizer!r} is no file's name")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{file} is not what `mfun data build` writes ({error}): remove it, or build again"
        ) from error
    return about


def tokenizer_of(path: str | Path) -> Tokenizer:
    """The vocabulary a dataset was built with.

    Raises: DataError if it is not known.
    """
    about = read_about(path)
    if not about.tokenizer:
        raise DataError(
            f"{prefix_of(path)} does not say its vocabulary: name it by --tokenizer, `bytes` or a "
            "tokenizer.json"
        )
    if about.tokenizer == BYTES:
        return open_tokenizer(BYTES)
    return open_tokenizer(str(prefix_of(path).with_name(about.tokenizer)), "")


def are_built(data: DataConfig) -> bool:
    """Whether the data is indexed datasets (or made up), not text.

    Raises: DataError if `data.path` names both, or something only datasets have is set for text.
    """
    if data.mock:
        return True
    built = [path for path in data.path if is_indexed(path)]
    if built and len(built) < len(data.path):
        other = next(path for path in data.path if path not in built)
        raise DataError(
            f"data.path: {built[0]} is a dataset and {other} is not: give datasets alone, or build "
            "one of the text by `mfun data build`"
        )
    for key in ("weights", "split", "val_path", "val_weights", "samples", "keep_partial"):
        if not built and getattr(data, key):
            named = ", ".join(data.path) or "the standard library's text"
            raise DataError(
                f"data.{key} is for datasets, and {named} is none (there is no .idx): leave it "
                "out, or build one by `mfun data build`"
            )
    return bool(built)


def open_built(
    data: DataConfig, *, training: int, validation: int, seq_len: int, vocab: int
) -> tuple[Built, Built]:
    """The training and the validation part of the datasets that are named.

    Args:
        data: what is named.
        training: samples to order together where `data.samples` does not say.
        validation: samples of a validation loss.
        seq_len: tokens of a sample; of a part for validation, datasets too short for one are left
            out.
        vocab: of the model; made-up data has its tokens.

    Raises: DataError for datasets that are damaged, or built with different vocabularies.
    """
    opened = [Mock(vocab - 1)] if data.mock else [open_indexed(path) for path in data.path]
    extra = [open_indexed(path) for path in data.val_path]
    abouts = [read_about(path) for path in (*data.path, *data.val_path)]
    how: dict[str, Any] = {
        "hash": _hash([*opened, *extra], data),
        "eod": (vocab - 1,) if data.mock else _eod(data, abouts),
        "largest": max([about.largest for about in abouts], default=-1),
        "cache": _cache(data),
    }
    shares, rest = _parts(opened, extra, data)
    weights = data.val_weights if extra else data.weights
    usable = [i for i, share in enumerate(rest) if share.samples(seq_len)]
    first = Built(shares=shares, weights=data.weights, samples=data.samples or training, **how)
    second = Built(
        shares=tuple(rest[i] for i in usable),
        weights=tuple(weights[i] for i in usable if weights),
        samples=validation,
        partial=data.keep_partial,
        **how,
    )
    return first.without_zeros(), second.without_zeros()


def _parts(
    opened: Sequence[Sequences], extra: Sequence[Indexed], data: DataConfig
) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """What of the datasets is for training, and what for validation."""
    names = data.path or ("made-up data",)
    split = (1.0,) if extra else data.split or (1 - data.val_fraction, data.val_fraction)
    bounds = [split_bounds(split, len(one.lengths)) for one in opened]

    def shares(part: int) -> tuple[Share, ...]:
        rows = zip(opened, bounds, names, strict=True)
        return tuple(Share(one, cuts[part], name) for one, cuts, name in rows)

    if extra:
        rows = zip(extra, data.val_path, strict=True)
        return shares(0), tuple(Share(one, range(len(one)), name) for one, name in rows)
    return shares(0), shares(1) if len(split) > 1 else ()


def _hash(opened: Sequence[Sequences], data: DataConfig) -> str:
    """Of all datasets in order, and of which of them are for training: `digest-documents-tokens`.

    Weights and splits are settings, compared by themselves.
    """
    hashes = [
        content_hash(one) if isinstance(one, Indexed) else f"mock-{DOCUMENTS}-0" for one in opened
    ]
    if len(hashes) == 1:
        return hashes[0]
    counts = [[int(x) for x in one.split("-")[1:]] for one in hashes]
    state = blake2b(json.dumps([len(data.path), hashes]).encode(), digest_size=16)
    documents, tokens = (sum(column) for column in zip(*counts, strict=True))
    return f"{state.hexdigest()}-{documents}-{tokens}"


def _eod(data: DataConfig, abouts: Sequence[About]) -> tuple[int, ...]:
    """The tokens that end a document: given, or what the datasets agree on."""
    if data.eod:
        return data.eod
    known = {about.eod for about in abouts}
    if len(known) > 1:
        raise DataError(
            f"data.path: the datasets end documents by different tokens, {sorted(known)}: set "
            "data.eod, or build them with one tokenizer"
        )
    eod = known.pop() if known else -1
    return (eod,) if eod >= 0 else ()


def _cache(data: DataConfig) -> Path | None:
    if data.cache:
        return Path(data.cache).expanduser()
    return None if data.mock else file_of(prefix_of(data.path[0]), "-cache")
