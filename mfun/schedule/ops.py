"""The ops of a pipeline schedule: small frozen values that print short.

A stage's stream is a sequence of ops. `F` and `B` compute; `Send` and `Recv` move one message each.
A model cut in `stages * chunks` pieces has as many *virtual stages*, in the order of the layers.
New kinds of op are new classes here, and rows in `streams.needs` and `streams.gives`.
"""

from __future__ import annotations

from typing import Literal

import attrs

Kind = Literal["act", "grad"]
Tag = tuple[Kind, int, int]  # (kind, microbatch, receiving virtual stage): names a message


class ScheduleError(ValueError):
    """A schedule's numbers or ops cannot run; the message names the stage and the ops."""


def tag_text(tag: Tag) -> str:
    """A tag as text: `act3>1` is microbatch 3's activation for virtual stage 1."""
    kind, mb, to = tag
    return f"{kind}{mb}>{to}"


@attrs.frozen(repr=False)
class _OnChunk:
    """What ops of one microbatch on one chunk are made of.

    Args:
      mb: microbatch, 0-based.
      chunk: which of the stage's chunks, 0-based; printed only where it is not 0.
    """

    mb: int
    chunk: int = 0

    def __repr__(self) -> str:
        """`F3`, or `F3.1` for chunk 1."""
        return f"{type(self).__name__}{self.mb}" + (f".{self.chunk}" if self.chunk else "")


@attrs.frozen(repr=False)
class _OnLayer(_OnChunk):
    """What compute ops are made of: an op on a chunk, or on one of its layers.

    Args:
      layer: which of the chunk's layers, 0-based; None is all of them, in order.
    """

    layer: int | None = None

    def __repr__(self) -> str:
        """As on a chunk, with the layer after it: `B3.1[2]`."""
        text = super().__repr__()
        return text if self.layer is None else f"{text}[{self.layer}]"


@attrs.frozen(repr=False)
class F(_OnLayer):
    """Forward of one microbatch through one chunk of layers.

    Example:
      >>> F(3), F(3, chunk=1), F(3, chunk=1, layer=2)
      (F3, F3.1, F3.1[2])
    """


@attrs.frozen(repr=False)
class B(_OnLayer):
    """Whole backward (inputs and weights) of one microbatch through one chunk of layers.

    Example:
      >>> B(0), B(0) == F(0)
      (B0, False)
    """


@attrs.frozen(repr=False)
class I(_OnLayer):  # noqa: E742  # the field's own letters: F, I, W, and B = I and W together
    """Backward to the inputs of one microbatch through one chunk; its `W` comes later.

    Example:
      >>> I(2, chunk=1)
      I2.1
    """


@attrs.frozen(repr=False)
class W(_OnLayer):
    """Gradients of the weights of one microbatch and chunk, from what `F` and `I` have left.

    Example:
      >>> W(2)
      W2
    """


@attrs.frozen(repr=False)
class _End:
    """One end of a message.

    Args:
      mb: microbatch, 0-based.
      to: virtual stage that uses the message.
      kind: "act" (towards the last stage) or "grad" (towards the first).
      peer: stage at the other end.
    """

    mb: int
    to: int
    kind: Kind
    peer: int

    @property
    def tag(self) -> Tag:
        """What both ends compare: (kind, microbatch, receiving virtual stage)."""
        return (self.kind, self.mb, self.to)

    def __repr__(self) -> str:
        """`Send(act3>1)`: the text of the tag, equal on both ends."""
        return f"{type(self).__name__}({tag_text(self.tag)})"


@attrs.frozen(repr=False)
class Send(_End):
    """Hand one message to another stage; complete when the receiver has posted its `Recv`.

    Example:
      >>> Send(3, to=1, kind="act", peer=1), Send(3, to=1, kind="act", peer=1).tag
      (Send(act3>1), ('act', 3, 1))
    """


@attrs.frozen(repr=False)
class Recv(_End):
    """Take one message from another stage.

    Example:
      >>> Recv(3, to=1, kind="act", peer=0)
      Recv(act3>1)
    """


@attrs.frozen(repr=False)
class _OnBucket:
    """What collectives of one flat buffer are made of.

    Args:
      bucket: index of the buffer on its stage.
    """

    bucket: int

    def __repr__(self) -> str:
        """`Gather2`."""
        return f"{type(self).__name__}{self.bucket}"


@attrs.frozen(repr=False)
class Reduce(_OnBucket):
    """Start to sum a bucket's gradients over the ranks that hold it; all of them are there.

    Args:
      window: the microbatch whose gradients it closes; None is the whole step.
    Example:
      >>> Reduce(2), Reduce(2, window=3)
      (Reduce2, Reduce2@3)
    """

    window: int | None = None

    def __repr__(self) -> str:
        """`Reduce2`, or `Reduce2@3` for the window of microbatch 3."""
        return super().__repr__() + ("" if self.window is None else f"@{self.window}")


@attrs.frozen(repr=False)
class Gather(_OnBucket):
    """Start to collect a bucket's parameters from the ranks that hold its shards.

    Example:
      >>> Gather(0)
      Gather0
    """


@attrs.frozen(repr=False)
class Release(_OnBucket):
    """Give up a bucket's gathered parameters; the shard stays.

    Example:
      >>> Release(0)
      Release0
    """


@attrs.frozen(repr=False)
class Recompute(_OnLayer):
    """Run a forward again from its kept input, for the backward that follows.

    Example:
      >>> Recompute(3, chunk=1), Recompute(3, layer=0)
      (Recompute3.1, Recompute3[0])
    """


@attrs.frozen(repr=False)
class Offload(_OnChunk):
    """Move what a forward has kept to the host.

    Example:
      >>> Offload(3)
      Offload3
    """


@attrs.frozen(repr=False)
class Reload(_OnChunk):
    """Bring what was offloaded back to the device.

    Example:
      >>> Reload(3, chunk=1)
      Reload3.1
    """


Compute = F | B | I | W
Message = Send | Recv
Op = Compute | Message
Aside = Reduce | Gather | Release | Offload | Reload  # beside computation
ASIDE = (Reduce, Gather, Release, Offload, Reload)
Extra = Aside | Recompute  # inserted by `transforms`
AnyOp = Op | Extra
