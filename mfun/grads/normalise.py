"""Loss normalisation, in one place: the seed of each microbatch's backward.

The global token count is data: every stage reads the batch, so the count is known and reduced over
the data axes before the first op, and the one division there is happens in the seed that backward
starts from. Gradients leave the pipeline normalised; nothing divides them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mfun.comm.world import Waits, World


def seeds(world: World, counts: Sequence[Tensor], norm: str) -> Waits[tuple[list[Tensor], Tensor]]:
    """The gradient of the step's loss with respect to each microbatch's token-loss sum.

    tokens:      loss = sum of token losses / number of valid tokens of the global batch.
    microbatch:  loss = mean over data ranks and microbatches of each microbatch's token mean.

    A microbatch (or a whole batch) without a valid token contributes exactly 0.

    Args:
        world: of this rank.
        counts: valid tokens of each local microbatch, float64, of shape `world.lead`.
        norm: "tokens" or "microbatch".

    Returns:
        The seeds, like `counts`, and the number of valid tokens of the global batch.

    Raises:
        ValueError: `norm` is neither.
    """
    local = torch.stack(list(counts)).sum(0)
    total = yield from world.all_reduce(local, ("dp", "cp"))
    match norm:
        case "tokens":
            out = [1.0 / total.clamp(min=1.0) for _ in counts]
        case "microbatch":
            ranks = world.mesh.dp * world.mesh.cp
            out = [1.0 / (count.clamp(min=1.0) * len(counts) * ranks) for count in counts]
        case _:
            raise ValueError(f'loss_norm is {norm!r}; use "tokens" or "microbatch"')
    return out, total


def explain(norm: str) -> str:
    """The normalisation in a sentence."""
    if norm == "tokens":
        return "normalised once, in the backward's seed: 1 / valid tokens of the global batch"
    return (
        "normalised once, in the backward's seed: 1 / (valid tokens of the microbatch * "
        "microbatches * data ranks)"
    )
