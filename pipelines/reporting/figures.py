"""Numbers of a report out of the event log. What a number means is said in docs/terms.md.

The statistics are `dspark.acceptance` and `dspark.calibration`; here events are grouped by drafter, temperature and
domain, and the results put into the records of report.json.

Legend: R rounds, G block slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.reporting import statistics
from pipelines.reporting.events import columns

MEAN = "mean"
_PAIR = ["drafter", "temperature"]
THRESHOLDS = 51
# The temperatures were fitted for the whole drafter, not for one with a part switched off.
UNCALIBRATED = ("no-sequential-head", "plain")


def groups(events: pa.Table) -> Iterator[tuple[str, float, dict[str, np.ndarray]]]:
    """(drafter, temperature, columns) in a fixed order: DSpark first, plain last."""
    table = columns(events)
    if not len(events):
        return
    pairs = sorted(set(zip(table["drafter"], table["temperature"], strict=True)), key=_rank)
    for drafter, temperature in pairs:
        yield (
            drafter,
            float(temperature),
            _rows(table, (table["drafter"] == drafter) & (table["temperature"] == temperature)),
        )


def _rank(pair: tuple[str, float]) -> tuple[int, str, float]:
    order = {"dspark": 0, "no-sequential-head": 1, "plain": 9}
    return order.get(pair[0], 5), pair[0], float(pair[1])


def _rows(table: Mapping[str, np.ndarray], keep: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[keep] for name, values in table.items()}


def _domains(table: Mapping[str, np.ndarray]) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    for domain in sorted(set(table["domain"])):
        yield domain, _rows(table, table["domain"] == domain)


def accepted_lengths(events: pa.Table) -> list[dict[str, Any]]:
    """One record a drafter, temperature and domain, then their mean (every domain counts the same)."""
    records = []
    for drafter, temperature, table in groups(events):
        parts = []
        for domain, rows in _domains(table):
            estimate = statistics.accepted_length(rows["committed"], rows["request_id"])
            parts.append((domain, rows, estimate))
        mean = statistics.mean_accepted_length([(rows["committed"], rows["request_id"]) for _, rows, _ in parts])
        for domain, rows, estimate in [*parts, (MEAN, table, mean)]:
            records.append(
                {
                    "drafter": drafter,
                    "temperature": temperature,
                    "domain": domain,
                    **estimate,
                    "rounds": len(rows["committed"]),
                    "requests": len(set(rows["request_id"])),
                    "tokens": int(rows["committed"].sum()),
                    "drafted": int(rows["scheduled"].sum()),
                    "accepted": int(rows["accepted_raw"].sum()),
                    "verification_rate": _ratio(rows["accepted_raw"].sum(), rows["scheduled"].sum()),
                    "stop_cuts": int(rows["stop_cut"].sum()),
                }
            )
    return records


def positions(events: pa.Table) -> list[dict[str, Any]]:
    """Acceptance by slot: conditional, survival, and the mean analytic rate; one record a drafter and domain."""
    records = []
    for drafter, temperature, table in groups(events):
        if not table["scheduled"].any():
            continue
        for domain, rows in [("all", table), *_domains(table)]:
            records.append(
                {
                    "drafter": drafter,
                    "temperature": temperature,
                    "domain": domain,
                    "slots": statistics.acceptance_by_slot(
                        rows["accepted"],
                        rows["reached"],
                        rows["scheduled"],
                        rows["acceptance_rate"],
                        rows["request_id"],
                    ),
                }
            )
    return records


def confidence(events: pa.Table, temperatures: Sequence[float] | None) -> list[dict[str, Any]]:
    """How well the confidences tell what is accepted, before and after calibration, judged on these events.

    The temperatures were fitted on other events (the calibration prompts). A record a drafter and temperature that has
    confidences; before and after are equal without `temperatures`.
    """
    records = []
    for drafter, temperature, table in groups(events):
        logits = table["confidence_logits"]
        if drafter in UNCALIBRATED or not logits.size or np.isnan(logits).all():
            continue
        record: dict[str, Any] = {"drafter": drafter, "temperature": temperature, "rounds": len(logits)}
        record |= statistics.judge_confidence(
            logits, table["accepted"], table["reached"], table["scheduled"], temperatures
        )
        record["thresholds"] = statistics.threshold_sweep(
            logits,
            table["accepted_raw"],
            table["scheduled"],
            temperatures,
            np.linspace(0.0, 1.0, THRESHOLDS),
        )
        records.append(record)
    return records


def speed(
    events: pa.Table, completions: pa.Table, timings: Sequence[Mapping[str, Any]], mean_length: Mapping[Any, Any]
) -> list[dict[str, Any]]:
    """Wall-clock speed by drafter and temperature, beside plain decoding at the same temperature.

    `timings` are stopwatch records {"drafter", "temperature", "tokens", "seconds", "max_rows"}. Without one the rounds'
    own times are added up, each step's shared among the answers in it; the pass over the prompt is not in them.
    """
    records = []
    measured = {(row["drafter"], float(row["temperature"])): row for row in timings}
    recorded = {(drafter, temperature): _round_times(rows) for drafter, temperature, rows in groups(events)}
    decoded = {(row["drafter"], float(row["temperature"])) for row in completions.select(_PAIR).to_pylist()}
    for drafter, temperature in sorted(decoded | set(measured) | set(recorded), key=_rank):
        own = recorded.get((drafter, temperature), {})
        timing = measured.get((drafter, temperature), own)
        records.append(
            {
                "drafter": drafter,
                "temperature": temperature,
                "tokens": timing.get("tokens"),
                "seconds": timing.get("seconds"),
                "max_rows": timing.get("max_rows"),
                "clock": "stopwatch" if (drafter, temperature) in measured else "rounds",
                "tokens_per_second": _ratio(timing.get("tokens"), timing.get("seconds")),
                "tokens_per_pass": 1.0 if drafter == "plain" else mean_length.get((drafter, temperature)),
                "draft_share": own.get("draft_share"),
            }
        )
    plain = {row["temperature"]: row for row in records if row["drafter"] == "plain"}
    for row in records:
        other = plain.get(row["temperature"])
        alike = other is not None and other["clock"] == row["clock"]
        row["against_plain"] = _ratio(row["tokens_per_second"], other["tokens_per_second"]) if other and alike else None
    return records


def _round_times(rows: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A step's time belongs to all the answers in it, so each answer's round carries its share."""
    share = np.maximum(rows["batch_rows"], 1)
    draft, verify = float((rows["draft_ms"] / share).sum()), float((rows["verify_ms"] / share).sum())
    return {
        "tokens": int(rows["committed"].sum()),
        "seconds": (draft + verify) / 1000,
        "max_rows": int(rows["batch_rows"].max()) if len(share) else None,
        "draft_share": _ratio(draft, draft + verify),
    }


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if part is not None and whole else None
