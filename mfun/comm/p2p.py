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
        self._exchange_descriptions(batch, outgoing, sizes)
        p2p: list[dist.P2POp] = []
        counts: list[tuple[Send | Recv, int, list[Tensor]]] = []
        for op in batch:
            if isinstance(op, Send):
                tensors = [x.contiguous() for x in outgoing[op].values()]
                start, header = dist.isend, _header(op, self._device)
            else:
                shapes = self._shapes[op.kind, op.to, sizes[op.mb]]
                message = empty_like_description(shapes, self._device)
                start, header = dist.irecv, torch.empty(3, dtype=torch.int64, device=self._device)
                tensors = list(message.values())
                self._posted[op] = (header, message, [])
            peer = self._ranks[op.peer]
            p2p += [dist.P2POp(start, x, peer, group=self._group) for x in (header, *tensors)]
            counts.append((op, 1 + len(tensors), [header, *tensors]))
        works = iter(dist.batch_isend_irecv(p2p))
        self._keep(counts, list(works), len(p2p))

    def _keep(
        self, counts: list[tuple[Send | Recv, int, list[Tensor]]], works: list[Any], total: int
    ) -> None:
        """Every handle is kept: NCCL returns one for the batch, gloo one for each tensor."""
        coalesced = len(works) != total
        for op, count, tensors in counts:
            mine = works if coalesced else [works.pop(0) for _ in range(count)]
            if isinstance(op, Recv):
                self._posted[op][2].extend(mine)
            else:
                self._sent.extend((work, tensors) for work in mine)

    def _exchange_descriptions(
        self, batch: Sequence[Send | Recv], outgoing: Mapping[Send, Message], sizes: Sequence[Any]
    ) -> None:
        """Tell and learn shapes not met before; sends first, so that no stages wait in a circle."""
        for op in batch:
            key = (op.kind, op.to, sizes[op.mb])
            if isinstance(op, Send) and key not in self._told:
                self._told.add(key)
                text = describe(outgoing[op]).to(self._device)
                work = dist.isend(text, self._ranks[op.peer], group=self._group)
                self._sent.append((work, [text]))
        for op in batch:
            key = (op.kind, op.to, sizes[op.mb])
            if isinstance(op, Recv) and key not in self._shapes:
                text = torch.empty(DESCRIPTION_BYTES, dtype=torch.uint8, device=self._device)
                dist.recv(text, self._ranks[op.peer], group=self._group)
                self._shapes[key] = text

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
