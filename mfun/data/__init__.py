"""Data: what sample n is, as a pure function of (seed, n), from text or from indexed datasets."""

from mfun.data.blend import blend_index, exhaustive_index, sizes_of, split_bounds
from mfun.data.built import Built, Share
from mfun.data.corpus import VOCAB, Corpus, DataError, check_hash, join, split
from mfun.data.indexed import Indexed, is_indexed, open_indexed
from mfun.data.megatron import Index, build_index, read_sample, sample_index
from mfun.data.mock import Mock
from mfun.data.opening import About, are_built, open_built, read_about, tokenizer_of, write_about
from mfun.data.samples import (
    Batch,
    Rows,
    Source,
    batch,
    check_corpus,
    cut,
    rank_batch,
    rank_samples,
    restarted,
    rows,
    tensors,
    windows,
)
from mfun.data.shuffle import order, permute
from mfun.data.text import decode, encode, load
from mfun.data.tokenizer import Tokenizer, open_tokenizer, train_bpe
from mfun.data.writer import Writer, token_dtype

__all__ = [
    "VOCAB",
    "About",
    "Batch",
    "Built",
    "Corpus",
    "DataError",
    "Index",
    "Indexed",
    "Mock",
    "Rows",
    "Share",
    "Source",
    "Tokenizer",
    "Writer",
    "are_built",
    "batch",
    "blend_index",
    "build_index",
    "check_corpus",
    "check_hash",
    "cut",
    "decode",
    "encode",
    "exhaustive_index",
    "is_indexed",
    "join",
    "load",
    "open_built",
    "open_indexed",
    "open_tokenizer",
    "order",
    "permute",
    "rank_batch",
    "rank_samples",
    "read_about",
    "read_sample",
    "restarted",
    "rows",
    "sample_index",
    "sizes_of",
    "split",
    "split_bounds",
    "tensors",
    "token_dtype",
    "tokenizer_of",
    "train_bpe",
    "windows",
    "write_about",
]
