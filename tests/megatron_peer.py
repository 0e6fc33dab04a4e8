"""What Megatron-Core's own data sets answer, where it is installed."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mfun.data import Writer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it misses CUDA and what is made for it
    from megatron.core.datasets import (  # pyright: ignore[reportMissingImports]
        blended_megatron_dataset_builder as builder_module,
    )
    from megatron.core.datasets import helpers  # pyright: ignore[reportMissingImports]
    from megatron.core.datasets.gpt_dataset import (  # pyright: ignore[reportMissingImports]
        GPTDataset,
        GPTDatasetConfig,
    )
    from megatron.core.datasets.indexed_dataset import (  # pyright: ignore[reportMissingImports]
        IndexedDataset,
        IndexedDatasetBuilder,
    )
    from megatron.core.datasets.utils import Split  # pyright: ignore[reportMissingImports]


def dataset(
    prefix: Path, documents: np.ndarray, *, seq_len: int, samples: int | None, seed: int, **options
) -> Any:
    """Its GPTDataset of some documents of a dataset of ours."""
    resets = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_len,
        blend=([str(prefix)], None),
        split="1,0,0",
        path_to_cache=tempfile.mkdtemp(dir=prefix.parent),
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=256, unique_identifiers={}),
        **(resets | options),
    )
    return GPTDataset(
        IndexedDataset(str(prefix)), str(prefix), documents, samples, Split.train, config
    )


def parts(
    prefixes: list[Path], weights: list[float] | None, split: str, sizes: list[int], **how: Any
) -> list[list[list[int]]]:
    """The tokens and last labels of its training and validation samples, as its builder does."""
    config = GPTDatasetConfig(
        random_seed=how["seed"],
        sequence_length=how["seq_len"],
        blend=([str(prefix) for prefix in prefixes], weights),
        split=split,
        tokenizer=SimpleNamespace(eod=0, pad=-1, vocab_size=256, unique_identifiers={}),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    made = builder_module.BlendedMegatronDatasetBuilder(
        GPTDataset, [*sizes, 0], lambda: True, config
    ).build()
    return [
        [[*x["tokens"].tolist(), int(x["labels"][-1])] for x in (part[i] for i in range(size))]
        for part, size in zip(made, sizes, strict=False)
    ]


def gpt_indices(lengths: np.ndarray, documents: np.ndarray, **how: Any) -> list[np.ndarray]:
    """Its document, sample and shuffle index."""
    with tempfile.TemporaryDirectory() as folder:
        with Writer(f"{folder}/x", np.dtype("u1")) as out:
            out.add_all(np.zeros(int(lengths.sum()), np.uint8), lengths)
        made = dataset(Path(folder) / "x", documents, **how)
        return [np.array(x) for x in (made.document_index, made.sample_index, made.shuffle_index)]


def blend(weights: list[float], size: int) -> list[tuple[int, int]]:
    """Its rows of (dataset, sample)."""
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    share = np.array(weights) / np.sum(np.array(weights))
    helpers.build_blending_indices(dataset, sample, share, len(weights), size, False)
    return [*zip(dataset.tolist(), sample.tolist(), strict=True)]


def exhaustive(sizes: list[int]) -> list[tuple[int, int]]:
    """The same of build_exhaustive_blending_indices."""
    total = sum(sizes)
    dataset, sample = np.zeros(total, np.int16), np.zeros(total, np.int64)
    given = np.array(sizes, np.int64)
    helpers.build_exhaustive_blending_indices(dataset, sample, given, len(sizes))
    return [*zip(dataset.tolist(), sample.tolist(), strict=True)]


def write(prefix: Path, documents: list[list[int]], dtype: type) -> None:
    """A dataset of its own writing."""
    import torch

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numpy, about how a tensor becomes an array
        for document in documents:
            builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
    builder.finalize(f"{prefix}.idx")
