"""What a submitted job is told to run."""

import shlex
from pathlib import Path

import pytest

from pipelines.errors import UserError
from pipelines.settings import Settings, settings_from_dict
from pipelines.stages import pilot, train
from pipelines.submission import job_command


def settings(directory: str, codec: str = "bf16", **cluster: str) -> Settings:
    values = {"run": {"directory": directory}, "target": {"model": "m"}, "cluster": cluster}
    return settings_from_dict({**values, "cache": {"hidden_states_codec": codec}})


def test_the_job_runs_the_same_settings_in_an_absolute_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["data.train=[{source: 'x y'}]"]
    command = job_command("configs/a.yaml", overrides, settings("runs/a"), tmp_path, redo=True)
    assert shlex.split(command) == [
        *("python", "-m", "pipelines.cli", "run", "configs/a.yaml", "data.train=[{source: 'x y'}]"),
        f"run.directory={tmp_path}/runs/a",
        "--redo",
    ]


def test_an_object_store_stays_as_it_is(tmp_path: Path) -> None:
    command = job_command(str(tmp_path / "a.yaml"), [], settings("s3://bucket/run"), tmp_path)
    assert shlex.split(command) == ["python", "-m", "pipelines.cli", "run", "a.yaml"]


def test_a_refit_is_sent_with_its_drafter_and_the_clusters_own_interpreter(tmp_path: Path) -> None:
    wanted = settings("s3://bucket/run", python="/opt/env/bin/python")
    command = job_command(str(tmp_path / "a.yaml"), [], wanted, tmp_path, refit="/drafters/old")
    assert shlex.split(command) == [
        *("/opt/env/bin/python", "-m", "pipelines.cli", "refit", "a.yaml", "--from", "/drafters/old")
    ]


def test_a_config_outside_the_working_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not inside"):
        job_command("/elsewhere/a.yaml", [], settings("runs/a"), tmp_path)


def test_training_into_an_object_store_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"s3://bucket/run: .* need a folder"):
        train.check(settings("s3://bucket/run"))
    with pytest.raises(UserError, match=r"s3://bucket/run: training \(a pilot's too\) .* need a folder"):
        pilot.check(settings("s3://bucket/run", codec="projected"))
    pilot.check(settings("s3://bucket/run", codec="transform"))
