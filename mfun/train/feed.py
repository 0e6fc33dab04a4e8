"""`Feed`: this rank's microbatches of any step, a pure function of configuration and step."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from mfun import config as cfg
from mfun import data
from mfun.config import Config, rampup
from mfun.data import Batch, Corpus


@attrs.frozen(eq=False)
class Feed:
    """The two parts of the data, and which rows of a batch are this rank's.

    Args:
        config: resolved.
        training: its corpus.
        validation: its corpus, empty if there is none.
        dp_index: this rank's coordinate.
        device: where batches go.
    """

    config: Config
    training: Corpus
    validation: Corpus
    dp_index: int
    device: torch.device

    def step(self, step: int) -> list[Batch]:
        """The microbatches of the update that follows `step` updates."""
        train = self.config.train
        then = attrs.evolve(self, config=rampup.at(self.config, step))
        return then._rows(self.training, train.seed, rampup.consumed(train, step))

    def evaluation(self) -> list[Batch]:
        """The microbatches of a validation loss: the same samples in every layout and every run.

        `train.eval_batches` global batches of the fixed validation order.
        """
        size = self.config.train.global_batch
        batches = range(self.config.train.eval_batches)
        return [b for i in batches for b in self._rows(self.validation, None, i * size)]

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return data.windows(self.validation, self.config.model.seq_len) > 0

    def _rows(self, corpus: Corpus, seed: int | None, consumed: int) -> list[Batch]:
        model, train = self.config.model, self.config.train
        batches = data.rank_batch(
            corpus,
            seed=seed,
            consumed=consumed,
            dp_index=self.dp_index,
            dp=self.config.parallel.dp or 1,
            global_batch=train.global_batch,
            microbatch_sizes=cfg.microbatch_sizes(self.config),
            seq_len=model.seq_len,
            vocab=model.vocab,
            packed=self.config.data.packed,
        )
        return [{k: x.to(self.device) for k, x in batch.items()} for batch in batches]


def open_data(config: Config) -> tuple[Corpus, Corpus]:
    """Read and split the data, and see that this run can use it.

    Returns: training and validation part.

    Raises: DataError for no text, another hash than `data.hash`, too little text for a window, or
        a token that `model.vocab` has no row for.
    """
    return _parts(config, data.load(config.data.path))


def with_hash(config: Config) -> Config:
    """The configuration with the hash of the data it names.

    Raises: DataError as `open_data`.
    """
    corpus = data.load(config.data.path)
    _parts(config, corpus)
    return attrs.evolve(config, data=attrs.evolve(config.data, hash=corpus.hash))


def _parts(config: Config, corpus: Corpus) -> tuple[Corpus, Corpus]:
    data.check_hash(corpus, config.data.hash)
    model = config.model
    parts = data.split(corpus, config.data.val_fraction, at_least=model.seq_len + 1)
    names = ("training", "validation")
    for part, name in zip(parts, names, strict=True):
        if name == "training" or data.windows(part, model.seq_len):
            data.check_corpus(part, seq_len=model.seq_len, vocab=model.vocab, part=name)
    return parts


def feed(config: Config, coords: Mapping[str, int], device: torch.device | str = "cpu") -> Feed:
    """The feed of the rank at some coordinates; reads the data."""
    training, validation = open_data(config)
    return Feed(config, training, validation, coords["dp"], torch.device(device))
