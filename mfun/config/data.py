"""The section of a configuration that says what is learned from."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs

from mfun.config.fields import choice, choices, flag, real, reals, text, texts, whole, wholes

Reset = Literal["positions", "attention", "loss"]
Reading = Literal["each", "first"]


@attrs.frozen(kw_only=True)
class DataConfig:
    """What is learned from.

    Args:
      path: text files and folders; or datasets, each the X of an X.idx and X.bin that `mfun data
        build` or Megatron wrote; empty means the Python standard library's own sources.
      weights: shares of the datasets, in order; empty gives each its size.
      split: shares of a dataset's documents for training, validation and test, as 969,30,1; empty
        is 1 - ``val_fraction`` and ``val_fraction``.
      val_fraction: part of the data kept for the validation loss.
      val_path: datasets for the validation loss alone; then ``path`` is all for training.
      val_weights: shares of those.
      mock: made-up documents instead, to measure speed.
      packed: attention, positions and loss restart at each document, as ``reset`` of all three.
      reset: what restarts: positions, attention, or loss, which leaves out each document's first
        token.
      eod: tokens that end a document; empty is the dataset's own, and without one each sequence is
        a document.
      keep_partial: the last tokens of the validation part, too few for a sample, are a shorter one.
      samples: of datasets that are ordered together; filled in by a run with what it needs, so that
        a longer run takes the same ones first.
      cache: folder of the datasets' orders; empty is X-cache beside the first.
      read: each rank reads its own samples, or the first of tp ranks does and sends them.
      hash: digest of the data, filled in by a run and compared when it resumes.
    """

    section: ClassVar[str] = "data"

    path: tuple[str, ...] = texts()
    weights: tuple[float, ...] = reals()
    split: tuple[float, ...] = reals()
    val_fraction: float = real(0.05, below=1.0)
    val_path: tuple[str, ...] = texts()
    val_weights: tuple[float, ...] = reals()
    mock: bool = flag(False)
    packed: bool = flag(False)
    reset: tuple[Reset, ...] = choices(Reset)
    eod: tuple[int, ...] = wholes()
    keep_partial: bool = flag(False)
    samples: int = whole(0)
    cache: str = text("")
    read: Reading = choice("each", Reading)
    hash: str = text("")

    @property
    def resets(self) -> tuple[str, ...]:
        """What restarts at each document."""
        return ("positions", "attention", "loss") if self.packed else self.reset
