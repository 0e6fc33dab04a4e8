"""What a model is made of: a layer is parameter specs and a pure function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import attrs
from torch import Tensor

from mfun.comm import Groups
from mfun.nn.weight_grads import WeightGrads
from mfun.rng import Key

Params = Mapping[str, Any]
Values = dict[str, Tensor]


@attrs.frozen
class Ctx:
    """What a layer's function reads besides parameters and input; nothing in it is differentiated.

    Args:
        groups: this rank's axes.
        batch: tokens (b, s) int64; labels (b, s) int64; mask (b, s) float, the weight of each
            token's loss; sample (b,) int64, global sample numbers (for dropout); for packed
            documents also documents and positions (b, s) int64. Whole sequences, equal over tp.
        key: root of this step's dropout keys; None turns dropout off.
        derivatives: "any" order and mode, or "first" reverse derivatives only, as a training step
            takes on one rank's own tensors, for which faster kernels exist. Both have one value.
        weight_grads: takes the weights' gradients in autograd's place ("first" only).
    """

    groups: Groups
    batch: Mapping[str, Tensor]
    key: Key | None = None
    derivatives: Literal["any", "first"] = "any"
    weight_grads: WeightGrads | None = None

    def fold(self, *path: str | int) -> Key | None:
        """The dropout key of a place in the model, or None."""
        return None if self.key is None else self.key.fold(*path)


class Layer(NamedTuple):
    """A piece of a model that a pipeline stage may start or end with.

    Args:
        name: for messages, unique in its model.
        specs: nested dict of `ParamSpec` at full paths. A leaf shared with another layer (a tied
            weight) has the same path in both.
        apply: `apply(params, x, ctx) -> y`, with params nested as specs, x and y dicts of
            differentiable tensors. It is pure.
        parts: layers that do the same one after the other, () where it is in one piece.
    """

    name: str
    specs: dict[str, Any]
    apply: Callable[[Params, Values, Ctx], Values]
    parts: tuple[Layer, ...] = ()
