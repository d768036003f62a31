"""Small SVG charts for the report: text in, text out. Colours and fonts come from the page's style sheet.

Every chart is drawn 340 units wide, so that its text is readable when the page is as narrow as a phone, has a title and
a description for screen readers, and tells its series apart by marker and dash as well as by colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from markupsafe import Markup

WIDTH = 340

Points = Sequence[tuple[float, float | None]]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line. `tone` is a colour class of the style sheet (a, b, c, d); `band` holds (x, low, high)."""

    name: str
    points: Points
    tone: str = "a"
    dashed: bool = False
    marker: str = "circle"
    band: Sequence[tuple[float, float | None, float | None]] = field(default_factory=list)
    hollow: frozenset[float] = frozenset()  # points that rest on little, drawn as outlines


def number(value: float | None, digits: int = 2) -> str:
    """A number for reading; a dash when there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}%"


def clipped(text: str, longest: int = 14) -> str:
    """A label that fits its place; charts tell the whole name in their description."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def short(value: float) -> str:
    """1200 as 1.2k; small numbers as they are."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 10) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def shape(name: str, *classes: str, **attributes: Any) -> str:
    """An SVG element without content."""
    return f'<{name} class="{" ".join(classes)}"' + "".join(f' {key}="{at}"' for key, at in attributes.items()) + "/>"


def text(kind: str, x: float, y: float, content: str, anchor: str = "") -> str:
    """A text of a class of the style sheet; `anchor` is where (x, y) lies in it: end, middle, or its start."""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x}" y="{y}"{where}>{escape(content)}</text>'


def figure(width: int, height: int, title: str, description: str, body: str, kind: str = "chart") -> Markup:
    """An SVG element; title and description are its accessible name."""
    name = escape(f"{title}. {description}", quote=True)
    return Markup(f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{name}">{body}</svg>')


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_ticks: Sequence[float] | None = None,
    y_ticks: Sequence[float] | None = None,
    x_format: Callable[[float], str] = short,
    y_format: Callable[[float], str] = short,
    diagonal: bool = False,
    bars: Sequence[tuple[float, float, float]] = (),
    height: int = 220,
    cursor: bool = False,
) -> Markup:
    """Lines with markers, bands and optional bars (x from, x to, share of the height), on linear axes."""
    left, right, top, bottom = 38, 14, 16, 36
    span_x = x_range[1] - x_range[0] or 1.0
    span_y = y_range[1] - y_range[0] or 1.0

    def px(x: float) -> float:
        return round(left + (x - x_range[0]) / span_x * (WIDTH - left - right), 1)

    def py(y: float) -> float:
        inside = min(max(y, y_range[0]), y_range[1])
        return round(height - bottom - (inside - y_range[0]) / span_y * (height - top - bottom), 1)

    marks, base, edge = ticks(*y_range) if y_ticks is None else y_ticks, height - bottom, WIDTH - right
    out = []
    for y in marks:
        out.append(shape("line", "grid", x1=left, x2=edge, y1=py(y), y2=py(y)))
        out.append(text("tick", left - 6, py(y) + 3.5, y_format(y), "end"))
    for x in ticks(*x_range) if x_ticks is None else x_ticks:
        out.append(text("tick", px(x), base + 15, x_format(x), "middle"))
    for start, end, share in bars:
        tall, wide = round(share * (base - top), 1), max(px(end) - px(start) - 1, 0.5)
        out.append(shape("rect", "bar-quiet", x=px(start) + 0.5, y=base - tall, width=f"{wide:.1f}", height=tall))
    out.append(shape("line", "axis", x1=left, x2=edge, y1=base, y2=base))
    if diagonal:
        ends = {"x1": px(x_range[0]), "y1": py(y_range[0]), "x2": px(x_range[1]), "y2": py(y_range[1])}
        out.append(shape("line", "diagonal", **ends))
    out += [_band(one, px, py) for one in series]
    out += [_line(one, px, py) for one in series]
    if cursor:
        data = {"data-left": left, "data-right": edge}
        out.append(shape("line", "cursor", **data, x1=left, x2=left, y1=top, y2=base))
    out.append(text("label", edge, height - 4, x_label, "end"))
    out.append(text("label", left, 9, y_label))
    description = "; ".join(f"{one.name}: {_ends(one.points)}" for one in series)
    return figure(WIDTH, height, title, description or "no data", "".join(out))


def _ends(points: Points) -> str:
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return "no data"
    return f"from {short(known[0][1])} at {short(known[0][0])} to {short(known[-1][1])} at {short(known[-1][0])}"


def _band(one: Series, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    known = [(x, low, high) for x, low, high in one.band if low is not None and high is not None]
    if len(known) < 2:
        return ""
    upper = " ".join(f"{px(x)},{py(high)}" for x, _, high in known)
    lower = " ".join(f"{px(x)},{py(low)}" for x, low, _ in reversed(known))
    return f'<polygon class="band tone-{one.tone}" points="{upper} {lower}"/>'


def _line(one: Series, px: Callable[[float], float], py: Callable[[float], float]) -> str:
    """The line, broken where a value is missing, and its markers."""
    pieces: list[list[str]] = []
    current: list[str] = []
    markers = []
    for x, y in one.points:
        if y is None:
            pieces, current = [*pieces, current], []
            continue
        current.append(f"{px(x)},{py(y)}")
        if one.marker != "none":
            tip = f"{one.name}, {short(x)}: {y:.3g}"
            markers.append(marker(one.marker, px(x), py(y), one.tone, tip, hollow=x in one.hollow))
    dash = " dashed" if one.dashed else ""
    lines = "".join(
        f'<polyline class="line tone-{one.tone}{dash}" points="{" ".join(piece)}"/>'
        for piece in [*pieces, current]
        if len(piece) > 1
    )
    return lines + "".join(markers)


def marker(kind: str, x: float, y: float, tone: str, tip: str = "", size: float = 3.4, *, hollow: bool = False) -> str:
    """A point; `tip` shows on hover."""
    look = f'class="{"ring" if hollow else "dot"} tone-{tone}"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    if kind == "square":
        shape = f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size}" height="{2 * size}"'
        return f"{shape} {look}>{title}</rect>"
    if kind == "diamond":
        far = size * 1.35
        points = f"{x},{y - far:.1f} {x + far:.1f},{y} {x},{y + far:.1f} {x - far:.1f},{y}"
        return f'<polygon points="{points}" {look}>{title}</polygon>'
    return f'<circle cx="{x}" cy="{y}" r="{size}" {look}>{title}</circle>'


def tape(value: float | None, low: float | None, high: float | None, cells: int, tone: str, name: str) -> Markup:
    """Accepted length on its own scale: one cell a token that a round can yield, filled to the mean.

    The whisker below is the interval.
    """
    gap, tall = 3.0, 22.0
    wide = (WIDTH - gap * (cells - 1)) / cells
    body = []
    for cell in range(cells):
        x = cell * (wide + gap)
        body.append(shape("rect", "cell", x=f"{x:.1f}", y=1, width=f"{wide:.1f}", height=tall, rx=3))
        share = min(max((value or 0.0) - cell, 0.0), 1.0)
        if share > 0:
            size = {"width": f"{wide * share:.1f}", "height": tall}
            body.append(shape("rect", "cell-full", f"tone-{tone}", x=f"{x:.1f}", y=1, **size, rx=3))

    def at(length: float) -> float:
        length = min(max(length, 0.0), float(cells))
        return round(length * wide + gap * min(math.floor(length), cells - 1), 1)

    if low is not None and high is not None and high - low > 1e-3:
        y = tall + 6
        for x1, x2, reach in ((at(low), at(high), 0), (at(low), at(low), 3), (at(high), at(high), 3)):
            body.append(shape("line", "whisker", f"tone-{tone}", x1=x1, x2=x2, y1=y - reach, y2=y + reach))
    description = f"{number(value)} of at most {cells} tokens a target pass"
    if low is not None:
        description += f", interval {number(low)} to {number(high)}"
    return figure(WIDTH, int(tall) + 12, name, description, "".join(body), "tape")


@dataclass(frozen=True, kw_only=True)
class IntervalPoint:
    """One dot of an interval chart."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    tone: str = "a"
    marker: str = "circle"


def interval_chart(
    rows: Sequence[tuple[str, Sequence[IntervalPoint]]], *, title: str, x_label: str, start: float
) -> Markup:
    """Dots with whiskers, one row a label, one dot a series."""
    known = [v for _, estimates in rows for e in estimates for v in (e.value, e.high) if v is not None]
    end = max([*known, start + 1]) * 1.02
    left, right, pitch, top = 92, 36, 15, 8
    heights = [pitch * max(len(estimates), 1) + 12 for _, estimates in rows]
    total = top + sum(heights) + 34

    def px(x: float) -> float:
        return round(left + (x - start) / (end - start) * (WIDTH - left - right), 1)

    bottom = top + sum(heights)
    out = []
    for x in ticks(start, end):
        out.append(shape("line", "grid", x1=px(x), x2=px(x), y1=top, y2=bottom))
        out.append(text("tick", px(x), bottom + 14, short(x), "middle"))
    y = float(top)
    for (label, estimates), height in zip(rows, heights, strict=True):
        out.append(text("row", left - 10, y + height / 2 + 4, clipped(label), "end"))
        for index, one in enumerate(estimates):
            at = y + 6 + pitch * (index + 0.5)
            if one.value is None:
                continue
            if one.low is not None and one.high is not None:
                out.append(shape("line", "whisker", f"tone-{one.tone}", x1=px(one.low), x2=px(one.high), y1=at, y2=at))
            out.append(marker(one.marker, px(one.value), at, one.tone, f"{one.name}: {number(one.value)}", 4))
            after = px(one.high if one.high is not None else one.value) + 8
            out.append(text("value", after, at + 3.5, number(one.value)))
        y += height
        out.append(shape("line", "rule", x1=0, x2=WIDTH, y1=y, y2=y))
    out.append(text("label", WIDTH, total - 4, x_label, "end"))
    description = "; ".join(
        f"{label}: " + ", ".join(f"{one.name} {number(one.value)}" for one in estimates) for label, estimates in rows
    )
    return figure(WIDTH, total, title, description or "no data", "".join(out))


def bar_chart(rows: Sequence[tuple[str, float | None, str, str]], *, title: str) -> Markup:
    """Horizontal bars: (label, value, text at its end, tone)."""
    most = max((value for _, value, _, _ in rows if value is not None), default=0) or 1.0
    out, pitch = [], 40
    for index, (label, value, end, tone) in enumerate(rows):
        y, long = index * pitch, (value or 0) / most * (WIDTH - 2)
        out += _bar_label(y, label, end)
        out.append(shape("rect", "cell", x=0, y=y + 18, width=WIDTH, height=10, rx=2))
        out.append(shape("rect", "cell-full", f"tone-{tone}", x=0, y=y + 18, width=f"{long:.1f}", height=10, rx=2))
    description = "; ".join(f"{label}: {end}" for label, _, end, _ in rows)
    return figure(WIDTH, max(pitch * len(rows), 1), title, description or "no data", "".join(out), "chart bars")


def _bar_label(y: float, label: str, end: str) -> list[str]:
    return [text("row", 0, y + 12, clipped(label, 32)), text("value", WIDTH, y + 12, end, "end")]


def stacked_bar(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], *, title: str, size_text: Callable[[float], str]
) -> Markup:
    """Bars of parts on one scale: (label, [(part, size)])."""
    most = max((sum(size for _, size in parts) for _, parts in rows), default=0) or 1.0
    tones = ("a", "b", "d", "c")
    out, pitch = [], 44
    for index, (label, parts) in enumerate(rows):
        y, x = index * pitch, 0.0
        out += _bar_label(y, label, size_text(sum(size for _, size in parts)))
        for order, (part, size) in enumerate(parts):
            wide = size / most * WIDTH
            tone = tones[order % len(tones)] if len(rows) == 1 or index == 0 else "c"
            tip = f"<title>{escape(part)}: {escape(size_text(size))}</title>"
            out.append(
                f'<rect class="cell-full tone-{tone}" x="{x:.1f}" y="{y + 18}" width="{max(wide - 1, 0.8):.1f}" '
                f'height="14">{tip}</rect>'
            )
            x += wide
    said = [f"{label}: " + ", ".join(f"{part} {size_text(size)}" for part, size in parts) for label, parts in rows]
    description = "; ".join(said) or "no data"
    return figure(WIDTH, max(pitch * len(rows) - 8, 1), title, description, "".join(out), "chart bars")
