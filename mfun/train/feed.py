"""`Feed`: this rank's microbatches of any step, a pure function of configuration and step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mfun import config as cfg
from mfun import data
from mfun.comm import Axis
from mfun.config import Config, rampup
from mfun.data import Batch, Rows, Source


class Ahead:
    """What a function gives for a step, computed beside the step before.

    A thread that is asked for nothing else reads ahead; it makes arrays, never tensors. What it
    raises is raised where the step is asked for.

    Args:
        read: of a step; a pure function.
        steps: there are none from this one on.
    """

    def __init__(self, read: Callable[[int], Rows], steps: int) -> None:
        self.read, self.steps = read, steps
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mfun-data")
        self._next: tuple[int, Future[Rows]] | None = None

    def __call__(self, step: int) -> Rows:
        """Those of `step`; the next step's are on their way when this returns."""
        ready, self._next = self._next, None
        rows = ready[1].result() if ready and ready[0] == step else self.read(step)
        if step + 1 < self.steps:
            self._next = step + 1, self._pool.submit(self.read, step + 1)
        return rows


@attrs.frozen(eq=False)
class Feed:
    """The two parts of the data, and which rows of a batch are this rank's.

    Args:
        config: resolved.
        training: its source.
        validation: its source, empty if there is none.
        dp_index: this rank's coordinate.
        device: where batches go.
        tp: with `data.read = "first"`, whose first rank reads for all.
        ahead: reads the next step's rows; None reads them when they are asked for.
    """

    config: Config
    training: Source
    validation: Source
    dp_index: int
    device: torch.device
    tp: Axis | None = None
    ahead: Ahead | None = None

    def step(self, step: int) -> list[Batch]:
        """The microbatches of the update that follows `step` updates."""
        config = rampup.at(self.config, step)
        return self._sent(config, partial(self.ahead or self.rows, step))

    def rows(self, step: int) -> Rows:
        """This rank's rows of that update."""
        train = self.config.train
        consumed = rampup.consumed(train, step)
        return self._read(rampup.at(self.config, step), self.training, train.seed, consumed)

    def evaluation(self) -> list[Batch]:
        """The microbatches of a validation loss: the same samples in every layout and every run.

        `train.eval_batches` global batches of the fixed validation order.
        """
        config, out = self.config, []
        for i in range(config.train.eval_batches):
            first = i * config.train.global_batch
            out += self._sent(config, partial(self._read, config, self.validation, None, first))
        return out

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return data.windows(self.validation, self.config.model.seq_len) > 0

    def _read(self, config: Config, source: Source, seed: int | None, consumed: int) -> Rows:
        dp, model = config.parallel.dp or 1, config.model
        return data.rows(
            source,
            data.rank_samples(consumed, self.dp_index, dp, config.train.global_batch),
            seed=seed,
            seq_len=model.seq_len,
            vocab=model.vocab,
            resets=config.data.resets,
        )

    def _sent(self, config: Config, read: Callable[[], Rows]) -> list[Batch]:
        """Rows as microbatches on the device: read here, or received from the one that reads."""
        tp = self.tp
        if tp is None or tp.size == 1 or config.data.read == "each":
            whole = {name: x.to(self.device) for name, x in data.tensors(read()).items()}
        else:
            whole = _broadcast(config, tp, read, self.device)
        return data.cut(whole, cfg.microbatch_sizes(config))


def _broadcast(
    config: Config, tp: Axis, read: Callable[[], Rows], device: torch.device
) -> dict[str, Tensor]:
    """What the first rank of an axis reads, on all of them; every tensor's shape is known."""
    first = tp.position == 0
    given = data.tensors(read()) if first else {}
    out = {}
    for name, (shape, dtype) in _shapes(config).items():
        x = given[name].to(device) if first else torch.empty(shape, dtype=dtype, device=device)
        dist.broadcast(x, tp.ranks[0], group=tp.group)
        out[name] = x
    return out


def _shapes(config: Config) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor of a rank's batch, from two made-up documents."""
    rows = config.train.global_batch // (config.parallel.dp or 1)
    size = config.model.seq_len
    like: dict[str, Any] = {"mask": np.ones((1, size), np.float32)}
    like |= {name: np.zeros((1, size), np.int64) for name in ("tokens", "labels")}
    like |= data.restarted(like["mask"], np.zeros((1, size + 1), np.int64), config.data.resets)
    like["sample"] = np.zeros(1, np.int64)
    made = data.tensors(like)
    return {name: ((rows, *made[name].shape[1:]), made[name].dtype) for name in sorted(made)}


def open_data(config: Config) -> tuple[Source, Source]:
    """Read and split the data, and see that this run can use it.

    Returns: training and validation part.

    Raises: DataError for no text, another hash than `data.hash`, too little text for a window, or
        a token that `model.vocab` has no row for.
    """
    return _open(config)[1:]


def _open(config: Config) -> tuple[str, Source, Source]:
    """The hash of all data, and both parts, checked."""
    model = config.model
    hash_, *parts = _found(config)
    for part, name in zip(parts, ("training", "validation"), strict=True):
        if name == "training" or data.windows(part, model.seq_len):
            data.check_corpus(part, seq_len=model.seq_len, vocab=model.vocab, part=name)
    return hash_, parts[0], parts[1]


def _found(config: Config) -> tuple[str, Source, Source]:
    """The hash of all data, the one it should have, and both parts."""
    model, train = config.model, config.train
    if data.are_built(config.data):
        training, validation = data.open_built(
            config.data,
            training=samples(config),
            validation=train.eval_batches * train.global_batch,
            seq_len=model.seq_len,
            vocab=model.vocab,
        )
        data.check_hash(training, config.data.hash)
        return training.hash, training, validation
    corpus = data.load(config.data.path)
    data.check_hash(corpus, config.data.hash)
    parts = data.split(corpus, config.data.val_fraction, at_least=model.seq_len + 1)
    return corpus.hash, *parts


def samples(config: Config) -> int:
    """Training samples of a run."""
    return rampup.consumed(config.train, config.train.steps)


def with_hash(config: Config) -> Config:
    """The configuration with the hash of its data, and of datasets the samples ordered together.

    Raises: DataError as `open_data`.
    """
    hash_, ordered = _open(config)[0], config.data.samples
    if data.are_built(config.data):
        ordered = ordered or samples(config)
    return attrs.evolve(config, data=attrs.evolve(config.data, hash=hash_, samples=ordered))


def feed(
    config: Config,
    coords: Mapping[str, int],
    device: torch.device | str = "cpu",
    tp: Axis | None = None,
    *,
    ahead: bool = False,
) -> Feed:
    """The feed of the rank at some coordinates; opens the data.

    Args:
        config: resolved.
        coords: of this rank.
        device: where batches go.
        tp: this rank's axis, for `data.read = "first"`.
        ahead: read the next step's samples while a step runs.
    """
    training, validation = open_data(config)
    here = Feed(config, training, validation, coords["dp"], torch.device(device), tp)
    return attrs.evolve(here, ahead=Ahead(here.rows, config.train.steps)) if ahead else here
