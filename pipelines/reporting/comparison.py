"""compare.json, compare.md and compare.html: the figures of `dspark compare`, in the report's own tables and charts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pipelines.reporting import page_tables
from pipelines.reporting.charts import number, percent
from pipelines.reporting.looks import domain_look
from pipelines.reporting.markdown import escape, markdown_table
from pipelines.reporting.page import environment, packaged_text
from storage.files.filesystems import Folder

LENGTH_HEAD = ["drafter", "temperature", "domain", "accepted length", "95% interval", "rounds", "prompts"]
GAIN_HEAD = ["drafter", "temperature", "domain", "accepted length against it", "95% interval", "prompts"]
COST_HEAD = ["drafter", "requests", "draft ms", "verify ms", "of it the heads ms", "heads' overhead"]
COST_NOTE = (
    "Greedy, whole blocks, on this machine; the best of several turns. The overhead is what the sequential and "
    "confidence heads add to the rest of a round; the paper reports 0.2 to 1.3% for its sequential head, on a GPU."
)
DRAFTER_HEAD = ["drafter", "algorithm", "slots", "draft layers", "parameters stored", "weights (SHA-256)", "folder"]


def rows_of(report: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that the page and compare.md share."""
    names = [drafter["name"] for drafter in report["drafters"]]
    return {
        "gain_head": GAIN_HEAD,
        "gains": [
            [
                row["drafter"],
                f"{row['temperature']:g}",
                row["domain"],
                _signed(row["value"]),
                "–" if row["low"] is None else f"{_signed(row['low'])} to {_signed(row['high'])}",
                row["prompts"],
            ]
            for row in report["gains"]
        ],
        "cost_head": COST_HEAD,
        "cost_note": COST_NOTE,
        "costs": [
            [
                row["drafter"],
                row["batch"],
                number(row["draft_ms"], 1),
                number(row["verify_ms"], 1),
                number(row["head_ms"], 2),
                percent(row["head_share"], 1),
            ]
            for row in report["costs"]
        ],
        "drafter_head": DRAFTER_HEAD,
        "drafters": [
            [
                drafter["name"],
                drafter["algorithm"],
                drafter["block_size"],
                drafter["num_draft_layers"],
                f"{drafter['parameters']:,}",
                drafter["weights_sha256"][:12],
                drafter["folder"],
            ]
            for drafter in report["drafters"]
        ],
        "differences": [
            [row["setting"], *(_short(row["values"][name]) if name in row["values"] else "–" for name in names)]
            for row in report["differences"]
        ],
    }


def render_comparison(report: Mapping[str, Any]) -> str:
    """The page as text. The same comparison gives the same bytes."""
    names = [drafter["name"] for drafter in report["drafters"]]
    domains = list(dict.fromkeys(row["domain"] for row in report["accepted_length"]))
    return (
        environment()
        .get_template("compare.html")
        .render(
            report=report,
            rows=rows_of(report),
            names=names,
            domains=domains,
            look=partial(domain_look, names),
            style=packaged_text("page.css"),
        )
    )


def comparison_text(report: Mapping[str, Any]) -> str:
    """For a terminal: accepted lengths in the mean, who is ahead, and what is wrong."""
    lines = [f"{'accepted length, mean of domains':<40}" + "".join(f"  T={t:<16g}" for t in report["temperatures"])]
    means = {(row["drafter"], row["temperature"]): row for row in report["accepted_length"] if row["domain"] == "mean"}
    for drafter in report["drafters"]:
        cells = []
        for temperature in report["temperatures"]:
            row = means.get((drafter["name"], temperature))
            interval = f" ({number(row['low'])}–{number(row['high'])})" if row and row["low"] is not None else ""
            cells.append(f"  {(number(row['value']) if row else '–') + interval:<18}")
        lines.append(f"  {drafter['name']:<38}" + "".join(cells))
    for row in report["costs"]:
        if row["head_share"] is not None:
            lines.append(
                f"  {row['drafter']}, {row['batch']} requests: heads' overhead {percent(row['head_share'], 1)}"
            )
    lines += ["", *report["account"]]
    return "\n".join([*lines, *(f"ERROR: {text}" for text in report["errors"])])


def render_comparison_markdown(report: Mapping[str, Any]) -> str:
    rows = rows_of(report)
    out = [f"# {escape(report['title'])}", "", *(f"- {escape(text)}" for text in report["account"])]
    out += [f"- **Error.** {escape(text)}" for text in report["errors"]]
    for name, found in report["equality"].items():
        out.append(
            f"- {escape(name)}: {found['equal']} of {found['compared']} greedy texts equal plain greedy decoding"
        )
    lengths = [row[:7] for row in page_tables.lengths(report["accepted_length"])]
    sections = [
        ("Accepted length", LENGTH_HEAD, lengths),
        (f"Against {report['baseline']}, on the same prompts", GAIN_HEAD, rows["gains"]),
        ("What a round costs", COST_HEAD, rows["costs"]),
        ("The drafters", DRAFTER_HEAD, rows["drafters"]),
        ("Settings that differ", ["setting", *(one["name"] for one in report["drafters"])], rows["differences"]),
    ]
    for title, head, table in sections:
        if table:
            out += ["", f"## {escape(title)}", "", *markdown_table(head, table)]
    out += ["", f"Measured {report['created']}; {report['prompts']} prompts, seeds {report['seeds']}. {COST_NOTE}", ""]
    return "\n".join(out)


def write_comparison(report: Mapping[str, Any], folder: Path) -> None:
    """Write compare.json, compare.md and compare.html; each appears whole or not at all."""
    out = Folder(folder)
    out.write("compare.json", (json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode())
    out.write("compare.md", render_comparison_markdown(report).encode())
    out.write("compare.html", render_comparison(report).encode())


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}%"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"
