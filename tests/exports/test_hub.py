import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.manifest import CheckpointError, write_manifest
from pipelines.exports.hub import HubSettings, UploadFailed, upload


class Refusal(OSError):
    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


class FakeHub:
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

    def create_repo(self, **options: Any) -> None:
        assert options["exist_ok"]
        assert options["private"] is True
        self._maybe_fail("create")

    def list_repo_tree(self, **options: Any) -> list[Any]:
        self._maybe_fail("list")
        entries = []
        for name, data in self.files.items():
            large = {"sha256": hashlib.sha256(data).hexdigest()} if name.endswith("safetensors") else None
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entries.append(SimpleNamespace(path=name, lfs=large, blob_id="pointer" if large else blob))
        return entries

    def upload_file(self, *, path_or_fileobj: str, path_in_repo: str, **options: Any) -> None:
        self._maybe_fail(path_in_repo)
        self.files[path_in_repo] = Path(path_or_fileobj).read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("README.md", "a card"), ("config.json", "{}"), ("model.safetensors", "weights")):
        (tmp_path / name).write_text(text)
    write_manifest(tmp_path, engines=[])
    return tmp_path


SETTINGS = HubSettings(repo_id="someone/drafter", first_wait=2, longest_wait=30, attempts=4)


def test_nothing_is_uploaded_unless_asked_for(folder: Path) -> None:
    hub = FakeHub()
    assert upload(folder, HubSettings(), api=hub) == []
    assert hub.calls == []


def test_uploads_the_manifest_last_and_only_once(folder: Path) -> None:
    hub = FakeHub()
    assert upload(folder, SETTINGS, api=hub) == ["README.md", "config.json", "model.safetensors", "manifest.json"]
    assert upload(folder, SETTINGS, api=hub) == []
    assert hub.files["model.safetensors"] == b"weights"


def test_backs_off_and_heeds_retry_after(folder: Path) -> None:
    waits: list[float] = []
    hub = FakeHub([None, None, Refusal(503), Refusal(429, {"Retry-After": "17"}), ConnectionResetError("cut"), None])
    sent = upload(folder, SETTINGS, api=hub, sleep=waits.append)
    assert len(sent) == 4
    assert waits == [2, 17, 8]


def test_goes_on_where_it_was_cut_off(folder: Path) -> None:
    hub = FakeHub([None, None, None, *[Refusal(502)] * 4])
    with pytest.raises(UploadFailed, match="run it again"):
        upload(folder, SETTINGS, api=hub, sleep=lambda seconds: None)
    assert "manifest.json" not in hub.files
    assert upload(folder, SETTINGS, api=hub) == ["config.json", "model.safetensors", "manifest.json"]


def test_a_refusal_is_not_repeated(folder: Path) -> None:
    hub = FakeHub([Refusal(401)])
    with pytest.raises(UploadFailed, match="HF_TOKEN"):
        upload(folder, SETTINGS, api=hub, sleep=lambda seconds: pytest.fail("must not wait"))
    assert hub.calls == ["create"]


def test_an_incomplete_folder_is_not_uploaded(folder: Path) -> None:
    (folder / "config.json").write_text("changed")
    with pytest.raises(CheckpointError, match=r"config\.json has been changed"):
        upload(folder, SETTINGS, api=FakeHub())
