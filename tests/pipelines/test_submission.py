"""What a submitted job is told to run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from cluster import jobs
from pipelines.cli import main
from pipelines.errors import UserError
from pipelines.settings import Settings, load_settings, settings_from_dict
from pipelines.settings.schema import PromptSource
from pipelines.stages import pilot, train
from pipelines.submission import job_command, job_variables, require_small, require_variables, submit_run


def settings(directory: str, codec: str = "bf16", **cluster: str) -> Settings:
    values = {"run": {"directory": directory}, "target": {"model": "m"}, "cluster": cluster}
    return settings_from_dict({**values, "cache": {"hidden_states_codec": codec}})


def folder_with(tmp_path: Path, *names: str) -> Path:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    return tmp_path


def command(folder: Path, config: str, overrides: list[str], wanted: Settings, **options: Any) -> list[str]:
    return shlex.split(job_command(config, overrides, wanted, folder, jobs.files_sent(folder), **options))


def test_the_job_runs_the_same_settings_in_an_absolute_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder_with(tmp_path, "configs/a.yaml"))
    overrides = ["regenerate.temperature=0.5", "tracking.tags=['x y']"]
    assert command(tmp_path, "configs/a.yaml", overrides, settings("runs/a"), redo=True) == [
        *("python", "-m", "pipelines.cli", "run", "configs/a.yaml", *overrides),
        f"run.directory={tmp_path}/runs/a",
        "--redo",
    ]


def test_an_object_store_stays_as_it_is(tmp_path: Path) -> None:
    folder_with(tmp_path, "a.yaml")
    expected = ["python", "-m", "pipelines.cli", "run", "a.yaml"]
    assert command(tmp_path, str(tmp_path / "a.yaml"), [], settings("s3://bucket/run")) == expected


def test_a_refit_is_sent_with_its_drafter_and_the_clusters_own_interpreter(tmp_path: Path) -> None:
    wanted = settings("s3://bucket/run", python="/opt/env/bin/python")
    folder_with(tmp_path, "a.yaml")
    assert command(tmp_path, str(tmp_path / "a.yaml"), [], wanted, refit="/drafters/old") == [
        *("/opt/env/bin/python", "-m", "pipelines.cli", "refit", "a.yaml", "--from", "/drafters/old")
    ]


def test_a_config_or_a_base_of_it_that_is_not_sent_is_refused(tmp_path: Path) -> None:
    folder_with(tmp_path, "base.yaml", "in/a.yaml", "in/.gitignore", "in/b.yaml")
    (tmp_path / "in/a.yaml").write_text("extends: ../base.yaml")
    (tmp_path / "base.yaml").write_text("run: {directory: x}")
    (tmp_path / "in/.gitignore").write_text("b.yaml")
    for config, named in (("base.yaml", "base.yaml"), ("in/a.yaml", "base.yaml"), ("in/b.yaml", "in/b.yaml")):
        with pytest.raises(UserError, match=f"{named} is not among the files inside"):
            command(tmp_path / "in", str(tmp_path / config), [], settings("runs/a"))


def test_relative_inputs_are_found_by_the_job_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent keeps its place, also where the command is given elsewhere; the rest gets its absolute path."""
    work, there = folder_with(tmp_path / "work", "a.yaml", "data/x.jsonl", "models/m/config.json", "runs/b/c"), tmp_path
    folder_with(there, "own/y.jsonl", "costs.json")
    monkeypatch.chdir(there)
    wanted = settings_from_dict(
        {
            "run": {"directory": "s3://bucket/run"},
            "target": {"model": "work/models/m"},
            "data": {
                "train": [{"source": "work/data/x.jsonl"}, {"source": "own/y.jsonl", "limit": 3}],
                "evaluation": [{"source": "benchmark:gsm8k"}, {"source": "hub:a/b"}],
            },
            "drafter": {"initial_weights": "owner/name"},
            "evaluate": {"baselines": {"old": "work/runs/b"}, "cost": {"table": str(there / "costs.json")}},
        }
    )
    said: list[str] = []
    words = command(work, "work/a.yaml", [], wanted, say=said.append)
    assert words[:5] == ["python", "-m", "pipelines.cli", "run", "a.yaml"]
    assert {word.partition("=")[0]: json.loads(word.partition("=")[2]) for word in words[5:]} == {
        "data.train": [
            {"source": "data/x.jsonl", "split": "train", "skip": 0},
            {"source": f"{there}/own/y.jsonl", "split": "train", "skip": 0, "limit": 3},
        ],
        "target.model": f"{work}/models/m",
        "evaluate.baselines.old": f"{work}/runs/b",
    }
    assert len(said) == 3
    assert all("which the cluster has to see" in line for line in said)
    # They are what the job's own command line understands.
    again = load_settings(work / "a.yaml", ["run.directory=x", *words[5:]])
    assert again.data.train[1].limit == 3
    data = wanted.data.model_copy(update={"train": (PromptSource(source="own/z.jsonl"),)})
    with pytest.raises(UserError, match=r"data\.train: there is no own/z\.jsonl here"):
        command(work, "work/a.yaml", [], wanted.model_copy(update={"data": data}))


def test_keys_and_passwords_stay_at_home_and_sources_do_not(tmp_path: Path) -> None:
    secret = [".env", "sub/.env.local", "a.pem", "sub/id_rsa", "sub/id_ed25519.pub", "credentials", ".aws/config"]
    secret += [".netrc", ".ssh/config", "token", "service-account-x.json", "models/a", "runs/a", ".git/config"]
    code = ["a.py", "dspark/models/a.py", "storage/credentials.py", "pipelines/runs/b.py", "next_token/c.py"]
    folder_with(tmp_path, *secret, *code)
    assert {str(path) for path in jobs.files_sent(tmp_path)} == set(code)


def test_the_upload_is_sized_before_it_is_packed(tmp_path: Path) -> None:
    folder_with(tmp_path, "a.yaml", "small")
    (tmp_path / "big").write_bytes(bytes(3_000_000))
    line = require_small(jobs.files_sent(tmp_path), tmp_path, 10**7)
    assert line == f"sends {tmp_path}: 3 files, 3.0 MB; the largest: big (3.0 MB), a.yaml (0.0 MB), small (0.0 MB)"
    (tmp_path / "a.yaml").write_text("{run: {directory: s3://b/x}, target: {model: m}}")
    with pytest.raises(UserError, match=r"(?s)big \(3\.0 MB\).*limit is 1\.0 MB.*cluster\.max_upload_bytes"):
        submit_run(
            str(tmp_path / "a.yaml"),
            [f"cluster.working_dir={tmp_path}", "cluster.max_upload_bytes=1000000"],
            "http://127.0.0.1:1",
        )


def test_variables_go_along_and_secrets_by_name_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WANDB_MODE": "offline", "HF_TOKEN": "x" * 20, "HTTP_PROXY": "http://me:pw@proxy:3128"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_REGION", raising=False)
    names = ("WANDB_MODE", "HF_TOKEN", "HTTP_PROXY", "AWS_REGION")
    assert job_variables(names) == ({"WANDB_MODE": "offline"}, ["HF_TOKEN", "HTTP_PROXY"])
    require_variables(names)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="HF_TOKEN, whose value is not sent"):
        require_variables(names)


@pytest.mark.parametrize("name", ["status", "logs", "stop"])
@pytest.mark.parametrize("job", ["", " ", "a/b", "../jobs"])
def test_what_is_no_jobs_id_is_refused_before_anybody_is_asked(
    name: str, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, job, "--address", "http://127.0.0.1:9"])
    assert end.value.code == 2
    assert "is not a job's id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "function", "said"),
    [
        (["logs", "j", "--follow"], "logs", "the job goes on (`dspark logs j --follow`"),
        (["status", "j"], "status", "the job is as it was"),
        (["stop", "j"], "stop", "`dspark status j` says whether"),
    ],
)
def test_an_interrupt_says_how_it_stands_with_the_job(
    arguments: list[str], function: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, function, interrupted)
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--address", "http://127.0.0.1:9"])
    assert end.value.code == 130
    assert said in capsys.readouterr().err


def test_training_into_an_object_store_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match=r"s3://bucket/run: .* need a folder"):
        train.check(settings("s3://bucket/run"))
    with pytest.raises(UserError, match=r"s3://bucket/run: training \(a pilot's too\) .* need a folder"):
        pilot.check(settings("s3://bucket/run", codec="projected"))
    pilot.check(settings("s3://bucket/run", codec="transform"))
