"""The report's load points against plain counting, and what the page computes against the same in numpy."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_events import LOADS, evaluation, full_report, served, serving_figures

from dspark.calibration import SlotCalibration
from pipelines.evaluation.round_log import EVENT_SCHEMA
from pipelines.evaluation.serving import conditional, measured_points, recording_of
from pipelines.reporting.page import render_page


def test_measured_points_against_plain_counting() -> None:
    rows = served(users=4).to_pylist()
    points = {point["policy"]: point for point in measured_points(served(users=4))}
    for policy in ("none", "full"):
        own = [row for row in rows if row["policy"] == policy and row["batch_rows"] == 4]
        seconds = sum(row["draft_ms"] + row["verify_ms"] for row in own) / 4 / 1000
        point = points[policy]
        assert point["users"] == 4
        assert point["tokens_per_second"] == pytest.approx(sum(row["committed"] for row in own) / seconds)
        assert point["tokens_per_second_user"] == pytest.approx(point["tokens_per_second"] / 4)
        assert point["drafts"] == pytest.approx(np.mean([row["scheduled"] for row in own]), rel=0.02)
    assert points["none"]["drafts"] == 0
    assert points["none"]["accepted_length"] == pytest.approx(1, rel=0.05)
    # Steps in which a user was missing are not counted.
    assert measured_points(served(users=3)) == []


def test_the_recording_is_the_full_blocks_of_one_temperature() -> None:
    events = evaluation()[0]
    rows = [r for r in events.to_pylist() if r["drafter"] == "dspark" and r["temperature"] == 1.0]
    found = recording_of(events, 1.0, SlotCalibration((2.0,) * 7))
    assert found is not None
    assert len(found.accepted) == len(rows)
    assert found.tokens.sum() == sum(row["committed"] for row in rows)
    assert found.rounds.sum() == len(rows)
    assert found.survival is not None
    first = conditional(found.survival)[0] * (1 + 1e-12)
    logits = next(row for row in rows if row["round"] == 0 and row["request_id"] == "chat-000")["confidence_logits"]
    assert first == pytest.approx(1 / (1 + np.exp(-np.array(logits) / 2.0)), rel=1e-6)
    assert recording_of(events, 0.3, None) is None


def test_light_and_heavy_load() -> None:
    found = serving_figures(evaluation()[0])
    assert found is not None
    light, heavy = found["best"][0], found["best"][-1]
    assert light["policy"] != "none"
    assert light["against_none"] > 1.3
    assert heavy["against_none"] < light["against_none"]
    budget = {p["users"]: p["drafts"] for p in found["replayed"] if p["policy"] == "scheduler"}
    assert budget[LOADS[0]] > budget[LOADS[-1]]
    assert serving_figures(EVENT_SCHEMA.empty_table()) is None


def test_every_policy_and_load_stands_on_the_page() -> None:
    text = render_page(full_report()).partition('<section id="serving"')[2].partition("</section>")[0]
    for name in ("no drafting", "one slot", "scheduler", "two steps behind"):
        assert text.count(name) > len(LOADS)
    assert "No step costs were measured" in render_page({**full_report(), "serving": None})
