"""Tagged point-to-point messages between pipeline stages.

A message is a set of named tensors with a tag (kind, microbatch, receiving virtual stage). A header
with the tag and a checksum of its shapes leads it, and the receiver compares both: a swapped
microbatch is an error, not a wrong number. Shapes are told once per (kind, receiver, size): the
first message carries a description in JSON, later ones do not. A sent tensor is kept until its send
was waited for.

On gloo, tensors of another tag or other shapes than are due find no receive that takes them (a
receive of another size would end the process), so the header is what is read of such a message.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mfun.comm.world import Message
from mfun.schedule import Recv, Send

DESCRIPTION_BYTES = 4096
_KINDS = {"act": 0, "grad": 1}
_HEADER, _DESCRIPTION, _TENSORS = 0, 1, 2  # slots, gloo's tags; tensors have one of many from 2 on
Shapes = list[tuple[str, str, list[int]]]
Parts = list[tuple[Tensor, int]]
"""Tensors and the slot each goes through."""


def describe(message: Message) -> Tensor:
    """Names, dtypes and shapes of a message as a fixed number of bytes.

    Raises:
        ValueError: they do not fit; send fewer or shorter-named tensors.
    """
    shapes: Shapes = [
        (name, str(x.dtype).removeprefix("torch."), [*x.shape]) for name, x in message.items()
    ]
    text = json.dumps(shapes).encode()
    if len(text) > DESCRIPTION_BYTES:
        raise ValueError(
            f"the description of a message of {len(message)} tensors takes {len(text)} bytes, "
            f"more than {DESCRIPTION_BYTES}; send fewer tensors over one stage boundary"
        )
    return torch.frombuffer(bytearray(text.ljust(DESCRIPTION_BYTES)), dtype=torch.uint8)


def read(description: Tensor) -> Shapes:
    """The shapes that a description tells."""
    return json.loads(bytes(description.cpu().numpy()).decode())


def empty_like_description(description: Tensor, device: torch.device) -> Message:
    """Uninitialised tensors as described."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, dtype, shape in read(description)
    }


class Header(NamedTuple):
    """What leads a message: its tag, the checksum of its shapes, whether a description follows."""

    kind: int
    mb: int
    to: int
    shapes: int
    described: int = 0

    @classmethod
    def of(cls, op: Send | Recv, description: Tensor, described: bool = False) -> Header:
        """The header of an op's message."""
        checksum = zlib.crc32(bytes(description.cpu().numpy()))
        return cls(*_tag(op), checksum, int(described))

    @property
    def slot(self) -> int:
        """The slot of the tensors."""
        number = zlib.crc32(repr(self[:4]).encode())
        return _TENSORS + number % (2**31 - _TENSORS)

    @property
    def tag(self) -> tuple[int, int, int]:
        """Kind, microbatch, virtual stage."""
        return self[:3]


class Posted(NamedTuple):
    """A receive under way, and the checksum of the shapes it expects."""

    header: Tensor
    message: Message
    shapes: int | None
    header_works: list[Any]
    works: list[Any]


class Transport:
    """Messages of one rank along its pipeline.

    Args:
        group: the pipeline's process group, None for one stage.
        ranks: global rank of each stage of this pipeline.
        device: where tensors live.
    """

    def __init__(self, group: Any, ranks: Sequence[int], device: torch.device) -> None:
        self._group, self._ranks, self._device = group, tuple(ranks), device
        self._shapes: dict[Any, Tensor] = {}
        self._told: dict[Any, Tensor] = {}
        self._posted: dict[Recv, Posted] = {}
        self._sent: list[tuple[list[Any], Tensor]] = []

    def post(
        self, batch: Sequence[Send | Recv], outgoing: Mapping[Send, Message], sizes: Sequence[Any]
    ) -> None:
        """Start all messages of a batch together.

        Args:
            batch: the ops.
            outgoing: the tensors of each `Send`; not to be written to before `drain`.
            sizes: for each microbatch, what identifies its shapes: messages of equal (kind,
                receiver, size) have equal shapes.

        Raises:
            ValueError: a message to send has other shapes than those told for its size.
        """
        self._reap()
        posts: list[tuple[Send | Recv, Parts]] = [
            (op, self._outgoing(op, outgoing[op], sizes)) for op in batch if isinstance(op, Send)
        ]
        for op in (op for op in batch if isinstance(op, Recv)):
            key = (op.kind, op.to, sizes[op.mb])
            header = torch.empty(len(Header._fields), dtype=torch.int64, device=self._device)
            posted = self._posted[op] = Posted(header, {}, None, [], [])
            parts: Parts = [(header, _HEADER)]
            if key not in self._shapes:
                # Sends go before this wait: the peer may need them to get to its description.
                self._wait([*posts, (op, parts)])
                posts, parts = [], []
                posted.header_works.clear()  # a second wait for one handle hangs on gloo
                if not self._learn(op, key, header):
                    continue  # `take` says what came instead
            due = Header.of(op, self._shapes[key])
            message = empty_like_description(self._shapes[key], self._device)
            self._posted[op] = posted._replace(message=message, shapes=due.shapes)
            posts.append((op, [*parts, *((x, due.slot) for x in message.values())]))
        self._start(posts)

    def _outgoing(self, op: Send, message: Message, sizes: Sequence[Any]) -> Parts:
        """What goes over the wire: the header, the description the first time, the tensors."""
        key = (op.kind, op.to, sizes[op.mb])
        text = describe(message)
        first = key not in self._told
        told = self._told.setdefault(key, text)
        if not torch.equal(told, text):
            raise ValueError(
                f"{op}: the message is {read(text)}, but for microbatches of size {sizes[op.mb]!r} "
                f"it was {read(told)}; sizes must differ where shapes do"
            )
        header = Header.of(op, text, described=first)
        described: Parts = [(text.to(self._device), _DESCRIPTION)] if first else []
        numbers = torch.tensor(header, device=self._device)
        tensors = ((x.contiguous(), header.slot) for x in message.values())
        return [(numbers, _HEADER), *described, *tensors]

    def _learn(self, op: Recv, key: Any, header: Tensor) -> bool:
        """Receive the description that follows a header, if it is the one due."""
        came = Header(*header.tolist())
        if came.tag != _tag(op) or not came.described:
            return False
        text = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=self._device)
        self._wait([(op, [(text, _DESCRIPTION)])])
        self._shapes[key] = text.cpu()
        return True

    def _wait(self, posts: Sequence[tuple[Send | Recv, Parts]]) -> None:
        """Post all together and wait for the last tensor."""
        for work in self._start(posts):
            work.wait()

    def _start(self, posts: Sequence[tuple[Send | Recv, Parts]]) -> list[Any]:
        """Post all together and keep every handle; returns those of the last tensor.

        NCCL returns one handle for the batch, gloo one for each tensor.
        """
        flat = [(op, x, slot) for op, parts in posts for x, slot in parts]
        p2p = [
            dist.P2POp(
                dist.isend if isinstance(op, Send) else dist.irecv,
                x,
                self._ranks[op.peer],
                group=self._group,
                tag=slot,
            )
            for op, x, slot in flat
        ]
        works = list(dist.batch_isend_irecv(p2p)) if p2p else []
        each = [[work] for work in works] if len(works) == len(p2p) else [works] * len(p2p)
        for (op, x, slot), mine in zip(flat, each, strict=True):
            if isinstance(op, Send):
                self._sent.append((mine, x))
            elif slot == _HEADER:
                self._posted[op].header_works.extend(mine)
            elif slot >= _TENSORS:
                self._posted[op].works.extend(mine)
        return each[-1] if each else []

    def take(self, op: Recv) -> Message:
        """Wait for a posted message and compare its header.

        Raises:
            RuntimeError: another message came in its place, or one of other shapes.
        """
        posted = self._posted.pop(op)
        for work in posted.header_works:
            work.wait()
        came = Header(*posted.header.tolist())
        if came.tag != _tag(op):
            names = {number: name for name, number in _KINDS.items()}
            raise RuntimeError(
                f"stage received message {names.get(came.kind, came.kind)} of microbatch {came.mb} "
                f"for virtual stage {came.to} where {op} was due; sender and receiver run "
                "different schedules"
            )
        if came.shapes != posted.shapes:
            raise RuntimeError(
                f"{op}: the message has other shapes than messages of its size had; sender and "
                "receiver disagree on the sizes of microbatches"
            )
        for work in posted.works:
            work.wait()
        return posted.message

    def _reap(self) -> None:
        """Let go of tensors whose send is complete."""
        self._sent = [
            (works, x) for works, x in self._sent if not all(work.is_completed() for work in works)
        ]

    def drain(self) -> None:
        """Wait for every send."""
        for works, _ in self._sent:
            for work in works:
                work.wait()
        self._sent.clear()


def _tag(op: Send | Recv) -> tuple[int, int, int]:
    return _KINDS[op.kind], op.mb, op.to
