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
class F:
    """Forward of one microbatch through one chunk of layers.

    Args:
      mb: microbatch, 0-based.
      chunk: which of the stage's chunks, 0-based; printed only where it is not 0.
    Example:
      >>> F(3), F(3, chunk=1)
      (F3, F3.1)
    """

    mb: int
    chunk: int = 0

    def __repr__(self) -> str:
        """`F3`, or `F3.1` for chunk 1."""
        return f"F{self.mb}.{self.chunk}" if self.chunk else f"F{self.mb}"


@attrs.frozen(repr=False)
class B:
    """Whole backward (inputs and weights) of one microbatch through one chunk of layers.

    Args:
      mb: microbatch, 0-based.
      chunk: which of the stage's chunks, 0-based; printed only where it is not 0.
    Example:
      >>> B(0), B(0) == F(0)
      (B0, False)
    """

    mb: int
    chunk: int = 0

    def __repr__(self) -> str:
        """`B3`, or `B3.1` for chunk 1."""
        return f"B{self.mb}.{self.chunk}" if self.chunk else f"B{self.mb}"


@attrs.frozen(repr=False)
class Send:
    """Hand one message to another stage; complete when the receiver has posted its `Recv`.

    Args:
      mb: microbatch, 0-based.
      to: virtual stage that uses the message.
      kind: "act" (towards the last stage) or "grad" (towards the first).
      peer: stage that receives.
    Example:
      >>> Send(3, to=1, kind="act", peer=1), Send(3, to=1, kind="act", peer=1).tag
      (Send(act3>1), ('act', 3, 1))
    """

    mb: int
    to: int
    kind: Kind
    peer: int

    @property
    def tag(self) -> Tag:
        """What the receiver compares: (kind, microbatch, receiving virtual stage)."""
        return (self.kind, self.mb, self.to)

    def __repr__(self) -> str:
        """`Send(act3>1)`: the text of the tag, equal on both ends."""
        return f"Send({tag_text(self.tag)})"


@attrs.frozen(repr=False)
class Recv:
    """Take one message from another stage.

    Args:
      mb: microbatch, 0-based.
      to: virtual stage that uses the message, on this stage.
      kind: "act" or "grad".
      peer: stage that sends.
    Example:
      >>> Recv(3, to=1, kind="act", peer=0)
      Recv(act3>1)
    """

    mb: int
    to: int
    kind: Kind
    peer: int

    @property
    def tag(self) -> Tag:
        """What the sender must have sent: (kind, microbatch, receiving virtual stage)."""
        return (self.kind, self.mb, self.to)

    def __repr__(self) -> str:
        """`Recv(act3>1)`: the text of the tag, equal on both ends."""
        return f"Recv({tag_text(self.tag)})"


Compute = F | B
Message = Send | Recv
Op = Compute | Message
