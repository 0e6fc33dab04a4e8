"""What is wrong with one stage's layers and activations: a class a concern, each a table of rules.

A rule takes the place of an op and the op, and returns what is wrong with it, if anything.
`ending` says what is missing when the stream ends. None of these classes knows the transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mfun.schedule.layers import last_layer
from mfun.schedule.ops import (
    AnyOp,
    B,
    Compute,
    Extra,
    F,
    Gather,
    I,
    Message,
    Offload,
    Recompute,
    Recv,
    Reduce,
    Release,
    Reload,
    Send,
    W,
)
from mfun.schedule.transforms import Which, recomputes
from mfun.schedule.walk import some

Rule = Callable[[int, Any], str | None]
Rules = Mapping[type[AnyOp], Rule]


class Layers:
    """Ops on layers come whole and in order, and nothing gets between a batch of messages.

    Args:
      layers: how many layers each chunk has; () for streams of ops on whole chunks.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = layers
        self.done: Counter[tuple[type[Compute], int, int]] = Counter()
        self.open: Compute | None = None  # the op that has to come next, of a chunk begun
        self.batch: Message | None = None  # the last message since a compute op
        self.between: Extra | None = None  # what was inserted after it
        computes = dict.fromkeys((F, B, I, W), self.compute)
        extras = dict.fromkeys((Reduce, Gather, Release, Recompute, Offload, Reload), self.extra)
        self.rules: Rules = {**computes, **extras, Send: self.message, Recv: self.message}

    def compute(self, at: int, op: Compute) -> str | None:
        """A chunk's layers in order; no other forward or backward begins before its last."""
        self.batch = self.between = None
        count = self.layers[op.chunk] if op.chunk < len(self.layers) else 0
        if op.layer is None and not count:
            return f"{op} begins before {self.open}" if self.open else None
        if op.layer is None or op.layer >= count:
            return f"{op} is not an op of this schedule: chunk {op.chunk} has {count} layers"
        return self.layer(op, count)

    def layer(self, op: Compute, count: int) -> str | None:
        """One layer's op."""
        kind, mb, chunk = key = type(op), op.mb, op.chunk
        done = self.done[key]
        due = done if kind is F else count - 1 - done
        if op.layer != due and op.layer is not None:
            again = op.layer < due if kind is F else op.layer > due
            return f"{op} runs twice" if again else f"{op} runs before {kind(mb, chunk, due)}"
        self.done[key] = done + 1
        if kind is W:
            begun = self.done[I, mb, chunk] > done
            return None if begun else f"{op} runs before {I(mb, chunk, op.layer)}"
        if self.open and self.open != op:
            return f"{op} begins before {self.open}"
        following = due + 1 if kind is F else due - 1
        self.open = kind(mb, chunk, following) if 0 <= following < count else None
        return None

    def message(self, at: int, op: Message) -> str | None:
        """Around a chunk's ops, not between its layers; what is posted together stays together."""
        if self.open:
            return f"{op} comes before {self.open}, in the middle of a chunk"
        if self.between:
            return f"{self.between} parts {self.batch} and {op}, which are posted together"
        self.batch = op
        return None

    def extra(self, at: int, op: Extra) -> str | None:
        """Anywhere, but not between messages."""
        if self.batch:
            self.between = self.between or op
        return None

    def ending(self) -> str | None:
        """What a chunk that was begun still needs."""
        if self.open:
            return f"never runs {self.open}"
        rest = [
            kind(mb, chunk, self.layers[chunk] - 1 - done)
            for (kind, mb, chunk), done in self.done.items()
            if kind is W and 0 < done < self.layers[chunk]
        ]
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

    Args:
      depth: most items on the device.
      layers: how many layers each chunk has.
    """

    def __init__(self, depth: int, layers: Sequence[int]) -> None:
        self.depth, self.layers = depth, layers
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
        if len(self.here) <= self.depth:
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
