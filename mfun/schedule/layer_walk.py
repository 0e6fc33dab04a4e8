"""What is wrong with one stage's layers and activations: a class a concern, each a table of rules.

A rule takes the place of an op and the op, and returns what is wrong with it, if anything.
`ending` says what is missing when the stream ends. None of these classes knows the transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfun.schedule.layers import ENDS, EXTRAS, last_layer
from mfun.schedule.ops import (
    AnyOp,
    B,
    Compute,
    Extra,
    F,
    I,
    Message,
    Offload,
    Recompute,
    Reload,
    W,
)
from mfun.schedule.transforms import Which, recomputes
from mfun.schedule.walk import some

Rule = Callable[[int, Any], str | None]
Rules = Mapping[type[AnyOp], Rule]
Layer = tuple[type[F | B | I], int, int, int]  # kind, microbatch, chunk, layer: an op


def _op(layer: Layer) -> F | B | I:
    kind, *at = layer
    return kind(*at)


class Layers:
    """Ops on layers come whole and in order, and nothing gets between a batch of messages.

    Args:
      stream: the stage's ops.
      layers: how many layers each chunk has; () for streams of ops on whole chunks.
    """

    def __init__(self, stream: Sequence[AnyOp], layers: Sequence[int]) -> None:
        self.stream, self.layers = stream, layers
        self.counts = dict(enumerate(layers))
        self.open: Layer | None = None  # the op that has to come next, of a chunk begun
        self.inputs: dict[tuple[int, int], int] = {}  # (microbatch, chunk): last layer's I
        self.weights: dict[tuple[int, int], int] = {}  # and W
        self.rules: Rules = {
            **dict.fromkeys((F, B, I), self.layer if layers else self.whole),
            **dict.fromkeys(ENDS if layers else (), self.message),
            **dict.fromkeys(EXTRAS, self.extra),
            W: self.weight if layers else self.whole,
        }

    def whole(self, at: int, op: Compute) -> str | None:
        """On a chunk, if that is not cut."""
        count = self.layers[op.chunk] if op.chunk < len(self.layers) else 0
        if op.layer is not None or count:
            return f"{op} is not an op of this schedule: chunk {op.chunk} is cut in {count} layers"
        return f"{op} runs before {_op(self.open)}" if self.open else None

    def layer(self, at: int, op: F | B | I) -> str | None:
        """A chunk's layers in order; no other forward or backward begins before its last."""
        kind, mb, chunk, layer = type(op), op.mb, op.chunk, op.layer
        count = self.counts.get(chunk)
        if layer is None or not count:
            return self.whole(at, op)
        step, first = (1, 0) if kind is F else (-1, count - 1)
        due = self.open or (kind, mb, chunk, first)
        if (kind, mb, chunk, layer) != due:
            return self.early(at, op, _op(due))
        self.open = (kind, mb, chunk, layer + step) if 0 <= layer + step < count else None
        if kind is I:
            self.inputs[mb, chunk] = layer
        return None

    def weight(self, at: int, op: W) -> str | None:
        """In order, each after its `I`; others may come between."""
        item, count = (op.mb, op.chunk), self.counts.get(op.chunk)
        if op.layer is None or not count:
            return self.whole(at, op)
        due = self.weights.get(item, count) - 1
        if op.layer != due:
            return self.early(at, op, W(*item, max(due, 0)))
        if self.inputs.get(item, count) > op.layer:
            return f"{op} runs before {I(*item, op.layer)}"
        self.weights[item] = due
        return None

    def early(self, at: int, op: Compute, due: Compute) -> str:
        """Why an op is not the one that is due."""
        ran = any(self.stream[i] == op for i in range(at))
        return f"{op} runs twice" if ran else f"{op} runs before {due}"

    def message(self, at: int, op: Message) -> str | None:
        """Around a chunk's ops, not between its layers."""
        if self.open:
            return f"{op} runs before {_op(self.open)}, in the middle of a chunk"
        return None

    def extra(self, at: int, op: Extra) -> str | None:
        """Anywhere, but not between messages: these are posted together."""
        if at == 0 or not isinstance(before := self.stream[at - 1], ENDS):
            return None
        rest = (self.stream[i] for i in range(at, len(self.stream)))
        after = next((op for op in rest if not isinstance(op, EXTRAS)), None)
        if isinstance(after, ENDS):
            return f"{op} parts {before} and {after}, which are posted together"
        return None

    def ending(self) -> str | None:
        """What a chunk that was begun still needs."""
        if self.open:
            return f"never runs {_op(self.open)}"
        rest = [W(*item, layer - 1) for item, layer in self.weights.items() if layer]
        return f"never runs {some(rest)}" if rest else None


class Recomputes:
    """The layers that are asked for are recomputed, once, between a forward and its backward.

    Args:
      which: layers.
    """

    def __init__(self, which: Which) -> None:
        self.which: Which = which
        self.kept: dict[tuple[int, int, int | None], bool] = {}  # forwards, and whether again
        self.rules: Rules = {F: self.forward, Recompute: self.again, B: self.use, I: self.use}

    def forward(self, at: int, op: F) -> str | None:
        """Leaves its input."""
        self.kept[op.mb, op.chunk, op.layer] = False
        return None

    def again(self, at: int, op: Recompute) -> str | None:
        """Once, while the input is there."""
        key = op.mb, op.chunk, op.layer
        if not recomputes(self.which, op):
            return f"{op} is not an op of this schedule: it does not recompute that layer"
        if key not in self.kept:
            return f"{op} runs before {F(*key)}, or after its backward"
        if self.kept[key]:
            return f"{op} runs twice"
        self.kept[key] = True
        return None

    def use(self, at: int, op: B | I) -> str | None:
        """After it, where it is asked for."""
        key = op.mb, op.chunk, op.layer
        again = self.kept.pop(key, True)  # no forward: the schedule's own check names it
        if not again and recomputes(self.which, op):
            return f"{op} runs before {Recompute(*key)}"
        return None

    def ending(self) -> str | None:
        """Nothing: every backward has been asked."""
        return None


class Offloads:
    """What has left the device is back before it is used, and what is on it has room.

    Without backwards nothing is kept.

    Args:
      stream: the stage's ops.
      depth: most items on the device.
      layers: how many layers each chunk has.
    """

    def __init__(self, stream: Sequence[AnyOp], depth: int, layers: Sequence[int]) -> None:
        self.depth, self.layers = depth, layers
        self.trains = any(isinstance(op, (B, W)) for op in stream)
        self.here: dict[tuple[int, int], str] = {}  # what was done with it last
        self.away: dict[tuple[int, int], int] = {}  # and the place of its offload
        self.rules: Rules = {
            F: self.forward,
            Recompute: self.use,
            B: self.use,
            I: self.use,
            W: self.use,
            Offload: self.offload,
            Reload: self.reload,
        }

    def forward(self, at: int, op: F) -> str | None:
        """Takes room with its first layer, and is complete with its last."""
        self.here[op.mb, op.chunk] = "complete" if last_layer(op, self.layers) else "begun"
        return self.full(op)

    def full(self, op: AnyOp) -> str | None:
        """More than there is room for."""
        if len(self.here) <= self.depth or not self.trains:
            return None
        return f"{op} makes {len(self.here)} on the device, above the depth of {self.depth}"

    def use(self, at: int, op: Compute | Recompute) -> str | None:
        """Only what is on the device; the last backward frees it."""
        item = op.mb, op.chunk
        if item in self.away:
            gone = f"{Offload(*item)} (op {self.away[item]})"
            return f"{op} runs before {Reload(*item)}: {gone} took what it uses"
        if isinstance(op, (B, W)) and last_layer(op, self.layers):
            self.here.pop(item, None)
        elif item in self.here:
            self.here[item] = "used"
        return None

    def offload(self, at: int, op: Offload) -> str | None:
        """Between a forward and its backward, and only what is on the device."""
        item = op.mb, op.chunk
        if item in self.away:
            return f"{op} runs twice: it did so at op {self.away[item]}"
        if self.here.get(item) != "complete":
            return f"{op} runs before {F(*item)}, or after its backward begins"
        del self.here[item]
        self.away[item] = at
        return None

    def reload(self, at: int, op: Reload) -> str | None:
        """Only what has left."""
        item = op.mb, op.chunk
        if self.away.pop(item, None) is None:
            return f"{op} brings back what is not away"
        self.here[item] = "complete"
        return self.full(op)

    def ending(self) -> str | None:
        """What is still away."""
        return f"never runs {some(Reload(*item) for item in self.away)}" if self.away else None
