"""Covering arrays: few rows in which every pair of two fields' values stands together somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
Pair = tuple[tuple[str, str], ...]
Fields = Mapping[str, Sequence[str]]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """All pairs of fields with their values."""
    return set(combinations(row.items(), 2))


def wanted(
    fields: Fields, allowed: Callable[[Row], bool], related: Callable[[str, str], bool]
) -> set[Pair]:
    """Every pair of values of related fields that may stand together."""
    every = [
        ((a, x), (b, y))
        for a, b in combinations(fields, 2)
        if related(a, b)
        for x in fields[a]
        for y in fields[b]
    ]
    return {pair for pair in every if allowed(dict(pair))}


def covering(
    fields: Fields,
    allowed: Callable[[Row], bool],
    related: Callable[[str, str], bool] = lambda a, b: True,
    seed: int = 0,
    tries: int = 60,
) -> list[Row]:
    """Rows that cover all wanted pairs, greedily; the same for the same arguments.

    Args:
        fields: values of each field.
        allowed: of a row, or a part of one: whether it may be. What is forbidden must be
            forbidden by two fields together.
        related: whether the pairs of two fields are wanted.
        seed: another one gives other rows.
        tries: candidates for each row, of which the one with most new pairs is taken.
    """
    draw = random.Random(seed)
    left = wanted(fields, allowed, related)
    rows: list[Row] = []
    while left:
        candidates = [_candidate(fields, allowed, left, draw) for _ in range(tries)]
        rows.append(max(candidates, key=lambda row: len(pairs_of(row) & left)))
        left -= pairs_of(rows[-1])
    return rows


def _candidate(
    fields: Fields, allowed: Callable[[Row], bool], left: set[Pair], draw: random.Random
) -> Row:
    """One row around a pair that is not covered yet; each further value covers most new pairs."""
    row: Row = dict(draw.choice(sorted(left)))
    order = {name: i for i, name in enumerate(fields)}

    def gain(name: str, value: str) -> int:
        items = ([(other, row[other]), (name, value)] for other in row)
        return sum(tuple(sorted(two, key=lambda item: order[item[0]])) in left for two in items)

    for name in draw.sample(list(fields), len(fields)):
        if name not in row:
            gains = {v: gain(name, v) for v in fields[name] if allowed({**row, name: v})}
            best = max(gains.values())
            row[name] = draw.choice([value for value in gains if gains[value] == best])
    return {name: row[name] for name in fields}
