"""Schedulers against brute force, and proof that they do not look ahead."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import a_drafter, tiny_target

from dspark.calibration import survival
from dspark.decoding.proposers import proposer_for
from dspark.decoding.sampling import SamplingConfig
from dspark.decoding.scheduling import (
    CostTable,
    FullBlock,
    Scheduler,
    SchedulingError,
    StaticLength,
    Threshold,
    TwoStepsBehind,
    algorithm_1,
    global_search,
    threshold,
    throughput_curve,
    top_k,
    two_steps_capacity,
)
from dspark.decoding.step_costs import StepCosts
from dspark.decoding.step_timing import measure_step_costs

APPENDIX_A = CostTable((1, 2, 3), (1.0, 0.5, 0.45))


def objective(chances: np.ndarray, lengths: np.ndarray, cost: CostTable) -> float:
    """Θ written out: (Σ 1 + Σ_{j<=l} a_j) * SPS(Σ 1 + l)."""
    rows = len(chances)
    expected = rows + sum(chances[r, : lengths[r]].sum() for r in range(rows))
    return float(expected * cost(rows + int(lengths.sum())))


def brute_force(chances: np.ndarray, cost: CostTable) -> float:
    rows, slots = chances.shape
    every = np.array(list(itertools.product(range(slots + 1), repeat=rows)))  # all length vectors
    sums = np.concatenate([np.zeros((rows, 1)), chances.cumsum(1)], axis=1)
    return float(((rows + sums[np.arange(rows), every].sum(1)) * cost(rows + every.sum(1))).max())


def random_case(rng: np.random.Generator, jagged: bool) -> tuple[np.ndarray, CostTable]:
    chances = np.cumprod(rng.uniform(0.2, 1.0, (3, 4)), axis=1)
    seconds = 1.0 + rng.uniform(0, 0.3) * np.arange(15) + rng.uniform(0, 0.03) * np.arange(15) ** 2
    if jagged:
        seconds = np.maximum.accumulate(seconds + rng.uniform(0, 1.0, 15))
    return chances, CostTable(tuple(range(1, 16)), tuple(1 / seconds))


def is_unimodal(theta: np.ndarray) -> bool:
    rises = np.diff(theta) > 0
    return not (np.diff(rises.astype(int)) > 0).any()


def two_steps_behind(past: np.ndarray, present: np.ndarray, cost: CostTable) -> np.ndarray:
    """Lengths [B] of present survivals, as many as a global search over the past ones admits."""
    return top_k(present, two_steps_capacity(past, cost, len(present)))


def compared_with_brute_force(cases: int = 2000) -> dict[str, np.ndarray]:
    """Shortfalls 1 - Θ/Θ_best of 3 requests x 4 slots, every second case on a jagged curve.

    "stale" is the two-steps-behind variant whose capacity comes from confidences of other tokens of the same kind.
    """
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {name: [] for name in ("global", "algorithm 1", "behind", "stale")}
    kinds: dict[str, list[bool]] = {"unimodal": [], "jagged": []}
    for case in range(cases):
        chances, cost = random_case(rng, jagged=case % 2 == 1)
        past = np.cumprod(rng.uniform(0.2, 1.0, (3, 4)), axis=1)
        best = brute_force(chances, cost)
        lengths = {
            "global": global_search(chances, cost),
            "algorithm 1": algorithm_1(chances, cost),
            "behind": two_steps_behind(chances, chances, cost),
            "stale": two_steps_behind(past, chances, cost),
        }
        for name, chosen in lengths.items():
            found[name].append(1 - objective(chances, chosen, cost) / best)
        kinds["unimodal"].append(is_unimodal(throughput_curve(chances, cost)[1]))
        kinds["jagged"].append(case % 2 == 1)
    return {name: np.array(values) for name, values in (found | kinds).items()}


def test_schedulers_against_brute_force(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared_with_brute_force()
    unimodal, jagged = found["unimodal"], found["jagged"]
    assert found["global"] == pytest.approx(0, abs=1e-12)
    assert found["algorithm 1"][unimodal] == pytest.approx(0, abs=1e-12)
    assert found["behind"] == pytest.approx(0, abs=1e-12), "with unchanged confidences the capacity is the best one"
    gaps, stale = found["algorithm 1"][~unimodal], found["stale"][jagged]
    with capsys.disabled():
        print(f"\nAlgorithm 1: equal to brute force in {unimodal.sum()} unimodal cases; elsewhere ", end="")
        print(f"({len(gaps)} cases) short of the best by {gaps.mean():.1%} on average, at most {gaps.max():.1%}")
        print(f"Two steps behind, other confidences, {len(stale)} jagged curves: {stale.mean():.1%} short on average, ")
        print(f"at most {stale.max():.1%}; Algorithm 1 there {found['algorithm 1'][jagged].mean():.1%}")
    assert unimodal.sum() > 100
    assert len(gaps) > 50
    # Early stopping on a jagged curve costs more than a capacity that is two steps old.
    assert stale.mean() < found["algorithm 1"][jagged].mean()


def test_toy_of_the_paper() -> None:
    confident = np.array([[0.8, 0.8 * 0.9]])
    hopeless = np.array([[0.8, 0.0]])
    assert algorithm_1(confident, APPENDIX_A).tolist() == algorithm_1(hopeless, APPENDIX_A).tolist() == [0]
    # The search over everything lets the first token decide about its own admission.
    assert global_search(confident, APPENDIX_A).tolist() == [2]
    assert global_search(hopeless, APPENDIX_A).tolist() == [0]
    logit = np.log(0.8 / 0.2)
    assert survival([[logit] * 3])[0, 2] == pytest.approx(0.512)


confidences = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.4, 0.5, 0.8, 0.9, 1.0]), min_size=4, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(confidences, confidences, st.integers(0, 3), st.integers(0, 3), st.integers(0, 1000))
def test_policies_do_not_look_ahead(before: list, after: list, row: int, slot: int, seed: int) -> None:
    """Confidences after slot j are functions of the token at j: whatever they are, j's admission stays."""
    first = np.array(before)
    row %= len(first)
    second = first.copy()
    second[row, slot + 1 :] = np.array(after)[0, slot + 1 :]
    _, cost = random_case(np.random.default_rng(seed), jagged=True)
    past = np.cumprod(np.random.default_rng(seed).uniform(0, 1, (5, 4)), axis=1)
    admitted = []
    for chances in (np.cumprod(first, axis=1), np.cumprod(second, axis=1)):
        behind = TwoStepsBehind(cost)
        for _ in range(2):
            behind.lengths(past, 5, 4)
        lengths = [
            Scheduler(cost).lengths(chances, len(first), 4),
            behind.lengths(chances, len(first), 4),
            Threshold(0.5).lengths(chances, len(first), 4),
            StaticLength(2).lengths(chances, len(first), 4),
            FullBlock().lengths(chances, len(first), 4),
        ]
        admitted.append([bool(values[row] > slot) for values in lengths])
    assert admitted[0] == admitted[1]


def test_small_rules() -> None:
    chances = np.array([[0.9, 0.5, 0.4], [0.8, 0.7, 0.1]])
    assert top_k(chances, 3).tolist() == [1, 2]
    assert top_k(chances, 0).tolist() == [0, 0]
    assert top_k(chances, 99).tolist() == [3, 3]
    assert threshold(chances, 0.5).tolist() == [2, 2]
    assert threshold(chances, 0.0).tolist() == [3, 3]
    # Conditional confidences of the first row: 0.9, 0.556, 0.8.
    assert Threshold(0.6).lengths(chances, 2, 3).tolist() == [1, 2]
    assert StaticLength(5).lengths(None, 2, 3).tolist() == [3, 3]
    assert StaticLength(5).most(3) == 3


def test_verifying_nothing_is_a_choice() -> None:
    steep = CostTable((1, 2, 4, 8, 16), (1.0, 0.5, 0.25, 0.125, 0.0625))
    assert algorithm_1(np.full((2, 4), 0.9).cumprod(1), steep).tolist() == [0, 0]
    flat = CostTable((1, 16), (1.0, 0.99))
    assert algorithm_1(np.full((2, 4), 0.9).cumprod(1), flat).tolist() == [4, 4]


def test_cost_table() -> None:
    table = CostTable.from_dict({"tokens": [4, 8], "steps_per_second": [10.0, 5.0], "source": "toy"})
    assert CostTable.from_dict(table.to_dict()) == table
    assert table([1, 4, 6, 8, 16]).tolist() == pytest.approx([10.0, 10.0, 1 / 0.15, 5.0, 2.5])
    for tokens, speeds, words in (
        ((), (), "at least one"),
        ((4, 2), (1.0, 1.0), "ascend"),
        ((1, 2), (1.0, 0.0), "positive"),
        ((1, 2), (1.0,), "as many"),
    ):
        with pytest.raises(SchedulingError, match=words):
            CostTable(tokens, speeds)
    with pytest.raises(SchedulingError, match="lacks tokens"):
        CostTable.from_dict({"steps_per_second": [1.0]})
    with pytest.raises(SchedulingError, match="finite"):
        algorithm_1([[0.5, float("nan")]], table)
    with pytest.raises(SchedulingError, match="0 to 1"):
        Threshold(1.5)


def test_scheduling_is_quick() -> None:
    """Under a millisecond of one core for 256 requests x 7 slots."""
    rng = np.random.default_rng(1)
    chances = np.cumprod(rng.uniform(0.5, 1, (256, 7)), axis=1)
    cost = CostTable(tuple(range(1, 2049, 64)), tuple(1 / (1 + 0.001 * np.arange(1, 2049, 64))))
    for rule in (algorithm_1, global_search, lambda a, c: two_steps_behind(a, a, c), lambda a, _: threshold(a, 0.5)):
        best = min(_seconds(rule, chances, cost) for _ in range(30))
        assert best < 1e-3, f"{best * 1e3:.2f} ms"


def _seconds(rule, chances: np.ndarray, cost: CostTable) -> float:
    # Processor time: another process on the machine does not count.
    start = time.thread_time()
    rule(chances, cost)
    return time.thread_time() - start


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(temperature=1.0)])
@pytest.mark.parametrize("kind", ["vanilla", "eagle3"])
def test_step_costs_are_measured_and_read_back(kind: str, sampling: SamplingConfig) -> None:
    target = tiny_target()
    proposer = proposer_for(a_drafter(target, kind), target)
    costs = measure_step_costs(target, proposer, (1, 6, 16), context=20, repeats=1, sampling=sampling, source="here")
    assert costs.verify.tokens == (1, 6, 16)
    assert costs.draft_rows == (1, 2, 4)
    assert min(costs.draft_seconds) > 0
    assert costs.conditions["temperature"] == sampling.temperature
    assert StepCosts.from_dict(costs.to_dict()) == costs
    with pytest.raises(SchedulingError, match="1 or more"):
        measure_step_costs(target, None, ())


def test_a_step_takes_the_draft_and_the_pass() -> None:
    costs = StepCosts(CostTable((1, 3), (10.0, 5.0)), (1, 3), (0.1, 0.3))
    assert costs.seconds([1, 2, 3], [1, 2, 3]).tolist() == pytest.approx([0.2, 0.35, 0.5])
    assert costs.seconds(6, 6).item() == pytest.approx(0.4 + 0.6)  # beyond the tables: time by token, by row
    assert costs.seconds(2, 2, drafting=False).item() == pytest.approx(0.15)
    assert costs.at_rows(2)([1, 3]).tolist() == pytest.approx([1 / 0.3, 1 / 0.4])
    # A scheduler reads the same times, beyond the tables too, where the draft's time is not the pass's.
    for rows, tokens in itertools.product((1, 2, 5, 300), (1, 2, 3, 6, 4096)):
        assert 1 / costs.at_rows(rows)(tokens).item() == pytest.approx(costs.seconds(tokens, rows).item(), rel=1e-12)
    # A table measured elsewhere has the draft in it.
    elsewhere = StepCosts.from_dict({"tokens": [1, 3], "steps_per_second": [10.0, 5.0]})
    assert elsewhere.at_rows(7)(3).item() == pytest.approx(5.0)
    with pytest.raises(SchedulingError, match="ascend"):
        StepCosts(costs.verify, (2, 2), (0.1, 0.1))
    with pytest.raises(SchedulingError, match="as many"):
        StepCosts(costs.verify, (2,), ())
