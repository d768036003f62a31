"""What a submitted job is told to run."""

import shlex
from pathlib import Path

import pytest

from pipelines.errors import UserError
from pipelines.submission import job_command


def test_the_job_runs_the_same_settings_in_an_absolute_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = job_command("configs/a.yaml", ["data.train=[{source: 'x y'}]"], "runs/a", tmp_path, redo=True)
    assert shlex.split(command) == [
        *("python", "-m", "pipelines.cli", "run", "configs/a.yaml", "data.train=[{source: 'x y'}]"),
        f"run.directory={tmp_path}/runs/a",
        "--redo",
    ]


def test_an_object_store_stays_as_it_is(tmp_path: Path) -> None:
    command = job_command(str(tmp_path / "a.yaml"), [], "s3://bucket/run", tmp_path, redo=False)
    assert shlex.split(command) == ["python", "-m", "pipelines.cli", "run", "a.yaml"]


def test_a_config_outside_the_working_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not inside"):
        job_command("/elsewhere/a.yaml", [], "runs/a", tmp_path, redo=False)
