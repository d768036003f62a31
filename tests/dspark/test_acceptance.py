"""Statistics of hand-written events, and of events of a decoder whose rates are known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from table_models import TableProposer, TableTarget

from dspark.acceptance import (
    RoundTable,
    accepted_length,
    analytic_acceptance,
    conditional_acceptance,
    confidence_quality,
    ratio,
    survival_per_slot,
    threshold_sweep,
    verification_rate,
)
from dspark.decoding.decoder import Decoder, Request
from dspark.decoding.rounds import RoundEvent
from dspark.decoding.sampling import SamplingConfig
from dspark.decoding.scheduling import Threshold


def an_event(kept: int, scheduled: int, logits: list[float], **changes: Any) -> RoundEvent:
    reached = [slot <= kept for slot in range(scheduled)]
    event = RoundEvent(
        round=0, position=0, anchor_id=0, draft_ids=[0] * len(logits), proposed=len(logits), scheduled=scheduled,
        accepted_raw=kept, committed=kept + 1, bonus=True, stop_cut=False, confidence_logits=logits,
        accepted=[slot < kept for slot in range(scheduled)], reached=reached,
        acceptance_rate=[0.5 * value for value in reached], committed_ids=[0] * (kept + 1), draft_ms=1.0,
        verify_ms=2.0, batch_rows=1, batch_tokens=1 + scheduled,
    )  # fmt: skip
    return replace(event, **changes)


def a_table(*events: RoundEvent, names: list[str] | None = None) -> RoundTable:
    names = names or [str(index) for index in range(len(events))]
    return RoundTable.from_events(
        [event.to_dict() | {"prompt_id": name, "domain": "chat"} for event, name in zip(events, names, strict=True)]
    )


def test_figures_of_four_rounds() -> None:
    high = [9.0, 9.0, 9.0]
    table = a_table(
        an_event(3, 3, high),
        an_event(1, 3, high),
        an_event(1, 1, high),  # cut short by its policy: slot 2 is unknown
        an_event(2, 3, high, committed=1, bonus=False, stop_cut=True, reached=[True] + [False] * 2,
                 accepted=[True] + [False] * 2),
    )  # fmt: skip
    assert accepted_length(table).value == pytest.approx((4 + 2 + 2 + 1) / 4)
    assert verification_rate(table).value == pytest.approx((3 + 1 + 1 + 2) / (3 + 3 + 1 + 3))
    assert [e.value for e in conditional_acceptance(table)] == pytest.approx([4 / 4, 1 / 2, 1 / 1])
    assert [e.rounds for e in conditional_acceptance(table)] == [4, 2, 1]
    assert [e.value for e in survival_per_slot(table)] == pytest.approx([4 / 4, 1 / 2, 1 / 2])
    assert [e.value for e in analytic_acceptance(table)] == pytest.approx([0.5] * 3)


def test_threshold_sweep_replays_full_rounds() -> None:
    logit = {p: float(np.log(p / (1 - p))) for p in (0.2, 0.6, 0.9)}
    table = a_table(
        an_event(2, 3, [logit[0.9], logit[0.9], logit[0.2]]),
        an_event(1, 3, [logit[0.9], logit[0.6], logit[0.9]]),
        an_event(1, 1, [logit[0.9], logit[0.6], logit[0.9]]),  # not fully verified: left out
    )
    nothing, middle, strict = threshold_sweep(table, [0.0, 0.5, 0.8])
    assert (nothing.verified.value, nothing.rate.value, nothing.accepted_length.value) == pytest.approx((3, 0.5, 2.5))
    assert (middle.verified.value, middle.rate.value, middle.accepted_length.value) == pytest.approx((2.5, 0.6, 2.5))
    assert (strict.verified.value, strict.rate.value, strict.accepted_length.value) == pytest.approx((1.5, 1.0, 2.5))
    with pytest.raises(ValueError, match="full block"):
        threshold_sweep(a_table(an_event(1, 1, [0.0, 0.0])), [0.5])


def test_threshold_replay_equals_decoding_with_the_threshold() -> None:
    """The sweep over fully verified rounds agrees with really decoding under that policy."""
    target = TableTarget([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.45, 0.1, 0.45]])
    proposer = TableProposer([[0.4, 0.2, 0.4], [0.3, 0.4, 0.3], [0.3, 0.2, 0.5]], [2.0, -1.0, 0.3], block_size=3)
    requests = [Request(request_id=str(i), prompt_ids=[0], max_new_tokens=40, seed=i) for i in range(150)]
    tables = []
    for policy in (None, Threshold(0.5)):
        decoder = Decoder(
            target, proposer, sampling=SamplingConfig(temperature=1.0), max_rows=150, length_policy=policy
        )
        tables.append(
            RoundTable.from_events(
                [
                    event.to_dict() | {"prompt_id": completion.request_id, "domain": "chat"}
                    for completion in decoder.generate(requests)
                    for event in completion.rounds
                ]
            )
        )
    (replayed,) = threshold_sweep(tables[0], [0.5])
    # Rounds start elsewhere once lengths differ, so the shares agree in distribution only.
    assert verification_rate(tables[1]).value == pytest.approx(replayed.rate.value, abs=0.05)
    for slot, (counted, analytic) in enumerate(
        zip(conditional_acceptance(tables[0]), analytic_acceptance(tables[0]), strict=True)
    ):
        spread = (0.25 / counted.rounds) ** 0.5
        assert abs(counted.value - analytic.value) < 4 * spread, f"slot {slot}"
        assert counted.low < counted.value < counted.high


def test_intervals_cover_and_know_about_prompts() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(60):
        rate = rng.beta(4, 4, 30)  # each prompt has its own acceptance
        events, names = [], []
        for prompt in range(30):
            for _ in range(10):
                events.append(an_event(int(rng.random() < rate[prompt]), 1, [0.0]))
                names.append(str(prompt))
        estimate = verification_rate(a_table(*events, names=names), draws=300, seed=trial)
        covered += estimate.low <= 0.5 <= estimate.high
        assert (estimate.rounds, estimate.prompts) == (300, 30)
    # 95% intended; intervals that took rounds for independent would cover far less.
    assert covered >= 50


def test_confidence_quality_of_a_calibrated_head() -> None:
    rng = np.random.default_rng(2)
    events = []
    for _ in range(12_000):
        chances = rng.uniform(0.05, 0.95, 2)
        accepted = 0
        while accepted < 2 and rng.random() < chances[accepted]:
            accepted += 1
        events.append(an_event(accepted, 2, np.log(chances / (1 - chances)).tolist()))
    table = a_table(*events)
    good, bad = confidence_quality(table, draws=50), confidence_quality(table, [0.3, 0.3], draws=50)
    for slot in range(2):
        assert good[slot].slot == slot + 1
        assert good[slot].ece.value < 0.03 < bad[slot].ece.value
        assert good[slot].ece.low <= good[slot].ece.high
        assert good[slot].auroc.value > 0.75
        assert good[slot].brier.value < bad[slot].brier.value


def test_nothing_to_measure_is_nan_not_zero() -> None:
    empty = RoundTable.from_events([])
    assert np.isnan(accepted_length(empty).value)
    assert accepted_length(empty).to_dict() == {"value": None, "low": None, "high": None, "rounds": 0, "prompts": 0}
    table = a_table(an_event(0, 0, []))
    assert np.isnan(verification_rate(table).value)
    assert ratio(table, [1], [1]).value == 1.0
