"""Made-up batches that make faults visible: unequal valid lengths, holes in the mask, documents."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from mfun.config import Config, microbatch_sizes

Batch = dict[str, Tensor]


def global_batch(config: Config, step: int) -> Batch:
    """The whole batch of a step: a pure function of the configuration and the step.

    Returns:
        tokens, labels (b, s) int64, mask (b, s) float64, sample (b,) int64; with `data.reset` also
        documents and positions (b, s).
    """
    rows, seq, vocab = config.train.global_batch, config.model.seq_len, config.model.vocab
    draw = np.random.Generator(np.random.Philox(key=[config.train.seed % 2**63, step]))
    text = draw.integers(0, vocab, (rows, seq + 1))
    lengths = draw.integers(1, seq + 1, (rows, 1))
    mask = (np.arange(seq) < lengths) & (draw.random((rows, seq)) < 0.9)
    batch = {
        "tokens": torch.from_numpy(text[:, :-1].copy()),
        "labels": torch.from_numpy(text[:, 1:].copy()),
        "mask": torch.from_numpy(mask.astype(np.float64)),
        "sample": torch.arange(step * rows, (step + 1) * rows),
    }
    if {"positions", "attention"} & {*config.data.resets}:
        starts = draw.random((rows, seq)) < 0.3
        starts[:, 0] = True
        at = np.arange(seq)
        begin = np.maximum.accumulate(np.where(starts, at, 0), axis=1)
        batch["documents"] = torch.from_numpy(starts.cumsum(1) - 1)
        batch["positions"] = torch.from_numpy(at - begin)
    return batch


def rank_batches(config: Config, coords: Mapping[str, int], step: int) -> list[Batch]:
    """The microbatches of the rank at some coordinates."""
    whole = global_batch(config, step)
    rows = config.train.global_batch // config.parallel.dp
    start = coords["dp"] * rows
    out = []
    for size in microbatch_sizes(config):
        out.append({name: x[start : start + size] for name, x in whole.items()})
        start += size
    return out


def all_batches(config: Config, step: int) -> list[Batch]:
    """Every microbatch of every data rank."""
    return [b for dp in range(config.parallel.dp) for b in rank_batches(config, {"dp": dp}, step)]
