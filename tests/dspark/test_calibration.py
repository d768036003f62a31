"""Measures against slow restatements, and temperatures that come back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.calibration import (
    CalibrationError,
    auroc,
    brier,
    calibration_errors,
    expected_calibration_error,
    fit_affine,
    fit_sequential_temperatures,
    outcomes_known,
    reliability_bins,
    sigmoid,
    survival,
)

TRUE_TEMPERATURES = np.array([1.5, 2.0, 2.5, 1.2])


def synthetic(rounds: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Over-confident logits [R, G] with outcomes drawn at sigmoid(logit / true temperature)."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(2.5, 2.0, (rounds, 4))
    took = rng.random((rounds, 4)) < sigmoid(logits / TRUE_TEMPERATURES)
    reached = np.cumprod(np.concatenate([np.ones((rounds, 1)), took[:, :-1]], axis=1), axis=1).astype(bool)
    return logits, took & reached, reached


def test_temperatures_are_recovered() -> None:
    found = fit_sequential_temperatures(*synthetic(60_000, seed=1))
    assert found == pytest.approx(TRUE_TEMPERATURES, rel=0.12)
    logits, accepted, reached = synthetic(60_000, seed=2)  # judged on other data
    before = calibration_errors(survival(logits), accepted, reached)
    after = calibration_errors(survival(logits, found), accepted, reached)
    assert after.mean() < 0.02
    assert after.mean() < before.mean() / 3
    for slot in range(4):
        order = np.argsort(logits[:, slot])
        assert (np.diff(sigmoid(logits[order, slot] / found[slot])) >= 0).all()


def test_slots_without_data_keep_temperature_one() -> None:
    logits, accepted, reached = synthetic(40, seed=5)
    assert fit_sequential_temperatures(logits, accepted, reached).tolist() == [1.0] * 4


def test_what_is_known_after_a_rejection() -> None:
    accepted = [[True, False, False], [True, True, False], [False, False, False]]
    reached = [[True, True, False], [True, True, False], [False, False, False]]  # the second was cut short
    survived, known = outcomes_known(accepted, reached)
    assert survived.tolist() == [[True, False, False], [True, True, False], [False, False, False]]
    assert known.tolist() == [[True, True, True], [True, True, False], [False, False, False]]


pairs = st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(pairs)
def test_measures_against_plain_loops(data: list[tuple[int, bool]]) -> None:
    p, y = [value / 50 for value, _ in data], [outcome for _, outcome in data]
    boxes: dict[int, list[tuple[float, bool]]] = {}
    for chance, outcome in zip(p, y, strict=True):
        boxes.setdefault(min(int(chance * 20), 19), []).append((chance, outcome))
    error = sum(abs(sum(c for c, _ in box) - sum(o for _, o in box)) for box in boxes.values()) / len(data)
    assert expected_calibration_error(p, y) == pytest.approx(error, abs=1e-12)
    assert brier(p, y) == pytest.approx(sum((c - o) ** 2 for c, o in zip(p, y, strict=True)) / len(p))
    wins = [
        (a > b) + 0.5 * (a == b) for a, o in zip(p, y, strict=True) if o for b, q in zip(p, y, strict=True) if not q
    ]
    assert auroc(p, y) == pytest.approx(np.mean(wins) if wins else float("nan"), nan_ok=True)
    assert reliability_bins(p, y).counts.sum() == len(data)


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(CalibrationError, match="do not pair"):
        brier([0.1], [1, 0])
    with pytest.raises(CalibrationError, match="outside"):
        expected_calibration_error([1.2], [1])
    with pytest.raises(CalibrationError, match="alike"):
        fit_sequential_temperatures(np.zeros((3, 2)), np.zeros((3, 3)), np.zeros((3, 2)))
    assert np.isnan(auroc([0.5], [1]))
    assert np.isnan(expected_calibration_error([], []))
    assert sigmoid([-1000.0, 1000.0]).tolist() == [0.0, 1.0]


def test_a_shift_mends_what_a_temperature_cannot() -> None:
    """Confidences that are too high everywhere: divided, they only move towards one half."""
    rng = np.random.default_rng(7)
    truth = rng.normal(-1.0, 1.0, (40_000, 3))
    took = rng.random(truth.shape) < sigmoid(truth)
    reached = np.cumprod(np.concatenate([np.ones((len(truth), 1)), took[:, :-1]], axis=1), axis=1).astype(bool)
    logits = 1.5 * truth + np.array([2.0, 1.0, 0.5])
    fit, judge = slice(0, 20_000), slice(20_000, None)
    part = (logits[fit], (took & reached)[fit], reached[fit])
    temperatures, shifts = fit_affine(*part)
    assert temperatures == pytest.approx([1.5] * 3, rel=0.1)
    assert shifts == pytest.approx([2.0, 1.0, 0.5], abs=0.2)
    held_out = ((took & reached)[judge], reached[judge])
    affine = calibration_errors(survival(logits[judge], temperatures, shifts), *held_out).mean()
    scaled = calibration_errors(survival(logits[judge], fit_sequential_temperatures(*part)), *held_out).mean()
    assert affine < 0.02
    assert affine < scaled / 3


def test_few_outcomes_hardly_move_an_affine_calibration() -> None:
    logits = np.array([[0.3], [1.2], [-0.5]])
    temperatures, shifts = fit_affine(logits, np.zeros((3, 1), bool), np.ones((3, 1), bool), shrinkage=1000.0)
    assert temperatures == pytest.approx([1.0], abs=0.02)
    assert shifts == pytest.approx([0.0], abs=0.02)
    none = fit_affine(logits, np.zeros((3, 1), bool), np.zeros((3, 1), bool))
    assert [values.tolist() for values in none] == [[1.0], [0.0]]
    # All accepted: finite, and the order stays.
    sure, offset = fit_affine(logits, np.ones((3, 1), bool), np.ones((3, 1), bool))
    assert np.isfinite([*sure, *offset]).all()
    assert sure.min() > 0


def affine_objective(x: np.ndarray, y: np.ndarray, shrinkage: float, slope: float, offset: float) -> float:
    """The shrunk log loss, restated by the probability of what happened."""
    z = slope * x + offset
    loss = np.log1p(np.exp(np.where(y, -z, z))).sum()
    return float(loss + shrinkage / 8 * ((slope - 1) ** 2 + offset**2))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(20, 300), st.floats(-2.0, 8.0), st.floats(0.2, 4.0), st.floats(-1.5, 1.5))
def test_affine_reaches_the_minimum_of_its_objective(
    seed: int, rounds: int, centre: float, width: float, truth: float
) -> None:
    """Logits far from 0, hardly varying, unrelated or contrary to the outcomes: no nearby point is better."""
    rng = np.random.default_rng(seed)
    x = rng.normal(centre, width, rounds)
    y = rng.random(rounds) < sigmoid(truth * (x - centre) - 0.8)
    temperature, shift = fit_affine(x[:, None], y[:, None], np.ones((rounds, 1), bool))
    slope, offset = 1 / temperature[0], -shift[0] / temperature[0]
    assert slope >= 0.02 - 1e-12
    best = affine_objective(x, y, 10.0, slope, offset)
    for scale in (1.0, 0.1, 1e-2, 1e-3):
        for da, db in rng.normal(size=(20, 2)) * scale:
            assert affine_objective(x, y, 10.0, max(slope + da, 0.02), offset + db) >= best - 1e-7
    # On the bound as inside, the offset makes the predictions right on average, up to its own shrinkage.
    p = sigmoid(slope * x + offset)
    assert p.sum() - y.sum() == pytest.approx(-10.0 / 4 * offset, abs=1e-5)


@pytest.mark.parametrize(("centre", "width", "rounds"), [(6.0, 2.0, 200), (3.0, 0.5, 60)])
def test_affine_mends_a_head_that_is_sure_of_everything(centre: float, width: float, rounds: int) -> None:
    """Logits unrelated to outcomes that are accepted 3 times in 10."""
    rng = np.random.default_rng(0)
    x = rng.normal(centre, width, (rounds, 1))
    y = rng.random((rounds, 1)) < 0.3
    reached = np.ones_like(y)
    table = fit_affine(x, y, reached)
    before, after = (calibration_errors(survival(x, *given), y, reached)[0] for given in ((), table))
    assert after < 0.15
    assert after < before / 3
