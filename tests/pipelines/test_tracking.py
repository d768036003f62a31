"""The local log is complete whatever W&B does; W&B offline takes the same numbers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelines.tracking import Tracker, TrackerPlan, WandbMode, read_log, wandb_mode


def plan(folder: Path, mode: WandbMode = "disabled") -> TrackerPlan:
    return TrackerPlan(
        stage="train",
        directory=str(folder),
        log_name="logs/train-1.jsonl",
        run_id="train-1",
        group="group",
        mode=mode,
        project="project",
        entity=None,
        tags=(),
        config={"a": 1},
    )


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_log(str(folder), "logs/train-1.jsonl") if row["step"] is not None]


def test_rows_come_back_with_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    with Tracker(plan(tmp_path)) as tracker:
        tracker.log({"train/loss": float("nan"), "train/tau": 2.5}, step=1)
        tracker.summary({"best": 3})
    rows = read_log(str(tmp_path), "logs/train-1.jsonl")
    assert (rows[0]["train/loss"], rows[0]["train/tau"], rows[1]["summary"]) == ("nan", 2.5, {"best": 3})


def test_a_resumed_stage_leaves_no_gap_and_no_repeat(tmp_path: Path) -> None:
    with Tracker(plan(tmp_path)) as tracker:
        for step in range(1, 8):
            tracker.log({"x": step}, step=step)
    with Tracker(plan(tmp_path)) as tracker:
        tracker.resume_after(4)
        for step in range(5, 10):
            tracker.log({"x": step}, step=step)
    assert steps(tmp_path) == list(range(1, 10))


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    with Tracker(plan(tmp_path)) as tracker:
        tracker.log({"x": 1}, step=1)
    with open(tmp_path / "logs/train-1.jsonl", "a") as file:
        file.write('{"step": 2, "x"')
    with Tracker(plan(tmp_path)) as tracker:
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
        with Tracker(plan(tmp_path, "offline"), said.append) as tracker:
            tracker.log({"train/loss": 1.0}, step=1)
            tracker.html("report", tmp_path / "page.html")
            tracker.artifact(tmp_path / "page.html", "report")
    assert said == []
    found = sorted(path.name for path in (tmp_path / "logs/wandb").rglob("run-*.wandb"))
    assert found
    assert set(found) == {"run-train-1.wandb"}


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
    with Tracker(plan(tmp_path, "online"), said.append) as tracker:
        for step in (1, 2, 3):
            tracker.log({"x": 1.0}, step=step)
    assert steps(tmp_path) == [1, 2, 3]
    assert len(said) == 1
    assert "no network" in said[0]


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
    "from pipelines.tracking import Tracker\n"
    "tracker = Tracker(plan(Path(sys.argv[1])))\n"
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
