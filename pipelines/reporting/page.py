"""index.html: one self-contained page, rendered from report.json and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from pipelines.reporting import page_confidence, page_record, page_results, page_serving
from pipelines.reporting.style import SCRIPT, STYLE

# Nothing may be fetched, whatever stands in a title or a sample text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# An eight-cell tape, the mark of these pages.
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cg fill='%230a6c70'%3E"
    "%3Crect y='4' width='4.5' height='8' rx='1'/%3E%3Crect x='5.5' y='4' width='4.5' height='8' rx='1'/%3E%3C/g%3E"
    "%3Crect x='11' y='4' width='4.5' height='8' rx='1' fill='%23bbb'/%3E%3C/svg%3E"
)
SECTIONS = (
    ("lengths", "Accepted length", page_results.accepted_length),
    ("speed", "By the clock", page_results.speed),
    ("positions", "Slot by slot", page_results.positions),
    ("confidence", "Confidence", page_confidence.confidence),
    ("serving", "Under load", page_serving.serving),
    ("samples", "Sample texts", page_record.samples),
    ("training", "Training", page_record.training),
    ("cache", "Target cache", page_record.cache),
    ("data", "Data", page_record.data),
    ("provenance", "Provenance", page_record.provenance),
    ("terms", "Terms", page_record.terms),
)


def render_page(report: Mapping[str, Any]) -> str:
    """The page as text. The same report gives the same bytes."""
    links = [("checks", "Checks")] + [(name, title) for name, title, _ in SECTIONS]
    menu = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in links)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{escape(title)}</h2>'
        f"{render(report)}</section>"
        for name, title, render in SECTIONS
    )
    thresholds = json.dumps([row["thresholds"] for row in report["confidence"]], separators=(",", ":"))
    load = json.dumps(page_serving.serving_data(report), separators=(",", ":"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(report["title"])}</title><link rel="icon" href="{_ICON}"><style>{STYLE}</style></head><body>'
        '<a class="skip" href="#main">Skip to the figures</a>'
        f'{_header(report)}<nav aria-label="Sections"><ul>{menu}</ul></nav>'
        f'<main id="main">{_checks(report)}{body}</main>{_footer(report)}'
        f'<script type="application/json" id="thresholds">{_script_safe(thresholds)}</script>'
        f'<script type="application/json" id="serving-data">{_script_safe(load)}</script>'
        f"<script>{SCRIPT}{page_serving.SERVING_SCRIPT}</script></body></html>\n"
    )


def _script_safe(text: str) -> str:
    return text.replace("<", "\\u003c")


def _header(report: Mapping[str, Any]) -> str:
    subject = report["subject"]
    target, drafter = subject["target"], subject["drafter"]
    facts = [
        ("target", target.get("name")),
        ("drafter", drafter.get("algorithm")),
        ("block", f"{drafter['block_size']} draft slots" if drafter.get("block_size") else None),
        ("sequential head", _head(drafter)),
        ("measured", report["created"][:10]),
    ]
    items = "".join(f"<li>{escape(name)} <b>{escape(str(value))}</b></li>" for name, value in facts if value)
    lede = " ".join(report["summary"]) or "Nothing has been evaluated yet: this report holds no decoding rounds."
    return (
        '<header><p class="eyebrow">Speculative decoding, measured</p>'
        f'<h1>{escape(report["title"])}</h1><p class="lede">{escape(lede)}</p><ul class="facts">{items}</ul></header>'
    )


def _head(drafter: Mapping[str, Any]) -> str | None:
    rank = drafter.get("markov_rank")
    if rank is None:
        return None
    return f"{drafter.get('markov_head_type') or 'vanilla'}, rank {rank}" if rank else "none"


def _checks(report: Mapping[str, Any]) -> str:
    flags = report["flags"]
    items = "".join(
        f'<li class="flag-{escape(flag["level"])}"><b>{"Warning" if flag["level"] == "warning" else "Note"}.</b> '
        f"{escape(flag['text'])}</li>"
        for flag in flags
    )
    items = items or "<li><b>Nothing stood out.</b> The texts do not loop, and there are rounds enough.</li>"
    equality = report["equality"]
    if equality and equality["equal"] + equality["ties"] == equality["compared"]:
        tied = f", {equality['ties']} of them but for a tie in the target's logits" if equality["ties"] else ""
        items += (
            f'<li class="good"><b>Lossless.</b> All {equality["compared"]} greedy texts equal plain greedy decoding, '
            f"token for token{tied}.</li>"
        )
    return (
        '<section id="checks" aria-labelledby="checks-h"><h2 id="checks-h">Before you believe it</h2>'
        f'<ul class="flags">{items}</ul></section>'
    )


def _footer(report: Mapping[str, Any]) -> str:
    return (
        f"<footer><p>Made {escape(report['created'])} from the event log of one evaluation. The same figures stand in "
        "<code>report.json</code> and <code>report.md</code> beside this page.</p></footer>"
    )
