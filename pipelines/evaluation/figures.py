"""Numbers of a report out of the event log. What a number means is said in docs/terms.md.

The statistics are those of `dspark.acceptance` and `dspark.calibration`; here events are grouped by variant,
temperature and domain, and the results put into the records of report.json.

Legend: R rounds, G block slots, P prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from dspark import acceptance
from dspark.acceptance import DRAWS, Estimate, RoundTable
from dspark.calibration import (
    METHODS,
    Floats,
    expected_calibration_error,
    outcomes_known,
    read_table,
    reliability_bins,
    slot_calibration,
    survival,
    table_for,
)
from pipelines.errors import UserError
from pipelines.evaluation.round_log import columns

MEAN = "mean"
MAIN = "dspark"
PLAIN = "plain"
USUAL_POLICIES = ("", "none", "full", "full-block")
LEVELS = np.linspace(0.0, 1.0, 41)
SWEEP_DRAWS = 200

Columns = Mapping[str, np.ndarray]


def variant(drafter: str, policy: str) -> str:
    """The name under which a drafter is reported: by itself, or with a length policy other than the whole block."""
    return drafter if policy in USUAL_POLICIES else f"{drafter}, {policy}"


def rank(pair: tuple[str, float]) -> tuple[int, str, float]:
    """Order of the variants: the drafter, without its sequential head, others, plain decoding; then by temperature."""
    return {MAIN: 0, "no-sequential-head": 2, "one-slot": 7, PLAIN: 9}.get(pair[0], 5), pair[0], float(pair[1])


def groups(events: pa.Table) -> Iterator[tuple[str, float, Columns]]:
    """(variant, temperature, columns), in the order of `rank`."""
    table = columns(events)
    if not len(events):
        return
    names = np.array([variant(*pair) for pair in zip(table["drafter"], table["policy"], strict=True)], dtype=object)
    for name, temperature in sorted(set(zip(names, table["temperature"], strict=True)), key=rank):
        yield name, float(temperature), _rows(table, (names == name) & (table["temperature"] == temperature))


def _rows(table: Columns, keep: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[keep] for name, values in table.items()}


def _domains(table: Columns) -> Iterator[tuple[str, Columns]]:
    for domain in sorted(set(table["domain"])):
        yield domain, _rows(table, table["domain"] == domain)


def round_table(rows: Columns) -> RoundTable:
    """The rounds as `dspark.acceptance` takes them: every seed and turn of a prompt belongs to that one prompt."""
    names: dict[tuple[Any, ...], int] = {}
    keys = zip(rows["prompt_id"], rows["domain"], strict=True)
    slots = max(int(np.max(rows["proposed"], initial=0)), int(np.max(rows["scheduled"], initial=0)))

    def cut(name: str) -> np.ndarray:
        return rows[name][:, :slots]

    return RoundTable(
        prompt=np.array([names.setdefault(key, len(names)) for key in keys], dtype=np.int64),
        committed=rows["committed"].astype(np.int64),
        accepted_raw=rows["accepted_raw"].astype(np.int64),
        scheduled=rows["scheduled"].astype(np.int64),
        proposed=rows["proposed"].astype(np.int64),
        bonus=rows["bonus"],
        stop_cut=rows["stop_cut"],
        accepted=cut("accepted"),
        reached=cut("reached"),
        rate=np.nan_to_num(cut("acceptance_rate").astype(np.float64)),
        confidence_logits=cut("confidence_logits").astype(np.float64),
    )


def accepted_lengths(events: pa.Table, completions: pa.Table | None = None) -> list[dict[str, Any]]:
    """One record a variant, temperature and domain, then their mean (every domain counts the same).

    Plain decoding leaves no rounds: its record is made from its `completions`, one token a target pass.
    """
    records = []
    for name, temperature, table in groups(events):
        parts = [(domain, round_table(rows)) for domain, rows in _domains(table)]
        whole = round_table(table)
        estimates = [(domain, part, acceptance.accepted_length(part)) for domain, part in parts]
        estimates.append((MEAN, whole, mean_accepted_length([part for _, part in parts])))
        for domain, part, estimate in estimates:
            rate = acceptance.verification_rate(part)
            records.append(
                {
                    "drafter": name,
                    "temperature": temperature,
                    "domain": domain,
                    **_estimate(estimate),
                    "tokens": int(part.committed.sum()),
                    "drafted": int(part.scheduled.sum()),
                    "accepted": int(part.accepted_raw.sum()),
                    "verification_rate": _number(rate.value),
                    "stop_cuts": int(part.stop_cut.sum()),
                }
            )
    if completions is not None and not any(record["drafter"] == PLAIN for record in records):
        records += _plain_lengths(completions)
    return records


def _plain_lengths(completions: pa.Table) -> list[dict[str, Any]]:
    """The first token of an answer comes from the pass over the prompt, as it does with a drafter."""
    rows = [row for row in completions.to_pylist() if row["drafter"] == PLAIN and len(row["output_ids"]) > 1]
    records = []
    for temperature in sorted({row["temperature"] for row in rows}):
        here = [row for row in rows if row["temperature"] == temperature]
        for domain in [*sorted({row["domain"] for row in here}), MEAN]:
            own = [row for row in here if domain in (row["domain"], MEAN)]
            passes = sum(len(row["output_ids"]) - 1 for row in own)
            record: dict[str, Any] = {"drafter": PLAIN, "temperature": temperature, "domain": domain, "value": 1.0}
            record |= {"low": None, "high": None, "rounds": passes, "prompts": len({row["prompt_id"] for row in own})}
            record |= {"tokens": passes, "drafted": 0, "accepted": 0, "verification_rate": None, "stop_cuts": 0}
            records.append(record)
    return records


def mean_accepted_length(domains: Sequence[RoundTable], *, draws: int = DRAWS) -> Estimate:
    """Mean of the domains' accepted lengths; prompts are drawn again inside each domain.

    There is no interval where a domain has a single prompt: how prompts of its kind differ is unknown.
    """
    values = np.zeros(draws)
    for seed, table in enumerate(domains):
        committed = np.bincount(table.prompt, table.committed, minlength=table.prompts)
        rounds = np.bincount(table.prompt, minlength=table.prompts)
        chances = np.full(table.prompts, 1 / table.prompts)
        counts = np.random.default_rng(seed).multinomial(table.prompts, chances, size=draws)
        values += (counts @ committed) / (counts @ rounds) / len(domains)
    mean = float(np.mean([table.committed.sum() / len(table) for table in domains]))
    alone = any(table.prompts < 2 for table in domains)
    low, high = (np.nan, np.nan) if alone else np.percentile(values, [2.5, 97.5])
    rounds_, prompts = (sum(sizes) for sizes in zip(*[(len(t), t.prompts) for t in domains], strict=True))
    return Estimate(mean, float(low), float(high), rounds_, prompts)


def positions(events: pa.Table) -> list[dict[str, Any]]:
    """Acceptance by slot: conditional, analytic and survival; one record a variant, temperature and domain."""
    records = []
    for name, temperature, table in groups(events):
        if not table["scheduled"].any():
            continue
        for domain, rows in [("all", table), *_domains(table)]:
            part = round_table(rows)
            by_slot = zip(
                acceptance.conditional_acceptance(part),
                acceptance.survival_per_slot(part),
                acceptance.analytic_acceptance(part),
                strict=True,
            )
            records.append(
                {
                    "drafter": name,
                    "temperature": temperature,
                    "domain": domain,
                    "slots": [
                        {
                            "slot": slot,
                            "conditional": _estimate(conditional),
                            "survival": _estimate(survived),
                            "analytic": _estimate(analytic),
                        }
                        for slot, (conditional, survived, analytic) in enumerate(by_slot, 1)
                    ],
                }
            )
    return records


def confidence(events: pa.Table, calibration: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """How well the confidences tell what is accepted, before and after calibration, judged on these events.

    The record `calibration` was fitted on other events (the calibration prompts). Before and after are equal without
    one. A record a temperature, with every variant of the calibration beside the one that is used (`methods`).
    """
    records = []
    for name, temperature, rows in groups(events):
        table = round_table(rows)
        # Temperatures were fitted for the drafter itself, and rounds cut short by a policy hide what followed.
        if name != MAIN or not table.with_confidence.any():
            continue
        used = slot_calibration(calibration, temperature)
        if used is not None and len(used.temperatures) != table.slots:
            count = len(used.temperatures)
            raise UserError(
                f"{count} temperatures for events of a block of {table.slots}; calibrate this drafter again"
            )
        record: dict[str, Any] = {"drafter": name, "temperature": temperature, "rounds": len(table)}
        after = table if used is None else replace(table, confidence_logits=used.logits(table.confidence_logits))
        for moment, seen in (("before", table), ("after", after)):
            record |= _quality(seen, moment)
        record["methods"] = calibration_methods(table, calibration, temperature) if calibration else []
        record["thresholds"] = _sweep(after)
        records.append(record)
    return records


def calibration_methods(table: RoundTable, record: Mapping[str, Any], temperature: float) -> list[dict[str, Any]]:
    """Every method of the record, on rounds that it was not fitted on: mean over slots of ECE, Brier and AUROC.

    Uncalibrated confidences ("none") are always among them.
    """
    fitted = table_for(record, temperature)
    logits = table.confidence_logits
    survivals = {"none": survival(logits)}
    if fitted is not None:
        own = [method for method in METHODS if method == "temperature" or method in fitted]
        survivals |= {method: read_table(fitted, method).survival(logits) for method in own}
    rows = []
    for method, chances in survivals.items():
        by_slot = acceptance.confidence_quality(table, survivals=chances, draws=1)
        means = {name: _mean([getattr(slot, name).value for slot in by_slot]) for name in ("ece", "brier", "auroc")}
        rows.append({"method": method, **means, "ece_floor": noise_floor(table, chances)})
    return rows


def noise_floor(table: RoundTable, chances: Floats, draws: int = 20) -> float | None:
    """The mean ECE that these very survivals [R, G] would show, with so few rounds, if they were exactly right."""
    rng = np.random.default_rng(0)
    use = table.with_confidence
    _, known = outcomes_known(table.accepted[use], table.reached[use])
    errors = []
    for _ in range(draws):
        # One number a round: survival of later slots then implies that of earlier ones.
        lived = rng.random((int(use.sum()), 1)) < chances[use]
        for slot in np.flatnonzero(known.any(axis=0)):
            seen = known[:, slot]
            errors.append(expected_calibration_error(chances[use][seen, slot], lived[seen, slot]))
    return _mean(errors)


def _quality(table: RoundTable, moment: str) -> dict[str, Any]:
    by_slot = acceptance.confidence_quality(table)
    found: dict[str, Any] = {
        f"{measure}_{moment}": _mean([getattr(slot, measure).value for slot in by_slot])
        for measure in ("ece", "auroc", "brier")
    }
    found[f"by_slot_{moment}"] = [
        {measure: _estimate(getattr(slot, measure)) for measure in ("ece", "auroc", "brier")} for slot in by_slot
    ]
    use = table.with_confidence
    survived, known = outcomes_known(table.accepted[use], table.reached[use])
    chances = survival(table.confidence_logits[use])
    bins = reliability_bins(chances[known], survived[known])
    edges = np.linspace(0.0, 1.0, len(bins.counts) + 1)
    found[f"reliability_{moment}"] = [
        {
            "low": float(edges[k]),
            "high": float(edges[k + 1]),
            "count": int(bins.counts[k]),
            "confidence": _number(bins.confidence[k]),
            "accepted": _number(bins.frequency[k]),
        }
        for k in range(len(bins.counts))
    ]
    return found


def _sweep(table: RoundTable) -> list[dict[str, Any]]:
    """Empty when no round verified its whole block: a shorter one cannot tell what longer ones would have given."""
    if not (table.with_confidence & (table.scheduled == table.slots)).any():
        return []
    return [
        {
            "threshold": round(point.level, 4),
            "scheduled": _number(point.verified.value),
            "accepted_length": _number(point.accepted_length.value),
            "verification_rate": _number(point.rate.value),
        }
        for point in acceptance.threshold_sweep(table, LEVELS, draws=SWEEP_DRAWS)
    ]


def speed(
    events: pa.Table, completions: pa.Table, timings: Sequence[Mapping[str, Any]], mean_length: Mapping[Any, Any]
) -> list[dict[str, Any]]:
    """Wall-clock speed by variant and temperature, beside plain decoding at the same temperature.

    `timings` are stopwatch records {"drafter", "temperature", "tokens", "seconds", "max_rows"}. Without one the rounds'
    own times are added up, each step's shared among the answers in it; the pass over the prompt is not in them.
    """
    records = []
    measured = {(row["drafter"], float(row["temperature"])): row for row in timings}
    recorded = {(name, temperature): _round_times(rows) for name, temperature, rows in groups(events)}
    decoded = {
        (variant(row["drafter"], row["policy"]), float(row["temperature"]))
        for row in completions.select(["drafter", "policy", "temperature"]).to_pylist()
    }
    for pair in sorted(decoded | set(measured) | set(recorded), key=rank):
        own = recorded.get(pair, {})
        timing = measured.get(pair, own)
        records.append(
            {
                "drafter": pair[0],
                "temperature": pair[1],
                "tokens": timing.get("tokens"),
                "seconds": timing.get("seconds"),
                "max_rows": timing.get("max_rows"),
                "clock": "stopwatch" if pair in measured else "rounds",
                "tokens_per_second": _ratio(timing.get("tokens"), timing.get("seconds")),
                "tokens_per_pass": 1.0 if pair[0] == PLAIN else mean_length.get(pair),
                "draft_share": own.get("draft_share"),
            }
        )
    plain = {row["temperature"]: row for row in records if row["drafter"] == PLAIN}
    for row in records:
        other = plain.get(row["temperature"])
        alike = other is not None and other["clock"] == row["clock"]
        row["against_plain"] = _ratio(row["tokens_per_second"], other["tokens_per_second"]) if other and alike else None
    return records


def _round_times(rows: Columns) -> dict[str, Any]:
    """A step's time belongs to all the answers in it, so each answer's round carries its share."""
    share = np.maximum(rows["batch_rows"], 1)
    draft, verify = float((rows["draft_ms"] / share).sum()), float((rows["verify_ms"] / share).sum())
    return {
        "tokens": int(rows["committed"].sum()),
        "seconds": (draft + verify) / 1000,
        "max_rows": int(rows["batch_rows"].max()) if len(share) else None,
        "draft_share": _ratio(draft, draft + verify),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    """A single prompt has no interval."""
    found = estimate.to_dict()
    return found | {"low": None, "high": None} if estimate.prompts < 2 else found


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _ratio(part: Any, whole: Any) -> float | None:
    return float(part) / float(whole) if part is not None and whole else None
