"""Confidence against what happened: measures, and the temperatures that repair it. Pure numpy.

R rounds, G slots, n pairs of a probability and an outcome. A slot's confidence c_k is the probability that draft k is
accepted given that all before it were; its survival is a_k = c_1 ... c_k (section 3.2.1 of the DSpark paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

BINS = 20
# Symmetric around 1 on a log scale, 1 included.
DEFAULT_GRID: Floats = np.geomspace(0.1, 10.0, 161)
MINIMUM_OUTCOMES = 50


class CalibrationError(ValueError):
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

    counts: Floats  # [bins] pairs, or their weight
    confidence: Floats  # [bins] mean probability, NaN where empty
    frequency: Floats  # [bins] share of outcomes that were true, NaN where empty


def reliability_bins(p: ArrayLike, y: ArrayLike, bins: int = BINS, weights: ArrayLike | None = None) -> ReliabilityBins:
    """Probabilities [n] and outcomes [n] sorted into bins; probability 1 belongs to the last one."""
    chances, outcomes = _pairs(p, y)
    weight = np.ones_like(chances) if weights is None else np.asarray(weights, dtype=np.float64)
    index = np.minimum((chances * bins).astype(np.int64), bins - 1)
    counts = np.asarray(np.bincount(index, weight, minlength=bins), dtype=np.float64)
    with np.errstate(invalid="ignore"):
        confidence = np.bincount(index, weight * chances, minlength=bins) / counts
        frequency = np.bincount(index, weight * outcomes, minlength=bins) / counts
    return ReliabilityBins(counts, confidence, frequency)


def expected_calibration_error(p: ArrayLike, y: ArrayLike, bins: int = BINS, weights: ArrayLike | None = None) -> float:
    """Mean over bins, weighted by their counts, of |mean probability - frequency|. NaN without data."""
    found = reliability_bins(p, y, bins, weights)
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


@dataclass(frozen=True)
class StepFunction:
    """A non-decreasing map of probabilities: value i holds up to bound i, linear between block centres."""

    x: Floats
    y: Floats

    def __call__(self, p: ArrayLike) -> Floats:
        return np.asarray(np.interp(np.asarray(p, dtype=np.float64), self.x, self.y))


def fit_isotonic(p: ArrayLike, y: ArrayLike) -> StepFunction:
    """Isotonic regression of outcomes [n] on probabilities [n] (pool adjacent violators), as a map to interpolate."""
    chances, outcomes = _pairs(p, y)
    if len(chances) == 0:
        raise CalibrationError("isotonic regression needs at least one outcome")
    xs, index = np.unique(chances, return_inverse=True)
    weight = np.bincount(index).astype(np.float64)
    mean = np.bincount(index, outcomes) / weight
    blocks: list[list[float]] = []  # [value, weight, weighted x]
    for x, value, w in zip(xs, mean, weight, strict=True):
        blocks.append([value, w, w * x])
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            value2, w2, x2 = blocks.pop()
            value1, w1, x1 = blocks.pop()
            blocks.append([(value1 * w1 + value2 * w2) / (w1 + w2), w1 + w2, x1 + x2])
    table = np.array(blocks)
    return StepFunction(table[:, 2] / table[:, 1], table[:, 0])


@dataclass(frozen=True)
class IsotonicCalibration:
    """One isotonic map a slot, of the conditional confidence: a variant to compare temperatures with."""

    maps: tuple[StepFunction, ...]

    def survival(self, confidence_logits: ArrayLike) -> Floats:
        """Confidence logits [R, G] to survival probabilities [R, G]."""
        confidence = sigmoid(confidence_logits)
        columns = [self.maps[slot](confidence[:, slot]) for slot in range(confidence.shape[1])]
        return np.asarray(np.cumprod(np.stack(columns, axis=1), axis=1))


def fit_isotonic_calibration(
    confidence_logits: ArrayLike, accepted: ArrayLike, reached: ArrayLike, *, minimum: int = MINIMUM_OUTCOMES
) -> IsotonicCalibration:
    """Fit each slot's map on the rounds that reached it; with fewer than `minimum` of them it is the identity."""
    confidence = sigmoid(confidence_logits)
    took, got_to = np.asarray(accepted, dtype=bool), np.asarray(reached, dtype=bool)
    identity = StepFunction(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    maps = []
    for slot in range(confidence.shape[1]):
        use = got_to[:, slot]
        maps.append(fit_isotonic(confidence[use, slot], took[use, slot]) if use.sum() >= minimum else identity)
    return IsotonicCalibration(tuple(maps))


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
