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
    """What compute ops are made of.

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
class F(_OnChunk):
    """Forward of one microbatch through one chunk of layers.

    Example:
      >>> F(3), F(3, chunk=1)
      (F3, F3.1)
    """


@attrs.frozen(repr=False)
class B(_OnChunk):
    """Whole backward (inputs and weights) of one microbatch through one chunk of layers.

    Example:
      >>> B(0), B(0) == F(0)
      (B0, False)
    """


@attrs.frozen(repr=False)
class I(_OnChunk):  # noqa: E742  # the field's own letters: F, I, W, and B = I and W together
    """Backward to the inputs of one microbatch through one chunk; its `W` comes later.

    Example:
      >>> I(2, chunk=1)
      I2.1
    """


@attrs.frozen(repr=False)
class W(_OnChunk):
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


Compute = F | B | I | W
Message = Send | Recv
Op = Compute | Message
