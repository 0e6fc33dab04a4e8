"""The safetensors format: a header of names, types and places, then every tensor's bytes.

    8 bytes   length n of the header, little-endian
    n bytes   JSON {name: {"dtype", "shape", "data_offsets": [begin, end]}}, then spaces
    the rest  tensors, dense and row-major, one after the other

Everything that a header says is checked against the file's size before anything is read by it, so
that no crafted file leads to memory that was never meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

HEADER_LIMIT = 100_000_000
"""Bytes of a header beyond which the official reader refuses a file."""
PAGE = 4096
"""Data begin at a multiple of it, so that large tensors share no page with their neighbours."""

TYPES = MappingProxyType(
    {
        "float64": ("F64", 8),
        "float32": ("F32", 4),
        "float16": ("F16", 2),
        "bfloat16": ("BF16", 2),
        "float8_e4m3fn": ("F8_E4M3", 1),
        "float8_e5m2": ("F8_E5M2", 1),
        "complex64": ("C64", 8),
        "int64": ("I64", 8),
        "int32": ("I32", 4),
        "int16": ("I16", 2),
        "int8": ("I8", 1),
        "uint64": ("U64", 8),
        "uint32": ("U32", 4),
        "uint16": ("U16", 2),
        "uint8": ("U8", 1),
        "bool": ("BOOL", 1),
    }
)
"""torch's name of a type -> the format's, and the bytes of an element."""
_NAMES = {code: name for name, (code, _) in TYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or loaded; the message says why and what to do."""


class Stored(NamedTuple):
    """One tensor of a file: torch's name of its type, its shape, and its bytes [begin, end)."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """The beginning of a file that holds these tensors, and the order of their bytes in it.

    The widest types come first and of these the largest tensors, which keeps all of them aligned.

    Args:
        tensors: name -> (torch's name of the type, shape).
        metadata: texts for other tools.

    Raises:
        CheckpointError: a type that the format does not know, or a header that no reader accepts.

    Example:
        >>> start, order = header({"a": ("bool", (3,)), "b": ("float32", (2, 2))})
        >>> order, len(start) % PAGE, start[8:70]
        (['b', 'a'], 0, b'{"b":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"a":{')
    """
    for name, (dtype, _) in tensors.items():
        if dtype not in TYPES:
            raise CheckpointError(f"{name} is of type {dtype}, which safetensors does not hold")
    size = {name: math.prod(shape) * TYPES[dtype][1] for name, (dtype, shape) in tensors.items()}
    order = sorted(tensors, key=lambda name: (-TYPES[tensors[name][0]][1], -size[name], name))
    rows: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        dtype, shape = tensors[name]
        place = [at, at + size[name]]
        rows[name] = {"dtype": TYPES[dtype][0], "shape": [*shape], "data_offsets": place}
        at = place[1]
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(
            f"a file would have a header of {len(text)} bytes and readers accept {HEADER_LIMIT}: "
            "give the rank fewer or shorter tensor names"
        )
    return len(text).to_bytes(8, "little") + text, order


def read_header(path: Path) -> tuple[dict[str, Stored], bytes]:
    """The tensors of a safetensors file by name, and the bytes before their data.

    Raises:
        CheckpointError: naming the file and what is wrong with it: a length that is not the file's,
            tensors that overlap or leave a hole, bytes that do not fit the shape, names that stand
            twice, unknown types, JSON that is none.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise _refused(path, f"its header should have {length} bytes, the file has {size}")
        if length > HEADER_LIMIT:
            raise _refused(path, f"its header has {length} bytes, readers accept {HEADER_LIMIT}")
        text = file.read(length)
    rows = strict_json(text, path)
    if not isinstance(rows, dict):
        raise _refused(path, "its header is no JSON object")
    _check_metadata(rows.pop("__metadata__", {}), path)
    out = {name: _stored(name, row, 8 + length, path) for name, row in rows.items()}
    _check_places(out, 8 + length, size, path)
    return out, start + text


def strict_json(text: bytes, path: Path) -> Any:
    """What JSON says, if it says it once: no key twice, no NaN, nothing nested without end.

    Raises:
        CheckpointError: naming the file.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands twice")
        return found

    def never(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=never)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"it is not JSON as it should be ({error})") from error


def _refused(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {problem}. It was cut short, altered, or never was what its name "
        "says; use another copy, or resume from another checkpoint"
    )


def _check_metadata(metadata: Any, path: Path) -> None:
    plain = isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())
    if not plain:
        raise _refused(path, "__metadata__ holds something else than texts")


def _stored(name: str, row: Any, start: int, path: Path) -> Stored:
    """One row of a header, if its bytes are those of its shape."""
    if not isinstance(row, dict) or row.keys() != {"dtype", "shape", "data_offsets"}:
        raise _refused(path, f"{name} has not exactly dtype, shape and data_offsets")
    code, shape, place = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(code, str) or code not in _NAMES:
        raise _refused(path, f"{name} is of the unknown type {code!r}")
    if not (_counts(shape) and _counts(place) and len(place) == 2 and place[0] <= place[1]):
        raise _refused(path, f"{name} has shape {shape!r} and data_offsets {place!r}")
    dtype, (begin, end) = _NAMES[code], place
    if math.prod(shape) * TYPES[dtype][1] != end - begin:
        raise _refused(path, f"{name} of shape {shape} and type {code} has {end - begin} bytes")
    return Stored(dtype, tuple(shape), start + begin, start + end)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and n >= 0 for n in values)


def _check_places(tensors: Mapping[str, Stored], start: int, size: int, path: Path) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    at = start
    for name, one in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if one.begin != at:
            what = "overlaps the tensor before it" if one.begin < at else "leaves a hole before it"
            raise _refused(path, f"{name} {what}")
        at = one.end
    if at != size:
        raise _refused(path, f"its tensors end at byte {at} of {size}")
