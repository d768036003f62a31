"""A cache on an emulator of Google Cloud Storage that answers one request in twenty badly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_builders import SAMPLES, build, make_plan
from object_stores import gcs_server

from storage import filesystems
from storage.filesystems import Folder
from storage.target_cache import TargetCache

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    with gcs_server() as port:
        yield port


def url_of(port: int, name: str) -> str:
    return f"gs://anonymous@bucket/{name}?scheme=http&endpoint_override=127.0.0.1%3A{port}&retry_limit_seconds=1"


def test_a_build_and_its_reading_go_through_faults(tmp_path: Path) -> None:
    # Without broken uploads: the emulator does not know how to go on with one.
    with gcs_server(rate=0.05, seed=5, faults=("500", "503", "late")) as port:
        url, plan = url_of(port, "faulty"), make_plan("int8")
        build(tmp_path / "local", plan)
        build(url, plan)
        local, remote = Folder(tmp_path / "local"), Folder(url)
        assert remote.files() == local.files()
        assert all(remote.read(name) == local.read(name) for name in local.files())
        cache = TargetCache.open(url, local_copy=tmp_path / "copy", local_copy_bytes=24_000)
        assert [row.sample_id for row in cache.rows([5, 13, 0, 2, 9])] == [SAMPLES[i][0] for i in (5, 13, 0, 2, 9)]
        assert cache.verify() == []


def test_a_store_that_never_answers_well_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "PAUSE", 0.0)
    monkeypatch.setattr(filesystems, "ATTEMPTS", 2)
    with (
        gcs_server(rate=1.0, faults=("500",)) as port,
        pytest.raises(OSError, match=r"gs://.*bucket/good/.*: no success in 2 attempts"),
    ):
        TargetCache.open(url_of(port, "good"))


def test_an_interrupted_writer_leaves_no_object(store: int) -> None:
    folder = Folder(url_of(store, "interrupted"))

    def broken() -> None:
        with folder.writer("half") as stream:
            stream.write(b"x" * 20_000_000)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken()
    assert folder.files() == {}
    with pytest.raises(FileNotFoundError, match="nothing"):
        folder.read("nothing")
