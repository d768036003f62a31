"""The page's sections on what was measured: accepted lengths, speed, acceptance by slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelines.reporting.charts import (
    IntervalPoint,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    number,
    percent,
    tape,
)
from pipelines.reporting.page_parts import FEW, absent, folded, key, legend, marker_of, name_of, table, tone_of


def _temperatures(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({row["temperature"] for row in rows})


def _drafters(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["drafter"] for row in rows))


def accepted_length(report: Mapping[str, Any]) -> str:
    rows = report["accepted_length"]
    if not rows:
        return absent("No rounds were recorded.")
    drafted = [row["value"] for row in rows if row["value"] is not None]
    block = report["subject"]["drafter"].get("block_size")
    cells = block + 1 if block else max(2, round(max(drafted, default=1) + 1))
    domains = [domain for domain in dict.fromkeys(row["domain"] for row in rows) if domain != "mean"]
    heroes, charts = [], []
    for temperature in _temperatures(rows):
        here = [row for row in rows if row["temperature"] == temperature]
        heroes.append(_hero(here, temperature, cells, len(domains)))
        chart = interval_chart(
            [
                (
                    domain,
                    [
                        IntervalPoint(
                            name=name_of(row["drafter"]),
                            value=row["value"],
                            low=row["low"],
                            high=row["high"],
                            tone=tone_of(row["drafter"]),
                            marker=marker_of(row["drafter"]),
                        )
                        for row in here
                        if row["domain"] == domain and row["drafter"] != "plain"
                    ],
                )
                for domain in domains
            ],
            title=f"Accepted length by domain, temperature {temperature:g}",
            x_label="tokens a target pass",
            start=1.0,
        )
        charts.append(f'<div class="panel"><h3>By domain, temperature {temperature:g}</h3>{chart}</div>')
    drafters = [drafter for drafter in _drafters(rows) if drafter != "plain"]
    figures = table(
        "Accepted length with its 95% interval",
        [
            "drafter",
            "temperature",
            "domain",
            "accepted length",
            "interval",
            "rounds",
            "prompts",
            "tokens",
            "verified kept",
        ],
        [
            [
                name_of(row["drafter"]),
                f"{row['temperature']:g}",
                "mean of domains" if row["domain"] == "mean" else row["domain"],
                number(row["value"], 3),
                f"{number(row['low'])} – {number(row['high'])}" if row["low"] is not None else "–",
                f"{row['rounds']:,}",
                f"{row['prompts']:,}",
                f"{row['tokens']:,}",
                percent(row["verification_rate"]),
            ]
            for row in rows
        ],
    )
    return (
        "<p>How many tokens one pass of the target yields: the drafts it keeps, and one of its own. Each cell is a "
        f"token that a round can yield, {cells} at most; the line below a tape is the 95% interval.</p>"
        f'<div class="grid2">{"".join(heroes)}</div><div style="height:22px"></div>{legend(drafters)}'
        f'<div class="grid2">{"".join(charts)}</div>{folded("All accepted lengths as a table", figures)}'
    )


def _hero(rows: Sequence[Mapping[str, Any]], temperature: float, cells: int, domains: int) -> str:
    overall = [row for row in rows if row["domain"] == "mean"]
    first = next((row for row in overall if row["drafter"] == "dspark"), overall[0])
    items = "".join(
        f'<li><div class="who"><span>{escape(name_of(row["drafter"]))}</span><b>{number(row["value"])}</b></div>'
        f"{tape(row['value'], row['low'], row['high'], cells, tone_of(row['drafter']), name_of(row['drafter']))}</li>"
        for row in overall
    )
    interval = f" 95% interval {number(first['low'])} to {number(first['high'])}." if first["low"] is not None else ""
    over = f"Mean of {domains} domains" if domains > 1 else "One domain"
    return (
        f'<div class="panel"><h3>Temperature {temperature:g}</h3>'
        f'<div class="big">{number(first["value"])}<small>tokens a target pass</small></div>'
        f'<ul class="ladder">{items}</ul>'
        f'<p class="note">{over}, {first["rounds"]:,} rounds of {first["prompts"]:,} prompts.{interval}</p></div>'
    )


def speed(report: Mapping[str, Any]) -> str:
    rows = report["speed"]
    if not any(row["tokens_per_second"] for row in rows):
        return absent("No wall-clock times were recorded with this evaluation.")
    panels = []
    for temperature in _temperatures(rows):
        here = [row for row in rows if row["temperature"] == temperature and row["tokens_per_second"]]
        if not here:
            continue
        bars = [
            (name_of(row["drafter"]), row["tokens_per_second"], _pace(row), tone_of(row["drafter"])) for row in here
        ]
        chart = bar_chart(bars, title=f"Tokens a second, temperature {temperature:g}")
        panels.append(f'<div class="panel"><h3>Temperature {temperature:g}</h3>{chart}{_clock_note(here)}</div>')
    return (
        "<p>Fewer passes of the target do not make a text faster by themselves: drafting takes time, and so does "
        "verifying several tokens at once. This is what a stopwatch said, on the hardware named under Provenance.</p>"
        f'<div class="grid2">{"".join(panels)}</div>'
    )


def _pace(row: Mapping[str, Any]) -> str:
    text = f"{row['tokens_per_second']:.1f} tokens/s"
    ratio = row["against_plain"]
    return text if row["drafter"] == "plain" or ratio is None else f"{text} ({ratio:.2f}×)"


def _clock_note(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    shares = [row["draft_share"] for row in rows if row["drafter"] == "dspark" and row["draft_share"] is not None]
    if shares:
        parts.append(f"This drafter spends {percent(shares[0])} of a round on drafting.")
    batched = sorted({row["max_rows"] for row in rows if row["max_rows"]})
    if batched:
        parts.append(f"Up to {' and '.join(map(str, batched))} answers were decoded together.")
    return f'<p class="note">{" ".join(parts)}</p>' if parts else ""


def positions(report: Mapping[str, Any]) -> str:
    rows = report["positions"]
    if not rows:
        return absent("No draft was verified.")
    slots = max(len(row["slots"]) for row in rows)
    panels, by_domain = [], []
    domains = [domain for domain in dict.fromkeys(row["domain"] for row in rows) if domain != "all"]
    for temperature in _temperatures(rows):
        here = [row for row in rows if row["temperature"] == temperature]
        overall = [row for row in here if row["domain"] == "all"]
        looks = [(name_of(row["drafter"]), tone_of(row["drafter"]), marker_of(row["drafter"])) for row in overall]
        for kind in ("Conditional acceptance", "Survival"):
            lines = [_slot_line(row, kind, *look) for row, look in zip(overall, looks, strict=True)]
            panels.append(_slot_panel(f"{kind}, temperature {temperature:g}", lines, slots))
        own = [row for row in here if row["drafter"] == "dspark" and row["domain"] != "all"]
        lines = [_slot_line(row, "Conditional acceptance", row["domain"], *_domain_look(domains, row)) for row in own]
        if lines:
            by_domain.append(_slot_panel(f"This drafter by domain, temperature {temperature:g}", lines, slots))
    keys = "".join(key(*_domain_look(domains, {"domain": domain}), domain) for domain in domains)
    return (
        "<p>Conditional acceptance says how good a slot is in itself; survival says how often a draft gets that far. "
        f"Bands are 95% intervals; a hollow point rests on fewer than {FEW} rounds.</p>"
        f'{legend(_drafters(rows))}<div class="grid2">{"".join(panels)}</div>'
        + (f'<ul class="legend domains">{keys}</ul><div class="grid2">{"".join(by_domain)}</div>' if by_domain else "")
        + folded("Acceptance by slot and domain as a table", _slot_table(rows, slots))
    )


def _domain_look(domains: Sequence[str], row: Mapping[str, Any]) -> tuple[str, str]:
    """Tone and marker of a domain's line."""
    place = domains.index(row["domain"])
    return "adbc"[place % 4], ("circle", "diamond", "square")[place % 3]


def _slot_line(row: Mapping[str, Any], kind: str, name: str, tone: str, marker: str) -> Series:
    field = "survival" if kind == "Survival" else "conditional"
    found = [(slot["slot"], slot[field]) for slot in row["slots"]]
    return Series(
        name=name,
        points=[(slot, estimate["value"]) for slot, estimate in found],
        band=[(slot, estimate["low"], estimate["high"]) for slot, estimate in found] if row["domain"] == "all" else [],
        hollow=frozenset(slot for slot, estimate in found if estimate["rounds"] < FEW),
        tone=tone,
        marker=marker,
    )


def _slot_panel(title: str, lines: Sequence[Series], slots: int) -> str:
    chart = line_chart(
        lines,
        title=title,
        x_label="draft slot",
        y_label="",
        x_range=(0.7, slots + 0.3),
        y_range=(0.0, 1.0),
        x_ticks=list(range(1, slots + 1)),
        y_ticks=[0, 0.25, 0.5, 0.75, 1],
        y_format=percent,
    )
    return f'<div class="panel"><h3>{escape(title)}</h3>{chart}</div>'


def _slot_table(rows: Sequence[Mapping[str, Any]], slots: int) -> str:
    return table(
        "Conditional acceptance by slot, and how often the first and the last slot were reached",
        ["drafter", "temperature", "domain", *[f"slot {slot + 1}" for slot in range(slots)], "reached first", "last"],
        [
            [
                name_of(row["drafter"]),
                f"{row['temperature']:g}",
                row["domain"],
                *[percent(slot["conditional"]["value"], 1) for slot in row["slots"]],
                *["–"] * (slots - len(row["slots"])),
                f"{row['slots'][0]['conditional']['rounds']:,}" if row["slots"] else "–",
                f"{row['slots'][-1]['conditional']['rounds']:,}" if row["slots"] else "–",
            ]
            for row in rows
        ],
    )
