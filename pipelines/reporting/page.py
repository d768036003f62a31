"""index.html: one self-contained page, rendered from report.json and from nothing else.

What is said stands in `templates/` (one file a section, escaped by Jinja), what is drawn in `page_charts`, the rows of
tables in `page_tables`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from pipelines.progress import byte_size
from pipelines.reporting import page_charts, page_tables
from pipelines.reporting.charts import number, percent, tape
from pipelines.reporting.looks import FEW, POLICY_NAMES, domain_look, listed, look_of, name_of, policy_look
from pipelines.reporting.terms import TERMS

SECTIONS = (
    ("lengths", "Accepted length"),
    ("speed", "By the clock"),
    ("positions", "Slot by slot"),
    ("confidence", "Confidence"),
    ("serving", "Under load"),
    ("samples", "Sample texts"),
    ("training", "Training"),
    ("cache", "Target cache"),
    ("data", "Data"),
    ("provenance", "Provenance"),
    ("terms", "Terms"),
)


def render_page(report: Mapping[str, Any]) -> str:
    """The page as text. The same report gives the same bytes."""
    serving = report["serving"]
    names = ("policies", "users", "threshold", "replayed", "rounds", "costs")
    data = {name: serving[name] for name in names} | {"names": POLICY_NAMES} if serving else None
    return (
        environment()
        .get_template("page.html")
        .render(
            report=report,
            sections=SECTIONS,
            style=packaged_text("page.css"),
            script=packaged_text("page.js"),
            thresholds=_script_data([row["thresholds"] for row in report["confidence"]]),
            serving_data=_script_data(data),
        )
    )


@cache
def environment() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("pipelines.reporting"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.ChainableUndefined,
    )
    found.filters |= {
        "number": number,
        "percent": percent,
        "g": lambda value: f"{value:g}",
        "thousands": lambda value: f"{value:,}",
        "name": name_of,
        "bytes": byte_size,
        "inline": _inline,
        "listed": listed,
        "one_line": _one_line,
        "json": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    }
    found.globals |= {
        "charts": page_charts,
        "tables": page_tables,
        "tape": tape,
        "temperatures": lambda rows: sorted({row["temperature"] for row in rows}),
        "slot_names": lambda count: [f"slot {slot + 1}" for slot in range(count)],
        "without": lambda values, name: {key: value for key, value in values.items() if key != name},
        "facts": _facts,
        "most_tokens": _most_tokens,
        "provenance": _provenance,
        "round_in_words": _round_in_words,
        "look_of": look_of,
        "domain_look": domain_look,
        "policy_look": policy_look,
        "policy_names": POLICY_NAMES,
        "FEW": FEW,
        "TERMS": TERMS,
    }
    return found


@cache
def packaged_text(name: str) -> Markup:
    return Markup((files("pipelines.reporting") / "templates" / name).read_text(encoding="utf-8"))


def _script_data(value: Any) -> Markup:
    """JSON for a script element, which nothing in it can end."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _facts(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    target, drafter = report["subject"]["target"], report["subject"]["drafter"]
    rank = drafter.get("markov_rank")
    head = f"{drafter.get('markov_head_type') or 'vanilla'}, rank {rank}" if rank else "none"
    facts = [
        ("target", target.get("name")),
        ("drafter", drafter.get("algorithm")),
        ("block", f"{drafter['block_size']} draft slots" if drafter.get("block_size") else None),
        ("sequential head", None if rank is None else head),
        ("measured", report["created"][:10]),
    ]
    return [(name, value) for name, value in facts if value]


def _most_tokens(report: Mapping[str, Any]) -> int:
    """Tokens that a round can yield: the block and the target's own."""
    block = report["subject"]["drafter"].get("block_size")
    seen = [row["value"] for row in report["accepted_length"] if row["value"] is not None]
    return block + 1 if block else max(2, round(max(seen, default=1) + 1))


def _provenance(report: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """What is shown as it is, and what is folded away."""
    flat: dict[str, Any] = {}
    long: list[tuple[str, Any]] = []
    for name, value in report["provenance"].items():
        if isinstance(value, Mapping) and len(json.dumps(value, default=str)) > 160:
            long.append((name, value))
        else:
            flat[name] = " ".join(map(str, value)) if name == "command" and isinstance(value, list) else value
    long += [(name, report["subject"][name]) for name in ("target", "drafter", "contract") if report["subject"][name]]
    return flat, long


def _round_in_words(order: int, entry: Mapping[str, Any]) -> str:
    """A round of a sample text in words."""
    parts = [f"Round {order}: {len(entry['accepted'])} kept"]
    cut = entry["cut"]
    drafts = [f"“{_one_line(piece)}” ✓" for piece in entry["accepted"]]
    drafts += [f"“{_one_line(piece)}” cut" for piece in entry["dropped"][:cut]]
    drafts += [f"“{_one_line(piece)}”" + ("" if late else " ✗") for late, piece in enumerate(entry["dropped"][cut:])]
    if drafts:
        parts.append("drafted " + " ".join(drafts))
    if entry["target"] is not None:
        parts.append(f"then the target's own “{_one_line(entry['target'])}”")
    if entry["confidence"]:
        parts.append("confidence " + " ".join(f"{value:.2f}" for value in entry["confidence"]))
    return "; ".join(parts) + "."


def _one_line(piece: str) -> str:
    return piece.replace("\n", "⏎")


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_inline(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(_inline(entry) for entry in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
