"""Messages between pipeline stages on two real ranks: they arrive whole, and as what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool, RankError
from torch import Tensor

from mfun.comm import distribute
from mfun.comm.p2p import Header, Transport, describe
from mfun.mesh import Mesh
from mfun.schedule import Recv, Send

SHAPES = {"h": (2, 3), "extra": (1,)}


def message(mb: int, scale: float = 1.0) -> dict[str, Tensor]:
    """A message known by its microbatch; one of its tensors is not contiguous."""
    h = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).T + 10 * mb
    return {"h": h * scale, "extra": torch.tensor([mb])}


def exchange(rank: int, microbatches: int) -> list[Any]:
    """Activations down, gradients up, in the batches of a two-stage 1F1B; sizes by microbatch."""
    way = transport()
    sizes = [0] * microbatches
    out: list[Any] = []
    if rank == 0:
        for mb in range(microbatches):
            send = Send(mb, to=1, kind="act", peer=1)
            ops: list[Any] = [send]
            if mb:
                ops.append(Recv(mb - 1, to=0, kind="grad", peer=1))
            way.post(ops, {send: message(mb)}, sizes)
            out += [way.take(op) for op in ops[1:]]
        last = Recv(microbatches - 1, to=0, kind="grad", peer=1)
        way.post([last], {}, sizes)
        out.append(way.take(last))
    else:
        recv = Recv(0, to=1, kind="act", peer=0)
        way.post([recv], {}, sizes)
        out.append(way.take(recv))
        for mb in range(microbatches):
            send = Send(mb, to=0, kind="grad", peer=0)
            ops = [send]
            if mb + 1 < microbatches:
                ops.append(Recv(mb + 1, to=1, kind="act", peer=0))
            way.post(ops, {send: message(mb, -1.0)}, sizes)
            out += [way.take(op) for op in ops[1:]]
    way.drain()
    return out


def transport() -> Transport:
    axis = distribute(Mesh(pp=2)).pp
    return Transport(axis.group, axis.ranks, torch.device("cpu"))


def test_messages_both_ways(pool: Pool) -> None:
    """Five microbatches: names, shapes, dtypes and numbers arrive; each stage gets its kind."""
    grads, acts = pool.run(exchange, 5)
    for got, scale in ((acts, 1.0), (grads, -1.0)):
        assert len(got) == 5
        for mb, found in enumerate(got):
            assert list(found) == list(SHAPES)
            assert torch.equal(found["h"], message(mb, scale)["h"])
            assert found["extra"].tolist() == [mb]
            assert found["extra"].dtype == torch.int64


def resized(rank: int) -> list[Any]:
    """The last microbatch is smaller: its size says so, and its shapes are told anew."""
    way = transport()
    sizes, out = [4, 4, 3, 4], []
    for mb, size in enumerate(sizes):
        send, recv = Send(mb, to=1, kind="act", peer=1), Recv(mb, to=1, kind="act", peer=0)
        if rank == 0:
            way.post([send], {send: {"h": torch.full((size, 2), float(mb))}}, sizes)
        else:
            way.post([recv], {}, sizes)
            out.append(way.take(recv)["h"])
    way.drain()
    return out


def test_messages_of_two_sizes(pool: Pool) -> None:
    """Shapes belong to a microbatch's size, not to the first message."""
    got = pool.run(resized)[1]
    assert [tuple(x.shape) for x in got] == [(4, 2), (4, 2), (3, 2), (4, 2)]
    assert [float(x[0, 0]) for x in got] == [0, 1, 2, 3]


def grouped(rank: int, together: bool) -> list[Any]:
    """Two first messages to one peer, in one batch or in two on the other side."""
    way = transport()
    sends = [Send(mb, to=2 * mb + 1, kind="act", peer=1) for mb in (0, 1)]
    recvs = [Recv(mb, to=2 * mb + 1, kind="act", peer=0) for mb in (0, 1)]
    out = []
    if rank == 0:
        bodies = {op: {"h": torch.full((2 + op.mb,), float(op.mb))} for op in sends}
        for batch in [sends] if together else [[op] for op in sends]:
            way.post(batch, bodies, [0, 0])
    else:
        for batch in [[op] for op in recvs] if together else [recvs]:
            way.post(batch, {}, [0, 0])
            out += [way.take(op)["h"].tolist() for op in batch]
    way.drain()
    return out


@pytest.mark.parametrize("together", [True, False])
def test_batches_need_not_match(pool: Pool, together: bool) -> None:
    """What one side posts as one batch the other may post as two, from the first message on."""
    assert pool.run(grouped, together)[1] == [[0, 0], [1, 1, 1]]


def mistagged(rank: int, sent: tuple[Any, ...], due: tuple[Any, ...]) -> Any:
    """A good message, so that shapes are known, then one that is not the one due."""
    way = transport()
    first = (Send(0, to=1, kind="act", peer=1), Recv(0, to=1, kind="act", peer=0))
    then = (Send(*sent, peer=1), Recv(*due, peer=0))
    for send, recv in (first, then):
        if rank == 0:
            way.post([send], {send: message(send.mb)}, [0] * 4)
        else:
            way.post([recv], {}, [0] * 4)
            way.take(recv)
    way.drain()


@pytest.mark.parametrize("due", [(1, 1, "act"), (1, 2, "act")])
@pytest.mark.parametrize("sent", [(2, 1, "act"), (1, 1, "grad"), (1, 3, "act")])
def test_message_with_another_tag_is_refused(
    pool: Pool, sent: tuple[Any, ...], due: tuple[Any, ...]
) -> None:
    """Another microbatch, kind or virtual stage than is due raises on the receiver, by name.

    Whether the shapes of what is sent, and of what is due, were told before or not.
    """
    kind = f"message {sent[2]} of microbatch {sent[0]} for virtual stage {sent[1]} where "
    with pytest.raises(RankError, match="rank 1 raised") as found:
        pool.run(mistagged, sent, due, limit=20.0)
    assert f"{kind}Recv(act1>{due[1]}) was due" in str(found.value)
    assert "sender and receiver run different schedules" in str(found.value)


def missized(rank: int, sizes: list[list[int]], rows: list[int]) -> Any:
    """Messages of so many rows, where each side has its own idea of the microbatches' sizes."""
    way = transport()
    for mb, n in enumerate(rows):
        send, recv = Send(mb, to=1, kind="act", peer=1), Recv(mb, to=1, kind="act", peer=0)
        if rank == 0:
            way.post([send], {send: {"h": torch.ones(n, 2)}}, sizes[0])
        else:
            way.post([recv], {}, sizes[1])
            way.take(recv)
    way.drain()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[4, 3], [4, 4]], r"rank 1 raised(?s:.*)Recv\(act1>1\): the message has other shapes"),
        ([[4, 4], [4, 3]], r"rank 0 raised(?s:.*)Send\(act1>1\): the message is .*\[3, 2\]"),
        ([[4, 4], [4, 4]], r"rank 0 raised(?s:.*)sizes must differ where shapes do"),
    ],
)
def test_message_of_another_size_is_refused(pool: Pool, sizes: Any, message: str) -> None:
    """Ranks that disagree on a size find out by a message, not by an abort or a wait."""
    with pytest.raises(RankError, match=message):
        pool.run(missized, sizes, [4, 3], limit=20.0)


def untold(rank: int) -> None:
    """The receiver has not met this size, the sender thinks that it has."""
    missized(rank, [[4, 4], [4, 5]], [4, 4])


def test_message_without_its_description_is_refused(pool: Pool) -> None:
    """A receiver does not wait for a description that no one sends."""
    with pytest.raises(RankError, match=r"rank 1 raised(?s:.*)disagree on the sizes"):
        pool.run(untold, limit=20.0)


def kept(rank: int) -> list[float]:
    """The sender drops and overwrites what it can after posting; nothing waits in between."""
    way = transport()
    out = []
    for mb in range(6):
        send, recv = Send(mb, to=1, kind="act", peer=1), Recv(mb, to=1, kind="act", peer=0)
        if rank == 0:
            body = {send: {"h": torch.full((1 << 18,), float(mb)).view(512, 512).T}}
            way.post([send], body, [0] * 6)
            del body
            torch.full((1 << 18,), -1.0)  # takes the freed memory, if it was freed too early
        else:
            way.post([recv], {}, [0] * 6)
            out.append(float(way.take(recv)["h"].sum()) / (1 << 18))
    way.drain()
    return out


def test_message_is_kept_until_sent(pool: Pool) -> None:
    """Large, temporary, transposed tensors arrive whole though the sender let go of them."""
    assert pool.run(kept)[1] == [0, 1, 2, 3, 4, 5]


def test_slots_are_tags_that_gloo_takes_and_messages_seldom_share() -> None:
    """Tags of 32 bits with a sign, apart from those of headers and descriptions."""
    description = describe(message(0))
    sends = [Send(mb, to=1, kind=k, peer=1) for k in ("act", "grad") for mb in range(1000)]
    slots = [Header.of(send, description).slot for send in sends]
    assert len(set(slots)) == len(slots)
    assert min(slots) >= 2 and max(slots) < 2**31
    received = Header.of(Recv(3, to=1, kind="act", peer=0), description, described=True)
    assert received.slot == slots[3]  # on both ends, whether a description goes along or not
