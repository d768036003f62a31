"""report.md: the same figures for a terminal, a review or a model card."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.reporting import page_tables
from pipelines.reporting.charts import number, percent
from pipelines.reporting.looks import name_of


def escape(text: Any) -> str:
    """Text from data as one line that Markdown and HTML show as it stands: no link, tag, heading or table cell."""
    line = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~#!])", r"\\\1", line)


def code(text: Any) -> str:
    """Text from data as a code span."""
    line = " ".join(str(text).split())
    fence = "`" * (max((len(run) for run in re.findall("`+", line)), default=0) + 1)
    return f"{fence} {line} {fence}" if "`" in line else f"{fence}{line}{fence}"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A pipe table of plain text."""
    lines = [[escape(cell) for cell in line] for line in (head, *rows)]
    return ["| " + " | ".join(line) + " |" for line in (lines[0], ["---"] * len(head), *lines[1:])]


def render_markdown(report: Mapping[str, Any]) -> str:
    out = [f"# {escape(report['title'])}", ""]
    out += [escape(sentence) for sentence in report["summary"]] or ["Nothing has been evaluated yet."]
    if report["flags"]:
        out += ["", "## Before you believe it", ""]
        out += [f"- **{flag['level'].capitalize()}.** {escape(flag['text'])}" for flag in report["flags"]]
    out += ["", "## Accepted length", "", *length_table(report), ""]
    if any(row["tokens_per_second"] for row in report["speed"]):
        out += ["## By the clock", "", *_speed(report), ""]
    if report["positions"]:
        out += ["## Acceptance by slot, conditional", "", *_positions(report), ""]
    if report["confidence"]:
        out += ["## Calibration error (ECE of the survival probability)", "", *_confidence(report), ""]
    out += _serving(report)
    out += _cache(report)
    out += ["## Provenance", ""]
    out += [
        f"- {escape(name)}: {escape(value)}"
        for name, value in report["provenance"].items()
        if not isinstance(value, Mapping)
    ]
    out += [f"- measured: {report['created']}", ""]
    return "\n".join(out)


def length_table(report: Mapping[str, Any]) -> list[str]:
    """Accepted lengths, domains as columns; also used by the model card."""
    rows = report["accepted_length"]
    domains = [domain for domain in dict.fromkeys(row["domain"] for row in rows) if domain != "mean"]
    by_key: dict[tuple[str, float], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        by_key.setdefault((row["drafter"], row["temperature"]), {})[row["domain"]] = row
    return markdown_table(
        ["drafter", "temperature", *domains, "mean", "95% interval", "rounds"],
        [
            [
                name_of(drafter),
                f"{temperature:g}",
                *[number(found[domain]["value"]) if domain in found else "–" for domain in domains],
                number(found["mean"]["value"]),
                f"{number(found['mean']['low'])} – {number(found['mean']['high'])}",
                found["mean"]["rounds"],
            ]
            for (drafter, temperature), found in by_key.items()
        ],
    )


def _speed(report: Mapping[str, Any]) -> list[str]:
    return markdown_table(
        ["decoding", "temperature", "tokens/s", "against plain", "tokens a target pass"],
        [
            [
                name_of(row["drafter"]),
                f"{row['temperature']:g}",
                number(row["tokens_per_second"], 1),
                number(row["against_plain"]),
                number(row["tokens_per_pass"]),
            ]
            for row in report["speed"]
        ],
    )


def _positions(report: Mapping[str, Any]) -> list[str]:
    slots = max(len(row["slots"]) for row in report["positions"])
    rows = [row[: 3 + slots] for row in page_tables.slots(report["positions"], slots)]
    return markdown_table(["drafter", "temperature", "domain", *[str(slot + 1) for slot in range(slots)]], rows)


def _confidence(report: Mapping[str, Any]) -> list[str]:
    names = list(dict.fromkeys(way["method"] for row in report["confidence"] for way in row["methods"]))
    return markdown_table(
        ["drafter", "temperature", "before", "after", "rounds", *[f"{name} (if exactly right)" for name in names]],
        [
            [
                name_of(row["drafter"]),
                f"{row['temperature']:g}",
                percent(row["ece_before"], 2),
                percent(row["ece_after"], 2),
                row["rounds"],
                *[_method(row, name) for name in names],
            ]
            for row in report["confidence"]
        ],
    )


def _method(row: Mapping[str, Any], name: str) -> str:
    found = [way for way in row["methods"] if way["method"] == name]
    return f"{percent(found[0]['ece'], 2)} ({percent(found[0]['ece_floor'], 2)})" if found else "–"


def _serving(report: Mapping[str, Any]) -> list[str]:
    found = report["serving"]
    if not found:
        return []
    points = {(point["policy"], point["users"]): point for point in found["replayed"]}
    measured = {(point["policy"], point["users"]): point for point in found["measured"]}

    def cell(name: str, users: int) -> str:
        point, own = points[name, users], measured.get((name, users))
        text = f"{number(point['tokens_per_second'], 0)} ({number(point['drafts'], 1)})"
        return text if own is None else f"{text} [{number(own['tokens_per_second'], 0)} ({number(own['drafts'], 1)})]"

    rows = [[name, *[cell(name, users) for users in found["users"]]] for name in found["policies"]]
    return [
        f"## Under load, temperature {found['temperature']:g}",
        "",
        "Tokens a second of all users together, and in parentheses the drafts verified a request, by users: recorded "
        "rounds replayed over the step costs; in brackets the engine itself.",
        "",
        *markdown_table(["policy", *[str(users) for users in found["users"]]], rows),
        "",
    ]


def _cache(report: Mapping[str, Any]) -> list[str]:
    cache = report["cache"]
    if not cache or not cache.get("bytes_per_token"):
        return []
    line = f"{cache['bytes_per_token']:,.1f} bytes a token"
    if cache.get("reference_bytes_per_token"):
        line += f"; the reference keeps {cache['reference_bytes_per_token']:,} a token"
    return ["## Target cache", "", line + ".", ""]
