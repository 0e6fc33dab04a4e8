"""Numbers and lists as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from mfun.config import PRESETS, Config, mesh


def count(number: float, unit: str = "") -> str:
    """A number with three digits and a suffix.

    Example:
        >>> count(824320), count(12), count(8.03e9), count(999999)
        ('824 k', '12', '8.03 G', '1.00 M')
    """
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            return f"{_three(number / limit)} {suffix}{unit}"
    text = f"{number:g}" if number == int(number) else _three(number)
    return f"{text} {unit}".rstrip()


def _three(number: float) -> str:
    return (
        f"{number:.2f}"
        if number < 9.995
        else f"{number:.1f}"
        if number < 99.95
        else f"{number:.0f}"
    )


def size(number: float) -> str:
    """Bytes, in powers of 1024.

    Example:
        >>> size(512), size(3 * 2**30), size(1536)
        ('512 B', '3.00 GiB', '1.50 KiB')
    """
    for power, suffix in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 2**power:
            return f"{_three(number / 2**power)} {suffix}"
    return f"{number:g} B"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> duration(59.6), duration(3725)
        ('1:00', '1:02:05')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def numbers(values: Sequence[int]) -> str:
    """Whole numbers with runs joined.

    Example:
        >>> numbers([0, 1, 2, 3, 7, 9, 10])
        '0-3,7,9-10'
    """
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def ranks_text(config: Config) -> str:
    """The layout in short, with how many ranks it is.

    Example:
        >>> ranks_text(PRESETS["tiny"]), ranks_text(PRESETS["gpt2"])
        ('tp 2 x pp 2 = 4 ranks', '1 rank')
    """
    world = mesh(config).world
    return f"{axes_text(config)} = {world} ranks" if world > 1 else "1 rank"


def axes_text(config: Config) -> str:
    """The axes in use: `tp 2 x pp 2`.

    Example:
        >>> axes_text(PRESETS["tiny"])
        'tp 2 x pp 2'
    """
    parallel = config.parallel
    used = [
        f"{axis} {getattr(parallel, axis)}"
        for axis in ("tp", "cp", "ep", "dp", "pp")
        if getattr(parallel, axis) > 1
    ]
    return " x ".join(used) or "one rank"


def presets_text() -> str:
    """One line a preset: its model and layout."""
    rows = []
    for name, config in PRESETS.items():
        model = config.model
        shape = f"{model.layers} x {model.hidden}, vocab {model.vocab}, {model.seq_len} tokens"
        rows.append(f"  {name:<14} {shape:<40} {axes_text(config)}")
    return "\n".join(rows)
