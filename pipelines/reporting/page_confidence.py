"""The page's section on confidence: reliability before and after calibration, and a threshold to play with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipelines.reporting.charts import Series, line_chart, number, percent
from pipelines.reporting.page_parts import FEW, absent, folded, key, name_of, table

METHODS = {
    "none": "none",
    "temperature": "temperature a slot",
    "affine": "temperature and shift",
}


def confidence(report: Mapping[str, Any]) -> str:
    rows = report["confidence"]
    if not rows:
        return absent("This drafter has no confidence head, or no confidences were recorded.")
    panels = []
    for index, row in enumerate(rows):
        if row["drafter"] == "dspark":
            panels.append(_reliability(row))
            panels += [_sweep(row, index)] if row["thresholds"] else []
    record = report["calibration"] or {}
    how = "a temperature and a shift a slot" if record.get("method") == "affine" else "a temperature a slot"
    fitted = (
        f"Calibrated with {how}, fitted on other prompts: {record.get('fitted_on', 'not said which')}."
        if record.get("temperatures")
        else "The confidences were not calibrated."
    )
    marks = key("b", "square", "before calibration", dashed=True) + key("a", "circle", "after")
    return (
        "<p>The drafter says beforehand how likely each draft is to be kept. On the dotted diagonal it is right; a "
        f"hollow point rests on fewer than {FEW} predictions. "
        f'{escape(fitted)}</p><ul class="legend">{marks}</ul><div class="grid2">{"".join(panels)}</div>'
        + _methods(rows)
        + folded("Calibration error as a table", _confidence_table(rows))
    )


def _reliability(row: Mapping[str, Any]) -> str:
    lines = []
    for name, tone, marker, dashed in (("before", "b", "square", True), ("after", "a", "circle", False)):
        bins = [b for b in row[f"reliability_{name}"] if b["count"]]
        lines.append(
            Series(
                name=name,
                points=[(b["confidence"], b["accepted"]) for b in bins],
                tone=tone,
                marker=marker,
                dashed=dashed,
                hollow=frozenset(b["confidence"] for b in bins if b["count"] < FEW),
            )
        )
    counts = [b["count"] for b in row["reliability_after"]]
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
        bars=[(b["low"], b["high"], 0.3 * b["count"] / most) for b in row["reliability_after"] if b["count"]],
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
        x_label="confidence threshold",
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
            ("tokens a round", "accepted_length", False),
            ("of them kept", "verification_rate", True),
        )
    )
    label = (
        f"Verify drafts up to the first whose confidence is below the threshold (temperature {row['temperature']:g})"
    )
    legend_items = key("a", "none", "accepted length") + key("c", "none", "tokens verified", dashed=True)
    return (
        f'<div class="panel" data-sweep="{index}"><h3>Verifying less, temperature {row["temperature"]:g}</h3>'
        f'<ul class="legend">{legend_items}</ul>{chart}'
        f'<div class="controls only-script"><input type="range" min="0" max="{len(sweep) - 1}" value="{start}" '
        f'aria-label="{escape(label, quote=True)}"></div><dl class="readout">{readout}</dl><p class="note">Drafts '
        "are verified up to the first whose calibrated confidence is below the threshold; replayed on the recorded "
        "rounds.</p></div>"
    )


def _methods(rows: Sequence[Mapping[str, Any]]) -> str:
    """Every way to calibrate that was fitted on the same rounds, judged on these."""
    cells = [
        [
            f"{METHODS.get(way['method'], way['method'])}, temperature {row['temperature']:g}",
            percent(way["ece"], 2),
            percent(way["ece_floor"], 2),
            number(way["brier"], 3),
            number(way["auroc"], 3),
        ]
        for row in rows
        for way in row["methods"]
    ]
    if not cells:
        return ""
    head = ["calibration", "ECE, mean of slots", "if exactly right", "Brier", "AUROC"]
    return (
        '<div class="panel wide" style="margin-top:18px"><h3>Ways to calibrate, judged on other prompts</h3>'
        f"{table('Calibration error by method', head, cells)}"
        '<p class="note">With few rounds even exact probabilities show an error: what these predictions would show if '
        "they were right stands in the third column.</p></div>"
    )


def _confidence_table(rows: Sequence[Mapping[str, Any]]) -> str:
    def cells(row: Mapping[str, Any], name: str) -> list[str]:
        by_slot = [percent(slot["ece"]["value"], 1) for slot in row[f"by_slot_{name}"]]
        auroc = number(row.get(f"auroc_{name}"), 3)
        first = f"{name_of(row['drafter'])}, temperature {row['temperature']:g}, {name}"
        return [first, percent(row[f"ece_{name}"], 2), number(row[f"brier_{name}"], 3), auroc, *by_slot]

    slots = max(len(row["by_slot_after"]) for row in rows)
    return table(
        "Expected calibration error (ECE) of the survival probability",
        ["", "ECE, mean", "Brier", "AUROC", *[f"slot {slot + 1}" for slot in range(slots)]],
        [cells(row, name) for row in rows for name in ("before", "after")],
    )
