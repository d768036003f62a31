"""Upload a published folder to the Hugging Face Hub: only when asked for, resumable, patient.

Every file is one commit, the manifest is the last. Files that the hub already holds with the same hash are left alone,
so an upload that was cut off goes on where it stopped, and doing it again does nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.manifest import MANIFEST, require_intact
from pipelines.errors import UserError

RETRIED = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    """`repo_id` None (the default) uploads nothing. Waits double from `first_wait` up to `longest_wait` seconds."""

    repo_id: str | None = None
    private: bool = True
    revision: str | None = None
    attempts: int = 8
    first_wait: float = 2.0
    longest_wait: float = 300.0


class UploadFailed(UserError):
    """The hub refused, or could not be reached often enough; what is already there stays, doing it again goes on."""


def upload(
    folder: str | Path,
    settings: HubSettings,
    *,
    api: Any = None,
    sleep: Callable[[float], None] = time.sleep,
    report: Callable[[str], None] = lambda message: None,
) -> list[str]:
    """Upload what the hub does not hold yet; returns the names of the files that were sent.

    The token is huggingface_hub's own business (`HF_TOKEN` or `hf auth login`). Raises CheckpointError for a folder
    that is not as it was published, UploadFailed when the hub says no.
    """
    if settings.repo_id is None:
        return []
    place = Path(folder)
    require_intact(place)
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    retry = _Retry(settings, sleep, report)
    repo: dict[str, Any] = {"repo_id": settings.repo_id, "repo_type": "model"}
    retry(lambda: api.create_repo(**repo, private=settings.private, exist_ok=True), "creating the repository")
    if settings.revision is not None:
        branch = settings.revision
        retry(lambda: api.create_branch(**repo, branch=branch, exist_ok=True), f"creating the branch {branch}")
    held = retry(
        lambda: {entry.path: entry for entry in api.list_repo_tree(**repo, recursive=True, revision=settings.revision)},
        "listing the repository",
    )
    files = json.loads((place / MANIFEST).read_text())["files"]
    sent = []
    for name in [*files, MANIFEST]:
        data = place / name
        if name in held and _same(held[name], data):
            continue
        report(f"{name}: {data.stat().st_size:,} bytes")

        def send(name: str = name, data: Path = data) -> None:
            api.upload_file(
                path_or_fileobj=str(data),
                path_in_repo=name,
                revision=settings.revision,
                commit_message=f"Publish {name}",
                **repo,
            )

        retry(send, f"uploading {name}")
        sent.append(name)
    return sent


def _same(entry: Any, path: Path) -> bool:
    """Whether the hub's entry has this file's content: by SHA-256 for large files, by git's blob hash for others."""
    large = getattr(entry, "lfs", None)
    if large:
        stated = large["sha256"] if isinstance(large, dict) else large.sha256
        with open(path, "rb") as stream:
            return bool(hashlib.file_digest(stream, "sha256").hexdigest() == stated)
    if path.stat().st_size > 100_000_000:
        return False
    data = path.read_bytes()
    return bool(hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == getattr(entry, "blob_id", None))


class _Retry:
    def __init__(self, settings: HubSettings, sleep: Callable[[float], None], report: Callable[[str], None]) -> None:
        self.settings, self.sleep, self.report = settings, sleep, report

    def __call__(self, action: Callable[[], Any], what: str) -> Any:
        wait = self.settings.first_wait
        for attempt in range(1, self.settings.attempts + 1):
            try:
                return action()
            except Exception as error:
                status = getattr(getattr(error, "response", None), "status_code", None)
                # No status: the connection broke. Any other status is an answer, and asking again won't change it.
                passing = (
                    status in RETRIED if status is not None else isinstance(error, OSError) or _is_transport(error)
                )
                if not passing:
                    raise UploadFailed(f"{what}: {error} (check HF_TOKEN and `publish.repository`)") from error
                if attempt == self.settings.attempts:
                    raise UploadFailed(
                        f"{what} failed {attempt} times, last with: {error}. What is uploaded stays; run it again"
                    ) from error
                pause = min(max(wait, _asked_for(error)), self.settings.longest_wait)
                self.report(f"{what}: {status or 'no connection'}, trying again in {pause:.0f} s")
                self.sleep(pause)
                wait *= 2
        raise AssertionError("attempts is at least 1")


def _is_transport(error: Exception) -> bool:
    """httpx reports a broken connection by an exception of its own family, under whatever name it is installed."""
    return any(kind.__name__ in ("TransportError", "TimeoutException") for kind in type(error).__mro__)


def _asked_for(error: Exception) -> float:
    """Seconds of a Retry-After header; 0 without one or with a date."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return float(headers.get("Retry-After") or headers.get("retry-after") or 0)
    except ValueError:
        return 0.0
