"""Pieces through memory that ranks of one host share: the values of messages, to the bit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pool import Pool, RankError

from mfun.comm import ProcessWorld, distribute, finish, memory
from mfun.comm.exchange import start_exchange, start_sum, wait
from mfun.comm.kernels import on_group
from mfun.mesh import Mesh


@contextmanager
def small(slot: int = 384, folder: str = memory.FOLDER) -> Iterator[None]:
    """Pieces of any size go through memory, in slots so small that one takes many."""
    before = memory.LEAST, memory.SLOT, memory.FOLDER
    memory.LEAST, memory.SLOT, memory.FOLDER = 1, slot, folder
    try:
        yield
    finally:
        memory.LEAST, memory.SLOT, memory.FOLDER = before


CASES = [
    ("all_reduce", ()),
    ("gather", (-2,)),
    ("gather", (-1,)),
    ("reduce_scatter", (-2,)),
    ("reduce_scatter", (-1,)),
    ("all_to_all", (-2, -1)),
    ("max", ()),
]
DTYPES = [torch.float64, torch.bfloat16, torch.uint8]


def values(rank: int, world: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """Rank r's matrix; small integers, of which every order of summation is exact."""
    numbers = torch.arange(2 * world * world * width).reshape(2 * world, world * width)
    return ((numbers * (rank + 3)) % 7).to(dtype)


def by_hand(name: str, params: tuple[int, ...], every: list[torch.Tensor], rank: int) -> Any:
    """What the name means, on all ranks' matrices."""
    world = len(every)
    match name, params:
        case "all_reduce", ():
            return sum(every[1:], every[0])
        case "max", ():
            return torch.stack(every).amax(0)
        case "gather", (dim,):
            return torch.cat(every, dim)
        case "reduce_scatter", (dim,):
            return sum(every[1:], every[0]).chunk(world, dim)[rank]
        case _:
            return torch.cat([x.chunk(world, params[0])[rank] for x in every], params[1])


def every_case(rank: int, world: int, folder: str) -> tuple[int, bool, list[str]]:
    """All cases in turn on one group; the wrong ones."""
    wrong = []
    with small(folder=folder):
        axis = distribute(Mesh(dp=world)).dp
        for width in (1, 23):
            for dtype in DTYPES:
                every = [values(r, world, dtype, width) for r in range(world)]
                for name, params in CASES:
                    have = on_group(name, every[rank].clone(), axis, params)
                    if not torch.equal(have, by_hand(name, params, every, rank)):
                        wrong.append(f"{name}{params} {dtype} {width}")
        assert axis.memory is not None
        return axis.memory.started, axis.memory.serves(torch.ones(1)), wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_collectives_through_memory(pool: Pool, world: int) -> None:
    """Of every dtype, over slots and rings many times, as by hand."""
    for started, serves, wrong in pool.run(every_case, world, memory.FOLDER, world=world):
        assert serves
        assert started > 4 * memory.GOING
        assert wrong == []


def test_without_memory_messages_serve(pool: Pool) -> None:
    """A folder that is not there, as on another host: the same values, by gloo."""
    for started, serves, wrong in pool.run(every_case, 2, "/nowhere"):
        assert (started, serves, wrong) == (0, False, [])


def no_room(rank: int) -> tuple[bool, list[str]]:
    """One rank's file cannot have its bytes."""

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    before = os.posix_fallocate
    os.posix_fallocate = full
    try:
        with small():
            axis = distribute(Mesh(dp=2)).dp
            x = torch.arange(4.0) + rank
            wait(start_sum(x, axis))
    finally:
        os.posix_fallocate = before
    assert axis.memory is not None
    left = [name for name in os.listdir(memory.FOLDER) if name.startswith("mfun-")]
    return axis.memory.serves(x), [*map(str, x.tolist()), *left]


def test_no_room_is_seen_before_it_is_used(pool: Pool) -> None:
    """A file with holes would end a process with SIGBUS when it is written to."""
    for serves, rest in pool.run(no_room):
        assert not serves
        assert rest[:4] == ["1.0", "3.0", "5.0", "7.0"]


def in_flight(rank: int) -> list[bool]:
    """More sums started than may be under way, waited for from the last; and rounding in order."""
    with small():
        axis = distribute(Mesh(dp=3)).dp
        sums = [torch.full((100 + 7 * i,), float(i + rank)) for i in range(9)]
        works = [start_sum(x, axis) for x in sums]
        for work in reversed(works):
            wait(work)
        good = [bool((x == 3 * i + 3).all()) for i, x in enumerate(sums)]
        # 1e16 + 1 - 1e16 is 0 in this order of ranks, and 1 in others
        x = torch.full((4,), [1e16, 1.0, -1e16][rank], dtype=torch.float64)
        wait(start_sum(x, axis))
        return [*good, bool((x == 0).all())]


def test_many_sums_under_way(pool: Pool) -> None:
    """A full ring reads the oldest; sums are in the order of ranks on every rank."""
    for good in pool.run(in_flight, world=3):
        assert good == [True] * 10


def changed_after(rank: int) -> bool:
    """What is sent to all may be overwritten once the call returns."""
    with small():
        axis = distribute(Mesh(dp=2)).dp
        own = torch.full((50,), float(rank))
        out = torch.zeros(2, 50)
        works = start_exchange(out, [own] * 2, axis)
        own.fill_(99)
        time.sleep(0.05 * rank)
        wait(works)
        return bool((out[1 - rank] == 1 - rank).all())


def test_the_caller_may_write_on(pool: Pool) -> None:
    """The ring has the values."""
    assert pool.run(changed_after) == [True, True]


def out_of_step(rank: int) -> None:
    """Rank 1 leaves one collective out."""
    with small():
        axis = distribute(Mesh(dp=2)).dp
        for _ in range(2 - rank):
            wait(start_sum(torch.ones(8), axis))
        assert axis.memory is not None
        axis.memory.started += rank  # it counts another round than the message that comes
        wait(start_sum(torch.ones(8), axis))


def test_ranks_out_of_step_are_an_error(pool: Pool) -> None:
    """Not a wrong sum."""
    with pytest.raises(RankError, match=r"in different orders: rank [01] is at round"):
        pool.run(out_of_step, limit=20.0)


def worlds(rank: int) -> list[bool]:
    """A world's bucket operations over memory, beside those over messages."""
    out = []
    x = torch.randn(4096, generator=torch.Generator().manual_seed(rank))
    results = []
    for on_host in (False, True):
        with small():
            world = ProcessWorld(distribute(Mesh(dp=2), on_host=on_host))
            total = finish(world.all_reduce(x.clone(), ("dp",)))
            piece = finish(world.reduce_scatter(x.clone(), ("dp",), "mean"))
            whole = finish(world.gather(torch.empty(8192), x.clone(), ("dp",)))
            wide = finish(world.reduce_scatter(x.bfloat16(), ("dp",), wide=True))
            memory_ = world.groups.dp.memory
            out.append((memory_ is not None and memory_.started > 0) == on_host)
            results.append([total, piece, whole, wide])
    return [*out, *(torch.equal(a, b) for a, b in zip(*results, strict=True))]


def test_buckets_through_memory(pool: Pool) -> None:
    """Bitwise what messages give, of two ranks."""
    assert pool.run(worlds) == [[True] * 6] * 2


def test_nothing_is_left_behind() -> None:
    """The file has no name once it is mapped; after all the above."""
    mine = [name for name in os.listdir(memory.FOLDER) if name.startswith("mfun-")]
    assert mine == []
