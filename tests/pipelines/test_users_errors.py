"""What is the user's to mend arrives as one line, wherever it is met; a stop ends in order and says so."""

import ast
import errno
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors import SafetensorError

from cluster.errors import NoCluster
from dspark.contract import ContractMismatch
from pipelines.cli.cluster import _address
from pipelines.errors import UserError, cannot_write, for_the_user
from pipelines.runs.directory import RunDirectory
from pipelines.runs.run import open_run
from pipelines.settings import Settings, settings_from_dict
from pipelines.target_spec import resolve_target
from pipelines.workers import on_pool, session
from storage.cache.target_cache import TargetCache
from storage.errors import MissingFile, UnsafeName

WAITS = (
    "import sys, time\n"
    "from pipelines import cli\n"
    "@cli.app.command('wait')\n"
    "def wait() -> None:\n"
    "    print('here', flush=True)\n"
    "    time.sleep(60)\n"
    "cli.main(['wait'])\n"
)


def settings(directory: Path | str, **target: str) -> Settings:
    return settings_from_dict({"run": {"directory": str(directory)}, "target": {"model": "m", **target}})


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_says_that_the_same_command_goes_on(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", WAITS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, said = process.communicate()
    assert (process.returncode, said) == (code, "stopped; the same command goes on from here\n")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "runs/a cannot be written: No space left on device"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "No space left on device"),
        (OSError(errno.EROFS, "", "/elsewhere/x"), r"Read-only file system \(at /elsewhere/x\)"),
        (OSError(errno.EACCES, "", "runs/a/cache/x"), r"Permission denied \(at runs/a/cache/x\)"),
        (OSError(errno.ENOTDIR, "", "runs/a"), "Not a directory"),
    ],
)
def test_a_disk_that_cannot_be_written_is_the_users(error: Exception, expected: str) -> None:
    with pytest.raises(UserError, match=expected), for_the_user("runs/a"):
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EACCES, "", "/elsewhere/x"), OSError(errno.ECONNRESET, "x"), RuntimeError("x")]
)
def test_other_errors_stay_as_they_are(error: Exception) -> None:
    assert cannot_write(error, "runs/a") is None
    with pytest.raises(type(error)) as caught, for_the_user("runs/a"):
        raise error
    assert caught.value is error


def test_a_users_mistake_that_a_worker_meets_arrives_as_one(tmp_path: Path) -> None:
    wanted = settings_from_dict(
        {"run": {"directory": str(tmp_path)}, "target": {"model": "m"}, "cluster": {"num_cpus": 1}}
    )
    open_cache = partial(TargetCache.open, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match="nowhere") as expected:
        open_cache()
    done: list[object] = []
    do = partial(on_pool, workers=1, on_result=lambda unit, result: done.append(unit), item_name=str)
    with session(wanted, str(tmp_path)), pytest.raises(UserError) as caught:
        do(wanted, open_cache, [1])
    assert str(caught.value) == str(expected.value)
    assert done == []


def test_what_is_for_the_user_is_told_by_its_class() -> None:
    for error in (UserError("x"), MissingFile("x"), ContractMismatch("x"), NoCluster("x"), UnsafeName("x")):
        with pytest.raises(UserError, match=r"^x$"), for_the_user("runs/a"):
            raise error
    with pytest.raises(UserError, match="damaged or cut off"), for_the_user("runs/a"):
        raise SafetensorError("header too short")
    with pytest.raises(ValueError, match="invalid literal") as caught, for_the_user("runs/a"):
        int("x")
    assert not isinstance(caught.value, UserError)


def test_no_package_raises_what_no_class_tells_from_a_fault_of_ours() -> None:
    """pydantic wants ValueError of a validator, and tells the user itself."""
    root, found = Path(__file__).parents[2], []
    validators = {*(root / "pipelines/settings").rglob("*.py"), root / "pipelines/records.py"}
    for package in ("dspark", "storage", "cluster", "pipelines"):
        for path in (root / package).rglob("*.py"):
            if path not in validators:
                for part in ast.walk(ast.parse(path.read_text())):
                    call = part.exc if isinstance(part, ast.Raise) else None
                    if isinstance(call, ast.Call) and ast.unparse(call.func) in ("ValueError", "FileNotFoundError"):
                        found.append(f"{path.relative_to(root)}:{part.lineno}")
    assert found == [], "raise the package's own class (errors.py)"


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/foo"])
def test_a_run_directory_that_cannot_be(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run\.directory: .* cannot hold a run"), RunDirectory(tmp_path / place).lock():
        pass


def test_a_bucket_out_of_reach_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot open 's3://127\.0\.0\.1"):
        RunDirectory("s3://127.0.0.1:9/x?wrong=1")


@pytest.mark.parametrize("text", ["{}", '{"settings": {}}', '{"settings": {"run": {}}}'])
def test_a_run_json_without_its_settings(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(UserError, match=r"run\.json: uid: "):
        open_run(str(tmp_path))


def test_addresses_of_a_job_server() -> None:
    assert _address("127.0.0.1:8265") == "http://127.0.0.1:8265"
    assert _address("https://head:8265") == "https://head:8265"
    for wrong in ("foo", "http://foo", "ray://head:10001", "head:port", "head:99999", "http://:8265"):
        with pytest.raises(UserError, match="expected http://HOST:8265"):
            _address(wrong)


@pytest.mark.parametrize("left", [(), ("model.safetensors", "tokenizer.json")])
def test_a_model_folder_without_its_config(left: tuple[str, ...], toy_folder: Path, tmp_path: Path) -> None:
    for name in left:
        shutil.copy(toy_folder / name, tmp_path)
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_target(settings(tmp_path / "run", model=str(tmp_path)))


def test_the_root_folder_is_refused_and_not_taken_for_the_working_directory() -> None:
    with pytest.raises(UserError, match=r"run\.directory: '/' is no place for a run"):
        RunDirectory("/")
    assert RunDirectory("/runs/a/").location("run.json") == "/runs/a/run.json"
