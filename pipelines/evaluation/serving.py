"""Figures of the serving comparison: the engine's own steps under load, and recorded rounds replayed beyond it.

Legend: R rounds, G block slots, Q answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dspark.calibration import Floats, SlotCalibration, survival
from dspark.decoding.scheduling import LengthPolicy, StaticLength, policy_named
from dspark.decoding.step_costs import StepCosts
from dspark.serving import Recording, load_point, replay
from pipelines.evaluation.figures import MAIN
from pipelines.evaluation.round_log import columns

WITHOUT_CONFIDENCE = ("none", "one-slot", "static", "full")
WITH_CONFIDENCE = ("threshold", "scheduler", "two-steps-behind")
MOST_ROUNDS = 1500  # recorded rounds that the page computes with
# A load is replayed until so many rounds were seen, and for so many steps at least.
ROUNDS, FEWEST_STEPS = 1500, 100


def policies_of(has_confidence: bool) -> tuple[str, ...]:
    """The policies that are compared."""
    return WITHOUT_CONFIDENCE + WITH_CONFIDENCE if has_confidence else WITHOUT_CONFIDENCE


def split_of(users: int) -> str:
    """How serving events are labelled with their load."""
    return f"{users} users"


def length_policy(name: str, costs: StepCosts, *, static_length: int, threshold: float) -> LengthPolicy | None:
    """The policy of a name in `policies_of`; None for no drafting."""
    if name == "none":
        return None
    if name == "one-slot":
        return StaticLength(1)
    return policy_named(name, length=static_length, level=threshold, cost=costs)


def recording_of(events: pa.Table, temperature: float, calibration: SlotCalibration | None) -> Recording | None:
    """The fully verified rounds of the drafter at this decoding temperature; None when there are none."""
    own = events.filter(
        pc.and_(
            pc.and_(pc.equal(events["drafter"], MAIN), pc.equal(events["policy"], "full")),
            pc.equal(events["temperature"], temperature),
        )
    ).sort_by([(name, "ascending") for name in ("prompt_id", "turn", "seed", "round")])
    if not len(own):
        return None
    rows = columns(own)
    answers = list(zip(rows["prompt_id"], rows["turn"], rows["seed"], strict=True))
    first = np.array([at for at, answer in enumerate(answers) if at == 0 or answer != answers[at - 1]], dtype=np.int64)
    rounds = np.diff([*first, len(answers)])
    logits = rows["confidence_logits"].astype(np.float64)
    return Recording(
        accepted=rows["accepted_raw"].astype(np.int64),
        survival=None if np.isnan(logits).any() else _survival(logits, calibration),
        first=first,
        rounds=rounds,
        tokens=np.add.reduceat(rows["committed"].astype(np.int64), first),
        slots=int(rows["proposed"].max()),
    )


def _survival(logits: np.ndarray, calibration: SlotCalibration | None) -> Floats:
    return survival(logits) if calibration is None else calibration.survival(logits)


def serving(
    events: pa.Table,
    measured: pa.Table | None,
    costs: StepCosts | None,
    calibration: SlotCalibration | None,
    *,
    temperature: float,
    users: Sequence[int],
    static_length: int,
    threshold: float,
) -> dict[str, Any] | None:
    """The comparison as the report keeps it (docs/report.md); None without step costs or recorded rounds."""
    recording = recording_of(events, temperature, calibration)
    if costs is None or recording is None:
        return None
    policies = policies_of(recording.survival is not None)
    replayed = []
    for name in policies:
        policy = length_policy(name, costs, static_length=static_length, threshold=threshold)
        for count in users:
            replayed.append(
                {
                    "policy": name,
                    **replay(recording, costs, policy, count, steps=max(FEWEST_STEPS, ROUNDS // count)).to_dict(),
                }
            )
    return {
        "temperature": temperature,
        "policies": list(policies),
        "users": list(users),
        "static_length": static_length,
        "threshold": threshold,
        "costs": costs.to_dict(),
        "replayed": replayed,
        "measured": [] if measured is None else measured_points(measured),
        "best": [_best(replayed, count) for count in users],
        "rounds": _rounds(recording),
    }


def measured_points(events: pa.Table) -> list[dict[str, Any]]:
    """The engine's own load points: the steps in which every user was there, passes over prompts left out."""
    rows = columns(events)
    points = []
    for policy in policies_of(True):
        for split in sorted(set(rows["split"]), key=lambda name: int(name.split()[0])):
            count = int(split.split()[0])
            use = (rows["policy"] == policy) & (rows["split"] == split) & (rows["batch_rows"] == count)
            steps = int(use.sum()) // count
            if not steps:
                continue
            seconds = float((rows["draft_ms"] + rows["verify_ms"])[use].astype(np.float64).sum()) / count / 1e3
            tokens, drafts = int(rows["committed"][use].sum()), int(rows["scheduled"][use].sum())
            points.append({"policy": policy, **load_point(count, tokens, drafts, seconds, steps).to_dict()})
    return points


def _best(points: Sequence[Mapping[str, Any]], users: int) -> dict[str, Any]:
    """Who gives the most tokens a second under a load, and how that compares with not drafting."""
    here = {point["policy"]: point["tokens_per_second"] for point in points if point["users"] == users}
    best = max(here, key=lambda name: here[name])
    return {"users": users, "policy": best, "against_none": here[best] / here["none"]}


def _rounds(recording: Recording) -> dict[str, Any]:
    """Evenly spaced rounds for the page: accepted drafts, and the confidences of each slot in thousandths."""
    chosen = np.unique(np.linspace(0, len(recording.accepted) - 1, MOST_ROUNDS).astype(np.int64))
    chosen = chosen[: len(recording.accepted)]
    confidence: list[list[int]] = []
    if recording.survival is not None:
        confidence = np.rint(conditional(recording.survival[chosen]) * 1000).astype(int).tolist()
    return {
        "recorded": len(recording.accepted),
        "slots": recording.slots,
        "accepted": recording.accepted[chosen].tolist(),
        "confidence": confidence,
    }


def conditional(chances: Floats) -> Floats:
    """Survival [R, G] back to each slot's own confidence [R, G]."""
    before = np.concatenate([np.ones((len(chances), 1)), chances[:, :-1]], axis=1)
    return np.asarray(np.divide(chances, before, out=np.zeros_like(chances), where=before > 0))
