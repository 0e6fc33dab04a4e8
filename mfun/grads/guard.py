"""Gradients looked at before they are reduced: afterwards all ranks have them, none their cause."""

from __future__ import annotations

import math

import attrs

from mfun import flat
from mfun.grads.buffers import GradBuffers


class GradientError(RuntimeError):
    """A rank's own gradient is not a number or too large; the message names rank and parameter."""


@attrs.frozen
class Guard:
    """Looks at each bucket of a rank's own gradients before it is reduced.

    Args:
        rank: for the message.
        largest: absolute value from which a gradient is refused; 0 refuses what is not finite.
    """

    rank: int
    largest: float = 0.0

    def check(self, grads: GradBuffers, bucket: int) -> None:
        """Refuse a bucket.

        Raises:
            GradientError: naming the worst parameters.

        Example:
            >>> Guard(3).name([("embed.tokens", float("nan"))])
            'rank 3: the gradient of embed.tokens is nan'
        """
        limit = self.largest or math.inf
        top = float(grads.buffers[bucket].abs().amax())
        if top < limit:
            return
        found = [(span.path, _largest(grads, span)) for span in grads.buckets[bucket].spans]
        wrong = [(path, value) for path, value in found if not value < limit]
        raise GradientError(
            f"{self.name(wrong)} before it is reduced over ranks; nothing of this step is kept. "
            + (
                f"Raise train.large_gradient = {self.largest:g}, or look"
                if self.largest and math.isfinite(top)
                else "Look"
            )
            + " at this rank's data and memory, or lower optim.lr"
        )

    def name(self, wrong: list[tuple[str, float]]) -> str:
        """The first parameters with their largest values."""
        listed = ", ".join(f"{path} is {value:g}" for path, value in wrong[:5])
        more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
        return f"rank {self.rank}: the gradient of {listed}{more}"


def _largest(grads: GradBuffers, span: flat.Span) -> float:
    view = grads.views[span.path]
    return float(view.abs().amax()) if view.numel() else 0.0
