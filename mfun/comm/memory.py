"""Memory that the ranks of one host share: how large pieces travel between processes on CPU.

gloo sends every byte through a socket to the same host: two copies by the kernel, and a thread that
takes a core from the computation. Here a rank copies what it has into a ring that all ranks of the
group have mapped, and says so in a message of 8 bytes; they read it, and sums are taken where the
summands lie. The messages are gloo's, so time-outs and lost ranks are errors as before; they carry
the number of the round, so that ranks which exchange in different orders are an error too.

Nobody asks whether a ring has room: a rank starts round k after it has read round k - GOING, thus
after every rank has started that one, having read round k - 2 GOING: whose slot it is, in a ring
of 2 GOING. The file is unlinked once it is mapped: ranks that are killed leave nothing.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

LEAST = 1 << 20
"""Bytes to the other ranks from which memory is used: below, messages are as fast."""
SLOT = 1 << 22
"""Bytes of a round."""
GOING = 4
"""Rounds that may be under way."""

FOLDER = "/dev/shm"

Rows = Sequence[Tensor] | Tensor
"""One tensor a rank."""


@attrs.define(eq=False)
class Round:
    """A slot's worth of an exchange under way.

    Args:
        memory: whose round it is.
        number: counted from 0.
        works: messages, sent and awaited.
        numbers: what the awaited messages say.
        take: reads the slot.
    """

    memory: HostMemory
    number: int
    works: list[Any]
    numbers: list[Tensor]
    take: Callable[[], None]

    def wait(self) -> None:
        """Read this round, and those before it."""
        while self.memory.going and self.memory.going[0].number <= self.number:
            self.memory.finish()


class HostMemory:
    """The rings of a process group; mapped at the first large piece, which all ranks have.

    Args:
        group: gloo's.
        ranks: its global ranks in the order of the axis.
        at: this rank's position.
    """

    def __init__(self, group: Any, ranks: Sequence[int], at: int) -> None:
        self.group, self.ranks, self.at = group, tuple(ranks), at
        self.others = [i for i in range(len(ranks)) if i != at]
        self.going: deque[Round] = deque()
        self.started = 0
        self._rings: Tensor | None = None
        self._tried = False

    def serves(self, x: Tensor) -> bool:
        """Whether pieces such as x travel through memory; the answer is the same on all ranks."""
        if x.device.type != "cpu" or x.nbytes * len(self.others) < LEAST:
            return False
        if not self._tried:
            self._rings, self._tried = self._map(), True
        return self._rings is not None

    def exchange(self, out: Rows, x: Rows) -> list[Round]:
        """Start to read what rank i has for this one into out[i]; x[i] is for rank i.

        Args:
            out: contiguous, one a rank; this rank's own is left as it is.
            x: likewise, all of one size; if all are one tensor, it is written once. The caller may
                change it after the call.

        Returns:
            Rounds to wait for.
        """
        into = [_bytes(row) for row in out]

        def take(rows: Sequence[Tensor], part: slice) -> None:
            for i in self.others:
                into[i][part].copy_(rows[i])

        return self._start(x, take)

    def add(self, out: Tensor, x: Rows) -> list[Round]:
        """Start to sum into `out`, in the order of ranks, what every rank has for this one.

        Args:
            out: contiguous; may be the tensor that is every row of x.
            x: as for `exchange`; the caller keeps this rank's own until it is read.

        Returns:
            Rounds to wait for.
        """
        own, into, of_own = _bytes(x[self.at]), _bytes(out), not _is_one(x)

        def take(rows: Sequence[Tensor], part: slice) -> None:
            rows = [own[part] if of_own and i == self.at else row for i, row in enumerate(rows)]
            first, second, *rest = (row.view(out.dtype) for row in rows)
            total = torch.add(first, second, out=into[part].view(out.dtype))
            for row in rest:
                total.add_(row)

        return self._start(x, take)

    def finish(self) -> None:
        """Read the oldest round.

        Raises:
            RuntimeError: another rank is at another round.
        """
        first = self.going.popleft()
        for work in first.works:
            work.wait()
        if any(int(number) != first.number for number in first.numbers):
            raise RuntimeError(
                f"ranks {self.ranks} exchange in different orders: rank {self.ranks[self.at]} is "
                f"at round {first.number} and the others at {[int(x) for x in first.numbers]}; "
                "every rank of a group must call the same collectives in the same order"
            )
        first.take()

    def _start(self, x: Rows, take: Callable[..., None]) -> list[Round]:
        one, rows = _is_one(x), [_bytes(row) for row in x]
        width = SLOT if one else SLOT // len(x) // 64 * 64
        first = 0 if one else self.at * width  # where the others have what is for this rank
        out = []
        for start in range(0, len(rows[0]), width):
            part = slice(start, min(start + width, len(rows[0])))
            slots = self._slots()
            for to in [0] if one else self.others:
                slots[self.at][to * width :][: part.stop - start].copy_(rows[to][part])
            have = [slot[first : first + part.stop - start] for slot in slots]
            out.append(self._tell(lambda have=have, part=part: take(have, part)))
        return out

    def _slots(self) -> list[Tensor]:
        """The next round's slot of every rank, of which this rank's is free."""
        while len(self.going) >= GOING:
            self.finish()
        assert self._rings is not None
        return list(self._rings[:, self.started % (2 * GOING)])

    def _tell(self, take: Callable[[], None]) -> Round:
        """Say that this round's slot is written."""
        number, others = torch.tensor([self.started]), [self.ranks[i] for i in self.others]
        numbers = [torch.empty_like(number) for _ in others]
        works = [
            dist.irecv(x, rank, group=self.group) for x, rank in zip(numbers, others, strict=True)
        ]
        works += [dist.isend(number, rank, group=self.group) for rank in others]
        self.going.append(Round(self, self.started, works, numbers, take))
        self.started += 1
        return self.going[-1]

    def _map(self) -> Tensor | None:
        """The rings, (ranks, 2 GOING, SLOT) bytes; None if ranks are apart or there is no room."""
        shape = (len(self.ranks), 2 * GOING, SLOT)
        size = shape[0] * shape[1] * shape[2]
        token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
        made = _made(_path(token), size) if self.at == 0 else None
        dist.broadcast(token, self.ranks[0], group=self.group)
        rings = made if self.at == 0 else _opened(_path(token), size)
        everywhere = torch.tensor([rings is not None], dtype=torch.uint8)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self.group)
        if made is not None:
            os.unlink(_path(token))
        return rings.view(shape) if rings is not None and everywhere else None


def _is_one(x: Rows) -> bool:
    """Whether every rank is sent the same tensor."""
    return isinstance(x, list) and all(row is x[0] for row in x)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


def _path(token: Tensor) -> str:
    return f"{FOLDER}/mfun-{bytes(token.numpy()).hex()}"


def _made(path: str, size: int) -> Tensor | None:
    """A new file of so many bytes, which are there: a file with holes would end the process."""
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, size)
        return _mapped(file, size)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(file)


def _opened(path: str, size: int) -> Tensor | None:
    """Another rank's file; None on another host, or where none was made."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        return _mapped(file, size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
