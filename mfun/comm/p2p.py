"""Tagged point-to-point messages between pipeline stages.

A message is a set of named tensors with a tag (kind, microbatch, receiving virtual stage). Every
message carries its tag, and the receiver compares it: a swapped microbatch is an error, not a wrong
number. Shapes are told once per (kind, receiver, size): the first message is preceded by a
description in JSON, later ones are not. A sent tensor is kept until its send was waited for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mfun.comm.world import Message
from mfun.schedule import Recv, Send

DESCRIPTION_BYTES = 4096
_KINDS = {"act": 0, "grad": 1}
Shapes = list[tuple[str, str, list[int]]]


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


def empty_like_description(description: Tensor, device: torch.device) -> Message:
    """Uninitialised tensors as described."""
    shapes: Shapes = json.loads(bytes(description.cpu().numpy()).decode())
    return {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        for name, dtype, shape in shapes
    }


def _header(op: Send | Recv, device: torch.device) -> Tensor:
    return torch.tensor([_KINDS[op.kind], op.mb, op.to], device=device)


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
        self._told: set[Any] = set()
        self._posted: dict[Recv, tuple[Tensor, Message, list[Any]]] = {}
        self._sent: list[tuple[Any, list[Tensor]]] = []

    def post(
        self, batch: Sequence[Send | Recv], outgoing: Mapping[Send, Message], sizes: Sequence[Any]
    ) -> None:
        """Start all messages of a batch together.

        Args:
            batch: the ops.
            outgoing: the tensors of each `Send`; not to be written to before `drain`.
            sizes: for each microbatch, what identifies its shapes: messages of equal (kind,
                receiver, size) have equal shapes.
        """
        self._reap()
        posts: list[tuple[Send | Recv, list[Tensor]]] = [
            (op, self._outgoing(op, outgoing[op], sizes)) for op in batch if isinstance(op, Send)
        ]
        for op in (op for op in batch if isinstance(op, Recv)):
            key = (op.kind, op.to, sizes[op.mb])
            if key not in self._shapes:
                # Sends go before this wait: the peer may need them to get to its description.
                text = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=self._device)
                for work in self._start([*posts, (op, [text])]):
                    work.wait()
                self._shapes[key], posts = text, []
            header = torch.empty(3, dtype=torch.int64, device=self._device)
            message = empty_like_description(self._shapes[key], self._device)
            self._posted[op] = (header, message, [])
            posts.append((op, [header, *message.values()]))
        self._start(posts)

    def _outgoing(self, op: Send, message: Message, sizes: Sequence[Any]) -> list[Tensor]:
        """What goes over the wire: the description the first time, the tag, the tensors."""
        key = (op.kind, op.to, sizes[op.mb])
        text = [] if key in self._told else [describe(message).to(self._device)]
        self._told.add(key)
        return [*text, _header(op, self._device), *(x.contiguous() for x in message.values())]

    def _start(self, posts: Sequence[tuple[Send | Recv, list[Tensor]]]) -> list[Any]:
        """Post all together and keep every handle; returns those of the last op.

        NCCL returns one handle for the batch, gloo one for each tensor.
        """
        p2p = [
            dist.P2POp(
                dist.isend if isinstance(op, Send) else dist.irecv,
                x,
                self._ranks[op.peer],
                group=self._group,
            )
            for op, tensors in posts
            for x in tensors
        ]
        works = list(dist.batch_isend_irecv(p2p)) if p2p else []
        coalesced = len(works) != len(p2p)
        mine: list[Any] = []
        for op, tensors in posts:
            mine = works if coalesced else [works.pop(0) for _ in tensors]
            if isinstance(op, Send):
                self._sent.extend((work, tensors) for work in mine)
            elif op in self._posted:
                self._posted[op][2].extend(mine)
        return mine

    def take(self, op: Recv) -> Message:
        """Wait for a posted message and compare its tag.

        Raises:
            RuntimeError: another message came in its place.
        """
        header, message, works = self._posted.pop(op)
        for work in works:
            work.wait()
        if not torch.equal(header, _header(op, self._device)):
            kind, mb, to = header.tolist()
            names = {number: name for name, number in _KINDS.items()}
            raise RuntimeError(
                f"stage received message {names.get(kind, kind)} of microbatch {mb} for virtual "
                f"stage {to} where {op} was due; sender and receiver run different schedules"
            )
        return message

    def _reap(self) -> None:
        """Let go of tensors whose send is complete."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]

    def drain(self) -> None:
        """Wait for every send."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
