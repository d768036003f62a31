"""Progress says what, how much, how fast and how long; provenance says where from."""

import io
import json
import time

import pytest

from pipelines import progress, provenance
from pipelines.progress import Reporter, byte_size, duration


def test_plain_lines_have_amount_speed_time_left_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    stream = io.StringIO()
    reporter = Reporter(stream=stream, terminal=False)
    with reporter.stage("train"), reporter.task("steps", total=200, unit="steps", done=100) as task:
        for _ in range(50):
            clock[0] += 0.5
            task.advance(1, loss=1.23456)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "== train"
    # Two in 25 s, one every ten seconds; what the earlier process did is not in the speed.
    assert lines[1] == "steps: 120/200 steps (60%), 2 steps/s, 40s left, loss=1.235"
    assert lines[2] == "steps: 140/200 steps (70%), 2 steps/s, 30s left, loss=1.235"
    assert lines[3] == "steps: 150/200 steps (75%), 2 steps/s, 25s left, loss=1.235, took 25s"
    assert lines[4] == "== train: done in 25s"


def test_bars_on_a_terminal_end_with_a_line() -> None:
    stream = io.StringIO()
    reporter = Reporter(stream=stream, terminal=True)
    with reporter.task("outer", total=2, unit="rows") as outer:
        with reporter.task("inner", unit="tokens") as inner:
            inner.advance(1000)
            reporter.say("a [word] in between")
        outer.advance(2)
    text = stream.getvalue()
    assert "inner: 1,000 tokens" in text
    assert "a [word] in between" in text
    assert "outer: 2/2 rows (100%)" in text


def test_a_total_that_is_learnt_later_and_quiet() -> None:
    stream = io.StringIO()
    with Reporter(stream=stream, terminal=False, quiet=True).task("x") as task:
        task.update(5, total=10)
    assert (task.total, task.done, stream.getvalue()) == (10, 5, "")


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.24, "4.2s"), (59.6, "1m00s"), (65, "1m05s"), (3600, "1h00m"), (7800, "2h10m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(512, "512 B"), (1536, "1.54 kB"), (38e12, "38 TB"), (5.4e15, "5,400 TB")])
def test_byte_sizes(count: float, text: str) -> None:
    assert byte_size(count) == text


def test_provenance_is_json_and_names_what_ran() -> None:
    found = json.loads(json.dumps(provenance.collect(seed=3)))
    assert found["seed"] == 3
    assert found["packages"]["torch"]
    assert found["hardware"]["cores"] >= 1
    assert progress.LINE_SECONDS > 0
