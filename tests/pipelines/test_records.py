"""The JSON files that stages leave for one another are read, or refused in one message with the cure."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.calibration import fit_table, slot_calibration
from pipelines.errors import UserError
from pipelines.records import DecodedItem, Record, RunRecord, Timings, read_record, read_rows, write_rows
from pipelines.runs.directory import RunDirectory
from pipelines.stages.calibrate import read_calibration
from pipelines.stages.step_costs import read_step_costs, table_identity
from storage.files.filesystems import Folder

SHORT = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
ROUNDS = {
    "confidence_logits": np.array([[1.0, -0.5], [0.5, 1.5], [-1.0, 0.25]]),
    "accepted": np.array([[True, True], [True, False], [False, False]]),
    "reached": np.array([[True, True], [True, True], [True, False]]),
}
TABLE = fit_table(ROUNDS, 1.0, np.geomspace(0.5, 2.0, 5), 4)  # as `calibrate` writes it
CALIBRATION: dict[str, Any] = {
    "method": "affine",
    "temperatures": TABLE["temperatures"],
    "fitted_on": "12 prompts",
    "rounds": 12,
    "ece_on_fitted_rounds": {"before": [0.1, None], "after": [0.1, None]},
    "tables": [TABLE],
}
ITEM = {"drafter": "dspark", "temperature": 0.0, "tokens": 5, "seconds": 0.5, "max_rows": 2, "skipped": {"a": "long"}}
COSTS = {"tokens": [1, 2], "steps_per_second": [9.0, 8.0], "draft": {"rows": [1], "seconds": [0.1]}}
TIMINGS = {"timings": [ITEM], "skipped": {}}
FILES: dict[str, Any] = {
    "temperatures.json": CALIBRATION,
    "timings.json": TIMINGS,
    "item.json": ITEM,
    "step_costs.json": [{"temperature": 0.0, **COSTS}],
    "table.json": COSTS,
    "run.json": {"uid": "ab12", "settings": {}, "stages": {}, "invocations": []},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def read(name: str, folder: Path) -> Any:
    """What the stages make of the file."""
    run: Any = SimpleNamespace(
        location=lambda stage: str(folder), settings=SimpleNamespace(drafter=SimpleNamespace(block_size=2))
    )
    readers = {
        "temperatures.json": lambda: read_calibration(run),
        "timings.json": lambda: read_record(Folder(folder), name, Timings, "make it anew").model_dump(),
        "item.json": lambda: read_record(Folder(folder), name, DecodedItem, "make it anew").model_dump(),
        "step_costs.json": lambda: read_step_costs(Folder(folder)),
        "table.json": lambda: table_identity(str(folder / name)),
        "run.json": lambda: RunDirectory(folder).read_json(name, RunRecord),
    }
    return readers[name]()


@pytest.mark.parametrize("name", FILES)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(FILES[name]))
    found = read(name, tmp_path)
    if name in ("temperatures.json", "timings.json", "item.json", "run.json"):
        assert found == FILES[name]
    else:
        costs = found[0.0] if name == "step_costs.json" else found
        assert {key: costs[key] for key in COSTS} == COSTS


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FILES)
@SHORT
@given(data=st.binary(max_size=60), value=JSON, whole=st.booleans())
def test_anything_else_is_read_or_refused(name: str, data: bytes, value: Any, whole: bool, tmp_path: Path) -> None:
    for content in (data, json.dumps(value).encode(), b"[" * 100_000, b"9" * 5_000):
        (tmp_path / name).write_bytes(content)
        try:
            read(name, tmp_path)
        except UserError as error:
            assert name in str(error)  # noqa: PT017
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.fuzz
@pytest.mark.parametrize("name", FILES)
@SHORT
@given(draw=st.data())
def test_a_changed_value_is_read_or_refused(name: str, draw: st.DataObject, tmp_path: Path) -> None:
    """A record whose value at one place is another: what is read is used without a traceback."""
    value = json.loads(json.dumps(FILES[name]))
    holder = value
    while True:
        key = draw.draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
        if not isinstance(holder[key], (dict, list)) or not holder[key] or draw.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = draw.draw(JSON)
    (tmp_path / name).write_text(json.dumps(value))
    try:
        found = read(name, tmp_path)
    except UserError as error:
        assert name in str(error)  # noqa: PT017
        return
    if name == "temperatures.json":
        calibration = slot_calibration(found, 1.0)
        assert calibration is None or len(calibration.temperatures) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": [1.0, 0.0]}, r"temperatures\.1: Input should be greater than 0.*calibrates anew"),
        ({"temperatures": [1.0]}, "is not for blocks of 2 slots: remove .* and run the same command again"),
        ({"tables": [{**TABLE, "affine": None}]}, r"tables\.0\.affine: "),
        ({"tables": [{**TABLE, "temperatures": [1.0]}]}, "is not for blocks of 2 slots"),
    ],
)
def test_a_calibration_that_does_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "temperatures.json").write_text(json.dumps({**CALIBRATION, **change}))
    with pytest.raises(UserError, match=message):
        read("temperatures.json", tmp_path)


def test_a_row_that_was_changed_is_found_and_one_without_a_hash_is_read(tmp_path: Path) -> None:
    class Row(Record):
        text: str
        ids: list[int]

    folder = Folder(str(tmp_path))
    rows = [{"text": "ü", "ids": [131, 7], "share": 0.1}, {"text": "b", "ids": []}]
    write_rows(folder, "rows.jsonl", rows)
    assert list(read_rows(folder, "rows.jsonl", Row, "cure")) == rows
    file = tmp_path / "rows.jsonl"
    written = file.read_text()
    file.write_text(written.replace("131", "135"))
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the row has been changed since it was written; cure"):
        list(read_rows(folder, "rows.jsonl", Row, "cure"))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(read_rows(folder, "rows.jsonl", Row, "cure")) == rows
