"""Every interleaving of the real streams, by exhaustion: one final state, and no deadlock.

The model here is written apart from `mfun.schedule.rendezvous`, which runs one interleaving only;
the two must agree, also on broken streams.
"""

from itertools import product

import pytest

from mfun.schedule import Recv, ScheduleError, Send, batches, check, plan, rendezvous

# A state is one pair a stage, (next step, messages of the current batch still open as positions in
# it), and one tuple a channel: the messages in its buffer.


def single(ops):
    """The stream with each message a batch of its own."""
    return [(op,) if isinstance(op, Send | Recv) else op for op in ops]


def start(steps):
    """Nothing has run, nothing is in a buffer."""
    return tuple((0, None) for _ in steps), ()


def channel(stage, op):
    """The ordered pair of stages that a message crosses."""
    return (stage, op.peer) if isinstance(op, Send) else (op.peer, stage)


def heads(steps, stages):
    """Per channel end, the first open message posted on it: (stage, position, op)."""
    found = {}
    for stage, (at, still) in enumerate(stages):
        for position in sorted(still or ()):
            op = steps[stage][at][position]
            found.setdefault((type(op), channel(stage, op)), (stage, position, op))
    return found


def closed(stages, *done):
    """The stages with these (stage, position) messages no longer open."""
    new = list(stages)
    for stage, position in done:
        at, still = new[stage]
        still = still - {position}
        new[stage] = (at, still) if still else (at + 1, None)
    return tuple(new)


def successors(steps, state, capacity):
    """All states one action away: compute, post a batch, or move one message."""
    stages, buffers = state
    for stage, (at, still) in enumerate(stages):
        if still is None and at < len(steps[stage]):
            step = steps[stage][at]
            new = (at, frozenset(range(len(step)))) if isinstance(step, tuple) else (at + 1, None)
            yield (*stages[:stage], new, *stages[stage + 1 :]), buffers
    first = heads(steps, stages)
    for (kind, pair), (stage, position, op) in first.items():
        held = [tag for p, tag in buffers if p == pair]
        if kind is Send and capacity == 0 and (Recv, pair) in first:
            other, there, taken = first[Recv, pair]
            assert op.tag == taken.tag
            yield closed(stages, (stage, position), (other, there)), buffers
        elif kind is Send and len(held) < capacity:
            yield closed(stages, (stage, position)), (*buffers, (pair, op.tag))
        elif kind is Recv and held:
            assert held[0] == op.tag
            rest = list(buffers)
            rest.remove((pair, held[0]))
            yield closed(stages, (stage, position)), tuple(rest)


def final_states(streams, capacity, batching=batches):
    """The states reached by any interleaving from which nothing can happen; how many in all."""
    steps = [list(batching(ops)) for ops in streams]
    first = start(steps)
    seen: set[tuple] = {first}
    todo: list[tuple] = [first]
    final: set[tuple] = set()
    while todo:
        state = todo.pop()
        # a channel holds one message at most, so the order inside `buffers` says nothing
        after = [(s, tuple(sorted(b))) for s, b in successors(steps, state, capacity)]
        if not after:
            final.add(state)
        for new in after:
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return final, len(seen)


def everything_done(streams):
    """The one state in which every stage is at its end and no buffer holds anything."""
    return tuple((len(list(batches(ops))), None) for ops in streams), ()


@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize(("stages", "microbatches"), list(product(range(1, 5), range(1, 5))))
def test_every_interleaving_of_1f1b_ends_the_same(stages, microbatches, capacity):
    """Sends that block until received (0), and channels that hold one message (1)."""
    streams = plan("1f1b" if stages > 1 else "none", stages, microbatches)
    final, _ = final_states(streams, capacity)
    assert final == {everything_done(streams)}


@pytest.mark.parametrize("capacity", [0, 1])
def test_every_interleaving_of_gpipe_ends_the_same(capacity):
    """The same for GPipe, three stages and three microbatches."""
    streams = plan("gpipe", 3, 3)
    assert final_states(streams, capacity)[0] == {everything_done(streams)}


SMALL = [
    *(
        ("interleaved", p, m, v)
        for p, m, v in ((1, 2, 2), (2, 1, 2), (2, 2, 2), (2, 2, 3), (3, 2, 2))
    ),
    *((name, p, m, 2) for name in ("dualpipev", "dualpipe") for p, m in ((1, 2), (2, 2), (2, 3))),
    ("looped-bfs", 2, 2, 2),
    ("dualpipe", 3, 2, 2),
]


@pytest.mark.parametrize("capacity", [0, 1])
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), SMALL)
def test_every_interleaving_of_several_chunks_ends_the_same(
    name, stages, microbatches, chunks, capacity
):
    """Loops, waves and two directions, where neighbours send to each other."""
    streams = plan(name, stages, microbatches, chunks=chunks)
    assert final_states(streams, capacity)[0] == {everything_done(streams)}


def test_one_message_at_a_time_hangs_in_every_interleaving():
    """The model can fail: unbatched, both stages of 1F1B end up in a send."""
    final, _ = final_states(plan("1f1b", 2, 3), 0, single)
    (stages, buffers) = next(iter(final))
    assert len(final) == 1 and not buffers
    assert all(still is not None for _, still in stages)


def channels_agree(streams):
    """Does every channel's k-th send carry the tag of its k-th receive?"""
    order = {Send: {}, Recv: {}}
    for stage, ops in enumerate(streams):
        for op in ops:
            if isinstance(op, Send | Recv):
                order[type(op)].setdefault(channel(stage, op), []).append(op.tag)
    return order[Send] == order[Recv]


def one_op_moved(streams):
    """All streams with one op of one stage at another place, if the channels still agree."""
    for stage, ops in enumerate(streams):
        for i, j in product(range(len(ops)), repeat=2):
            rest = [*ops[:i], *ops[i + 1 :]]
            moved = [*streams[:stage], [*rest[:j], ops[i], *rest[j:]], *streams[stage + 1 :]]
            if i != j and channels_agree(moved):
                yield moved


@pytest.mark.parametrize("sizes", [("1f1b", 2, 3), ("1f1b", 3, 2), ("gpipe", 3, 2)])
def test_one_run_decides_what_every_interleaving_does(sizes):
    """With any one op moved: one final state, which `rendezvous` finds; buffers only help."""
    verdicts = {True: 0, False: 0}
    for streams in one_op_moved([list(ops) for ops in plan(*sizes)]):
        final, _ = final_states(streams, 0)
        hangs = final != {everything_done(streams)}
        assert len(final) == 1
        stuck = {item.stage for item in rendezvous(streams)}
        stages, _ = next(iter(final))
        assert stuck == {s for s, (_, still) in enumerate(stages) if still is not None}
        assert bool(stuck) == hangs
        if not hangs:
            assert final_states(streams, 1)[0] == {everything_done(streams)}
        verdicts[hangs] += 1
    assert all(verdicts.values())


def test_check_refuses_every_moved_op_that_hangs():
    """Whatever the exhaustive model cannot finish, `check` does not accept."""
    hanging = 0
    for streams in one_op_moved([list(ops) for ops in plan("1f1b", 3, 2)]):
        if final_states(streams, 0)[0] != {everything_done(streams)}:
            hanging += 1
            with pytest.raises(ScheduleError):
                check(streams)
    assert hanging
