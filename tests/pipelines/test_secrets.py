"""Secrets that are planted everywhere are in no file that is written, and on no line that is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines import provenance
from pipelines.errors import UserError
from pipelines.settings import load_settings, settings_from_dict
from pipelines.workers import on_pool, session

KEY, SECRET, TOKEN = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY", "hf_" + "aB3" * 12
PLANTED = [
    ("run.directory", f"s3://{KEY}:{SECRET}@bucket/run"),
    ("data.train.0.source", f"https://me:{SECRET}@host/x.jsonl"),
    ("publish.repository", TOKEN),
    ("target.model", f"https://host/model?token={SECRET}"),
    ("cluster.address", f"http://me:{SECRET}@head:6379"),
    ("evaluate.baselines.old", f"gs://b/x?access_token={SECRET}"),
]


def files_with_secrets(folder: Path) -> list[str]:
    planted = [text.encode() for text in (KEY, SECRET, TOKEN)]
    return [str(path) for path in folder.rglob("*") if path.is_file() and any(t in path.read_bytes() for t in planted)]


@pytest.mark.parametrize(("key", "value"), PLANTED)
def test_a_secret_in_the_settings_is_refused_with_its_cure(key: str, value: str, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text("run: {directory: x}\ntarget: {model: m}\ndata: {train: [{source: a.jsonl}]}\n")
    with pytest.raises(UserError, match=rf"(?s){key.replace('.', '.')} is .*\*\*\*.*take it out, and set") as refused:
        load_settings(config, [f"{key}={value}"])
    assert not any(text in str(refused.value) for text in (KEY, SECRET, TOKEN))


def test_a_command_that_is_given_one_writes_and_prints_it_nowhere(tmp_path: Path) -> None:
    """On the command line, in the settings file, in the environment (whose store does not answer)."""
    (tmp_path / "a.yaml").write_text(f"run: {{directory: 's3://{KEY}:{SECRET}@bucket/run'}}\ntarget: {{model: m}}\n")
    (tmp_path / "b.yaml").write_text("run: {directory: out}\ntarget: {model: m}\n")
    variables = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HF_TOKEN": TOKEN,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    url = f"s3://{KEY}:{SECRET}@bucket/x"
    script = "\n".join(
        [
            "from pipelines.cli.commands import main",
            "import os, sys",
            "for words in (",
            f"    ['run', 'a.yaml'], ['run', 'b.yaml', 'run.directory={url}'], ['cache', 'info', {url!r}],",
            f"    ['report', {url!r}], ['status', 'j', '--address', 'http://me:{SECRET}@127.0.0.1:9'],",
            f"    ['run', 'b.yaml', 'nonsense={TOKEN}'], ['decode', {url!r}, '--prompt', 'x'],",
            "):",
            "    try:",
            "        main(words)",
            "    except SystemExit as end:",
            "        print(words[0], end.code, flush=True)",
            "raise RuntimeError(os.environ['HF_TOKEN']) if len(sys.argv) > 1 else SystemExit",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240
    )
    codes = [line for line in done.stdout.splitlines() if line.split()[-1:] == ["2"]]
    assert len(codes) == 7, done.stdout + done.stderr
    printed = done.stdout + done.stderr
    assert not any(text in printed for text in (KEY, SECRET, TOKEN))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.yaml", "b.yaml"]


def test_the_record_of_a_command_has_its_words_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark", "run", f"run.directory=s3://{KEY}:{SECRET}@bucket/x"])
    assert provenance.collect()["command"] == ["dspark", "run", "run.directory=s3://***@bucket/x"]


class Tells:
    def run(self, item: int) -> int:
        print(f"connecting to s3://{KEY}:{SECRET}@bucket", flush=True)
        raise ValueError(f"no answer from s3://{KEY}:{SECRET}@bucket")


@pytest.mark.slow
def test_what_workers_print_is_kept_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray keeps its workers' output; what of it stays beside the run is masked."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    wanted = settings_from_dict(
        {"run": {"directory": str(tmp_path)}, "target": {"model": "m"}, "cluster": {"num_cpus": 1}}
    )
    with pytest.raises(RuntimeError, match="no answer"), session(wanted, str(tmp_path)):
        on_pool(wanted, Tells, [1], workers=1, on_result=print, item_name=str)
    texts = [path.read_text() for path in (tmp_path / "ray-logs").rglob("*") if path.is_file()]
    assert any("connecting to s3://***@bucket" in text for text in texts)
    assert files_with_secrets(tmp_path) == []
