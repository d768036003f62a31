"""One commit, patience, and nothing sent that is not as it was published."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi

from dspark.manifest import CheckpointError, write_manifest
from pipelines.publishing.hub import HTTPError, UploadFailed, upload


class Refusal(OSError):
    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


class FakeHub(HfApi):
    """Keeps what is uploaded; fails as `script` says, one entry a call (None: works)."""

    def __init__(self, script: list[Exception | None] | None = None) -> None:
        self.files: dict[str, bytes] = {}
        self.script = script or []
        self.calls: list[str] = []

    def _maybe_fail(self, what: str) -> None:
        self.calls.append(what)
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error

    def create_repo(self, *, repo_id: str, private: bool, exist_ok: bool) -> None:  # type: ignore[override]
        assert (repo_id, private, exist_ok) == ("someone/drafter", True, True)
        self._maybe_fail("create")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:  # type: ignore[override]
        self._maybe_fail("upload")
        self.files |= {path.name: path.read_bytes() for path in folder_path.iterdir()}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("README.md", "a card"), ("config.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(text)
    write_manifest(tmp_path)
    return tmp_path


def test_the_whole_folder_goes_up_in_one_commit(folder: Path) -> None:
    hub = FakeHub()
    assert upload(folder, "someone/drafter", api=hub) == "https://hub/someone/drafter/commit/1"
    assert hub.calls == ["create", "upload"]
    assert sorted(hub.files) == ["README.md", "config.json", "manifest.json", "model.safetensors"]


def test_backs_off_and_heeds_retry_after(folder: Path) -> None:
    waits: list[float] = []
    broken = [Refusal(503), Refusal(429, {"Retry-After": "17"}), HTTPError("cut"), ConnectionResetError("cut")]
    hub = FakeHub([None, *broken])
    upload(folder, "someone/drafter", api=hub, sleep=waits.append)
    assert waits == [2, 17, 8, 16]
    assert len(hub.files) == 4


def test_gives_up_in_the_end(folder: Path) -> None:
    hub = FakeHub([Refusal(502)] * 8)
    with pytest.raises(UploadFailed, match="8 times; run the same command again"):
        upload(folder, "someone/drafter", api=hub, sleep=lambda seconds: None)


def test_a_refusal_is_not_repeated(folder: Path) -> None:
    hub = FakeHub([Refusal(401)])
    with pytest.raises(UploadFailed, match=r"HF_TOKEN and `publish\.repository`"):
        upload(folder, "someone/drafter", api=hub, sleep=lambda seconds: pytest.fail("must not wait"))
    assert hub.calls == ["create"]


def test_a_folder_that_was_changed_is_not_uploaded(folder: Path) -> None:
    (folder / "config.json").write_text("changed")
    with pytest.raises(CheckpointError, match=r"config\.json has been changed"):
        upload(folder, "someone/drafter", api=FakeHub())
