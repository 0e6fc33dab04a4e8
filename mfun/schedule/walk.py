"""One stage's stream by itself: every op once, after what it depends on, with its input."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from types import MappingProxyType

from mfun.schedule.ops import AnyOp, B, Compute, F, I, Recv, Send, Tag, W, tag_text
from mfun.schedule.streams import Placement, routes

# What has run of one microbatch on one chunk, as bits.
_FORWARD, _INPUTS, _WEIGHTS, _WHOLE = 1, 2, 4, 8

_BEFORE = MappingProxyType({F: 0, B: _FORWARD, I: _FORWARD, W: _FORWARD | _INPUTS})
_AFTER = MappingProxyType(
    {
        F: _FORWARD,
        B: _FORWARD | _INPUTS | _WEIGHTS | _WHOLE,
        I: _FORWARD | _INPUTS,
        W: _FORWARD | _INPUTS | _WEIGHTS,
    }
)
_LIVE = MappingProxyType({F: 1, B: -1, I: 0, W: -1})


class Walk:
    """Goes through a stage's stream: what has run, what it holds, what it made and has not sent.

    `steps` has a method for each type of op, which runs it and returns what is wrong, if anything.

    Args:
      stage: the stage.
      place: where virtual stages are.
      microbatches: of the step.
      forward_only: there are no backwards.
      bound: the most forwards that may wait for their B or W; None sets none.
    """

    def __init__(
        self, stage: int, place: Placement, microbatches: int, forward_only: bool, bound: int | None
    ) -> None:
        self.stage, self.place, self.forward_only, self.bound = stage, place, forward_only, bound
        self.routes = routes(stage, place)
        self.users = {(r.takes, r.here): (r.source, c) for (_, c), r in self.routes.items()}
        self.steps: defaultdict[type[AnyOp], Callable[..., str | None]] = defaultdict(
            lambda: _foreign,
            {Send: self.send, Recv: self.recv, **dict.fromkeys(_LIVE, self.compute)},
        )
        self.ran = {
            (mb, chunk): 0
            for chunk in range(place.chunks)
            for mb in place.microbatches(chunk, microbatches)
        }
        self.held: set[Tag] = set()
        self.unsent: set[Tag] = set()
        self.live = 0

    def compute(self, op: Compute) -> str | None:
        """Once, after what it depends on, and within the memory bound."""
        kind, at = type(op), (op.mb, op.chunk)
        ran = self.ran.get(at)
        if ran is None or (self.forward_only and kind is not F):
            return f"{op} is not an op of this schedule"
        if ran != _BEFORE[kind]:
            return _why(op, ran)
        route = self.routes[kind, op.chunk]
        if route.takes:
            taken = (route.takes, op.mb, route.here)
            if taken not in self.held:
                return f"{op} runs before its input: no Recv({tag_text(taken)}) precedes it"
            self.held.remove(taken)
        self.ran[at] = _AFTER[kind]
        if route.gives:
            mine = self.held if route.target == self.stage else self.unsent
            mine.add((route.gives, op.mb, route.there))
        self.live += _LIVE[kind]
        if self.bound is not None and self.live > self.bound:
            return f"{op} makes {self.live} in flight, above the schedule's bound of {self.bound}"
        return None

    def send(self, op: Send) -> str | None:
        """Only what was made and not sent yet, to the stage that uses it."""
        tag = (op.kind, op.mb, op.to)
        if tag not in self.unsent:
            return f"{op} sends what is not there: it was not made before, or is sent twice"
        if op.peer != (user := self.place.stage(op.to)):
            return f"{op} goes to stage {op.peer}, but stage {user} uses it"
        self.unsent.remove(tag)
        return None

    def recv(self, op: Recv) -> str | None:
        """Only what this stage uses, once, from the stage that makes it."""
        end = self.users.get((op.kind, op.to))
        if end is None:
            return f"{op} is for virtual stage {op.to}, which is not on this stage, or takes none"
        maker, chunk = end
        if maker != op.peer:
            return f"{op} comes from stage {op.peer}, but stage {maker} makes it"
        tag = (op.kind, op.mb, op.to)
        ran = self.ran.get((op.mb, chunk), 0)
        if tag in self.held or ran & (_FORWARD if op.kind == "act" else _INPUTS):
            user = F if op.kind == "act" else B if ran & _WHOLE else I
            return f"{op} is received twice, or after {user(op.mb, chunk)} that uses it"
        self.held.add(tag)
        return None

    def ending(self) -> str | None:
        """What is missing or left over when the stream ends."""
        whole = _FORWARD if self.forward_only else _FORWARD | _INPUTS | _WEIGHTS
        if missing := [
            op for at, ran in self.ran.items() if whole & ~ran for op in _rest(*at, ran)
        ]:
            kept = missing if not self.forward_only else [op for op in missing if isinstance(op, F)]
            return f"never runs {some(kept)}"
        if self.unsent:
            return f"never sends {some(map(tag_text, sorted(self.unsent)))}"
        if self.held:
            return f"never uses {some(map(tag_text, sorted(self.held)))}"
        return None


def _foreign(op: AnyOp) -> str:
    """Why an op cannot run that was inserted."""
    return f"{op} is not an op of this schedule, without extras"


def _why(op: Compute, ran: int) -> str:
    """Why an op cannot run when this much has: too early, twice, or instead of another."""
    if op.layer is not None:
        return f"{op} is of one layer, but nothing was said of layers: name the extras"
    if not isinstance(op, F) and not ran & _FORWARD:
        return f"{op} runs before {F(op.mb, op.chunk)}"
    if isinstance(op, W) and not ran & _INPUTS:
        return f"{op} runs before {I(op.mb, op.chunk)}"
    again = isinstance(op, F) or isinstance(op, B) == bool(ran & _WHOLE)
    return f"{op} runs twice" if again else f"{op} runs, but its backward was given by another op"


def _rest(mb: int, chunk: int, ran: int) -> list[Compute]:
    """The ops that are left to run."""
    if ran & _INPUTS:
        return [W(mb, chunk)]
    return [B(mb, chunk)] if ran else [F(mb, chunk), B(mb, chunk)]


def some(items: Iterable[object], most: int = 4) -> str:
    """The first few of a list, as text."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
