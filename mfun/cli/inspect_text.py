"""What `mfun inspect` prints."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from mfun.checkpoint.pieces import Piece
from mfun.cli.text import count, numbers, size
from mfun.inspect import Difference, Source, Statistics, Weight, Whole, statistics


def head(source: Source) -> Iterator[str]:
    """What it is, how large, and what its tensors are of."""
    index, paths = source.index, files_of(source.tensors.values())
    held = sum(one.nbytes for one in source.tensors.values())
    if index is not None:
        yield f"mfun checkpoint of step {index.step}, {index.consumed} samples: {source.path}"
        sizes = " x ".join(f"{k} {v}" for k, v in index.layout.items() if type(v) is int and v > 1)
        yield f"saved by {index.world} rank{'s' * (index.world > 1)}{sizes and f' ({sizes})'}"
    else:
        yield f"{source.kind}: {source.path}"
    yield f"{len(paths)} file{'s' * (len(paths) > 1)} of {size(held)}"
    for group, names in groups(source).items():
        whole = [source.tensors[name] for name in names]
        kinds = ", ".join(sorted({one.dtype for one in whole}))
        many = f"{len(whole)} tensor{'s' * (len(whole) > 1)}"
        yield (
            f"{group}: {count(sum(one.numel for one in whole))} elements in {many}, "
            f"{size(sum(one.nbytes for one in whole))}, {kinds}"
        )


def groups(source: Source) -> dict[str, list[str]]:
    """Names by what they are: parameters, and each kind of optimizer state; one group elsewhere."""
    if source.index is None:
        return {"tensors": [*source.tensors]}
    paths = {name.removeprefix("params.") for name in source.tensors if name.startswith("params.")}
    out: dict[str, list[str]] = {}
    for name in source.tensors:
        ends = [at for at in range(len(name)) if name[at] == "." and name[at + 1 :] in paths]
        out.setdefault(name[: ends[0]] if ends else "numbers", []).append(name)
    return out


def folded_lines(source: Source, names: Sequence[str]) -> Iterator[str]:
    """A line a tensor, or one for the equal tensors of many blocks: type, shape, cut, files."""
    rows: dict[Any, list[str]] = {}
    for name in names:
        one, match = source.tensors[name], re.fullmatch(r"(.*?\.)(\d+)(\..*)", name)
        about = (one.dtype, one.shape, one.spec, len(one.parts))
        key = (match[1], match[3], *about) if match else (name, *about)
        rows.setdefault(key, []).append(name)
    yield from table([_folded(source, key, held) for key, held in rows.items()])


def _folded(source: Source, key: Any, names: Sequence[str]) -> list[str]:
    one = source.tensors[names[0]]
    label = names[0]
    if len(names) > 1:
        start, end = key[0], key[1]
        label = f"{start}{numbers([int(n[len(start) : -len(end)]) for n in names])}{end}"
    paths = files_of(source.tensors[name] for name in names)
    pieces = f"{len(one.parts)} pieces, " if len(one.parts) > 1 else ""
    where = pieces + (paths[0] if len(paths) == 1 else f"{paths[0]} .. {paths[-1]}")
    return [label, one.dtype, f"{[*one.shape]}", one.spec, where]


def piece_lines(source: Source, names: Sequence[str]) -> Iterator[str]:
    """Each tensor, and below it which bytes of which file are which part of it."""
    for name in names:
        one = source.tensors[name]
        yield f"{name}  {one.dtype} {[*one.shape]}  {count(one.numel)}  {one.spec}".rstrip()
        for piece, weight in one.parts:
            end = weight.begin + weight.nbytes
            yield f"  {weight.path.name} bytes {weight.begin}-{end}: {span(piece)}"


def span(piece: Piece) -> str:
    """Which part of the whole a piece is.

    Example:
        >>> span(Piece(global_shape=(4, 6), start=(0, 3), box=(4, 3)))
        '[0:4, 3:6]'
        >>> span(Piece(global_shape=(4, 6), start=(0, 3), box=(4, 3), first=6, count=6))
        'elements 6-12 of [0:4, 3:6]'
    """
    box = ", ".join(f"{a}:{a + n}" for a, n in zip(piece.start, piece.box, strict=True))
    run = "" if piece.whole_box else f"elements {piece.first}-{piece.first + piece.count} of "
    return f"{run}[{box}]"


def stats_lines(source: Source, names: Sequence[str]) -> Iterator[str]:
    """The numbers of each tensor, as they are found."""
    width = max((len(name) for name in names), default=4)
    yield f"{'':<{width}}  {'norm':>10} {'mean':>10} {'std':>10} {'least':>10} {'most':>10}"
    trouble = 0
    for name in names:
        found = statistics(source.tensors[name])
        row = (found.norm, found.mean, found.std, found.least, found.most)
        notes = stats_notes(found)
        trouble += found.nan + found.inf > 0
        yield f"{name:<{width}}  {' '.join(f'{x:>10.4g}' for x in row)}  {notes}".rstrip()
    yield ""
    yield f"tensors with elements that are not finite: {trouble} of {len(names)}"


def stats_notes(found: Statistics) -> str:
    """What stands out.

    Example:
        >>> stats_notes(Statistics(0, 0, 0, 0, 0, nan=3, inf=0, zeros=9, rows=4, dead=1))
        '3 NaN, 1 of 4 rows zero'
    """
    notes = [f"{found.nan} NaN"] * (found.nan > 0) + [f"{found.inf} Inf"] * (found.inf > 0)
    notes += [f"{found.dead} of {found.rows} rows zero"] * (found.dead > 0)
    return ", ".join(notes)


def difference_line(one: Difference) -> str:
    """How one tensor differs."""
    if one.kind in ("values", "dtype"):
        types = f"{one.first} and {one.second}: " if one.kind == "dtype" else ""
        return (
            f"{one.name}: {types}{count(one.count)} element{'s' * (one.count != 1)} not equal, "
            f"by at most {one.most:.3g} ({one.relative:.2g} of the largest)"
        )
    both = " and ".join(filter(None, (one.first, one.second)))
    return f"{one.name}: {one.kind}: {both}"


def about_differences(first: Source, second: Source) -> dict[str, tuple[Any, Any]]:
    """What differs besides tensors: step, samples, settings, numbers of the optimizer."""
    a, b = first.index, second.index
    if a is None or b is None:
        return {}
    x, y = (
        {"step": i.step, "consumed": i.consumed, **_settings(i.config), **i.scalars} for i in (a, b)
    )
    return {key: (x.get(key), y.get(key)) for key in {**x, **y} if x.get(key) != y.get(key)}


def _settings(config: str) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, fields in tomllib.loads(config).items()
        for key, value in fields.items()
    }


def for_programs(source: Source, names: Sequence[str], stats: bool) -> dict[str, Any]:
    """Everything, as JSON values; a number that is not finite is null."""
    index = source.index
    about = {"step": index.step, "consumed": index.consumed, "world": index.world} if index else {}
    rows = {name: _row(source.tensors[name], stats) for name in names}
    return {"path": str(source.path), "kind": source.kind, **about, "tensors": rows}


def _row(one: Whole, stats: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"dtype": one.dtype, "shape": [*one.shape], "spec": one.spec}
    row["pieces"] = [_piece(piece, weight) for piece, weight in one.parts]
    if stats:
        found = attrs.asdict(statistics(one))
        row["stats"] = {k: v if math.isfinite(v) else None for k, v in found.items()}
    return row


def _piece(piece: Piece, weight: Weight) -> dict[str, Any]:
    return {
        "file": weight.path.name,
        "bytes": [weight.begin, weight.begin + weight.nbytes],
        "start": [*piece.start],
        "box": [*piece.box],
        "elements": [piece.first, piece.first + piece.count],
    }


def files_of(tensors: Any) -> list[str]:
    """Names of the files that tensors are in."""
    return sorted({weight.path.name for one in tensors for _, weight in one.parts})


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
