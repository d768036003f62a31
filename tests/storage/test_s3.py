"""A cache on an S3-compatible server that answers one request in twenty badly: right bytes, or an error with a name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cache_builders import build
from object_stores import (
    CREDENTIALS,
    FaultyProxy,
    check_build_and_reading,
    check_interrupted_writer,
    make_bucket,
    s3_server,
)

from storage.cache.target_cache import TargetCache
from storage.files import filesystems
from storage.files.filesystems import Folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    with s3_server() as port:
        make_bucket(port, "bucket")
        yield port


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


def use(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")


def test_a_build_and_its_reading_go_through_faults(store: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = FaultyProxy(store, rate=0.05, seed=11)
    use(monkeypatch, proxy.port)
    check_build_and_reading("s3://bucket/faulty", tmp_path)
    assert proxy.faults >= 5
    proxy.close()


def test_a_store_that_never_answers_well_is_named(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "PAUSE", 0.0)
    monkeypatch.setattr(filesystems, "ATTEMPTS", 2)
    use(monkeypatch, store)
    build("s3://bucket/good")
    proxy = FaultyProxy(store, rate=1.0, seed=3)
    use(monkeypatch, proxy.port)
    with pytest.raises(OSError, match=r"s3://bucket/good/.*: no success in 2 attempts"):
        TargetCache.open("s3://bucket/good")
    proxy.close()


def test_an_interrupted_writer_leaves_no_object(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, store)
    check_interrupted_writer(Folder("s3://bucket/interrupted"))


def test_the_endpoint_may_stand_in_the_url(store: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    folder = Folder(f"s3://bucket/by-url?endpoint_override=127.0.0.1:{store}&scheme=http&region=us-east-1")
    folder.write("a/b", b"here")
    assert folder.files() == {"a/b": 4}
    assert Folder(folder.location("a")).read("b") == b"here"
