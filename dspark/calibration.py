"""Confidence against what happened: measures, and the temperatures that repair it. Pure numpy.

R rounds, G slots, n pairs of a probability and an outcome. A slot's confidence c_k is the probability that draft k is
accepted given that all before it were; its survival is a_k = c_1 ... c_k (section 3.2.1 of the DSpark paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.errors import DsparkError

Floats = NDArray[np.float64]

BINS = 20
# Symmetric around 1 on a log scale, 1 included.
DEFAULT_GRID: Floats = np.geomspace(0.1, 10.0, 161)
MINIMUM_OUTCOMES = 50


class CalibrationError(DsparkError):
    """The data cannot be calibrated on, or measured, as given."""


def sigmoid(logits: ArrayLike) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    x = np.asarray(logits, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1.0, small) / (1.0 + small))


def survival(
    confidence_logits: ArrayLike, temperatures: ArrayLike | None = None, shifts: ArrayLike | None = None
) -> Floats:
    """Confidence logits [R, G], shifts [G] and divisors [G] (None: no change) to survival probabilities [R, G]."""
    return np.asarray(np.cumprod(sigmoid(calibrated_logits(confidence_logits, temperatures, shifts)), axis=-1))


def calibrated_logits(
    confidence_logits: ArrayLike, temperatures: ArrayLike | None = None, shifts: ArrayLike | None = None
) -> Floats:
    """(logit_k - shift_k) / temperature_k [R, G]; a table may be longer than the block that was drafted."""
    logits = np.asarray(confidence_logits, dtype=np.float64)
    if shifts is not None:
        logits = logits - np.asarray(shifts, dtype=np.float64)[: logits.shape[-1]]
    if temperatures is not None:
        logits = logits / np.asarray(temperatures, dtype=np.float64)[: logits.shape[-1]]
    return logits


# Measures


@dataclass(frozen=True)
class ReliabilityBins:
    """A reliability diagram: equal-width bins over [0, 1]."""

    counts: Floats  # [bins] pairs
    confidence: Floats  # [bins] mean probability, NaN where empty
    frequency: Floats  # [bins] share of outcomes that were true, NaN where empty


def reliability_bins(p: ArrayLike, y: ArrayLike, bins: int = BINS) -> ReliabilityBins:
    """Probabilities [n] and outcomes [n] sorted into bins; probability 1 belongs to the last one."""
    chances, outcomes = _pairs(p, y)
    index = np.minimum((chances * bins).astype(np.int64), bins - 1)
    counts = np.asarray(np.bincount(index, minlength=bins), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(index, chances, minlength=bins) / counts
        frequency = np.bincount(index, outcomes, minlength=bins) / counts
    return ReliabilityBins(counts, confidence, frequency)


def expected_calibration_error(p: ArrayLike, y: ArrayLike, bins: int = BINS) -> float:
    """Mean over bins, weighted by their counts, of |mean probability - frequency|. NaN without data."""
    found = reliability_bins(p, y, bins)
    total = found.counts.sum()
    if total == 0:
        return float("nan")
    return float(np.nansum(found.counts * np.abs(found.confidence - found.frequency)) / total)


def auroc(p: ArrayLike, y: ArrayLike) -> float:
    """Probability that a true outcome got a higher p than a false one, ties counting half. NaN with one kind only."""
    chances, outcomes = _pairs(p, y)
    positives = outcomes.sum()
    negatives = len(outcomes) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    _, inverse, counts = np.unique(chances, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2.0
    return float((ranks[inverse][outcomes > 0].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def brier(p: ArrayLike, y: ArrayLike) -> float:
    """Mean squared difference of probability and outcome. NaN without data."""
    chances, outcomes = _pairs(p, y)
    return float(np.mean((chances - outcomes) ** 2)) if len(chances) else float("nan")


def _pairs(p: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    chances, outcomes = np.asarray(p, dtype=np.float64).ravel(), np.asarray(y, dtype=np.float64).ravel()
    if chances.shape != outcomes.shape:
        raise CalibrationError(f"{len(chances)} probabilities and {len(outcomes)} outcomes do not pair")
    if not ((chances >= 0) & (chances <= 1)).all():
        raise CalibrationError("a probability is outside 0 to 1, or not a number")
    return chances, outcomes


# What the events say


def outcomes_known(accepted: ArrayLike, reached: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """(survived [R, G], known [R, G]) from per-slot acceptance and reach [R, G].

    A draft has survived when it and all before it were accepted. That is known where the slot was reached, and after a
    rejection (no); it is unknown where verification or the answer ended first.
    """
    took, got_to = np.asarray(accepted, dtype=bool), np.asarray(reached, dtype=bool)
    rejected = np.cumsum(got_to & ~took, axis=-1) > 0
    return got_to & took, got_to | rejected


# Repair


def fit_sequential_temperatures(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    reached: ArrayLike,
    grid: ArrayLike | None = None,
    *,
    bins: int = BINS,
    minimum: int = MINIMUM_OUTCOMES,
) -> Floats:
    """Sequential temperature scaling: divisors [G] of the confidence logits [R, G].

    For k = 1..G in turn, the temperature on the grid that minimises the expected calibration error of the cumulative
    product a_k, earlier slots kept as calibrated. Among equals the one nearest 1. A slot with fewer than `minimum`
    known outcomes keeps temperature 1. Order within a slot is preserved.
    """
    logits = np.asarray(confidence_logits, dtype=np.float64)
    candidates = np.asarray(DEFAULT_GRID if grid is None else grid, dtype=np.float64)
    if logits.ndim != 2 or logits.shape != np.shape(accepted) or logits.shape != np.shape(reached):
        raise CalibrationError(
            f"confidence logits {logits.shape}, accepted {np.shape(accepted)} and reached {np.shape(reached)} "
            "must be [rounds, slots] alike"
        )
    if candidates.size == 0 or candidates.min() <= 0:
        raise CalibrationError("temperatures on the grid must be above 0")
    candidates = candidates[np.argsort(np.abs(np.log(candidates)), kind="stable")]
    survived, known = outcomes_known(accepted, reached)
    chosen = np.ones(logits.shape[1])
    before = np.ones(logits.shape[0])
    for slot in range(logits.shape[1]):
        use = known[:, slot] & np.isfinite(logits[:, slot])
        if use.sum() >= minimum:
            x, y, prefix = logits[use, slot], survived[use, slot], before[use]
            errors = [expected_calibration_error(prefix * sigmoid(x / t), y, bins) for t in candidates]
            chosen[slot] = candidates[int(np.argmin(errors))]
        before = before * sigmoid(logits[:, slot] / chosen[slot])
    return chosen


def fit_affine(
    confidence_logits: ArrayLike, accepted: ArrayLike, reached: ArrayLike, *, shrinkage: float = 10.0
) -> tuple[Floats, Floats]:
    """(temperatures [G], shifts [G]): slot k's confidence becomes sigmoid((logit - shift) / temperature).

    A temperature alone moves confidences towards one half and cannot mend a head that is too sure or too timid of
    everything. This is logistic regression of a slot's outcomes on its logit, over the rounds that reached it (Platt
    scaling); `shrinkage` pulls slope and offset towards 1 and 0 as strongly as about so many outcomes would.
    """
    logits = np.asarray(confidence_logits, dtype=np.float64)
    took, got_to = np.asarray(accepted, dtype=bool), np.asarray(reached, dtype=bool)
    temperatures, shifts = np.ones(logits.shape[1]), np.zeros(logits.shape[1])
    for slot in range(logits.shape[1]):
        use = got_to[:, slot] & np.isfinite(logits[:, slot])
        slope, offset = _logistic(logits[use, slot], took[use, slot].astype(np.float64), shrinkage)
        temperatures[slot], shifts[slot] = 1 / slope, -offset / slope
    return temperatures, shifts


MINIMUM_SLOPE = 0.02


def _logistic(x: Floats, y: Floats, shrinkage: float) -> tuple[float, float]:
    """(slope, offset) at the minimum of the shrunk log loss over slopes of at least MINIMUM_SLOPE, so that order stays.

    The objective is convex: where its minimum has a smaller slope, the best allowed one lies on that bound, with the
    offset fitted anew beside it.
    """
    inputs = np.stack([x, np.ones_like(x)], axis=1)
    found = _minimise(inputs, y, shrinkage, np.array([1.0, 0.0]), np.array([1.0, 0.0]))
    if found[0] >= MINIMUM_SLOPE:
        return float(found[0]), float(found[1])
    bound = np.array([MINIMUM_SLOPE, 0.0])
    offset = _minimise(inputs[:, 1:], y, shrinkage, np.zeros(1), np.zeros(1), constant=inputs @ bound)
    return MINIMUM_SLOPE, float(offset[0])


def _minimise(
    inputs: Floats, y: Floats, shrinkage: float, start: Floats, centre: Floats, constant: Floats | float = 0.0
) -> Floats:
    """argmin over w of Σ log loss(y, constant + inputs·w) + shrinkage/8 · |w - centre|² by Newton with backtracking."""

    def objective(w: Floats) -> float:
        z = constant + inputs @ w
        return float(np.sum(np.logaddexp(0.0, z) - y * z) + shrinkage / 8 * np.sum((w - centre) ** 2))

    found, value = start, objective(start)
    # A coin's variance is 1/4: the penalty weighs like `shrinkage` outcomes.
    penalty = shrinkage / 4 * np.eye(len(start))
    for _ in range(200):
        p = sigmoid(constant + inputs @ found)
        gradient = inputs.T @ (p - y) + penalty @ (found - centre)
        step = np.linalg.solve((inputs * (p * (1 - p))[:, None]).T @ inputs + penalty, gradient)
        slope = float(gradient @ step)  # how fast the objective falls along the step
        if slope < 1e-18 * max(1.0, value):
            break
        length = 1.0
        while length > 1e-12 and objective(found - length * step) > value - 1e-4 * length * slope:
            length /= 2
        if length <= 1e-12:  # rounding hides any further gain
            break
        found = found - length * step
        value = objective(found)
    return found


def calibration_errors(survivals: ArrayLike, accepted: ArrayLike, reached: ArrayLike, bins: int = BINS) -> Floats:
    """Expected calibration error of a_k for each slot [G]; survivals, accepted, reached are [R, G]."""
    chances = np.asarray(survivals, dtype=np.float64)
    survived, known = outcomes_known(accepted, reached)
    return np.array(
        [
            expected_calibration_error(chances[known[:, slot], slot], survived[known[:, slot], slot], bins)
            for slot in range(chances.shape[1])
        ]
    )


# The record: a table for each decoding temperature


@dataclass(frozen=True)
class SlotCalibration:
    """What is done to the confidence logits: (logit - shift) / temperature, by slot."""

    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] | None = None

    def logits(self, confidence_logits: ArrayLike) -> Floats:
        return calibrated_logits(confidence_logits, self.temperatures, self.shifts)

    def survival(self, confidence_logits: ArrayLike) -> Floats:
        return survival(confidence_logits, self.temperatures, self.shifts)


METHODS = ("temperature", "affine")


def fit_table(rounds: Mapping[str, NDArray[Any]], temperature: float, grid: ArrayLike, bins: int) -> dict[str, Any]:
    """What every method fits on the rounds of one decoding temperature, as JSON values.

    rounds: `confidence_logits`, `accepted` and `reached`, [R, G] each. The result has `temperatures` (sequential
    temperature scaling) and `affine` (`temperatures` and `shifts`).
    """
    logits = rounds["confidence_logits"].astype(np.float64)
    accepted, reached = rounds["accepted"], rounds["reached"]
    fitted = fit_sequential_temperatures(logits, accepted, reached, grid, bins=bins)
    scales, shifts = fit_affine(logits, accepted, reached)
    after = {
        "none": survival(logits),
        "temperature": survival(logits, fitted),
        "affine": survival(logits, scales, shifts),
    }
    errors = {name: calibration_errors(chances, accepted, reached, bins) for name, chances in after.items()}
    return {
        "temperature": temperature,
        "rounds": len(logits),
        "temperatures": fitted.tolist(),
        "affine": {"temperatures": scales.tolist(), "shifts": shifts.tolist()},
        # JSON has no NaN; a slot without an outcome has no error.
        "ece_on_fitted_rounds": {
            name: [float(error) if np.isfinite(error) else None for error in values] for name, values in errors.items()
        },
    }


def read_table(table: Mapping[str, Any], method: str) -> SlotCalibration:
    """How a table reads confidences by one of METHODS."""
    if method == "affine":
        return SlotCalibration(tuple(table["affine"]["temperatures"]), tuple(table["affine"]["shifts"]))
    return SlotCalibration(tuple(table["temperatures"]))


def table_for(record: Mapping[str, Any], temperature: float) -> Mapping[str, Any] | None:
    """The table fitted at the decoding temperature nearest to this one; None when there is none of its kind.

    Greedy text and sampled text are of two kinds: what is accepted in one says little of the other, and a table of the
    wrong kind makes confidences worse.
    """
    if "tables" not in record:
        return record
    alike = [table for table in record["tables"] if (table["temperature"] > 0) == (temperature > 0)]
    return min(alike, key=lambda table: abs(float(table["temperature"]) - temperature), default=None)


def slot_calibration(record: Mapping[str, Any] | None, temperature: float) -> SlotCalibration | None:
    """How the record's method reads confidences of a decoding at this temperature; None when not calibrated."""
    if not record or record.get("temperatures") is None:
        return None
    table = table_for(record, temperature)
    return None if table is None else read_table(table, str(record.get("method")))


def without_harm(record: Mapping[str, Any], judged: Mapping[float, Mapping[str, float | None]]) -> dict[str, Any]:
    """The record as it may be published: what made the calibration error worse than no calibration is taken back.

    judged: ECE by method ("none" among them) at each decoding temperature, on prompts that nothing was fitted on. A
    method whose mean ECE over the temperatures that read a table is above that of "none" gets temperature 1 and shift
    0 in that table, and its name and both errors are noted in the table's `taken_back`.
    """
    tables = []
    for table in record.get("tables", [record]):
        readers = [errors for at, errors in judged.items() if table_for(record, at) is table]
        kept = dict(table)
        for method in METHODS:
            pairs = [(errors.get("none"), errors.get(method)) for errors in readers]
            known = np.array([pair for pair in pairs if None not in pair], dtype=np.float64).reshape(-1, 2)
            before, after = known.mean(axis=0) if len(known) else (0.0, 0.0)
            if after <= before:
                continue
            ones = [1.0] * len(table["temperatures"])
            if method == "affine":
                kept["affine"] = {"temperatures": ones, "shifts": [0.0] * len(ones)}
            else:
                kept["temperatures"] = ones
            note = {"ece_before": float(before), "ece_after": float(after)}
            kept["taken_back"] = {**kept.get("taken_back", {}), method: note}
        tables.append(kept)
    if "tables" not in record:
        return tables[0]
    # What engines read is the last table's.
    return {**record, "tables": tables, "temperatures": tables[-1]["temperatures"]}
