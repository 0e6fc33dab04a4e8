"""Every interleaving of the real streams, on the model of `Network.v`: counters and thresholds.

What a stage's next step waits for is worked out here from the streams alone: the n-th send on a
channel meets the n-th receive. A state says how many batches each stage has posted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from mfun.schedule import SCHEDULES, F, Recv, ScheduleError, Send, Sizes, plan
from mfun.schedule.ops import Message, Op
from proofs.claims import Claim, claim

Channel = tuple[int, int]
Needs = list[list[dict[int, int]]]
"""Per stage and batch: how many batches a peer must have posted before this one is."""


def gaps(ops: Sequence[Op]) -> list[list[Message]]:
    """The batches of a stage: what stands before, between and after its compute ops.

    Example:
        >>> from mfun.schedule import F
        >>> gaps([F(0), Send(0, to=1, kind="act", peer=1), F(1)])
        [[], [Send(act0>1)], []]
    """
    found: list[list[Message]] = [[]]
    for op in ops:
        if isinstance(op, Send | Recv):
            found[-1].append(op)
        else:
            found.append([])
    return found


def needs(streams: Sequence[Sequence[Op]], room: int = 0) -> Needs:
    """The thresholds of a set of streams, over channels that hold `room` messages.

    Batch k is posted once batch k - 1 is complete; one more, past the last, is the end.

    Raises:
        ValueError: a channel's n-th send and n-th receive are two messages.
    """
    batches = [gaps(ops) for ops in streams]
    ends: Mapping[type[Message], defaultdict[Channel, list[tuple[int, Message]]]]
    ends = {Send: defaultdict(list), Recv: defaultdict(list)}
    for stage, groups in enumerate(batches):
        for k, batch in enumerate(groups):
            for message in batch:
                pair = (stage, message.peer)
                if type(message) is Recv:
                    pair = (message.peer, stage)
                ends[type(message)][pair].append((k, message))
    for pair in {*ends[Send], *ends[Recv]}:
        tags = [[message.tag for _, message in ends[kind][pair]] for kind in (Send, Recv)]
        if tags[0] != tags[1]:
            raise ValueError(f"channel {pair}: sends {tags[0]}, receives {tags[1]}")
    found: Needs = [[{} for _ in range(len(groups) + 1)] for groups in batches]
    for kind, other, late in ((Send, Recv, room), (Recv, Send, 0)):
        for pair, messages in ends[kind].items():
            stage, peer = pair if kind is Send else pair[::-1]
            for n, (k, _) in enumerate(messages):
                if n >= late:
                    where = found[stage][k + 1]
                    posted = ends[other][pair][n - late][0] + 1
                    where[peer] = max(where.get(peer, 0), posted)
    return found


State = tuple[int, ...]


def steps(need: Needs, state: State) -> list[int]:
    """The stages that can post their next batch."""
    return [
        stage
        for stage, at in enumerate(state)
        if at < len(need[stage])
        and all(state[peer] >= count for peer, count in need[stage][at].items())
    ]


def explore(need: Needs) -> tuple[set[State], int]:
    """All states of all interleavings: those from which nothing goes on, and how many there are."""
    first: State = (0,) * len(need)
    seen: set[State] = {first}
    todo: list[State] = [first]
    final: set[State] = set()
    while todo:
        state = todo.pop()
        moves = steps(need, state)
        if not moves:
            final.add(state)
        for stage in moves:
            after = (*state[:stage], state[stage] + 1, *state[stage + 1 :])
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return final, len(seen)


def one_run(need: Needs) -> State:
    """Where a run ends that always takes the first stage that can move."""
    state = [0] * len(need)
    while moves := steps(need, tuple(state)):
        state[moves[0]] += 1
    return tuple(state)


def sizes(name: str, stages: int, microbatches: int) -> Iterator[tuple[int, int, int]]:
    """The sizes up to these that a schedule runs, with its number of chunks."""
    row = SCHEDULES[name]
    chunks = (row.chunks,) if row.chunks else (1, 2, 3)
    for p, m, v in product(range(1, stages + 1), range(1, microbatches + 1), chunks):
        try:
            row.place(Sizes(p, m, v))
        except ScheduleError:
            continue
        yield p, m, v


def every_interleaving(name: str, stages: int, microbatches: int, room: int) -> Iterator[str]:
    """What goes wrong in any interleaving of a schedule."""
    tried = 0
    for p, m, v in sizes(name, stages, microbatches):
        need = needs(plan(name, p, m, chunks=v), room)
        final, _ = explore(need)
        tried += 1
        if final != {tuple(map(len, need))}:
            yield f"{name}, {p} stages, {m} microbatches, {v} chunks: can end in {sorted(final)}"
    if not tried:
        yield f"{name} ran no sizes up to {stages} stages and {microbatches} microbatches"


def program(p: int, m: int, stage: int) -> list[tuple[bool, int]]:
    """[program] of `OneFOneB.v`: (whether backward, microbatch).

    Example:
        >>> program(2, 2, 0)
        [(False, 0), (False, 1), (True, 0), (True, 1)]
    """
    warmup = min(max(p - stage - 1, 0), m)
    pairs = [op for i in range(m - warmup) for op in ((False, warmup + i), (True, i))]
    first = [(False, i) for i in range(warmup)]
    return [*first, *pairs, *((True, i) for i in range(m - warmup, m))]


def as_proved(stages: int, microbatches: int) -> Iterator[str]:
    """Where the generator of 1F1B is not the theorem's program."""
    generate = SCHEDULES["1f1b"].ops
    for p, m in product(range(1, stages + 1), range(1, microbatches + 1)):
        for stage in range(p):
            ops = [(not isinstance(op, F), op.mb) for op in generate(stage, Sizes(p, m))]
            if ops != program(p, m, stage):
                yield f"1f1b, stage {stage} of {p}, {m} microbatches: {ops}"


def one_run_each(stages: int, microbatches: int) -> Iterator[str]:
    """1F1B up to these sizes, by one run."""
    for p, m in product(range(1, stages + 1), range(1, microbatches + 1)):
        need = needs(plan("1f1b", p, m))
        if one_run(need) != tuple(map(len, need)):
            yield f"1f1b, {p} stages, {m} microbatches: stuck at {one_run(need)}"


def claims(stages: int = 4, microbatches: int = 6) -> Iterator[Claim]:
    """All schedules by every interleaving on small sizes; 1F1B by one run on large ones."""
    for name in SCHEDULES:
        for room in (0, 1):
            says = f"{name}: every interleaving ends at the end, channels hold {room}"
            yield claim(says, every_interleaving(name, stages, microbatches, room))
    yield claim("1f1b: the generator is the theorem's program", as_proved(12, 16))
    yield claim("1f1b: up to 12 stages and 16 microbatches, by one run", one_run_each(12, 16))
