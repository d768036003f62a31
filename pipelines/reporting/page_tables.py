"""Rows of the page's tables, out of the report's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.reporting.charts import number, percent
from pipelines.reporting.looks import POLICY_NAMES, name_of

Records = Sequence[Mapping[str, Any]]
Cells = list[list[Any]]
METHOD_NAMES = {"none": "none", "temperature": "temperature a slot", "affine": "temperature and shift"}


def lengths(rows: Records) -> Cells:
    return [
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
    ]


def slots(rows: Records, count: int) -> Cells:
    return [
        [
            name_of(row["drafter"]),
            f"{row['temperature']:g}",
            row["domain"],
            *[percent(slot["conditional"]["value"], 1) for slot in row["slots"]],
            *["–"] * (count - len(row["slots"])),
            *[f"{row['slots'][at]['conditional']['rounds']:,}" if row["slots"] else "–" for at in (0, -1)],
        ]
        for row in rows
    ]


def calibration_methods(rows: Records) -> Cells:
    """Every way to calibrate that was fitted on the same rounds, judged on these."""
    return [
        [
            f"{METHOD_NAMES.get(way['method'], way['method'])}, temperature {row['temperature']:g}",
            percent(way["ece"], 2),
            percent(way["ece_floor"], 2),
            number(way["brier"], 3),
            number(way["auroc"], 3),
        ]
        for row in rows
        for way in row["methods"]
    ]


def calibration_errors(rows: Records) -> Cells:
    return [
        [
            f"{name_of(row['drafter'])}, temperature {row['temperature']:g}, {moment}",
            percent(row[f"ece_{moment}"], 2),
            number(row[f"brier_{moment}"], 3),
            number(row.get(f"auroc_{moment}"), 3),
            *[percent(slot["ece"]["value"], 1) for slot in row[f"by_slot_{moment}"]],
        ]
        for row in rows
        for moment in ("before", "after")
    ]


def loads(found: Mapping[str, Any]) -> Cells:
    points = [("engine", point) for point in found["measured"]] + [("replay", point) for point in found["replayed"]]
    order = {name: place for place, name in enumerate(found["policies"])}
    points.sort(key=lambda row: (row[1]["users"], row[0], order.get(row[1]["policy"], 99)))
    return [
        [
            POLICY_NAMES[point["policy"]],
            point["users"],
            source,
            number(point["tokens_per_second"], 1),
            number(point["tokens_per_second_user"], 2),
            number(point["drafts"]),
            number(point["accepted_length"]),
            number(1000 * point["step_seconds"], 1),
            point["steps"],
        ]
        for source, point in points
    ]


def passes(costs: Mapping[str, Any]) -> Cells:
    pairs = zip(costs["tokens"], costs["steps_per_second"], strict=True)
    return [[tokens, number(speed), number(1000 / speed, 1)] for tokens, speed in pairs]


def drafts(draft: Mapping[str, Any]) -> Cells:
    return [[rows, number(1000 * seconds, 1)] for rows, seconds in zip(draft["rows"], draft["seconds"], strict=True)]


def last_values(last: Mapping[str, float]) -> Cells:
    return [[name, f"{value:.6g}"] for name, value in sorted(last.items())]


def cache_parts(info: Mapping[str, Any]) -> Cells:
    sizes = [*info["parts"].items(), ("together", info["bytes_per_token"])]
    return [[name, f"{size:,.1f}", f"{100 * size / info['bytes_per_token']:.1f}%"] for name, size in sizes]


def outputs(rows: Records) -> Cells:
    return [
        [
            name_of(row["drafter"]),
            f"{row['temperature']:g}",
            row["completions"],
            *[len(row[kind]) for kind in ("empty", "looping", "repetitive")],
            row["identical"],
            row["cut_by_length"],
        ]
        for row in rows
    ]
