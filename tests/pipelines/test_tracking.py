"""The local log is complete whatever W&B does; W&B offline takes the same numbers."""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import UserError
from pipelines.settings import settings_from_dict
from pipelines.settings.schema import TrackingSettings, WandbMode
from pipelines.tracking import TrackerPlan
from pipelines.tracking.curves import Curves
from pipelines.tracking.local_log import parse_rows
from pipelines.tracking.wandb import wandb_mode


def plan(folder: Path, mode: WandbMode = "disabled", *, trackers: tuple[str, ...] = ("wandb",)) -> TrackerPlan:
    return TrackerPlan(
        stage="train",
        directory=str(folder),
        log_name="logs/train-1.jsonl",
        run_id="train-1",
        group="group",
        settings=TrackingSettings(wandb=mode, project="project", trackers=trackers),
        config={"a": 1},
    )


def read_log(folder: Path) -> list[dict[str, Any]]:
    return parse_rows((folder / "logs" / "train-1.jsonl").read_bytes())


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_log(folder) if row["step"] is not None]


def test_rows_come_back_with_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    with Curves(plan(tmp_path)) as tracker:
        tracker.log({"train/loss": float("nan"), "train/tau": 2.5}, step=1)
        tracker.summary({"best": 3})
    rows = read_log(tmp_path)
    assert (rows[0]["train/loss"], rows[0]["train/tau"], rows[1]["summary"]) == ("nan", 2.5, {"best": 3})


def test_a_resumed_stage_leaves_no_gap_and_no_repeat(tmp_path: Path) -> None:
    with Curves(plan(tmp_path)) as tracker:
        for step in range(1, 8):
            tracker.log({"x": step}, step=step)
    with Curves(plan(tmp_path)) as tracker:
        tracker.resume_after(4)
        for step in range(5, 10):
            tracker.log({"x": step}, step=step)
    assert steps(tmp_path) == list(range(1, 10))


def test_steps_that_a_stopped_stage_had_no_time_to_log_are_added_when_it_goes_on(tmp_path: Path) -> None:
    """Killed with steps 1, 2 and 5 in the local log; the work is at 4. The line of step 3 is torn."""
    with Curves(plan(tmp_path)) as tracker:
        for step in (1, 2, 3, 5):
            tracker.log({"train/x": step}, step=step)
        tracker.log({"validation/x": 2.5}, step=2)
    path = tmp_path / "logs/train-1.jsonl"
    path.write_text(path.read_text().replace('"train/x": 3', '"train/'))
    done = [(step, {"train/x": step}) for step in range(1, 7)]
    done += [(step, {"validation/x": step + 0.5}) for step in (2, 4, 6)]
    with Curves(plan(tmp_path)) as tracker:
        tracker.resume_after(4, done)
        tracker.log({"train/x": 5}, step=5)
    rows = read_log(tmp_path)
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)
    found = [(row["step"], name, row[name]) for row in rows for name in row if "/" in name]
    assert sorted(found) == sorted(
        [(step, "train/x", step) for step in range(1, 6)] + [(step, "validation/x", step + 0.5) for step in (2, 4)]
    )


NOISE = ("[1]", '{"step": -1.5}', '{"step": "3"}', "1" * 5000, "[" * 10**5, "null", '{"step": true}')


@pytest.mark.fuzz
@given(place=st.integers(0, 10**6), new=st.binary(min_size=1, max_size=60), noise=st.lists(st.sampled_from(NOISE)))
def test_of_a_damaged_log_every_row_is_read_that_is_whole(place: int, new: bytes, noise: list[str]) -> None:
    rows = [{"step": step, "x": step / 3} for step in range(8)] + [{"step": None, "summary": {"a": 1}}]
    data = "".join(f"{line}\n" for line in [*noise, *map(json.dumps, rows)]).encode()
    assert parse_rows(data) == rows
    place = len(data) - 300 + place % 300 if len(data) > 300 else place % len(data)
    end = min(place + len(new), len(data))
    damaged = data[:place] + new[: end - place].replace(b"\n", b" ") + data[end:]
    first, last = data.count(b"\n", 0, place) - len(noise), data.count(b"\n", 0, end) - len(noise)
    found = parse_rows(damaged)
    assert all(row["step"] is None or type(row["step"]) is int for row in found)
    assert [row for number, row in enumerate(rows) if not first <= number <= last] == [
        row for row in found if row in rows[: max(first, 0)] + rows[max(last + 1, 0) :]
    ]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    with Curves(plan(tmp_path)) as tracker:
        tracker.log({"x": 1}, step=1)
    with open(tmp_path / "logs/train-1.jsonl", "a") as file:
        file.write('{"step": 2, "x"')
    with Curves(plan(tmp_path)) as tracker:
        tracker.log({"x": 2}, step=2)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.slow
def test_wandb_offline_writes_one_run_a_stage_that_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "page.html").write_text("<b>report</b>")
    said: list[str] = []
    for _ in range(2):
        with Curves(plan(tmp_path, "offline"), said.append) as tracker:
            tracker.log({"train/loss": 1.0}, step=1)
            tracker.html("report", tmp_path / "page.html")
    assert said == []
    found = sorted(path.name for path in (tmp_path / "logs/wandb").rglob("run-*.wandb"))
    assert found
    assert set(found) == {"run-train-1.wandb"}


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file, a LevelDB log after 7 bytes: blocks of 32 KB, chunks of checksum, length, kind."""
    place, whole = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of a record, or its last chunk
            yield whole
            whole = b""


@pytest.mark.slow
def test_an_offline_run_that_goes_on_shows_the_earlier_steps_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What W&B itself reads in the newest of its files, which is what `wandb sync` sends."""
    from wandb.proto.wandb_internal_pb2 import Record

    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    with Curves(plan(tmp_path, "offline")) as tracker:
        for step in (1, 2, 3):
            tracker.log({"train/x": float(step)}, step=step)
    done = [(step, {"train/x": float(step)}) for step in (1, 2, 3, 4)]
    with Curves(plan(tmp_path, "offline")) as tracker:
        tracker.resume_after(4, done)
        tracker.log({"train/x": 5.0}, step=5)
    newest = max((tmp_path / "logs/wandb").rglob("run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    curve = []
    for data in wandb_records(newest.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {(item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        if items:
            curve.append((items["train/step"], items["train/x"]))
    assert curve == [(step, float(step)) for step in (1, 2, 3, 4, 5)]


class _Broken:
    def __init__(self, where: str) -> None:
        self.where = where
        self.summary: dict[str, Any] = {}

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, *_: Any) -> None:
        if self.where == "log":
            raise RuntimeError("no network")

    def finish(self, exit_code: int) -> None:
        if self.where == "finish":
            raise RuntimeError("no network")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_a_failing_wandb_is_said_once_and_stops_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def init(**_: Any) -> _Broken:
        if where == "init":
            raise RuntimeError("no network")
        return _Broken(where)

    monkeypatch.setattr(wandb, "init", init)
    said: list[str] = []
    with Curves(plan(tmp_path, "online"), said.append) as tracker:
        for step in (1, 2, 3):
            tracker.log({"x": 1.0}, step=step)
    assert steps(tmp_path) == [1, 2, 3]
    assert len(said) == 1
    assert "no network" in said[0]


TOY = '''
from pathlib import Path

from pipelines.tracking import Tracker, trackers


@trackers.register("toy")
class Toy(Tracker):
    """Lines in a file of its own."""

    def log(self, values, step):
        with open(Path(self.plan.directory) / "toy.txt", "a") as file:
            file.write(f"{self.plan.stage} {step} {dict(values)}\\n")

    def summary(self, values):
        raise RuntimeError("no summaries at http://me:secret@toy")
'''


def test_a_tracker_from_a_file_of_ones_own_is_named_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    values = {"run": {"directory": str(tmp_path)}, "target": {"model": "m"}, "tracking": {"trackers": ["toy"]}}
    with pytest.raises(UserError, match=r"no tracker 'toy'.*known are wandb.*tracking\.trackers"):
        settings_from_dict(values)
    settings = settings_from_dict({**values, "plugins": [str(tmp_path / "toy.py")]})
    said: list[str] = []
    with Curves(plan(tmp_path, trackers=settings.tracking.trackers), said.append) as curves:
        curves.log({"train/loss": 1.5}, step=1)
        curves.summary({"best": 1})
        curves.log({"train/loss": 1.0}, step=2)
    assert (tmp_path / "toy.txt").read_text() == "train 1 {'train/loss': 1.5}\n"
    assert said == [
        "toy stopped working (summary: RuntimeError: no summaries at http://***@toy); the local log "
        f"{tmp_path}/logs/train-1.jsonl goes on"
    ]
    assert steps(tmp_path) == [1, 2]


def test_wandb_is_offline_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert wandb_mode("auto") == "offline"
    assert wandb_mode("disabled") == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert wandb_mode("auto") == "online"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert wandb_mode("auto") == "offline"


LOGGER = (
    "import sys, itertools\n"
    "sys.path.insert(0, sys.argv[2])\n"
    "from test_tracking import plan\n"
    "from pathlib import Path\n"
    "from pipelines.tracking.curves import Curves\n"
    "tracker = Curves(plan(Path(sys.argv[1])))\n"
    "for step in itertools.count(1):\n"
    "    tracker.log({'x': step}, step=step)\n"
    "    if step == 50: print('going', flush=True)\n"
)


def test_a_killed_writer_leaves_every_row_that_it_had_logged(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", LOGGER, str(tmp_path), here], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    found = steps(tmp_path)
    assert found == list(range(1, len(found) + 1))
    assert len(found) >= 50
    assert json.dumps(found)
