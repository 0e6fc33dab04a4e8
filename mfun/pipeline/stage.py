"""Stages: the list of layers cut into consecutive slices, one per pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from mfun import tree
from mfun.nn.layer import Layer


@attrs.frozen(eq=False)
class Stage:
    """One stage's layers.

    Args:
        index: of the stage.
        stages: how many there are.
        layers: its slice of the model.
    """

    index: int
    stages: int
    layers: tuple[Layer, ...]

    @property
    def first(self) -> bool:
        """Whether its input is the batch."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether its output is the loss."""
        return self.index == self.stages - 1

    @property
    def specs(self) -> dict[str, Any]:
        """Specs of all its parameters; a leaf that two of its layers share stands once."""
        return tree.merge(*(layer.specs for layer in self.layers))


def cut(layers: Sequence[Layer], blocks: Sequence[Sequence[int]]) -> list[Stage]:
    """Cut a model [embedding, block 0 .. n-1, head] into stages.

    Args:
        layers: the model.
        blocks: for each stage the block numbers it runs (`config.stage_layers`); together
            0 .. n-1 in order.

    Returns:
        One `Stage` each; the embedding goes to the first, the head to the last.

    Raises:
        ValueError: the stages do not hold every block once and in order.
    """
    count = len(layers) - 2
    if [b for stage in blocks for b in stage] != list(range(count)):
        raise ValueError(
            f"stages hold the blocks {[list(s) for s in blocks]}, but the model has blocks "
            f"0 .. {count - 1}, each to be run once and in order"
        )
    out = []
    for i, numbers in enumerate(blocks):
        mine = [layers[1 + b] for b in numbers]
        mine = [layers[0], *mine] if i == 0 else mine
        mine = [*mine, layers[-1]] if i == len(blocks) - 1 else mine
        out.append(Stage(i, len(blocks), tuple(mine)))
    return out
