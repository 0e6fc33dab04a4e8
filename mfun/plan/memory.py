"""What a rank's memory holds during a training step, from shapes and buckets alone.

With p, g, m and v bytes of a parameter, its gradient, its master and its moments (`Element`), over
N ranks that hold the same parameters:

    parallel.sharding     between steps          bf16, grads=bf16   bf16        fp32
    no_shard              p + g + m + v          16                 18          16
    optim                 p + g + (m + v) / N    4 + 12 / N         6 + 12 / N  8 + 8 / N
    optim_grads           p + (g + m + v) / N    2 + 14 / N         2 + 16 / N  4 + 12 / N
    optim_grads_params    (p + g + m + v) / N    16 / N             18 / N      16 / N

Sharded, a leaf starts at a multiple of 64 elements and a bucket is padded, both counted here. On
top come, for a while:

    gathered     whole parameters of the layers at work and of `parallel.prefetch` buckets; copies
                 in the compute type
    unreduced    whole gradients of the layers at work, and of one bucket that is being reduced
    scratch      of collectives, and of the update where types differ; with the optimizer offloaded
                 (`parallel.offload_optimizer`) masters and moments of two neighbouring buckets or
                 leaves, the rest being in the host's memory, which on CPU is the device's
    activations  `mfun.train.memory`

A layer's own temporaries, the allocator's slack and the communication library's buffers are left
out. `mfun.plan.measure` counts what a run really holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

import attrs

from mfun import optim, tree
from mfun.config import Config
from mfun.flat import Bucket
from mfun.plan.replay import Sizes, Temporary, replay
from mfun.spec import ParamSpec, local_shape
from mfun.train.memory import in_flight, live_activations
from mfun.train.plan import Plan

Device = Literal["cpu", "cuda"]
BYTES = MappingProxyType({"none": 0, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8})
CUT = MappingProxyType(
    {
        "no_shard": (),
        "optim": ("masters", "moments"),
        "optim_grads": ("grads", "masters", "moments"),
        "optim_grads_params": ("params", "grads", "masters", "moments"),
    }
)
"""What each strategy cuts over the ranks that hold the same parameters."""


class Element(NamedTuple):
    """Bytes that are kept for one parameter."""

    params: int
    grads: int
    masters: int
    moments: int

    def held(self, sharding: str, n: int, elements: int = 1) -> dict[str, float]:
        """Bytes of a rank by kind, where n ranks hold the same parameters.

        Example:
            >>> Element(params=2, grads=4, masters=4, moments=8).held("optim", n=4)
            {'params': 2.0, 'grads': 4.0, 'masters': 1.0, 'moments': 2.0}
        """
        cut = CUT[sharding]
        return {
            kind: size * elements / (n if kind in cut else 1)
            for kind, size in self._asdict().items()
        }


def element(config: Config, spec: ParamSpec | None = None) -> Element:
    """Bytes of one parameter of a configuration.

    Args:
        config: its precision and optimizer count.
        spec: of the parameter; None is one of the many.

    Example:
        >>> from mfun.config import load
        >>> element(load("tiny", ["optim.name=sgd"]))
        Element(params=4, grads=4, masters=0, moments=4)
    """
    formats = config.precision.formats
    params = BYTES[formats.params]
    if spec is not None and spec.wide:
        params = max(params, BYTES["fp32"])
    return Element(
        params=params,
        grads=BYTES[formats.grads],
        masters=BYTES[formats.masters],
        moments=updated(config, params)
        * optim.moments(config.optim, matrix=spec is not None and bool(spec.matrix)),
    )


def updated(config: Config, params: int) -> int:
    """Bytes of the type in which a parameter of so many bytes is updated."""
    formats = config.precision.formats
    if formats.masters != "none":
        return BYTES[formats.masters]
    if formats.params in ("bf16", "fp16") or formats.params != formats.grads:
        return max(BYTES[formats.params], BYTES[formats.grads], BYTES["fp32"])
    return params


@attrs.frozen(kw_only=True)
class Account:
    """Bytes of one rank of a pipeline stage.

    Args:
        params, grads, masters, moments: kept from step to step.
        host: masters and moments in the host's memory in their stead.
        padding: of all these, what no parameter fills.
        gathered, unreduced, scratch: the most of each in a step, as in the module's docstring.
        temporary: the most of the three together.
        activations: the most by themselves.
        working: the most of temporaries and activations together.
        in_flight: chunks of microbatches whose activations are kept at once.
    """

    params: int
    grads: int
    masters: int
    moments: int
    host: int
    padding: int
    gathered: int
    unreduced: int
    scratch: int
    temporary: int
    activations: int
    working: int
    in_flight: int

    @property
    def opt(self) -> int:
        """The optimizer's: masters and moments."""
        return self.masters + self.moments

    @property
    def held(self) -> int:
        """What is there between steps."""
        return self.params + self.grads + self.opt

    @property
    def total(self) -> int:
        """The most at once."""
        return self.held + self.working


class Part(NamedTuple):
    """What is cut together: a leaf, or sharded a bucket.

    Args:
        elements: with padding.
        padding: of them.
        n: ranks that hold the same.
        element: bytes of one.
    """

    elements: int
    padding: int
    n: int
    element: Element


def account(plan: Plan, stage: int, *, device: Device = "cpu") -> Account:
    """The account of a rank of a stage; all ranks of a stage are alike.

    Args:
        plan: the layout.
        stage: which.
        device: whose collectives need their scratch: on CPU a reduce-scatter is an exchange.

    Example:
        >>> from mfun.config import load, resolve
        >>> from mfun.train.plan import plan
        >>> layout = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=4", "parallel.sharding=optim"]
        >>> a = account(plan(resolve(load("tiny", layout), None)), stage=0)
        >>> a.params, a.grads, a.masters, a.moments
        (3286016, 3286016, 0, 1643008)
    """
    sharding = plan.config.parallel.sharding
    held = dict.fromkeys(Element._fields, 0)
    padding = 0
    for part in parts(plan, stage):
        for kind, size in part.element.held(sharding, part.n, part.elements).items():
            held[kind] += int(size)
        padding += int(sum(part.element.held(sharding, part.n, part.padding).values()))
    host = 0
    if plan.config.parallel.offload_optimizer and device == "cuda":
        host, held["masters"], held["moments"] = held["masters"] + held["moments"], 0, 0
    activations = live_activations(plan, stage)
    live = [*temporaries(plan, stage, device)]
    after = [0] * (len(live) - len(activations))  # the stream's last op
    together = [t.total + a for t, a in zip(live, [*activations, *after], strict=True)]
    return Account(
        **held,
        host=host,
        padding=padding,
        gathered=max(t.gathered for t in live),
        unreduced=max(t.unreduced for t in live),
        scratch=max(t.scratch for t in live),
        temporary=max(t.total for t in live),
        activations=max(activations),
        working=max(together),
        in_flight=max(in_flight(plan, stage)),
    )


def parts(plan: Plan, stage: int) -> list[Part]:
    """The leaves of a stage, or its buckets where they are cut."""
    specs = tree.flatten(plan.stages[stage].specs)
    if not plan.sharded:
        sizes = {path: math.prod(local_shape(spec, plan.mesh)) for path, spec in specs.items()}
        return [Part(n, 0, 1, element(plan.config, specs[path])) for path, n in sizes.items()]
    return [
        Part(
            elements=bucket.size,
            padding=bucket.size - sum(span.stop - span.start for span in bucket.spans),
            n=sharers(plan, bucket),
            element=element(plan.config, specs[bucket.spans[0].path]),
        )
        for bucket in plan.buckets(stage)
    ]


def sharers(plan: Plan, bucket: Bucket) -> int:
    """Ranks of a stage over which a bucket is cut."""
    return math.prod(map(plan.mesh.size, plan.table[bucket.spans[0].path].shard_axes))


def temporaries(plan: Plan, stage: int, device: Device = "cpu") -> Iterator[Temporary]:
    """What is there on top of what is held: in each op of the stream, then until the step's end.

    Ops on chunks are taken as ops on their layers.
    """
    cut = parts(plan, stage)
    copies = 0 if plan.shards_params else _computed(plan, stage)
    if plan.sharded:
        sizes = [
            Sizes(x.elements * x.element.params, x.elements * x.element.grads, x.n) for x in cut
        ]
        exchanged = device == "cpu" or plan.config.parallel.wide_sums
        for each in replay(plan, stage, sizes, exchanged=exchanged):
            yield each._replace(gathered=each.gathered + copies)
    else:
        yield from [Temporary(gathered=copies)] * len(live_activations(plan, stage))
    yield Temporary(scratch=_update(plan.config, cut))


def _computed(plan: Plan, stage: int) -> int:
    """Copies of parameters that are used in another type than they are kept in."""
    return sum(
        math.prod(local_shape(spec, plan.mesh)) * used.itemsize
        for spec in tree.flatten(plan.stages[stage].specs).values()
        if (used := spec.dtype_among(plan.compute_dtype)) != spec.dtype_among(plan.dtype)
    )


def _update(config: Config, pieces: Sequence[Part]) -> int:
    """Copies that an update makes: all of what has another type, and one rounded leaf at a time.

    Offloaded, leaves are updated one by one, while the state of the next one arrives.
    """
    if not config.parallel.offload_optimizer:
        return _converted(config, pieces)
    states = [
        part.elements // part.n * (part.element.masters + part.element.moments) for part in pieces
    ]
    together = zip(pieces, states, [*states[1:], 0], strict=True)
    return max((_converted(config, [part]) + own + coming for part, own, coming in together))


def _converted(config: Config, pieces: Sequence[Part]) -> int:
    """Copies of what has another type than its update."""
    formats = config.precision.formats
    widened, rounded = 0, 0
    for part in pieces:
        own = part.elements // part.n
        wide = updated(config, part.element.params)
        if wide == part.element.params == part.element.grads:
            continue
        widened += own * wide * (part.element.grads != wide)
        if formats.masters == "none":
            widened += own * wide * (part.element.params != wide)
        rounded = max(rounded, own * part.element.params)
    return widened + rounded
