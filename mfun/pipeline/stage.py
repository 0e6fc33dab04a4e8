"""Stages: the list of layers cut into consecutive slices, laid out over the pipeline's stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import attrs

from mfun import tree
from mfun.nn.layer import Layer
from mfun.schedule import Placement


@attrs.frozen(eq=False)
class Stage:
    """One stage's layers.

    Args:
        index: of the stage.
        place: where virtual stages live.
        chunks: for each of its chunks, the layers of that slice of the model.
    """

    index: int
    place: Placement
    chunks: tuple[tuple[Layer, ...], ...]

    def virtual(self, chunk: int) -> int:
        """The virtual stage of one of its chunks."""
        return self.place.virtual(self.index, chunk)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all chunks."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def first(self) -> bool:
        """Whether it holds the embedding."""
        return any(self.place.first(self.virtual(c)) for c in range(len(self.chunks)))

    @property
    def last(self) -> bool:
        """Whether it holds the head and the loss."""
        return any(self.place.last(self.virtual(c)) for c in range(len(self.chunks)))

    @property
    def specs(self) -> dict[str, Any]:
        """Specs of all its parameters; a leaf that several of its layers share stands once."""
        return tree.merge(*(layer.specs for layer in self.layers))

    def holders(self, paths: Collection[str]) -> frozenset[tuple[int, int]]:
        """The (chunk, layer) places whose layers use any of some parameters."""
        return frozenset(
            (chunk, i)
            for chunk, layers in enumerate(self.chunks)
            for i, layer in enumerate(layers)
            if not tree.flatten(layer.specs).keys().isdisjoint(paths)
        )


def cut(
    layers: Sequence[Layer], blocks: Sequence[Sequence[int]], place: Placement | None = None
) -> list[Stage]:
    """Cut a model [embedding, block 0 .. n-1, head] into slices and lay them out over stages.

    Args:
        layers: the model.
        blocks: for each slice of the model the block numbers in it (`config.stage_layers`);
            together 0 .. n-1 in order.
        place: where virtual stages live; None is one slice a stage, in order.

    Returns:
        One `Stage` each; the embedding goes to the first slice, the head to the last.

    Raises:
        ValueError: the slices do not hold every block once and in order, or are not as many as
            the placement has.

    Example:
        >>> model = [Layer(name, {}, lambda p, x, c: x) for name in ("embed", "0", "1", "head")]
        >>> place = Placement(stages=1, chunks=2)
        >>> [[layer.name for layer in chunk] for chunk in cut(model, [[0], [1]], place)[0].chunks]
        [['embed', '0'], ['1', 'head']]
    """
    place = place or Placement(len(blocks))
    if len(blocks) != place.depth:
        raise ValueError(
            f"{len(blocks)} slices of blocks are given, but {place.stages} stages of "
            f"{place.chunks} chunks hold {place.depth} slices of the model"
        )
    count = len(layers) - 2
    if [b for part in blocks for b in part] != list(range(count)):
        raise ValueError(
            f"stages hold the blocks {[list(s) for s in blocks]}, but the model has blocks "
            f"0 .. {count - 1}, each to be run once and in order"
        )
    slices = [[layers[1 + b] for b in part] for part in blocks]
    slices[0].insert(0, layers[0])
    slices[-1].append(layers[-1])
    return [
        Stage(s, place, tuple(tuple(slices[place.slice(v)]) for v in _virtuals(place, s)))
        for s in range(place.stages)
    ]


def _virtuals(place: Placement, stage: int) -> list[int]:
    return [place.virtual(stage, chunk) for chunk in range(place.chunks)]
