import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic_events import labels, simulate

from dspark.decoding.rounds import RoundEvent
from pipelines.evaluation.round_log import (
    COMPLETIONS,
    EVENT_SCHEMA,
    EVENTS,
    EventLog,
    EventsMismatch,
    columns,
    completion_key,
    event_table,
    read_completions,
    read_events,
)


def test_the_schema_holds_every_field_of_a_round() -> None:
    assert {field.name for field in dataclasses.fields(RoundEvent)} <= set(EVENT_SCHEMA.names)


def test_rounds_come_back_as_they_were(tmp_path: Path) -> None:
    completion, log = simulate("chat-1", rate=0.7), EventLog(tmp_path, {"checkpoint": "abc"})
    log.append(completion, labels())
    log.merge()
    rows = read_events(tmp_path / EVENTS).to_pylist()
    assert len(rows) == len(completion.rounds)
    for row, event in zip(rows, completion.rounds, strict=True):
        for name, value in event.to_dict().items():
            assert row[name] == pytest.approx(value, rel=1e-6), name
    (kept,) = read_completions(tmp_path / COMPLETIONS).to_pylist()
    assert kept["output_ids"] == completion.output_ids
    assert kept["finish_reason"] == completion.finish_reason
    assert kept["prompt_tokens"] == 3


def test_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    completions = [simulate(f"chat-{index}", rate=0.6) for index in range(4)]
    for name, order in (("a", completions), ("b", completions[::-1])):
        log = EventLog(tmp_path / name)
        for completion in order:
            log.append(completion, labels())
            log.append(completion, labels())  # doing it again replaces it
        log.merge()
    for name in (EVENTS, COMPLETIONS):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    log, completion = EventLog(tmp_path), simulate("chat-1", rate=0.6)
    assert log.kept("chat-1", labels()) is None
    log.append(completion, labels(), stopwatch=2.5)
    assert log.kept("chat-1", labels()) == (completion.output_ids, 2.5)
    assert log.kept("chat-1", labels(temperature=1.0)) is None


def test_half_written_files_are_not_seen(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.append(simulate("chat-1", rate=0.6), labels())
    (part,) = (tmp_path / "parts").iterdir()
    (tmp_path / "parts" / f".{part.name}.host.1.abcd.writing").write_bytes(part.read_bytes()[:100])
    assert len(log.tables()[1]) == 1


def test_other_circumstances_are_refused(tmp_path: Path) -> None:
    EventLog(tmp_path, {"checkpoint": "abc"}).append(simulate("chat-1", rate=0.6), labels())
    with pytest.raises(EventsMismatch, match=r'"abc".*"def"'):
        EventLog(tmp_path, {"checkpoint": "def"}).tables()


def test_keys_tell_circumstances_apart() -> None:
    base = labels()
    changed = [dataclasses.replace(base, **{name: value}) for name, value in (("seed", 2), ("temperature", 1.0))]
    keys = {completion_key("a", base), completion_key("b", base), *(completion_key("a", other) for other in changed)}
    assert len(keys) == 4


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ValueError, match=r"broken\.parquet is no Parquet file"):
        read_events(tmp_path / "broken.parquet")
    pq.write_table(pa.table({"request_id": ["a"]}), tmp_path / "foreign.parquet")
    with pytest.raises(ValueError, match="lacks the columns"):
        read_events(tmp_path / "foreign.parquet")


def test_an_empty_log_is_empty_tables(tmp_path: Path) -> None:
    events, completions = EventLog(tmp_path).tables()
    assert (len(events), len(completions)) == (0, 0)
    assert columns(events)["draft_ids"].shape == (0, 0)


def test_columns_pad_ragged_rows() -> None:
    short, long = simulate("a", rate=0.6, block=2, tokens=12), simulate("b", rate=0.6, block=5, tokens=12)
    table = pa.concat_tables([event_table(short, labels()), event_table(long, labels())])
    found = columns(table)
    assert found["accepted"].shape == (len(table), 5)
    for index, row in enumerate(table.to_pylist()):
        size = len(row["draft_ids"])
        assert found["draft_ids"][index, :size].tolist() == row["draft_ids"]
        assert (found["draft_ids"][index, size:] == -1).all()
        assert np.isnan(found["confidence_logits"][index, size:]).all()
        assert not found["reached"][index, size:].any()
    # A slice of a table reads its own rows.
    np.testing.assert_array_equal(columns(table.slice(3), slots=5)["accepted"], found["accepted"][3:])
