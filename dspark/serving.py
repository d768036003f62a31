"""Closed-loop serving, replayed: recorded rounds of a drafter over a table of step costs. Pure numpy.

U users have one request each at any time; a user whose answer ends asks the next one at once. In every step each user
takes the next recorded round of its answer; the length policy decides from the confidences how much of it is verified,
the round gives min(accepted, length) + 1 tokens, and the step takes the time that the table says for its size.

What a replay leaves out: rounds are those that verifying whole blocks led to, so a shorter verification meets the
rounds of the same answers; passes over prompts cost nothing. The engine's own measurement beside it tells how much that
matters.

R rounds, G block slots, Q answers, U users.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.calibration import Floats
from dspark.decoding.scheduling import LengthPolicy, SchedulingError
from dspark.decoding.step_costs import StepCosts


@dataclass(frozen=True)
class Recording:
    """Fully verified rounds, those of one answer together and in order."""

    accepted: NDArray[np.int64]  # [R] drafts that the rule accepted, 0..G
    survival: Floats | None  # [R, G] calibrated; None without confidences
    first: NDArray[np.int64]  # [Q] index of each answer's first round
    rounds: NDArray[np.int64]  # [Q] rounds of each answer
    tokens: NDArray[np.int64]  # [Q] tokens of each answer
    slots: int

    def __post_init__(self) -> None:
        if not len(self.first):
            raise SchedulingError("there is no recorded round to replay; evaluate with the full block first")


@dataclass(frozen=True)
class LoadPoint:
    """One policy under one load, in the steady state."""

    users: int
    tokens_per_second: float  # of all users together
    tokens_per_second_user: float
    drafts: float  # verified drafts a user and step: the verification budget
    batch_tokens: float  # tokens in a step's batch
    accepted_length: float  # tokens a user and step
    step_seconds: float
    steps: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def load_point(users: int, tokens: float, drafts: float, seconds: float, steps: int) -> LoadPoint:
    """From the sums over `steps` steps: tokens committed, drafts verified, seconds."""
    return LoadPoint(
        users=users,
        tokens_per_second=tokens / seconds,
        tokens_per_second_user=tokens / seconds / users,
        drafts=drafts / steps / users,
        batch_tokens=users + drafts / steps,
        accepted_length=tokens / steps / users,
        step_seconds=seconds / steps,
        steps=steps,
    )


def replay(
    recording: Recording,
    costs: StepCosts,
    policy: LengthPolicy | None,
    users: int,
    *,
    steps: int = 200,
    warm_up: int = 40,
    seed: int = 0,
) -> LoadPoint:
    """A policy (None: no drafting, one token a user and step) under the load of so many users.

    Users begin at random places of random answers, so that they do not end together; the first `warm_up` steps are not
    counted.
    """
    if users < 1 or steps < 1:
        raise SchedulingError(f"a replay needs users and steps of 1 or more; got {users} users and {steps} steps")
    if policy is None:
        seconds = float(costs.seconds(users, users, drafting=False))
        return load_point(users, users * steps, 0, seconds * steps, steps)
    rng = np.random.default_rng(seed)
    policy.reset()
    slots = min(policy.most(recording.slots), recording.slots)
    answer = rng.integers(0, len(recording.first), users)
    at = rng.integers(0, recording.rounds[answer])
    room = np.maximum((recording.tokens[answer] * rng.random(users)).astype(np.int64), 1)
    nothing = np.zeros(users, dtype=np.int64)
    drafted = costs.seconds(users + np.arange(users * slots + 1), users)
    undrafted = costs.seconds(users, users, drafting=False)
    tokens = drafts = 0
    seconds = 0.0
    for step in range(warm_up + steps):
        index = recording.first[answer] + at
        drafting = policy.wants_draft(users)
        lengths = nothing
        if drafting:
            chances = None if recording.survival is None else recording.survival[index, :slots]
            lengths = policy.lengths(chances, users, slots)
        committed = np.minimum(np.minimum(recording.accepted[index], lengths) + 1, room)
        if step >= warm_up:
            verified = int(lengths.sum())
            tokens += int(committed.sum())
            drafts += verified
            seconds += float(drafted[verified] if drafting else undrafted)
        room = room - committed
        at = (at + 1) % recording.rounds[answer]
        ended = np.flatnonzero(room == 0)
        if len(ended):
            answer[ended] = rng.integers(0, len(recording.first), len(ended))
            at[ended] = 0
            room[ended] = recording.tokens[answer[ended]]
    return load_point(users, tokens, drafts, seconds, steps)


def mean_field(recording: Recording, costs: StepCosts, lengths: NDArray[np.int64], users: int) -> LoadPoint:
    """The same load when every step has the recording's mean length: [R] verified drafts of each round.

    A threshold's lengths do not depend on the other users, so this needs no simulation; the report's page uses it.
    """
    tokens = float((np.minimum(recording.accepted, lengths) + 1).mean()) * users
    drafts = float(lengths.mean()) * users
    return load_point(users, tokens, drafts, float(costs.seconds(users + drafts, users)), 1)
