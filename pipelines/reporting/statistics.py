"""Estimates with their intervals, in the form that report.json keeps.

Requests, not rounds, are drawn again in the bootstrap: rounds of one answer resemble each other.

Legend: R rounds, G block slots, U requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 1000
LEVEL = 0.95
BINS = 20


def _by_request(requests: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """Sums over each request's rounds: [U, len(values)] (or [U, len(values), G])."""
    _, index = np.unique(requests.astype(str), return_inverse=True)
    units = int(index.max()) + 1 if len(index) else 0
    sums = np.zeros((units, len(values), *values[0].shape[1:]))
    for column, value in enumerate(values):
        np.add.at(sums[:, column], index, value.astype(float))
    return sums


def _draws(units: int, seed: int) -> np.ndarray:
    """How often each request is drawn in each resample: [RESAMPLES, U]."""
    rng = np.random.default_rng(np.random.SeedSequence([units, seed]))
    return rng.multinomial(units, np.full(units, 1 / units), size=RESAMPLES).astype(float)


def _interval(values: np.ndarray) -> tuple[float | None, float | None]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None, None
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _resampled_ratio(sums: np.ndarray, seed: int = 0) -> np.ndarray:
    """Ratio of the first sum to the second, in each resample: [RESAMPLES] or [RESAMPLES, G]."""
    totals = np.tensordot(_draws(len(sums), seed), sums, axes=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(totals[:, 0] / totals[:, 1])


def accepted_length(committed: np.ndarray, requests: np.ndarray) -> dict[str, float | None]:
    """Tokens committed a round, with its interval; null without rounds, no interval with a single request."""
    if not len(committed):
        return {"value": None, "low": None, "high": None}
    value = float(committed.sum() / len(committed))
    sums = _by_request(requests, [committed, np.ones(len(committed))])
    low, high = _interval(_resampled_ratio(sums)) if len(sums) > 1 else (None, None)
    return {"value": value, "low": low, "high": high}


def mean_accepted_length(domains: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float | None]:
    """Mean of the domains' accepted lengths, requests resampled inside each domain."""
    parts = [(committed, requests) for committed, requests in domains if len(committed)]
    if not parts:
        return {"value": None, "low": None, "high": None}
    value = float(np.mean([committed.sum() / len(committed) for committed, _ in parts]))
    sums = [_by_request(requests, [committed, np.ones(len(committed))]) for committed, requests in parts]
    if min(len(part) for part in sums) < 2:
        return {"value": value, "low": None, "high": None}
    low, high = _interval(np.mean([_resampled_ratio(part, seed) for seed, part in enumerate(sums)], axis=0))
    return {"value": value, "low": low, "high": high}


def acceptance_by_slot(
    accepted: np.ndarray, reached: np.ndarray, scheduled: np.ndarray, rate: np.ndarray, requests: np.ndarray
) -> list[dict[str, Any]]:
    """A record a slot. Arrays are [R, G]; `scheduled` [R] is the number of slots that were verified.

    conditional: accepted / reached. survival: accepted / rounds in which the slot was scheduled (a slot that was not
    scheduled says nothing about itself). expected: mean analytic acceptance rate where the slot was reached.
    """
    slots = accepted.shape[1]
    offered = scheduled[:, None] > np.arange(slots)[None, :]
    hit = accepted & reached
    records = []
    conditional = _resampled_ratio(_by_request(requests, [hit, reached]))
    survival = _resampled_ratio(_by_request(requests, [hit, offered]))
    for slot in range(slots):
        tried, shown = int(reached[:, slot].sum()), int(offered[:, slot].sum())
        rates = rate[reached[:, slot], slot] if rate.shape[1] > slot else np.array([])
        rates = rates[np.isfinite(rates)]
        low, high = _interval(conditional[:, slot])
        survival_low, survival_high = _interval(survival[:, slot])
        records.append(
            {
                "slot": slot + 1,
                "reached": tried,
                "scheduled": shown,
                "conditional": float(hit[:, slot].sum() / tried) if tried else None,
                "low": low,
                "high": high,
                "survival": float(hit[:, slot].sum() / shown) if shown else None,
                "survival_low": survival_low,
                "survival_high": survival_high,
                "expected": float(rates.mean()) if len(rates) else None,
            }
        )
    return records


def survival_probabilities(logits: np.ndarray, temperatures: Sequence[float] | None) -> np.ndarray:
    """a_k, the cumulative product of the slots' confidences: [R, G]; NaN stays NaN."""
    scale = np.ones(logits.shape[1]) if temperatures is None else np.asarray(temperatures, float)[: logits.shape[1]]
    return np.asarray(np.cumprod(1 / (1 + np.exp(-logits.astype(float) / scale)), axis=1))


def judge_confidence(
    logits: np.ndarray,
    accepted: np.ndarray,
    reached: np.ndarray,
    scheduled: np.ndarray,
    temperatures: Sequence[float] | None,
) -> dict[str, Any]:
    """ECE, Brier, AUROC and reliability of the survival probabilities, before and after calibration."""
    width = min(logits.shape[1], accepted.shape[1])
    offered = (scheduled[:, None] > np.arange(width)[None, :]) & np.isfinite(logits[:, :width])
    labels = (accepted & reached)[:, :width]
    out: dict[str, Any] = {"ece_by_slot": {}, "reliability": {}}
    for name, scale in (("before", None), ("after", temperatures)):
        p = survival_probabilities(logits[:, :width], scale)
        by_slot = [_ece(p[offered[:, k], k], labels[offered[:, k], k]) for k in range(width)]
        out["ece_by_slot"][name] = by_slot
        known = [value for value in by_slot if value is not None]
        out[f"ece_{name}"] = float(np.mean(known)) if known else None
        out[f"brier_{name}"] = float(np.mean((p[offered] - labels[offered]) ** 2)) if offered.any() else None
        out["reliability"][name] = _bins(p[offered], labels[offered])
    return out


def _bins(p: np.ndarray, y: np.ndarray) -> list[dict[str, Any]]:
    index = np.minimum((p * BINS).astype(int), BINS - 1)
    return [
        {
            "low": k / BINS,
            "high": (k + 1) / BINS,
            "count": int((index == k).sum()),
            "confidence": float(p[index == k].mean()) if (index == k).any() else None,
            "accepted": float(y[index == k].mean()) if (index == k).any() else None,
        }
        for k in range(BINS)
    ]


def _ece(p: np.ndarray, y: np.ndarray) -> float | None:
    if not len(p):
        return None
    return sum(b["count"] / len(p) * abs(b["confidence"] - b["accepted"]) for b in _bins(p, y) if b["count"])


def threshold_sweep(
    logits: np.ndarray,
    accepted_raw: np.ndarray,
    scheduled: np.ndarray,
    temperatures: Sequence[float] | None,
    thresholds: np.ndarray,
) -> list[dict[str, Any]]:
    """What each recorded round would have given, had drafts of survival probability below the threshold been left out.

    The rounds stay as they were recorded: a shorter verification would have put the later ones elsewhere.
    """
    p = survival_probabilities(logits, temperatures)
    # The first slot below the threshold ends the block.
    records = []
    for threshold in thresholds:
        kept = np.cumprod(np.nan_to_num(p, nan=0.0) >= threshold, axis=1).sum(axis=1)
        lengths = np.minimum(kept, scheduled)
        accepted = np.minimum(accepted_raw, lengths)
        records.append(
            {
                "threshold": round(float(threshold), 4),
                "scheduled": float(lengths.mean()),
                "accepted_length": float(accepted.mean() + 1),
                "verification_rate": float(accepted.sum() / lengths.sum()) if lengths.sum() else None,
            }
        )
    return records


def auroc_of(record: Mapping[str, Any]) -> float | None:
    value = record.get("auroc")
    return None if value is None else float(value)
