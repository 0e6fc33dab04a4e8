"""What a schedule is generated from: the numbers of a pipeline, and what its ops cost."""

from __future__ import annotations

import math

import attrs

from mfun.schedule.ops import B, Compute, Recompute, ScheduleError

Cost = float | tuple[float, ...]


def _positive(instance: object, attribute: attrs.Attribute[Cost], value: Cost | None) -> None:
    """Refuse an op that takes no time: the picture and the bubble are made of time."""
    if isinstance(value, list):
        raise ScheduleError(f"cost {attribute.name} is a list: give a number, or a tuple per slice")
    for cost in value if isinstance(value, tuple) else (value,):
        if cost is not None and not 0 < cost < math.inf:
            raise ScheduleError(f"cost {attribute.name} is {cost}, but an op takes more than 0")


def _not_negative(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not 0 <= value < math.inf:
        raise ScheduleError(f"cost {attribute.name} is {value}, but a message takes 0 or more")


@attrs.frozen
class Costs:
    """How long ops take, in any unit; a number, or one per slice of the model (virtual stage).

    Args:
      F: one forward of one chunk.
      B: one whole backward; None is I + W.
      I: its part to the inputs.
      W: its part to the weights.
      latency: of a message, from its last byte's departure to its arrival.
      transfer: time a message occupies its link (bytes / bandwidth); messages of one link queue.
      overlap: messages travel beside computation; otherwise a transfer also occupies both stages.
      reduce: of a bucket of gradients, and
      gather: of a bucket of parameters, on the network of the stage.
      offload: of what a chunk's forward keeps, to the host or back.
    Raises:
      ScheduleError: a number that is not above 0 (ops), or below 0 (messages).
    Example:
      >>> from mfun.schedule.ops import F
      >>> Costs().of(F(3)), Costs().of(B(3)), Costs(F=(1, 4)).of(F(3), slice=1)
      (1, 2, 4)
    """

    F: Cost = attrs.field(default=1, validator=_positive)
    B: Cost | None = attrs.field(default=None, validator=_positive)
    I: Cost = attrs.field(default=1, validator=_positive)  # noqa: E741
    W: Cost = attrs.field(default=1, validator=_positive)
    latency: float = attrs.field(default=0, validator=_not_negative)
    transfer: float = attrs.field(default=0, validator=_not_negative)
    overlap: bool = True
    reduce: float = attrs.field(default=0, validator=_not_negative, kw_only=True)
    gather: float = attrs.field(default=0, validator=_not_negative, kw_only=True)
    offload: float = attrs.field(default=0, validator=_not_negative, kw_only=True)

    def of(self, op: Compute | Recompute, slice: int = 0) -> float:
        """The cost of one op on one slice of the model; running again costs a forward."""
        if isinstance(op, B) and self.B is None:
            return _at(self.I, slice) + _at(self.W, slice)
        cost = self.F if isinstance(op, Recompute) else getattr(self, type(op).__name__)
        return _at(cost, slice)

    def fit(self, slices: int) -> Costs:
        """These costs, for a model of so many slices.

        Raises:
          ScheduleError: a cost that is given per slice has another number of them.
        Example:
          >>> Costs(F=(1, 2, 1)).fit(4)
          Traceback (most recent call last):
          mfun.schedule.ops.ScheduleError: cost F has 3 numbers, but the model is cut in 4 slices
        """
        for name in "FBIW":
            cost = getattr(self, name)
            if isinstance(cost, tuple) and len(cost) != slices:
                raise ScheduleError(
                    f"cost {name} has {len(cost)} numbers, but the model is cut in {slices} slices"
                )
        return self

    def of_share(self, share: float) -> Costs:
        """Of a chunk that holds this share of the layers; messages are as large as before.

        Example:
          >>> Costs(F=2, W=4, transfer=1).of_share(0.5)
          Costs(F=1.0, B=None, I=0.5, W=2.0, latency=0, transfer=1, overlap=True, reduce=0, ...)
        """
        return attrs.evolve(
            self,
            F=_times(self.F, share),
            B=None if self.B is None else _times(self.B, share),
            I=_times(self.I, share),
            W=_times(self.W, share),
        )


def _at(cost: Cost, slice: int) -> float:
    return cost[slice] if isinstance(cost, tuple) else cost


def _times(cost: Cost, by: float) -> Cost:
    return tuple(one * by for one in cost) if isinstance(cost, tuple) else cost * by


@attrs.frozen
class Sizes:
    """The numbers of a pipeline.

    Args:
      stages: pipeline stages, p.
      microbatches: of one step, m.
      chunks: slices of the model that a stage holds, v.
      group: microbatches that go through one chunk before the next (interleaved); 0 is `stages`.
      costs: of ops, for the schedules that are driven by them.
      memory: most chunks whose activations a stage may keep (cost-driven schedules); 0 is the
        schedule's own limit.
    Raises:
      ScheduleError: naming the number and its range.
    Example:
      >>> Sizes(2, 0)
      Traceback (most recent call last):
      mfun.schedule.ops.ScheduleError: microbatches is 0, but a step has at least 1 microbatch
    """

    stages: int
    microbatches: int
    chunks: int = 1
    group: int = 0
    costs: Costs = Costs()
    memory: int = 0

    def __attrs_post_init__(self) -> None:
        """Refuse sizes that no schedule can run."""
        for name, what in (
            ("stages", "a pipeline has at least 1 stage"),
            ("microbatches", "a step has at least 1 microbatch"),
            ("chunks", "a stage holds at least 1 chunk"),
        ):
            if (value := getattr(self, name)) < 1:
                raise ScheduleError(f"{name} is {value}, but {what}")
