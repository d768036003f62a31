"""The command line: quick, light, and plain about a user's mistakes."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import cli

PIPELINE = ["run", "regenerate", "cache", "train", "calibrate", "evaluate", "report", "publish", "refit"]
COMMANDS = [*PIPELINE, "plan", "submit", "status", "logs", "stop", "decode", "doctor", "settings"]
TINY = str(Path(__file__).parents[2] / "configs" / "tiny.yaml")


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_help_answers_within_a_second_and_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from pipelines.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'datasets', 'pyarrow', 'wandb', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    # Processor time, which is the waiting time of an idle machine: this one may be busy with other tests.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    assert "Usage:" in capsys.readouterr().out


def test_settings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("settings", TINY, "train.num_workers=2", "--json") == 0
    assert json.loads(capsys.readouterr().out)["train"]["num_workers"] == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", TINY, "train.epoch=1"], "unknown key `train.epoch`; did you mean `train.num_train_epochs`?"),
        (["run", "nowhere.yaml"], "there is no settings file nowhere.yaml"),
        (["cache", "info", "nowhere"], "nowhere"),
        (["report", "nowhere"], "not a run directory"),
        (["status", "job", "--address", ""], "--address"),
        (["decode", TINY], "--prompt"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_cache_builds_by_default_and_keeps_its_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("cache", "nowhere.yaml") == 2
    assert "there is no settings file nowhere.yaml" in capsys.readouterr().err
    assert exit_code("cache", "verify", "--help") == 0
    assert "checksum" in capsys.readouterr().out
