"""What the sections of the page share: names and looks of the variants, legends, tables, folded parts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

# Points that rest on fewer rounds or predictions are drawn hollow.
FEW = 20
NAMES = {
    "dspark": "this drafter",
    "no-sequential-head": "without sequential head",
    "one-slot": "first slot alone",
    "plain": "plain decoding",
}
TONES = {"dspark": "a", "no-sequential-head": "b", "plain": "c", "one-slot": "e"}
MARKERS = {"dspark": "circle", "no-sequential-head": "square", "plain": "diamond", "one-slot": "square"}


def name_of(drafter: str) -> str:
    return NAMES.get(drafter, drafter)


def tone_of(drafter: str) -> str:
    """Drafters that are named in the settings keep their tone from report to report."""
    return TONES.get(drafter) or "df"[sum(drafter.encode()) % 2]


def marker_of(drafter: str) -> str:
    return MARKERS.get(drafter, "diamond")


def absent(what: str) -> str:
    return f'<p class="note">{escape(what)}</p>'


def key(tone: str, marker: str, name: str, dashed: bool = False) -> str:
    shapes = {
        "circle": f'<circle cx="13" cy="6" r="3.6" class="dot tone-{tone}"/>',
        "square": f'<rect x="9.6" y="2.6" width="6.8" height="6.8" class="dot tone-{tone}"/>',
        "diamond": f'<polygon points="13,1.2 17.8,6 13,10.8 8.2,6" class="dot tone-{tone}"/>',
        "none": "",
    }
    dash = " dashed" if dashed else ""
    line = f'<line class="line tone-{tone}{dash}" x1="0" x2="26" y1="6" y2="6"/>'
    return f'<li><svg viewBox="0 0 26 12" aria-hidden="true">{line}{shapes[marker]}</svg>{escape(name)}</li>'


def legend(drafters: Sequence[str]) -> str:
    return f'<ul class="legend">{"".join(key(tone_of(d), marker_of(d), name_of(d)) for d in drafters)}</ul>'


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], left: bool = False) -> str:
    """Cells are text; the first of a row is its heading."""
    top = "".join(f'<th scope="col">{escape(str(cell))}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{escape(str(row[0]))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    # A table may be wider than a phone: it scrolls in itself, also by keyboard.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}">'
        f"<table{' class=left' if left else ''}><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
