"""Text from a trained run: its newest checkpoint gathered on one device, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

from mfun import checkpoint, convert, data, rng, tree
from mfun.checkpoint import Rules
from mfun.comm import ProcessWorld, finish, single_groups
from mfun.config import Config, DataConfig, ParallelConfig, from_toml
from mfun.data import Tokenizer
from mfun.train.lifecycle import RunError, find_run
from mfun.train.plan import plan
from mfun.train.step import State, Trainer


@attrs.frozen(eq=False)
class Model:
    """A run's model on one device.

    Args:
        config: the run's, with a layout of one rank.
        trainer: with a head that gives logits.
        state: the checkpoint's parameters.
        tokenizer: of what it was trained on.
    """

    config: Config
    trainer: Trainer
    state: State
    tokenizer: Tokenizer

    def logits(self, tokens_s: Tensor) -> Tensor:
        """Logits of what follows the last of some tokens, (v,) float64."""
        tokens_bs = tokens_s[-self.config.model.seq_len :].unsqueeze(0)
        batch = {
            "tokens": tokens_bs,
            "labels": tokens_bs,
            "mask": torch.ones(tokens_bs.shape),
            "sample": torch.zeros(1, dtype=torch.int64),
        }
        (logits_bsv,) = finish(self.trainer.logits(self.state, [batch]))
        return logits_bsv[0, -1].double()


def open_model(run_dir: Path, tokenizer: str = "") -> Model:
    """The newest whole checkpoint of a run, whatever its layout, on the CPU.

    Args:
        run_dir: of the run, or a folder that `mfun convert` made.
        tokenizer: `bytes` or a tokenizer.json; by default the run's own.

    Raises:
        DataError: there is no such tokenizer.
        RunError: the folder holds no run, or no checkpoint yet.
        CheckpointError: the checkpoint's pieces are damaged or do not make a whole model.
    """
    find_run(run_dir)
    folder = checkpoint.latest(run_dir)
    if folder is None:
        raise RunError(
            f"{run_dir} has no whole checkpoint yet; train longer, or lower train.checkpoint_every"
        )
    index = checkpoint.read_index(folder)
    trained = from_toml(index.config, str(folder))
    text = data.open_tokenizer(tokenizer, "") if tokenizer else tokenizer_of(run_dir, trained)
    config = attrs.evolve(trained, parallel=ParallelConfig(dp=1), data=DataConfig())
    layout = plan(config, head="logits")
    dtype = layout.dtype
    expected = {f"params.{p}": (s.shape, s.dtype_among(dtype)) for p, s in layout.specs.items()}
    found = checkpoint.load(folder, expected, Rules(unexpected=("opt.*",)))
    params = {name.removeprefix("params."): x for name, x in found.items()}
    world = ProcessWorld(single_groups())
    state = State(index.step, tree.unflatten(params), {})
    return Model(config, Trainer(layout, world), state, text)


def tokenizer_of(run_dir: Path, config: Config) -> Tokenizer:
    """What a run's tokens are: its datasets' vocabulary, that of the model it came from, or bytes.

    Args:
        run_dir: of the run.
        config: of the run.
    """
    if config.data.path and not config.data.mock and data.is_indexed(config.data.path[0]):
        return data.tokenizer_of(config.data.path[0])
    file = convert.tokenizer_file(run_dir, config)
    return data.open_tokenizer(str(file) if file else "bytes", "")


def generate(
    model: Model,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Token ids that follow a prompt, each drawn from softmax(logits / temperature).

    Args:
        model: from `open_model`.
        prompt: text before them; a newline if empty.
        tokens: how many.
        temperature: 0 takes the likeliest.
        top_k: draw among so many of the likeliest; 0 among all.
        seed: the same numbers give the same text.
    """
    ids = torch.from_numpy(model.tokenizer.encode([prompt or "\n"])[0].astype("int64"))
    usable = min(model.config.model.vocab, model.tokenizer.vocab)
    if not ids.numel() or int(ids.max()) >= usable:
        raise RunError(
            f"the prompt has token {int(ids.max()) if ids.numel() else None} and the run's "
            f"model.vocab is {usable}; use another prompt"
        )
    for number in range(tokens):
        token = draw(model.logits(ids)[:usable], temperature, top_k, _uniform(seed, number))
        yield token
        ids = torch.cat([ids, torch.tensor([token])])


def texts(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they come, a character when all of its bytes are there.

    Example:
        >>> from mfun.data import open_tokenizer
        >>> [*texts(open_tokenizer("bytes"), [104, 195, 169, 195])]
        ['h', 'é', '\ufffd']
    """
    held: list[int] = []
    shown = text = ""
    for token in tokens:
        held.append(token)
        text = tokenizer.decode(held)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    if text != shown:
        yield text[len(shown) :]


def _uniform(seed: int, number: int) -> float:
    grid = rng.Grid.whole((1,))
    return float(rng.uniform(rng.key(seed, "sample", number), grid, dtype=torch.float64))


def draw(logits_v: Tensor, temperature: float, top_k: int, u: float) -> int:
    """The token whose share of the probability holds u.

    Args:
        logits_v: (v,).
        temperature: divides the logits; 0 takes the largest.
        top_k: likeliest tokens to draw among, 0 for all.
        u: in [0, 1).

    Example:
        >>> draw(torch.tensor([0.0, 1.0, 0.5]), 0.0, 0, 0.9)
        1
        >>> draw(torch.tensor([0.5, 0.25, 0.25]).log(), 1.0, 0, 0.6)
        1
    """
    if temperature == 0:
        return int(logits_v.argmax())
    if 0 < top_k < logits_v.numel():
        least = logits_v.topk(top_k).values[-1]
        logits_v = logits_v.masked_fill(logits_v < least, float("-inf"))
    shares_v = (logits_v / temperature).softmax(-1).cumsum(-1)
    at = int(torch.searchsorted(shares_v, u * float(shares_v[-1]), right=True))
    return min(at, logits_v.numel() - 1)
