"""Replayed load against arithmetic done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.decoding.scheduling import (
    CostTable,
    FullBlock,
    Scheduler,
    SchedulingError,
    StaticLength,
    Threshold,
    TwoStepsBehind,
    policy_named,
)
from dspark.decoding.step_costs import StepCosts
from dspark.serving import Recording, mean_field, replay

SIZES = tuple(range(1, 801))
# Flat up to 64 tokens, then by the token: what a memory-bound and then a compute-bound device does.
COSTS = StepCosts(CostTable(SIZES, tuple(1 / (0.02 * max(1.0, n / 64)) for n in SIZES)), (1, 200), (0.002, 0.02))


def recording(answers: int = 40, rounds: int = 25, slots: int = 4, seed: int = 0) -> Recording:
    """Answers of an easy and a hard kind, with confidences that know which is which."""
    rng = np.random.default_rng(seed)
    chance = np.repeat(np.where(np.arange(answers) % 2, 0.9, 0.2), rounds)[:, None]
    confidence = np.clip(chance + rng.normal(0, 0.05, (answers * rounds, slots)), 0.01, 0.99)
    took = rng.random((answers * rounds, slots)) < confidence
    accepted = took.cumprod(1).sum(1)
    return Recording(
        accepted=accepted,
        survival=confidence.cumprod(1),
        first=np.arange(answers) * rounds,
        rounds=np.full(answers, rounds),
        tokens=np.array([int((accepted[a * rounds : (a + 1) * rounds] + 1).sum()) for a in range(answers)]),
        slots=slots,
    )


def test_no_drafting_is_one_token_a_user_and_step() -> None:
    point = replay(recording(), COSTS, None, 32)
    assert point.tokens_per_second == pytest.approx(32 / 0.02)
    assert (point.drafts, point.accepted_length, point.batch_tokens) == (0, 1, 32)


def test_a_fixed_length_by_hand() -> None:
    """Constant rounds: every figure follows from the table."""
    same = Recording(np.full(10, 2), None, np.array([0]), np.array([10]), np.array([10_000]), slots=4)
    point = replay(same, COSTS, StaticLength(3), 20, steps=50)
    seconds = 0.02 * 80 / 64 + 0.002 + 0.018 * 19 / 199
    assert point.accepted_length == 3
    assert point.drafts == 3
    assert point.step_seconds == pytest.approx(seconds)
    assert point.tokens_per_second == pytest.approx(60 / seconds)
    assert point.tokens_per_second_user == pytest.approx(3 / seconds)


def test_answers_end_and_the_next_begins() -> None:
    """A tokens' limit cuts the last round: 7 tokens in rounds of 3 take three of them."""
    short = Recording(np.full(3, 2), None, np.array([0]), np.array([3]), np.array([7]), slots=4)
    point = replay(short, COSTS, FullBlock(), 1, steps=300)
    assert point.accepted_length == pytest.approx(7 / 3, abs=0.02)


def test_who_wins_where() -> None:
    """Light load: the whole block costs nothing. Heavy load: drafting does not pay, and the schedulers leave it."""
    recorded = recording()
    policies = {
        "none": None,
        "full": FullBlock(),
        "scheduler": Scheduler(COSTS),
        "two-steps-behind": TwoStepsBehind(COSTS),
        "threshold": Threshold(0.5),
    }
    light = {name: replay(recorded, COSTS, policy, 4).tokens_per_second for name, policy in policies.items()}
    heavy = {name: replay(recorded, COSTS, policy, 160) for name, policy in policies.items()}
    assert light["full"] > 1.5 * light["none"]
    assert light["scheduler"] == pytest.approx(light["full"], rel=0.02)
    assert heavy["full"].tokens_per_second < heavy["scheduler"].tokens_per_second
    for name in ("scheduler", "two-steps-behind"):
        assert heavy[name].tokens_per_second > 0.97 * max(point.tokens_per_second for point in heavy.values())
    budgets = [replay(recorded, COSTS, Scheduler(COSTS), users).drafts for users in (4, 40, 160)]
    assert budgets[0] > budgets[1] > budgets[2]


def test_the_mean_field_is_near_the_replay() -> None:
    recorded = recording()
    assert recorded.survival is not None
    lengths = Threshold(0.5).lengths(recorded.survival, len(recorded.accepted), 4)
    for users in (32, 128):
        simulated = replay(recorded, COSTS, Threshold(0.5), users, steps=600)
        quick = mean_field(recorded, COSTS, lengths, users)
        # Easy answers end in fewer steps when little is verified of the hard ones: the mixture moves a little.
        assert quick.drafts == pytest.approx(simulated.drafts, rel=0.15)
        assert quick.tokens_per_second == pytest.approx(simulated.tokens_per_second, rel=0.1)


def test_errors_say_what_is_missing() -> None:
    with pytest.raises(SchedulingError, match="no recorded round"):
        Recording(np.zeros(0, int), None, np.zeros(0, int), np.zeros(0, int), np.zeros(0, int), 4)
    with pytest.raises(SchedulingError, match="0 users"):
        replay(recording(), COSTS, None, 0)
    with pytest.raises(SchedulingError, match="needs a cost"):
        policy_named("scheduler")
    with pytest.raises(SchedulingError, match="needs a level"):
        policy_named("threshold")
    with pytest.raises(SchedulingError, match="there are full, static"):
        policy_named("best")
    assert isinstance(policy_named("two-steps-behind", cost=COSTS), TwoStepsBehind)
