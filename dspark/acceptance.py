"""Acceptance statistics from round events, each with a bootstrap interval. Pure numpy.

R rounds, G slots, P prompts. Terms:

- *accepted length*: tokens a round commits, Σ committed / R: drafts kept plus the one token of the target's own.
- *conditional acceptance* of slot k: accepted / reached, given that every slot before it was accepted.
- *analytic acceptance* of slot k: mean over rounds that reached it of Σ min(p_draft, p_target).
- *survival* of slot k: share of rounds in which drafts 1..k were all accepted, where that is known.
- *verification rate*: accepted drafts / verified drafts.

Rounds of one prompt resemble one another, those of its other seeds and turns too, so intervals come from drawing whole
prompts with replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.calibration import (
    BINS,
    Floats,
    auroc,
    brier,
    expected_calibration_error,
    outcomes_known,
    sigmoid,
    survival,
)
from dspark.decoding.scheduling import threshold
from dspark.errors import DsparkError

DRAWS = 1000


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95% bootstrap interval. NaN where there is nothing to measure."""

    value: float
    low: float
    high: float
    rounds: int
    prompts: int

    def to_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("value", "low", "high")}
        return {name: None if np.isnan(n) else n for name, n in numbers.items()} | {
            "rounds": self.rounds,
            "prompts": self.prompts,
        }


@dataclass(frozen=True)
class RoundTable:
    """Round events as arrays; per-slot ones are padded with False, 0 or NaN beyond what a round had."""

    prompt: NDArray[np.int64]  # [R] index of the prompt, from 0
    committed: NDArray[np.int64]
    accepted_raw: NDArray[np.int64]
    scheduled: NDArray[np.int64]
    proposed: NDArray[np.int64]
    bonus: NDArray[np.bool_]
    stop_cut: NDArray[np.bool_]
    accepted: NDArray[np.bool_]  # [R, G]
    reached: NDArray[np.bool_]  # [R, G]
    rate: Floats  # [R, G]
    confidence_logits: Floats  # [R, G], NaN without

    @classmethod
    def from_events(
        cls, events: Iterable[Mapping[str, Any]], key: Sequence[str] = ("prompt_id", "domain")
    ) -> RoundTable:
        """Rows of the event log: the fields of `RoundEvent`, and those in `key`, which tell prompts apart."""
        rows = list(events)
        names: dict[tuple[Any, ...], int] = {}
        prompt = [names.setdefault(tuple(row.get(part) for part in key), len(names)) for row in rows]
        slots = max((max(row["proposed"], row["scheduled"]) for row in rows), default=0)

        def padded(field: str, fill: Any, dtype: Any) -> NDArray[Any]:
            out = np.full((len(rows), slots), fill, dtype=dtype)
            for index, row in enumerate(rows):
                values = row[field]
                if values is not None:
                    out[index, : len(values)] = values
            return out

        def column(field: str, dtype: Any) -> NDArray[Any]:
            return np.array([row[field] for row in rows], dtype=dtype)

        return cls(
            prompt=np.array(prompt, dtype=np.int64),
            committed=column("committed", np.int64),
            accepted_raw=column("accepted_raw", np.int64),
            scheduled=column("scheduled", np.int64),
            proposed=column("proposed", np.int64),
            bonus=column("bonus", bool),
            stop_cut=column("stop_cut", bool),
            accepted=padded("accepted", False, bool),
            reached=padded("reached", False, bool),
            rate=padded("acceptance_rate", 0.0, np.float64),
            confidence_logits=padded("confidence_logits", np.nan, np.float64),
        )

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def slots(self) -> int:
        return self.accepted.shape[1]

    @property
    def prompts(self) -> int:
        return int(self.prompt.max()) + 1 if len(self) else 0

    @property
    def with_confidence(self) -> NDArray[np.bool_]:
        """[R] rounds whose every slot has a confidence."""
        if not self.slots:
            return np.zeros(len(self), dtype=bool)
        return np.asarray(~np.isnan(self.confidence_logits).any(axis=-1), dtype=bool)


def _resamples(prompts: int, draws: int, seed: int) -> NDArray[np.int64]:
    """[draws, P] how often each prompt is in each resample."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)


def ratio(table: RoundTable, top: ArrayLike, bottom: ArrayLike, *, draws: int = DRAWS, seed: int = 0) -> Estimate:
    """Σ top / Σ bottom over rounds, [R] each, with its interval; `rounds` counts those with a bottom above 0."""
    above, below = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    use = below > 0
    rounds, prompts = int(use.sum()), len(np.unique(table.prompt[use]))
    if rounds == 0:
        return Estimate(float("nan"), float("nan"), float("nan"), 0, 0)
    a = np.bincount(table.prompt, above, minlength=table.prompts)
    b = np.bincount(table.prompt, below, minlength=table.prompts)
    counts = _resamples(table.prompts, draws, seed)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = (counts @ a) / (counts @ b)
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Estimate(float(above.sum() / below.sum()), float(low), float(high), rounds, prompts)


def accepted_length(table: RoundTable, **options: int) -> Estimate:
    """Tokens committed a round, the target's own one included: block 7 gives at most 8."""
    return ratio(table, table.committed, np.ones(len(table)), **options)


def paired_gain(
    ours: Sequence[NDArray[np.int64]], theirs: Sequence[NDArray[np.int64]], *, draws: int = DRAWS, seed: int = 0
) -> Estimate:
    """How much longer one drafter's accepted length is than another's on the same prompts: 0.1 is 10% longer.

    Args:
        ours, theirs: an array a domain, [P, 2]: tokens and rounds of each prompt, its seeds and turns together.
            Row p of both is the same prompt.

    A resample draws prompts within each domain, the same ones for both; the mean over domains weighs each alike. There
    is no interval where a domain has a single prompt.
    """
    value_ours = np.mean([sums[:, 0].sum() / sums[:, 1].sum() for sums in ours])
    value_theirs = np.mean([sums[:, 0].sum() / sums[:, 1].sum() for sums in theirs])
    lengths = np.zeros((2, draws))
    for domain, pair in enumerate(zip(ours, theirs, strict=True)):
        counts = _resamples(len(pair[0]), draws, seed + domain)
        for side, sums in enumerate(pair):
            totals = counts @ sums
            with np.errstate(invalid="ignore", divide="ignore"):
                lengths[side] += totals[:, 0] / totals[:, 1]
    alone = any(len(sums) < 2 for sums in ours)
    low, high = (np.nan, np.nan) if alone else np.nanpercentile(lengths[0] / lengths[1] - 1, [2.5, 97.5])
    rounds, prompts = sum(int(sums[:, 1].sum()) for sums in ours), sum(len(sums) for sums in ours)
    return Estimate(float(value_ours / value_theirs - 1), float(low), float(high), rounds, prompts)


def conditional_acceptance(table: RoundTable, **options: int) -> list[Estimate]:
    """Accepted / reached for each slot [G]."""
    return [
        ratio(table, table.accepted[:, slot] & table.reached[:, slot], table.reached[:, slot], **options)
        for slot in range(table.slots)
    ]


def analytic_acceptance(table: RoundTable, **options: int) -> list[Estimate]:
    """Mean Σ min(p_draft, p_target) where reached, for each slot [G]: the same as conditional, with less noise."""
    return [
        ratio(table, table.rate[:, slot] * table.reached[:, slot], table.reached[:, slot], **options)
        for slot in range(table.slots)
    ]


def survival_per_slot(table: RoundTable, **options: int) -> list[Estimate]:
    """Share of rounds with drafts 1..k all accepted, for each slot [G]."""
    survived, known = outcomes_known(table.accepted, table.reached)
    return [ratio(table, survived[:, slot], known[:, slot], **options) for slot in range(table.slots)]


def verification_rate(table: RoundTable, **options: int) -> Estimate:
    """Accepted drafts / verified drafts, by the rule (before stop tokens and length limits)."""
    return ratio(table, table.accepted_raw, table.scheduled, **options)


@dataclass(frozen=True)
class ThresholdPoint:
    """One confidence threshold replayed over rounds that verified their whole block."""

    level: float
    verified: Estimate  # drafts verified a round
    rate: Estimate  # of those, the share accepted
    accepted_length: Estimate  # tokens a round, by the rule


def threshold_sweep(table: RoundTable, levels: Iterable[float], **options: int) -> list[ThresholdPoint]:
    """What each confidence threshold would have verified and accepted, from fully verified rounds.

    Shorter verification leaves the drafts and the rule's answers as they were, so a recorded round tells them exactly.
    Raises DsparkError when no round was verified in full with confidences.
    """
    use = (table.scheduled == table.slots) & table.with_confidence
    if not use.any():
        raise DsparkError("no round has both confidences and a fully verified block; evaluate with the full block")
    part = _rows(table, use)
    confidence, points = sigmoid(part.confidence_logits), []
    for level in levels:
        lengths = threshold(confidence, level)
        kept = np.minimum(part.accepted_raw, lengths)
        ones = np.ones(len(part))
        points.append(
            ThresholdPoint(
                level=float(level),
                verified=ratio(part, lengths, ones, **options),
                rate=ratio(part, kept, lengths, **options),
                accepted_length=ratio(part, kept + 1, ones, **options),
            )
        )
    return points


@dataclass(frozen=True)
class ConfidenceQuality:
    """Survival probability against outcome at one slot."""

    slot: int  # from 1
    ece: Estimate
    auroc: Estimate
    brier: Estimate


def confidence_quality(
    table: RoundTable,
    temperatures: ArrayLike | None = None,
    *,
    bins: int = BINS,
    draws: int = 200,
    seed: int = 0,
    survivals: ArrayLike | None = None,
) -> list[ConfidenceQuality]:
    """Calibration of a_k for each slot; `survivals` [R, G] replaces those from temperatures (other calibrations)."""
    part = _rows(table, table.with_confidence)
    if survivals is None:
        chances = survival(part.confidence_logits, temperatures)
    else:
        chances = np.asarray(survivals, dtype=np.float64)[table.with_confidence]
    survived, known = outcomes_known(part.accepted, part.reached)
    results = []
    for slot in range(part.slots):
        use = known[:, slot]
        p, y, owner = chances[use, slot], survived[use, slot], part.prompt[use]
        measures: list[Callable[[Floats, NDArray[np.bool_]], float]] = [
            lambda a, b: expected_calibration_error(a, b, bins),
            auroc,
            brier,
        ]
        found = [_by_prompts(measure, p, y, owner, draws, seed) for measure in measures]
        results.append(ConfidenceQuality(slot + 1, *found))
    return results


def _by_prompts(
    measure: Callable[[Floats, NDArray[np.bool_]], float],
    p: Floats,
    y: NDArray[np.bool_],
    owner: NDArray[np.int64],
    draws: int,
    seed: int,
) -> Estimate:
    if len(p) == 0:
        return Estimate(float("nan"), float("nan"), float("nan"), 0, 0)
    names, index = np.unique(owner, return_inverse=True)
    order = np.argsort(index, kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(index))[:-1])
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(draws):
        chosen = np.concatenate([groups[group] for group in rng.integers(0, len(names), len(names))])
        values.append(measure(p[chosen], y[chosen]))
    low, high = np.nanpercentile(values, [2.5, 97.5]) if not np.isnan(values).all() else (np.nan, np.nan)
    return Estimate(measure(p, y), float(low), float(high), len(p), len(names))


def _rows(table: RoundTable, use: NDArray[np.bool_]) -> RoundTable:
    return RoundTable(**{name: getattr(table, name)[use] for name in RoundTable.__dataclass_fields__})
