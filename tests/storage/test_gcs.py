"""A cache on an emulator of Google Cloud Storage that answers one request in twenty badly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from object_stores import check_build_and_reading, check_interrupted_writer, gcs_server

from storage.cache.target_cache import TargetCache
from storage.files import filesystems
from storage.files.filesystems import Folder

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
        check_build_and_reading(url_of(port, "faulty"), tmp_path)


def test_a_store_that_never_answers_well_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "PAUSE", 0.0)
    monkeypatch.setattr(filesystems, "ATTEMPTS", 2)
    with (
        gcs_server(rate=1.0, faults=("500",)) as port,
        pytest.raises(OSError, match=r"gs://.*bucket/good/.*: no success in 2 attempts"),
    ):
        TargetCache.open(url_of(port, "good"))


def test_an_interrupted_writer_leaves_no_object(store: int) -> None:
    check_interrupted_writer(Folder(url_of(store, "interrupted")))
