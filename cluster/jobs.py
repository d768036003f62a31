"""Runs as Ray jobs: submit, watch, read, stop, through the Ray Jobs API; and a private head to try it on.

A head asks for its token (`RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`) where it was started with one.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.errors import JobError
from cluster.ray_private import files_to_send, reload_environment
from cluster.session import (
    LOOPBACK,
    LOOPBACK_ENVIRONMENT,
    QUIET_ENVIRONMENT,
    environment,
    private_token,
    require_short_path,
)

HEAD_PATIENCE = 120.0  # seconds for a head to be ready once it answers
FINISHED = ("SUCCEEDED", "FAILED", "STOPPED")
# Patterns as of .gitignore. First what a checkout holds beside its sources, and what a job does not need; then where
# people keep keys and passwords.
NOT_SENT = (
    *(".git", ".venv", "/.engines", "/runs", "/models", "/wandb", "__pycache__", "*.egg-info", ".pytest_cache"),
    *(".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc", ".htpasswd"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.gpg", "*.asc"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", ".ssh", ".gnupg", ".aws", ".azure", ".gcloud", ".kube"),
    *("credentials", "credentials.json", "client_secret*.json", "service[-_]account*.json", "kubeconfig"),
    *("secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml", "token", "*.token", ".s3cfg", ".boto"),
)


def submit(
    command: str,
    *,
    address: str,
    working_dir: str | os.PathLike[str] | None = None,
    env_vars: Mapping[str, str] | None = None,
    job: str | None = None,
) -> str:
    """Start `command` on the cluster whose dashboard answers at `address` (http://host:8265); returns the job's id.

    Args:
        working_dir: folder sent along, in which the command runs; `files_sent` says what of it.
        env_vars: set for the command. The cluster keeps and shows their values: no secrets.
        job: an id of the caller's own; must be new.

    Raises:
        JobError: nothing answers at `address`, or the id is taken.
    """
    runtime: dict[str, Any] = {"env_vars": {**QUIET_ENVIRONMENT, **(env_vars or {})}}
    if working_dir is not None:
        runtime |= {"working_dir": str(working_dir), "excludes": list(NOT_SENT)}
    with _told(address, job):
        client = _client(address)
        logging.getLogger("ray").setLevel(logging.ERROR)  # it tells of every ignore file that it reads
        until = time.monotonic() + HEAD_PATIENCE
        while True:
            try:
                return client.submit_job(entrypoint=command, submission_id=job, runtime_env=runtime)
            except RuntimeError as error:
                # A head answers before the agent that starts jobs does; nothing was submitted.
                if "No available agent" not in str(error) or time.monotonic() > until:
                    raise
            time.sleep(1)


def files_sent(working_dir: str | os.PathLike[str]) -> dict[Path, int]:
    """The files below `working_dir`, with their bytes, that a job takes along.

    All but `NOT_SENT`, and what `.gitignore` and `.rayignore` files leave out.
    """
    return files_to_send(Path(working_dir), NOT_SENT)


def new_id() -> str:
    """An id for a job."""
    return f"dspark-{secrets.token_hex(6)}"


def status(job: str, *, address: str) -> str:
    """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED."""
    with _told(address, job):
        return str(_client(address).get_job_status(job).value)


def message(job: str, *, address: str) -> str:
    """What Ray says about the job's state, for a failed one the reason."""
    with _told(address, job):
        return _client(address).get_job_info(job).message or ""


def logs(job: str, *, address: str, follow: bool = False, poll_seconds: float = 1.0) -> Iterator[str]:
    """What the job has printed so far; with `follow`, what it goes on to print until it ends."""
    shown = 0
    while True:
        with _told(address, job):
            client = _client(address)
            ended = client.get_job_status(job).value in FINISHED
            text = client.get_job_logs(job)
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
        if ended or not follow:
            return
        time.sleep(poll_seconds)


def stop(job: str, *, address: str) -> bool:
    """Ask the job to stop (SIGTERM, and SIGKILL after Ray's grace period); False if it had ended already."""
    with _told(address, job):
        return bool(_client(address).stop_job(job))


def wait(job: str, *, address: str, timeout: float, poll_seconds: float = 0.5) -> str:
    """The job's last status, once it has ended.

    Raises:
        TimeoutError: it still runs after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while (state := status(job, address=address)) not in FINISHED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {job} is still {state} after {timeout:g} s")
        time.sleep(poll_seconds)
    return state


@dataclass(frozen=True, kw_only=True)
class Head:
    """A running head: where jobs are sent, where drivers connect, the variables with its token, and its process."""

    jobs_address: str
    address: str
    environment: dict[str, str]
    pid: int
    directory: Path


@contextlib.contextmanager
def start_head(*, num_cpus: int = 2, object_store_bytes: int = 200 * 1024**2, timeout: float = 120.0) -> Iterator[Head]:
    """A head of this process's own on loopback, with free ports, a fresh token and a folder that goes with it.

    The token's variables are set in this process for the body. It is `ray start --head --block` in a process group of
    its own, ended by its id, and jobs that still run end with it: `ray stop` would end every Ray on the machine.

    Raises:
        TimeoutError: it did not answer in `timeout` seconds; the message ends with what it printed.
    """
    require_short_path(f"{tempfile.gettempdir()}/dspark-head-12345678")
    directory = Path(tempfile.mkdtemp(prefix="dspark-head-"))
    (directory / "r").mkdir()  # Ray's own, which it makes writable for everybody
    gcs, dashboard, agent, client = _free_ports(4)
    variables = {**QUIET_ENVIRONMENT, **LOOPBACK_ENVIRONMENT, **private_token(directory)}
    interpreter = Path(sys.executable).parent  # `python` in a job is then this one, as in an activated environment
    variables["PATH"] = os.pathsep.join([str(interpreter), os.environ.get("PATH", os.defpath)])
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *(f"--node-ip-address={LOOPBACK}", f"--port={gcs}", f"--temp-dir={directory / 'r'}"),
        *("--include-dashboard=true", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
        *(f"--num-cpus={num_cpus}", f"--object-store-memory={object_store_bytes}"),
    ]
    output = directory / "head.log"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(reload_environment)
        stack.enter_context(environment(variables))
        reload_environment()
        with open(output, "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent
            )
        stack.callback(_end, process)
        jobs_address = f"http://{LOOPBACK}:{dashboard}"
        _await_head(process, jobs_address, output, timeout)
        yield Head(
            jobs_address=jobs_address,
            address=f"{LOOPBACK}:{gcs}",
            environment=variables,
            pid=process.pid,
            directory=directory,
        )


def _await_head(process: subprocess.Popen[bytes], address: str, output: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            _client(address).list_jobs()
            return
        except Exception as error:  # not up yet: the client raises whatever its HTTP layer raises
            if process.poll() is not None or time.monotonic() > deadline:
                said = output.read_text()[-2000:]
                raise TimeoutError(f"no Ray head came up at {address} ({error}); it said:\n{said}") from error
        time.sleep(0.3)


def _die_with_parent() -> None:
    """Have Linux end the head when this process is killed and cannot do it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the head, which Ray's processes do not outlive, and whatever is left below it.

    Jobs have process groups of their own, and what watches them ends with the head.
    """
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for left in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, from a range outside the one that the system hands out next."""
    ports: list[int] = []
    while len(ports) < count:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            ports.append(port)
    return ports


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


@contextlib.contextmanager
def _told(address: str, job: str | None) -> Iterator[None]:
    """Ray's errors in words for the person who gave the address or the id."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        raise JobError(
            f"the Ray head at {address} refused: it asks for its token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH "
            "gives none or another one; set it to the head's (with RAY_AUTH_MODE=token)"
        ) from error
    except ConnectionError as error:
        raise JobError(
            f"no Ray head answers at {address} ({error}); give the dashboard's address, such as http://host:8265, and "
            "its token in RAY_AUTH_TOKEN_PATH if it has one"
        ) from error
    except RuntimeError as error:
        text = str(error)
        if "does not exist" in text or "404" in text:
            raise JobError(f"the head at {address} knows no job {job!r}; the id is what submitting printed") from error
        raise JobError(f"the Ray head at {address} refused: {text}") from error
