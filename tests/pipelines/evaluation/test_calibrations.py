"""Tables by decoding temperature, the variants compared on other rounds, and the error that chance alone shows."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from synthetic_events import labels, simulate

from dspark.calibration import (
    DEFAULT_GRID,
    fit_table,
    sigmoid,
    slot_calibration,
    table_for,
    without_harm,
)
from pipelines.evaluation import figures
from pipelines.evaluation.figures import noise_floor, round_table
from pipelines.evaluation.round_log import columns, event_table
from pipelines.stages.publish import judged_errors


def rounds_of(first: int, answers: int, temperature: float = 1.0) -> pa.Table:
    """Answers whose confidences are over-confident twofold."""
    return pa.concat_tables(
        [
            event_table(
                simulate(f"{domain}-{i}", rate=rate, tokens=120),
                labels("dspark", temperature, domain, prompt_id=f"{domain}-{i}"),
            )
            for domain, rate in (("chat", 0.62), ("code", 0.74))
            for i in range(first, first + answers)
        ]
    )


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    rows = columns(rounds_of(0, 60))
    table = fit_table(rows, 1.0, DEFAULT_GRID, 20)
    return {"method": "temperature", "temperatures": table["temperatures"], "tables": [table]}


def test_every_method_is_judged_on_other_rounds(record: dict[str, Any]) -> None:
    (found,) = figures.confidence(rounds_of(1000, 60), record)
    ways = {way["method"]: way for way in found["methods"]}
    assert list(ways) == ["none", "temperature", "affine"]
    assert ways["none"]["ece"] == pytest.approx(found["ece_before"])
    assert ways["temperature"]["ece"] == pytest.approx(found["ece_after"])
    for name in ("temperature", "affine"):
        assert ways[name]["ece"] < 0.7 * ways["none"]["ece"]
    assert ways["temperature"]["ece"] < 2.5 * ways["temperature"]["ece_floor"]


def test_the_method_decides_how_confidences_are_read(record: dict[str, Any]) -> None:
    logits = np.array([[0.5] * 7])
    scaled = slot_calibration(record, 1.0)
    affine = slot_calibration({**record, "method": "affine"}, 1.0)
    assert scaled is not None
    assert affine is not None
    assert scaled.logits(logits)[0] == pytest.approx(0.5 / np.array(record["temperatures"]))
    table = record["tables"][0]["affine"]
    expected = (0.5 - np.array(table["shifts"])) / np.array(table["temperatures"])
    assert affine.survival(logits)[0] == pytest.approx(sigmoid(expected).cumprod())
    assert slot_calibration(None, 1.0) is None
    assert slot_calibration({"temperatures": None}, 1.0) is None


def test_a_decoding_has_the_table_of_the_nearest_temperature(record: dict[str, Any]) -> None:
    cold = {**record["tables"][0], "temperature": 0.0, "temperatures": [9.0] * 7}
    both = {**record, "tables": [cold, record["tables"][0]]}
    assert table_for(both, 0.0) is cold
    assert table_for(both, 0.7) is record["tables"][0]
    assert table_for(both, 0.2) is record["tables"][0]
    found = slot_calibration(both, 0.0)
    assert found is not None
    assert found.temperatures == (9.0,) * 7
    # Greedy text is not calibrated by what was seen of sampled text.
    assert slot_calibration(record, 0.0) is None
    # A record of one table is its own.
    assert table_for({"temperatures": [1.0]}, 0.3) == {"temperatures": [1.0]}


def test_the_floor_is_what_exact_probabilities_show() -> None:
    few, many = round_table(columns(rounds_of(0, 4))), round_table(columns(rounds_of(0, 120)))
    floors = []
    for table in (few, many):
        exact = sigmoid(table.confidence_logits / 2.0).cumprod(axis=1)
        floors.append(noise_floor(table, exact))
    assert floors[0] is not None
    assert floors[1] is not None
    assert floors[0] > 2 * floors[1] > 0


def test_cross_validation_never_reads_a_round_with_its_own_prompt() -> None:
    """Outcomes that no confidence tells: a table that had seen them would look better than one that had not."""
    benchmark = Path(__file__).parents[3] / "benchmarks" / "calibration.py"
    cross_validated = runpy.run_path(str(benchmark))["cross_validated"]
    rows = columns(rounds_of(0, 12))
    found = cross_validated(rows, DEFAULT_GRID, 20, folds=4)
    prompts, owner = np.unique(rows["prompt_id"], return_inverse=True)
    fold = np.random.default_rng(0).permutation(len(prompts))[owner] % 4
    changed = {name: values.copy() for name, values in rows.items()}
    own = fold == 2
    changed["accepted"][own] = False
    again = cross_validated(changed, DEFAULT_GRID, 20, folds=4)
    for name in ("temperature", "affine"):
        assert (again[name][own] == found[name][own]).all()
        assert (again[name][~own] != found[name][~own]).any()


def test_a_table_that_makes_the_error_worse_is_published_as_no_calibration(record: dict[str, Any]) -> None:
    """Judged on greedy prompts and sampled ones: each table answers for the temperatures that read it."""
    cold = {**record["tables"][0], "temperature": 0.0}
    both = {**record, "method": "affine", "tables": [cold, record["tables"][0]]}
    judged = {
        0.0: {"none": 0.05, "temperature": 0.06, "affine": 0.04},
        0.7: {"none": 0.10, "temperature": 0.02, "affine": 0.25},
        1.0: {"none": 0.10, "temperature": 0.02, "affine": None},
    }
    published = without_harm(both, judged)
    greedy, sampled = published["tables"]
    assert greedy["temperatures"] == [1.0] * 7
    assert greedy["affine"] == cold["affine"]
    assert greedy["taken_back"] == {"temperature": {"ece_before": 0.05, "ece_after": 0.06}}
    assert sampled["temperatures"] == record["temperatures"] == published["temperatures"]
    assert sampled["taken_back"] == {"affine": {"ece_before": 0.10, "ece_after": 0.25}}
    logits = np.array([[0.5] * 7])
    read = slot_calibration(published, 1.0)
    assert read is not None
    assert read.logits(logits) == pytest.approx(logits)  # the method's own table, taken back
    # Nothing judged, nothing taken back; the record itself is left as it was.
    assert without_harm(both, {}) == both
    assert "taken_back" not in both["tables"][0]


def test_what_is_judged_is_what_the_report_shows(record: dict[str, Any]) -> None:
    """A table fitted on other rounds helps here and stays; its inverse does harm and goes."""
    events = rounds_of(1000, 30)
    inverse = {**record["tables"][0], "temperatures": [0.2] * 7}
    for table, kept in ((record["tables"][0], record["temperatures"]), (inverse, [1.0] * 7)):
        given = {**record, "tables": [table], "temperatures": table["temperatures"]}
        report = {"confidence": figures.confidence(events, given)}
        assert without_harm(given, judged_errors(report))["temperatures"] == kept
