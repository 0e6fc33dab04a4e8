"""Data: text as bytes, cut into windows whose order is a pure function of (seed, sample number)."""

from mfun.data.corpus import VOCAB, Corpus, DataError, check_hash, join, split
from mfun.data.samples import Batch, batch, check_corpus, rank_batch, windows
from mfun.data.shuffle import order, permute
from mfun.data.text import decode, encode, load

__all__ = [
    "VOCAB",
    "Batch",
    "Corpus",
    "DataError",
    "batch",
    "check_corpus",
    "check_hash",
    "decode",
    "encode",
    "join",
    "load",
    "order",
    "permute",
    "rank_batch",
    "split",
    "windows",
]
