import dataclasses
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_events import evaluation, labels, simulate

from pipelines.evaluation import figures
from pipelines.evaluation.round_log import (
    COMPLETION_SCHEMA,
    EVENT_SCHEMA,
    Labels,
    completion_key,
    completion_table,
    event_table,
)

EMPTY = COMPLETION_SCHEMA.empty_table()


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return evaluation()[0]


def test_lengths_against_plain_counting(events: pa.Table) -> None:
    rows = events.to_pylist()
    for record in figures.accepted_lengths(events):
        if record["domain"] == "mean":
            continue
        own = [row for row in rows if all(row[name] == record[name] for name in ("drafter", "temperature", "domain"))]
        assert record["value"] == pytest.approx(sum(row["committed"] for row in own) / len(own))
        assert record["rounds"] == len(own)
        assert record["prompts"] == len({row["prompt_id"] for row in own})
        assert record["low"] <= record["value"] <= record["high"]


def test_the_mean_counts_every_domain_alike(events: pa.Table) -> None:
    records = [
        row for row in figures.accepted_lengths(events) if row["drafter"] == "dspark" and row["temperature"] == 0
    ]
    mean = next(row for row in records if row["domain"] == "mean")
    assert mean["value"] == pytest.approx(np.mean([row["value"] for row in records if row["domain"] != "mean"]))
    assert mean["low"] < mean["value"] < mean["high"]
    assert mean["rounds"] == sum(row["rounds"] for row in records if row["domain"] != "mean")


def test_plain_decoding_yields_one_token_a_pass(events: pa.Table) -> None:
    plain = [row for row in figures.accepted_lengths(events) if row["drafter"] == "plain"]
    assert {row["value"] for row in plain} == {1.0}
    assert all(row["verification_rate"] is None for row in plain)


def test_the_order_is_dspark_first_plain_last(events: pa.Table) -> None:
    names = list(dict.fromkeys(row["drafter"] for row in figures.accepted_lengths(events)))
    assert names == ["dspark", "no-sequential-head", "plain"]


def test_slots_against_plain_counting(events: pa.Table) -> None:
    rows = [r for r in events.to_pylist() if (r["drafter"], r["temperature"], r["domain"]) == ("dspark", 1.0, "code")]
    record = next(
        r for r in figures.positions(events) if (r["drafter"], r["temperature"], r["domain"]) == ("dspark", 1.0, "code")
    )
    for slot in record["slots"]:
        k = slot["slot"] - 1
        reached = [row for row in rows if row["reached"][k]]
        assert slot["conditional"]["rounds"] == len(reached)
        assert slot["conditional"]["value"] == pytest.approx(np.mean([row["accepted"][k] for row in reached]))
        assert slot["analytic"]["value"] == pytest.approx(np.mean([row["acceptance_rate"][k] for row in reached]))
        assert slot["survival"]["value"] == pytest.approx(np.mean([row["accepted_raw"] > k for row in rows]))


def test_calibration_helps_where_confidence_was_doubled(events: pa.Table) -> None:
    for record in figures.confidence(events, {"temperatures": [2.0] * 7}):
        assert record["drafter"] == "dspark"
        assert record["ece_after"] < record["ece_before"]
        assert record["brier_after"] < record["brier_before"]
        assert sum(b["count"] for b in record["reliability_after"]) == record["rounds"] * 7


def test_without_temperatures_nothing_changes(events: pa.Table) -> None:
    for record in figures.confidence(events, None):
        assert record["ece_after"] == record["ece_before"]


def test_temperatures_of_another_block_are_refused(events: pa.Table) -> None:
    with pytest.raises(ValueError, match="5 temperatures for events of a block of 7"):
        figures.confidence(events, {"temperatures": [1.0] * 5})


def test_a_threshold_of_zero_verifies_everything(events: pa.Table) -> None:
    for record in figures.confidence(events, {"temperatures": [2.0] * 7}):
        first, last = record["thresholds"][0], record["thresholds"][-1]
        assert (first["threshold"], first["scheduled"]) == (0.0, 7.0)
        assert (last["threshold"], last["accepted_length"]) == (1.0, 1.0)


def test_speed_shares_a_step_among_its_answers() -> None:
    events = pa.concat_tables(
        [event_table(simulate("a", rate=0.6), labels()), event_table(simulate("a", rate=0.6, block=0), labels("plain"))]
    )
    drafted, plain = figures.speed(events, EMPTY, [], {("dspark", 0.0): 2.5})
    rounds = [row for row in events.to_pylist() if row["drafter"] == "dspark"]
    assert drafted["seconds"] == pytest.approx(len(rounds) * 0.040 / 4)
    assert drafted["tokens_per_pass"] == 2.5
    assert plain["tokens_per_pass"] == 1.0
    assert plain["against_plain"] == 1.0
    assert drafted["against_plain"] == pytest.approx(drafted["tokens_per_second"] / plain["tokens_per_second"])
    assert drafted["draft_share"] == pytest.approx(9 / 40)


def test_a_stopwatch_is_never_compared_with_added_rounds() -> None:
    events = event_table(simulate("a", rate=0.6, block=0), labels("plain"))
    timing = {"drafter": "dspark", "temperature": 0.0, "tokens": 100, "seconds": 2.0, "max_rows": 4}
    drafted, _ = figures.speed(events, EMPTY, [timing], {})
    assert drafted["tokens_per_second"] == 50
    assert drafted["against_plain"] is None


def test_length_policies_are_reported_apart() -> None:
    own = labels()
    other = Labels(**{**own.__dict__, "policy": "threshold-0.5"})
    events = pa.concat_tables([event_table(simulate("a", rate=0.6), one) for one in (own, other)])
    assert {row["drafter"] for row in figures.accepted_lengths(events)} == {"dspark", "dspark, threshold-0.5"}


def test_no_events_no_figures() -> None:
    empty = EVENT_SCHEMA.empty_table()
    assert figures.accepted_lengths(empty) == figures.positions(empty) == figures.confidence(empty, None) == []
    assert figures.speed(empty, EMPTY, [], {}) == []


@settings(max_examples=12, deadline=None)
@given(rate=st.floats(0.02, 0.98), block=st.integers(0, 8), tokens=st.integers(2, 40), prompts=st.integers(1, 3))
def test_figures_stay_in_their_bounds(rate: float, block: int, tokens: int, prompts: int) -> None:
    made = [simulate(f"r{i}", rate=rate, block=block, tokens=tokens, seed=i) for i in range(prompts)]
    tables = [event_table(one, labels(prompt_id=one.request_id)) for one in made]
    events = pa.concat_tables([EVENT_SCHEMA.empty_table(), *tables])
    for record in figures.accepted_lengths(events):
        assert 1.0 <= record["value"] <= block + 1
        assert (record["low"] is None) == (prompts == 1)
    for record in figures.positions(events):
        alive = 1.0
        for slot in record["slots"]:
            value = slot["survival"]["value"]
            if value is not None:
                assert 0.0 <= value <= alive + 1e-9
                alive = value
    figures.confidence(events, None)


def test_plain_decoding_without_rounds_is_one_token_a_pass() -> None:
    completion = dataclasses.replace(simulate("a", rate=0.5, block=0, tokens=30), rounds=[])
    found = figures.accepted_lengths(EVENT_SCHEMA.empty_table(), completion_table(completion, labels("plain")))
    assert [(row["domain"], row["value"], row["rounds"]) for row in found] == [("chat", 1.0, 29), ("mean", 1.0, 29)]


def intervals_of(prompts: int, seeds: int, turns: int, seed: int) -> list[tuple[float, float]]:
    """Accepted length and slot 1's acceptance, where prompts differ and an answer's seed and turn hardly matter."""
    rng = np.random.default_rng(seed)
    tables = []
    for prompt in range(prompts):
        rate = rng.beta(4, 3)
        for draw, turn in itertools.product(range(seeds), range(turns)):
            answer = simulate(f"{prompt}/{turn}", rate=rate, block=3, tokens=14, seed=1000 * seed + 10 * draw + turn)
            own = dataclasses.replace(labels(prompt_id=str(prompt), seed=draw), turn=turn)
            tables.append(event_table(answer, own))
    events = pa.concat_tables(tables)
    length, mean = figures.accepted_lengths(events)
    slot = figures.positions(events)[0]["slots"][0]["conditional"]
    assert length["prompts"] == mean["prompts"] == slot["prompts"] == prompts
    return [(row["low"], row["high"]) for row in (length, mean, slot)]


def test_seeds_and_turns_of_a_prompt_do_not_narrow_an_interval() -> None:
    """More answers to the same 12 prompts tell little more about other prompts."""
    few, many = intervals_of(12, 1, 1, seed=3), intervals_of(12, 4, 3, seed=3)
    for (low, high), (low_of_many, high_of_many) in zip(few, many, strict=True):
        assert None not in (low, high, low_of_many, high_of_many)
        # Taken for independent, twelve times the answers would give a width of 0.3 of it.
        assert high_of_many - low_of_many > 0.5 * (high - low)


def test_a_single_prompt_in_a_domain_leaves_the_mean_without_an_interval() -> None:
    tables = [event_table(simulate("a", rate=0.6), labels(domain="chat", prompt_id="a"))]
    for name in ("b", "c"):
        tables.append(event_table(simulate(name, rate=0.8), labels(domain="code", prompt_id=name)))
    found = {row["domain"]: row for row in figures.accepted_lengths(pa.concat_tables(tables))}
    assert found["chat"]["low"] is None
    assert found["code"]["low"] is not None
    assert found["mean"]["low"] is None


def test_an_id_that_looks_like_a_turn_is_a_prompt_of_its_own() -> None:
    """`q` in its second turn and a prompt called `q/turn-2` are two answers, and two prompts."""
    second = dataclasses.replace(labels(prompt_id="q"), turn=1)
    other = labels(prompt_id="q/turn-2")
    assert completion_key("q/turn-2", second) != completion_key("q/turn-2", other)
    answer = simulate("q/turn-2", rate=0.6)
    found = figures.accepted_lengths(pa.concat_tables([event_table(answer, second), event_table(answer, other)]))
    assert [row["prompts"] for row in found] == [2, 2]
