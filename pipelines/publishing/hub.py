"""Upload a published folder to the Hugging Face Hub: only when asked for, in one commit, patiently.

`HfApi.upload_folder` sends the files whose content the hub does not hold yet, and makes no commit where it holds all of
them: doing it again does nothing, and an upload that was cut off begins with what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from dspark.manifest import require_intact
from pipelines.errors import UserError

HTTPError: Any = HfHubHTTPError.__mro__[1]  # the HTTP client's, under whatever name the hub client has it
RETRIED = (408, 429, 500, 502, 503, 504)
ATTEMPTS, FIRST_WAIT, LONGEST_WAIT = 8, 2.0, 300.0  # waits in seconds, doubled each time


class UploadFailed(UserError):
    """The hub refused, or could not be reached often enough."""


def upload(
    folder: str | Path,
    repository: str,
    *,
    private: bool = True,
    api: Any = None,
    sleep: Callable[[float], None] = time.sleep,
    say: Callable[[str], None] = lambda message: None,
) -> str:
    """Upload the folder's files to the main branch of a repository, made if need be; returns the commit's address.

    The token is huggingface_hub's own business (`HF_TOKEN` or `hf auth login`). Raises CheckpointError for a folder
    that is not as it was published, UploadFailed when the hub says no.
    """
    place = Path(folder)
    require_intact(place)
    hub = api or HfApi()

    def send() -> Any:
        hub.create_repo(repo_id=repository, private=private, exist_ok=True)
        return hub.upload_folder(repo_id=repository, folder_path=place, commit_message=f"Publish {place.name}")

    wait = FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return str(send().commit_url)
        except (HTTPError, OSError) as error:
            response = getattr(error, "response", None)
            status = None if response is None else response.status_code  # None: the connection broke
            if status is not None and status not in RETRIED:
                raise UploadFailed(f"{repository}: {error} (check HF_TOKEN and `publish.repository`)") from error
            if attempt == ATTEMPTS:
                raise UploadFailed(f"{repository}: {error}, {attempt} times; run the same command again") from error
            asked = "" if response is None else response.headers.get("Retry-After", "")
            pause = min(max(wait, float(asked) if asked.isdigit() else 0.0), LONGEST_WAIT)
            say(f"{repository}: {status or 'no connection'}, trying again in {pause:.0f} s")
            sleep(pause)
            wait *= 2
    raise AssertionError("ATTEMPTS is at least 1")
