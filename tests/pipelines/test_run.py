"""The stage graph on toy stages: what is done, skipped, refused, put aside, and taken up again after a kill."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dspark.manifest import new_folder
from pipelines.errors import UserError
from pipelines.progress import Reporter
from pipelines.runs.directory import RunDirectory
from pipelines.runs.executor import run_stages
from pipelines.runs.graph import Stage
from pipelines.runs.run import Run, open_run, settings_of
from pipelines.settings import Settings, settings_from_dict
from storage.files.filesystems import temporary_name

CALLS: list[str] = []


class ToyStage(Stage):
    """Writes its identity fields; fails once when told to."""

    def load(self) -> Any:
        return Toy(self.name, self.output)


class Toy:
    failing: str | None = None

    def __init__(self, name: str, output: str) -> None:
        self.name, self.output = name, output

    def identity(self, settings: Settings, run: Run) -> dict[str, Any]:
        values = {
            "first": settings.run.seed,
            "second": settings.train.num_train_epochs,
            "third": settings.evaluate.batch_size,
        }
        return {"value": values[self.name]}

    def execute(self, settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
        CALLS.append(self.name)
        run.directory.write_json(f"{self.output}/data.json", self.identity(settings, run))
        if Toy.failing == self.name:
            raise UserError("told to fail")
        return {"figure": 1}


STAGES = {
    "first": ToyStage(name="first", module="", output="one"),
    "second": ToyStage(name="second", module="", output="two", inputs=("first",)),
    "third": ToyStage(name="third", module="", output="three", inputs=("first", "second")),
}


@pytest.fixture(autouse=True)
def _clean() -> None:
    CALLS.clear()
    Toy.failing = None


def settings(folder: Path, seed: int = 0, epochs: float = 1.0, rows: int = 1) -> Settings:
    return settings_from_dict(
        {
            "run": {"directory": str(folder), "seed": seed},
            "target": {"model": "m"},
            "train": {"num_train_epochs": epochs},
            "evaluate": {"batch_size": rows},
            "tracking": {"wandb": "disabled"},
        }
    )


def do(values: Settings, **options: Any) -> list[str]:
    CALLS.clear()
    run_stages(values, Reporter(quiet=True), stages=STAGES, **options)
    return list(CALLS)


def test_a_second_run_finds_everything_done(tmp_path: Path) -> None:
    assert do(settings(tmp_path)) == ["first", "second", "third"]
    assert do(settings(tmp_path)) == []


def test_a_stage_that_stopped_goes_on_and_nothing_before_it(tmp_path: Path) -> None:
    Toy.failing = "second"
    with pytest.raises(UserError, match="told to fail"):
        do(settings(tmp_path))
    Toy.failing = None
    assert do(settings(tmp_path)) == ["second", "third"]


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    writer = "import os, sys; from storage.files.filesystems import *; print(temporary_name(sys.argv[1]))"
    dead = subprocess.run([sys.executable, "-c", writer, "data.json"], capture_output=True, text=True, check=True)
    living = tmp_path / "two" / temporary_name("data.json")
    for path in (
        tmp_path / "one" / dead.stdout.strip(),
        living,
        tmp_path / ".published.7.ab.writing" / "published" / "a",
    ):
        path.parent.mkdir(parents=True)
        path.touch()
    RunDirectory(tmp_path).remove_leftovers()
    assert list((tmp_path / "one").iterdir()) == []
    assert list((tmp_path / "two").iterdir()) == [living]
    assert not (tmp_path / ".published.7.ab.writing").exists()


def test_a_changed_setting_refuses_with_the_difference_and_touches_nothing(tmp_path: Path) -> None:
    do(settings(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with pytest.raises(UserError, match=r"value: these settings say 2.0, it was made with 1.0[\s\S]*--redo"):
        do(settings(tmp_path, epochs=2.0))
    assert CALLS == []
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_redo_makes_only_what_depends_on_the_change_and_keeps_the_old(tmp_path: Path) -> None:
    do(settings(tmp_path))
    assert do(settings(tmp_path, epochs=2.0), redo=True) == ["second", "third"]
    kept = [json.loads(path.read_text())["value"] for path in (tmp_path / "replaced").rglob("data.json")]
    assert sorted(kept) == [1, 1.0]
    # Going back takes the old outputs back instead of making them again.
    assert do(settings(tmp_path), redo=True) == []
    assert json.loads((tmp_path / "two/data.json").read_text()) == {"value": 1.0}
    assert do(settings(tmp_path)) == []


def test_a_single_stage_needs_its_inputs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"second needs .*one, which is not there yet; run `dspark first` first"):
        do(settings(tmp_path), only=["second"])
    assert do(settings(tmp_path), only=["first"]) == ["first"]
    with pytest.raises(UserError, match="made with other settings"):
        do(settings(tmp_path, seed=1), only=["second"])
    assert do(settings(tmp_path), only=["second"]) == ["second"]


def test_an_output_that_was_removed_by_hand_is_made_again(tmp_path: Path) -> None:
    do(settings(tmp_path))
    (tmp_path / "two/data.json").unlink()
    assert do(settings(tmp_path)) == ["second"]


@pytest.mark.parametrize("stop_at", range(1, 9))
def test_redo_stopped_at_any_write_or_rename_can_be_taken_up_again(
    stop_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(settings(tmp_path))
    do(settings(tmp_path, epochs=2.0), redo=True)
    steps = 0

    def counted(method: Any) -> Any:
        def call(self: RunDirectory, name: str, *rest: Any) -> Any:
            nonlocal steps
            if name != "run.json":
                steps += 1
            if steps == stop_at:
                raise KeyboardInterrupt
            return method(self, name, *rest)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "move", counted(RunDirectory.move))
        patch.setattr(RunDirectory, "write_json", counted(RunDirectory.write_json))
        with suppress(KeyboardInterrupt):
            do(settings(tmp_path), redo=True)
    do(settings(tmp_path), redo=True)
    assert do(settings(tmp_path)) == []
    assert json.loads((tmp_path / "two/data.json").read_text()) == {"value": 1.0}
    kept = [json.loads(path.read_text())["value"] for path in (tmp_path / "replaced").rglob("data.json")]
    assert 2.0 in kept


def test_files_of_unknown_origin_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one/data.json").write_text("{}")
    with pytest.raises(UserError, match=r"no stages/first\.json says what they are"):
        do(settings(tmp_path), redo=True)


def test_run_json_has_settings_states_and_invocations(tmp_path: Path) -> None:
    do(settings(tmp_path), provenance={"command": ["dspark"]})
    summary = json.loads((tmp_path / "run.json").read_text())
    assert summary["settings"]["target"]["model"] == "m"
    assert [state["complete"] for state in summary["stages"].values()] == [True] * 3
    assert summary["invocations"] == [{"command": ["dspark"]}]
    assert open_run(str(tmp_path)).settings == Run(settings(tmp_path)).settings
    assert settings_of(str(tmp_path), ["run.seed=3"]).run.seed == 3
    with pytest.raises(UserError, match="there is no settings file"):
        settings_of(str(tmp_path / "nowhere"), [])


HOLDER = (
    "import sys, time\n"
    "from pipelines.runs.directory import RunDirectory\n"
    "with RunDirectory(sys.argv[1]).lock():\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


def test_two_runs_in_one_directory_are_refused_and_a_killed_one_frees_it(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "):
            do(settings(tmp_path))
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert do(settings(tmp_path)) == ["first", "second", "third"]
    finally:
        holder.kill()
        holder.wait()


def test_the_lock_is_not_reentrant(tmp_path: Path) -> None:
    run = Run(settings(tmp_path), stages=STAGES)
    with run.directory.lock(), pytest.raises(UserError, match="already running"), run.directory.lock():
        pass


def made_drafter(folder: Path, text: str) -> None:
    with new_folder(folder) as staging:
        (staging / "config.json").write_text(text)


def test_a_drafter_that_was_changed_is_refused_and_one_that_is_gone_made_again(tmp_path: Path) -> None:
    """`done already` is said of a final checkpoint or a publication whose every file is as it was written."""

    def execute(self: Toy, settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
        CALLS.append(self.name)
        made_drafter(run.directory.path(f"{self.output}/final"), "{}")
        return {}

    stage = ToyStage(name="first", module="", output="one", drafter="one/final")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Toy, "execute", execute)

        def run() -> list[str]:
            CALLS.clear()
            run_stages(settings(tmp_path), Reporter(quiet=True), stages={"first": stage})
            return list(CALLS)

        assert run() == ["first"]
        assert run() == []
        final = tmp_path / "one" / "final"
        for name in ("config.json", "manifest.json"):
            data = (final / name).read_bytes()
            (final / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
            with pytest.raises(UserError, match=rf"{name} .*: remove {final} and run the same command again"):
                run()
            (final / name).write_bytes(data)
        assert run() == []
        shutil.rmtree(final)
        assert run() == ["first"]
        assert run() == []
