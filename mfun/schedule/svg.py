"""The picture of a schedule as SVG: a row a stage, time to the right, a colour a kind of op."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

import attrs

from mfun.schedule.ops import ScheduleError
from mfun.schedule.timing import Event, Timing

COLOURS = {
    "F": (91, 143, 214),
    "Recompute": (140, 130, 190),
    "I": (240, 150, 70),
    "W": (120, 190, 110),
    "B": (222, 130, 140),
    "Reduce": (70, 70, 70),
    "Gather": (170, 110, 40),
    "Offload": (0, 140, 140),
    "Reload": (0, 140, 140),
}
MEANING = {
    "F": "forward",
    "Recompute": "forward again",
    "I": "backward to inputs",
    "W": "weights",
    "B": "whole backward",
    "Reduce": "gradients",
    "Gather": "parameters",
    "Offload": "to host",
    "Reload": "from host",
}
CHUNKED = ("F", "Recompute", "I", "W", "B")
"""Kinds whose colour tells the chunk."""
ROW, LEFT, TOP, RIGHT = 26, 64, 58, 150
LARGEST, PAGE, WIDEST = 30, 1300, 4000
"""Pixels: of the shortest op at most; of all time; of all time where numbers need more room."""
DIGIT = 5.6
"""Pixels that a digit in a cell takes."""
SHADES = 8
"""Boxes of the legend at most, from the first chunk's to the last's."""
BAR = 4
"""Height of what runs beside, at the row's lower edge."""
MOST = 100_000
"""Ops in a picture at most: 20 MB."""


@attrs.frozen
class _Scale:
    """From time to pixels."""

    unit: float

    def x(self, time: float) -> float:
        return round(LEFT + time * self.unit, 2)


def to_svg(timing: Timing, title: str) -> str:
    """A schedule as SVG: cells to scale with microbatch numbers, a darker shade for a later chunk.

    Hovering over a cell tells the op and its times. Nothing outside the file is used.

    Args:
      timing: of `simulate_time`.
      title: what it is a picture of; how much is idle, and the peak, are added.
    Returns: the document.
    Raises:
      ScheduleError: more ops than can be looked at.
    Example:
      >>> from mfun.schedule.check import plan
      >>> from mfun.schedule.clock import simulate_time
      >>> print(to_svg(simulate_time(plan("1f1b", 2, 2)), "1f1b").splitlines()[-1])
      </svg>
    """
    if (count := len(timing.events) + len(timing.beside)) > MOST:
        raise ScheduleError(
            f"{count} ops are too many for a picture (at most {MOST}); a schedule "
            "repeats itself, so draw fewer microbatches"
        )
    scale = _scale(timing)
    bottom = TOP + ROW * len(timing.busy)
    legend, end = _legend(timing, bottom + 44)
    width = round(max(scale.x(timing.makespan) + RIGHT, LEFT + 560, end))
    parts = [
        *_head(width, bottom + 62, title, timing),
        *_rows(timing, scale),
        *_cells(timing, scale),
        *_bars(timing, scale),
        *_axis(timing, scale, bottom),
        *legend,
        "</svg>\n",
    ]
    return "\n".join(parts)


def number(value: float) -> str:
    """Six digits at most, unless it is whole.

    Example:
      >>> number(27.0), number(0.25), number(1 / 3), number(12345678)
      ('27', '0.25', '0.333333', '12345678')
    """
    return f"{value:.0f}" if value == int(value) else f"{value:.6g}"


def _scale(timing: Timing) -> _Scale:
    """As wide as a page; wider where microbatch numbers need it, up to a limit."""
    shortest = min((event.end - event.start for event in timing.events), default=1)
    digits = len(str(max((event.op.mb for event in timing.events), default=0)))
    whole = timing.makespan or 1
    wanted = max(PAGE / whole, (digits * DIGIT + 4) / shortest)
    return _Scale(min(wanted, WIDEST / whole, LARGEST / shortest))


def _head(width: int, height: int, title: str, timing: Timing) -> Iterator[str]:
    """The root element, its style, and two lines of title."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    yield "<style>.c{font-size:10px;text-anchor:middle}.m{text-anchor:middle}.g{fill:#555}</style>"
    yield '<rect width="100%" height="100%" fill="#fff"/>'
    yield f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>'
    facts = (
        f"makespan {number(timing.makespan)}, bubble {timing.idle:.1%}, "
        f"peak {max(timing.peak_in_flight, default=0)} chunks in flight, "
        f"{timing.messages} messages"
    )
    yield f'<text x="{LEFT}" y="42" class="g">{facts}</text>'


def _rows(timing: Timing, scale: _Scale) -> Iterator[str]:
    """The stages: a grey band where cells will not be, a label, and the stage's numbers."""
    end = scale.x(timing.makespan)
    for stage, (idle, peak) in enumerate(zip(timing.bubble, timing.peak_in_flight, strict=True)):
        y = TOP + ROW * stage
        box = f'width="{end - LEFT:g}" height="{ROW - 2}"'
        yield f'<rect x="{LEFT}" y="{y + 1}" {box} fill="#eee"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 17}" text-anchor="end">stage {stage}</text>'
        facts = f"bubble {number(idle)}, peak {peak}"
        yield f'<text x="{end + 8:g}" y="{y + 17}" class="g">{facts}</text>'


def _cells(timing: Timing, scale: _Scale) -> Iterator[str]:
    """One group an op: what hovering tells, the box, the microbatch if there is room for it."""
    chunks = 1 + max((event.op.chunk for event in timing.events), default=0)
    for event in timing.events:
        x, y = scale.x(event.start), TOP + ROW * event.stage + 1
        width = round(scale.x(event.end) - x, 2)
        gap = 1 if width > 5 else 0
        fill, ink = shade(type(event.op).__name__, event.op.chunk, chunks)
        label, middle = str(event.op.mb), x + (width - gap) / 2
        fits = width >= DIGIT * len(label) + 1
        at = f'class="c" x="{middle:g}" y="{y + 16}" fill="{ink}"'
        text = f"<text {at}>{label}</text>" if fits else ""
        box = f'x="{x:g}" y="{y}" width="{width - gap:g}" height="{ROW - 2}" fill="{fill}"'
        yield f"<g><title>{_told(event)}</title><rect {box}/>{text}</g>"


def _told(event: Event) -> str:
    """`forward of microbatch 3, chunk 1, stage 2: 4 to 5`."""
    kind, op = type(event.op).__name__, event.op
    chunk = f"chunk {op.chunk}" + ("" if op.layer is None else f", layer {op.layer}")
    times = f"{number(event.start)} to {number(event.end)}"
    return f"{MEANING[kind]} of microbatch {op.mb}, {chunk}, stage {event.stage}: {times}"


def _bars(timing: Timing, scale: _Scale) -> Iterator[str]:
    """Collectives and copies: low bars, over the cells that they run beside."""
    for trip in timing.beside:
        x, y = scale.x(trip.start), TOP + ROW * (trip.stage + 1) - 1 - BAR
        width = max(scale.x(trip.end) - x, 1)
        fill, _ = shade(type(trip.op).__name__, 0, 1)
        times = f"{number(trip.start)} to {number(trip.end)}"
        title = f"<title>{trip.op} on stage {trip.stage}, {trip.link}: {times}</title>"
        box = f'x="{x:g}" y="{y}" width="{width:g}" height="{BAR}" fill="{fill}"'
        yield f"<g>{title}<rect {box}/></g>"


def shade(kind: str, chunk: int, chunks: int) -> tuple[str, str]:
    """The colour of a box and of the text on it: the last chunk darkest.

    Example:
      >>> shade("F", 0, 1), shade("F", 1, 2)
      (('#98b3d8', '#111'), ('#42679a', '#fff'))
    """
    depth = chunk / (chunks - 1) if chunks > 1 else 0.25
    red, green, blue = (_towards(part, depth) for part in COLOURS[kind])
    bright = 0.299 * red + 0.587 * green + 0.114 * blue
    return f"#{red:02x}{green:02x}{blue:02x}", "#111" if bright > 140 else "#fff"


def _towards(part: int, depth: float) -> int:
    """Lighter for depth 0, darker for depth 1."""
    light, dark = part + (255 - part) * 0.55, part * 0.72
    return round(light + (dark - light) * depth)


def _axis(timing: Timing, scale: _Scale, y: int) -> Iterator[str]:
    """Ticks with times, at 1, 2 or 5 times a power of ten."""
    end = scale.x(timing.makespan)
    yield f'<path d="M{LEFT} {y + 3}H{end:g}" stroke="#999"/>'
    step = _tick(60 / scale.unit)
    for tick in range(int(timing.makespan / step) + 1):
        x = scale.x(tick * step)
        yield f'<path d="M{x:g} {y + 3}v5" stroke="#999"/>'
        yield f'<text class="m g" x="{x:g}" y="{y + 20}">{number(tick * step)}</text>'
    yield f'<text class="g" x="{end + 8:g}" y="{y + 20}">time units</text>'


def _tick(least: float) -> float:
    """The first of 1, 2, 5, 10, .. (or 0.5, 0.2, ..) that is not smaller."""
    power = 10.0 ** len(str(int(least))) if least >= 1 else 1.0
    while power > least:
        power /= 10
    return next(power * by for by in (1, 2, 5, 10) if power * by >= least)


def _legend(timing: Timing, y: int) -> tuple[list[str], float]:
    """A box for each kind and chunk in the picture (at most SHADES chunks), and where they end."""
    chunks = 1 + max((event.op.chunk for event in timing.events), default=0)
    kinds = {type(event.op).__name__ for event in (*timing.events, *timing.beside)}
    parts, x = [], float(LEFT)
    for kind in (kind for kind in COLOURS if kind in kinds):
        shades = min(chunks, SHADES) if kind in CHUNKED else 1
        for box in range(shades):
            fill, _ = shade(kind, box, shades)
            parts.append(f'<rect x="{x:g}" y="{y}" width="12" height="12" fill="{fill}"/>')
            x += 13
        several = chunks > 1 and kind in CHUNKED
        words = f"{kind} {MEANING[kind]}" + (f", chunks 0-{chunks - 1}" if several else "")
        parts.append(f'<text x="{x + 5:g}" y="{y + 10}">{words}</text>')
        x += 6.3 * len(words) + 26
    return parts, x
