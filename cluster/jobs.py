"""Ray jobs: send a command to a running cluster, ask after it, read its log, stop it.

The address is the cluster's job endpoint, `http://HOST:8265`, which `ray start --head` opens on loopback. Where the
cluster asks for a token, it comes from `RAY_AUTH_TOKEN` or the file in `RAY_AUTH_TOKEN_PATH`, as Ray itself reads it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.session import LOOPBACK, QUIET_ENVIRONMENT, private_token

POLL_SECONDS = 1.0
FINISHED = ("SUCCEEDED", "FAILED", "STOPPED")
# Neither is needed to run a job, and both may be large.
NOT_SENT = [".git", ".venv", ".engines", "runs", "models", "wandb", "**/__pycache__"]


class JobError(ValueError):
    """The cluster cannot be reached, or knows no such job."""


def submit(
    command: str,
    *,
    address: str,
    working_dir: str | os.PathLike[str] | None = None,
    env_vars: Mapping[str, str] | None = None,
) -> str:
    """Start `command` on the cluster, in a copy of `working_dir`; returns the job's id."""
    environment: dict[str, Any] = {"env_vars": dict(env_vars or {})}
    if working_dir is not None:
        environment |= {"working_dir": os.fspath(working_dir), "excludes": NOT_SENT}
    with _errors(address):
        return str(_client(address).submit_job(entrypoint=command, runtime_env=environment))


def status(job: str, *, address: str) -> str:
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    with _errors(address, job):
        return str(_client(address).get_job_status(job).value)


def logs(job: str, *, address: str, follow: bool = False) -> Iterator[str]:
    """Pieces of the job's output; with `follow` until it has ended."""
    with _errors(address, job):
        client, shown = _client(address), 0
        while True:
            ended = client.get_job_status(job).value in FINISHED
            text = client.get_job_logs(job)
            if len(text) > shown:
                yield text[shown:]
                shown = len(text)
            if ended or not follow:
                return
            time.sleep(POLL_SECONDS)


def stop(job: str, *, address: str) -> bool:
    """Ask the job to end (SIGTERM, then SIGKILL); False when it had ended already."""
    with _errors(address, job):
        return bool(_client(address).stop_job(job))


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


@contextlib.contextmanager
def _errors(address: str, job: str | None = None) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if job is not None and "does not exist" in str(error):
            raise JobError(
                f"the cluster at {address} knows no job {job!r}; the id is what `dspark submit` printed"
            ) from error
        raise JobError(
            f"the Ray cluster at {address} did not take the request ({reason}); the address is the job endpoint of "
            "`ray start --head` (http://127.0.0.1:8265), and RAY_AUTH_TOKEN_PATH names its token file where it has one"
        ) from error


@dataclass(frozen=True, kw_only=True)
class Head:
    """A Ray head of our own. `environment` is what a client needs to be let in."""

    address: str
    environment: dict[str, str]
    pid: int


@contextlib.contextmanager
def local_head(*, num_cpus: int = 2) -> Iterator[Head]:
    """A private Ray head on loopback, with its own ports, folder and token; ended by its pid, never by `ray stop`."""
    with tempfile.TemporaryDirectory(prefix="dspark-head-") as folder:
        ports = _free_ports(2)
        environment = {**QUIET_ENVIRONMENT, **private_token(Path(folder))}
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={LOOPBACK}",
            f"--port={ports[0]}",
            f"--dashboard-host={LOOPBACK}",
            f"--dashboard-port={ports[1]}",
            f"--num-cpus={num_cpus}",
            f"--object-store-memory={200 * 1024**2}",
            f"--temp-dir={folder}/ray",
        ]
        with open(Path(folder) / "head.log", "wb") as log:
            process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        address = f"http://{LOOPBACK}:{ports[1]}"
        try:
            _wait_for(address, environment, process, Path(folder) / "head.log")
            yield Head(address=address, environment=environment, pid=process.pid)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_for(address: str, environment: Mapping[str, str], process: Any, log: Path, seconds: float = 120) -> None:
    import urllib.error
    import urllib.request

    token = Path(environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = urllib.request.Request(f"{address}/api/version", headers={"Authorization": f"Bearer {token}"})
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise JobError(f"the Ray head did not come up within {seconds:g} s:\n{log.read_text(errors='replace')[-2000:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
