"""Runs as Ray jobs: submit, watch, read, stop, through the Ray Jobs API; and a private head to try it on.

A head asks for its token (`RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`) where it was started with one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.errors import JobError
from cluster.ray_private import files_to_send
from cluster.session import (
    QUIET_ENVIRONMENT,
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
                return str(client.submit_job(entrypoint=command, submission_id=job, runtime_env=runtime))
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
