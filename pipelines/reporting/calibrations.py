"""The calibration record: a table for each decoding temperature, how confidences are read with it, and the variants.

A table holds what was fitted on one decoding temperature's rounds: `temperatures` (sequential temperature scaling),
`affine` (`temperatures` and `shifts`), `isotonic` (a step function a slot), `domains` (`temperatures` of each domain).
The record's `method` says which of the first two is used; the others are there to be compared with.

Legend: R rounds, G block slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.acceptance import RoundTable, confidence_quality
from dspark.calibration import (
    Floats,
    IsotonicCalibration,
    StepFunction,
    calibrated_logits,
    calibration_errors,
    expected_calibration_error,
    fit_affine,
    fit_isotonic_calibration,
    fit_sequential_temperatures,
    outcomes_known,
    survival,
)

Record = Mapping[str, Any]
Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class SlotCalibration:
    """What is done to the confidence logits: (logit - shift) / temperature, by slot."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] | None = None

    def logits(self, confidence_logits: np.ndarray) -> Floats:
        return calibrated_logits(confidence_logits, self.temperatures, self.shifts)

    def survival(self, confidence_logits: np.ndarray) -> Floats:
        return survival(confidence_logits, self.temperatures, self.shifts)


def fit_table(rows: Columns, temperature: float, grid: Floats, bins: int) -> dict[str, Any]:
    """Everything that is fitted on the rounds of one decoding temperature, as JSON values."""
    logits = rows["confidence_logits"].astype(np.float64)
    accepted, reached = rows["accepted"], rows["reached"]
    fitted = fit_sequential_temperatures(logits, accepted, reached, grid, bins=bins)
    scales, shifts = fit_affine(logits, accepted, reached)
    isotonic = fit_isotonic_calibration(logits, accepted, reached)
    domains = {}
    for domain in sorted(set(rows["domain"])):
        own = rows["domain"] == domain
        domains[domain] = fit_sequential_temperatures(logits[own], accepted[own], reached[own], grid, bins=bins)
    after = {
        "none": survival(logits),
        "temperature": survival(logits, fitted),
        "affine": survival(logits, scales, shifts),
    }
    return {
        "temperature": temperature,
        "rounds": len(logits),
        "temperatures": fitted.tolist(),
        "affine": {"temperatures": scales.tolist(), "shifts": shifts.tolist()},
        "isotonic": [{"x": step.x.tolist(), "y": step.y.tolist()} for step in isotonic.maps],
        "domains": {domain: values.tolist() for domain, values in domains.items()},
        "ece_on_fitted_rounds": {
            name: finite(calibration_errors(chances, accepted, reached, bins)) for name, chances in after.items()
        },
    }


def cross_validated(rows: Columns, grid: Floats, bins: int, folds: int = 10) -> dict[str, Floats]:
    """Survivals [R, G] by method, each round's from a table that was fitted without its prompt.

    The prompts are dealt to the folds at random, by a fixed seed.
    """
    prompts, owner = np.unique(rows["prompt_id"], return_inverse=True)
    fold = np.random.default_rng(0).permutation(len(prompts))[owner] % folds
    logits = rows["confidence_logits"].astype(np.float64)
    found = {name: survival(logits) for name in ("none", "temperature", "affine", "isotonic")}
    for number in np.unique(fold):
        own = fold == number
        table = fit_table({name: values[~own] for name, values in rows.items()}, 1.0, grid, bins)
        affine, steps = table["affine"], table["isotonic"]
        maps = IsotonicCalibration(tuple(StepFunction(np.array(step["x"]), np.array(step["y"])) for step in steps))
        found["temperature"][own] = survival(logits[own], table["temperatures"])
        found["affine"][own] = survival(logits[own], affine["temperatures"], affine["shifts"])
        found["isotonic"][own] = maps.survival(logits[own])
    return found


def finite(values: Any) -> list[float | None]:
    """JSON has no NaN; a slot without an outcome has no error."""
    return [float(value) if value == value else None for value in values]


def table_for(record: Record, temperature: float) -> Mapping[str, Any] | None:
    """The table fitted at the decoding temperature nearest to this one; None when there is none of its kind.

    Greedy text and sampled text are of two kinds: what is accepted in one says little of the other, and a table of the
    wrong kind makes confidences worse.
    """
    if "tables" not in record:
        return record
    alike = [table for table in record["tables"] if (table["temperature"] > 0) == (temperature > 0)]
    return min(alike, key=lambda table: abs(float(table["temperature"]) - temperature), default=None)


def slot_calibration(record: Record | None, temperature: float) -> SlotCalibration | None:
    """How the record's method reads confidences of a decoding at this temperature; None when not calibrated."""
    if not record or record.get("temperatures") is None:
        return None
    table = table_for(record, temperature)
    if table is None:
        return None
    if record.get("method") == "affine":
        return SlotCalibration(tuple(table["affine"]["temperatures"]), tuple(table["affine"]["shifts"]))
    return SlotCalibration(tuple(table["temperatures"]))


def compared(table: RoundTable, domains: np.ndarray, record: Record, temperature: float) -> list[dict[str, Any]]:
    """Every variant of the record on rounds that it was not fitted on: mean over slots of ECE, Brier and AUROC.

    domains [R] are those of the rounds; a domain that was not calibrated has the table of all. Uncalibrated confidences
    are always among them.
    """
    fitted = table_for(record, temperature)
    logits = table.confidence_logits
    survivals: dict[str, Floats] = {"none": survival(logits)}
    if fitted is not None:
        survivals["temperature"] = survival(logits, fitted["temperatures"])
    if fitted is not None and "affine" in fitted:
        affine = SlotCalibration(tuple(fitted["affine"]["temperatures"]), tuple(fitted["affine"]["shifts"]))
        steps = tuple(StepFunction(np.array(step["x"]), np.array(step["y"])) for step in fitted["isotonic"])
        survivals |= {"affine": affine.survival(logits), "isotonic": IsotonicCalibration(steps).survival(logits)}
        by_domain = survivals["temperature"].copy()
        for domain, temperatures in fitted["domains"].items():
            own = domains == domain
            by_domain[own] = survival(logits[own], temperatures)
        survivals["temperature, by domain"] = by_domain
    rows = []
    for method, chances in survivals.items():
        quality = confidence_quality(table, survivals=chances, draws=1)
        means = {name: _mean([getattr(slot, name).value for slot in quality]) for name in ("ece", "brier", "auroc")}
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
            told = known[:, slot]
            errors.append(expected_calibration_error(chances[use][told, slot], lived[told, slot]))
    return _mean(errors)


def _mean(values: Sequence[float] | Floats) -> float | None:
    known = [float(value) for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else None
