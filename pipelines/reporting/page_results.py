"""The page's sections on what was measured: accepted lengths, speed, acceptance by slot, confidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelines.reporting.charts import (
    Estimate,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    number,
    percent,
    tape,
)

NAMES = {"dspark": "DSpark", "no-sequential-head": "without sequential head", "plain": "plain decoding"}
TONES = {"dspark": "a", "no-sequential-head": "b", "plain": "c"}
MARKERS = {"dspark": "circle", "no-sequential-head": "square", "plain": "diamond"}


def name_of(drafter: str) -> str:
    return NAMES.get(drafter, drafter)


def tone_of(drafter: str) -> str:
    return TONES.get(drafter, "d")


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
                        Estimate(
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
            "requests",
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
                f"{row['requests']:,}",
                f"{row['tokens']:,}",
                percent(row["verification_rate"]),
            ]
            for row in rows
        ],
    )
    return (
        "<p>How many tokens one pass of the target yields: the drafts it keeps, and one of its own. Each cell is a token "
        f"that a round can yield, {cells} at most; the line below a tape is the 95% interval.</p>"
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
        f'<p class="note">{over}, {first["rounds"]:,} rounds of {first["requests"]:,} answers.{interval}</p></div>'
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
        parts.append(f"DSpark spends {percent(shares[0])} of a round on drafting.")
    batched = sorted({row["max_rows"] for row in rows if row["max_rows"]})
    if batched:
        parts.append(f"Up to {' and '.join(map(str, batched))} answers were decoded together.")
    return f'<p class="note">{" ".join(parts)}</p>' if parts else ""


def positions(report: Mapping[str, Any]) -> str:
    rows = report["positions"]
    if not rows:
        return absent("No draft was verified.")
    panels = []
    slots = max(len(row["slots"]) for row in rows)
    for temperature in _temperatures(rows):
        here = [row for row in rows if row["temperature"] == temperature]
        overall = [row for row in here if row["domain"] == "all"]
        for title, field, low, high, y_label in (
            ("Accepted, given that the slots before were", "conditional", "low", "high", "acceptance rate"),
            ("Still accepted at this slot", "survival", "survival_low", "survival_high", "survival"),
        ):
            lines = [
                Series(
                    name=name_of(row["drafter"]),
                    points=[(slot["slot"], slot[field]) for slot in row["slots"]],
                    band=[(slot["slot"], slot[low], slot[high]) for slot in row["slots"]],
                    tone=tone_of(row["drafter"]),
                    marker=marker_of(row["drafter"]),
                )
                for row in overall
            ]
            panels.append(_slot_panel(f"{title}, temperature {temperature:g}", lines, slots, y_label))
    return (
        "<p>The conditional rate says how good a slot is in itself; survival says how often a draft gets that far. Bands "
        "are 95% intervals.</p>"
        f'{legend(_drafters(rows))}<div class="grid2">{"".join(panels)}</div>'
        + folded("Acceptance by slot and domain as a table", _slot_table(rows, slots))
    )


def _slot_panel(title: str, lines: Sequence[Series], slots: int, y_label: str) -> str:
    chart = line_chart(
        lines,
        title=title,
        x_label="draft slot",
        y_label=y_label,
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
                *[percent(slot["conditional"], 1) for slot in row["slots"]],
                *["–"] * (slots - len(row["slots"])),
                f"{row['slots'][0]['reached']:,}" if row["slots"] else "–",
                f"{row['slots'][-1]['reached']:,}" if row["slots"] else "–",
            ]
            for row in rows
        ],
    )


def confidence(report: Mapping[str, Any]) -> str:
    rows = report["confidence"]
    if not rows:
        return absent("This drafter has no confidence head, or no confidences were recorded.")
    panels = []
    for index, row in enumerate(rows):
        if row["drafter"] == "dspark":
            panels += [_reliability(row), _sweep(row, index)]
    temperatures = (report["calibration"] or {}).get("temperatures")
    fitted = (
        "Temperatures of the slots, fitted on other prompts: " + ", ".join(number(t) for t in temperatures) + "."
        if temperatures
        else "The confidences were not calibrated."
    )
    marks = key("b", "square", "before calibration", dashed=True) + key("a", "circle", "after")
    return (
        "<p>The drafter says beforehand how likely each draft is to be kept. On the dotted diagonal it is exactly right. "
        f'{escape(fitted)}</p><ul class="legend">{marks}</ul><div class="grid2">{"".join(panels)}</div>'
        + folded("Calibration error as a table", _confidence_table(rows))
    )


def _reliability(row: Mapping[str, Any]) -> str:
    lines = []
    for name, tone, marker, dashed in (("before", "b", "square", True), ("after", "a", "circle", False)):
        bins = [b for b in row["reliability"][name] if b["count"]]
        lines.append(
            Series(
                name=name,
                points=[(b["confidence"], b["accepted"]) for b in bins],
                tone=tone,
                marker=marker,
                dashed=dashed,
            )
        )
    counts = [b["count"] for b in row["reliability"]["after"]]
    most = max(counts, default=0) or 1
    chart = line_chart(
        lines,
        title=f"Reliability, temperature {row['temperature']:g}",
        x_label="predicted survival",
        y_label="really accepted",
        x_range=(0.0, 1.0),
        y_range=(0.0, 1.0),
        x_ticks=[0, 0.25, 0.5, 0.75, 1],
        y_ticks=[0, 0.25, 0.5, 0.75, 1],
        x_format=percent,
        y_format=percent,
        diagonal=True,
        bars=[(b["low"], b["high"], 0.3 * b["count"] / most) for b in row["reliability"]["after"] if b["count"]],
        height=250,
    )
    return (
        f'<div class="panel"><h3>Reliability, temperature {row["temperature"]:g}</h3>{chart}<p class="note">Expected '
        f"calibration error {percent(row['ece_before'], 1)} before, <b>{percent(row['ece_after'], 1)}</b> after, mean "
        f"over slots, {row['rounds']:,} rounds. Grey bars: how often each prediction was made.</p></div>"
    )


def _sweep(row: Mapping[str, Any], index: int) -> str:
    sweep = row["thresholds"]
    most = max(point["scheduled"] for point in sweep) + 1
    lines = [
        Series(
            name="accepted length",
            points=[(point["threshold"], point["accepted_length"]) for point in sweep],
            tone="a",
            marker="none",
        ),
        Series(
            name="tokens verified",
            points=[(point["threshold"], point["scheduled"] + 1) for point in sweep],
            tone="c",
            marker="none",
            dashed=True,
        ),
    ]
    chart = line_chart(
        lines,
        title=f"Accepted length against confidence threshold, temperature {row['temperature']:g}",
        x_label="survival threshold",
        y_label="tokens a round",
        x_range=(0.0, 1.0),
        y_range=(0.0, max(most, 2.0)),
        x_ticks=[0, 0.25, 0.5, 0.75, 1],
        height=200,
        cursor=True,
    )
    start = len(sweep) // 4
    readout = "".join(
        f'<div><dt>{name}</dt><dd data-field="{field}"{" data-percent=1" if share else ""}>'
        f"{percent(sweep[start][field]) if share else number(sweep[start][field])}</dd></div>"
        for name, field, share in (
            ("threshold", "threshold", False),
            ("drafts verified", "scheduled", False),
            ("accepted length", "accepted_length", False),
            ("of them kept", "verification_rate", True),
        )
    )
    label = f"Verify only drafts whose survival is at least the threshold (temperature {row['temperature']:g})"
    legend_items = key("a", "none", "accepted length") + key("c", "none", "tokens verified", dashed=True)
    return (
        f'<div class="panel" data-sweep="{index}"><h3>Verifying less, temperature {row["temperature"]:g}</h3>'
        f'<ul class="legend">{legend_items}</ul>{chart}'
        f'<div class="controls only-script"><input type="range" min="0" max="{len(sweep) - 1}" value="{start}" '
        f'aria-label="{escape(label, quote=True)}"></div><dl class="readout">{readout}</dl><p class="note">Replayed on '
        "the recorded rounds; with shorter rounds the later ones would have begun elsewhere.</p></div>"
    )


def _confidence_table(rows: Sequence[Mapping[str, Any]]) -> str:
    def cells(row: Mapping[str, Any], name: str) -> list[str]:
        by_slot = [percent(value, 1) for value in row["ece_by_slot"][name]]
        auroc = number(row.get(f"auroc_{name}"), 3)
        first = f"{name_of(row['drafter'])}, temperature {row['temperature']:g}, {name}"
        return [first, percent(row[f"ece_{name}"], 2), number(row[f"brier_{name}"], 3), auroc, *by_slot]

    slots = max(len(row["ece_by_slot"]["after"]) for row in rows)
    return table(
        "Expected calibration error (ECE) of the survival probability",
        ["", "ECE, mean", "Brier", "AUROC", *[f"slot {slot + 1}" for slot in range(slots)]],
        [cells(row, name) for row in rows for name in ("before", "after")],
    )
