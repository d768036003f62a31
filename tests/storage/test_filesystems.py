from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import psutil
import pytest
from cache_builders import build, fit, folder_bytes, make_plan, rows_of
from killed_writers import read_through_copy

from storage.cache import target_cache
from storage.cache.target_cache import CacheCorrupt, TargetCache, create_or_resume, finish, write_shard
from storage.files.filesystems import Folder, StorageFull, temporary_name
from storage.files.local_copy import LocalCopy


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("a/b.bin", b"old")

    def broken() -> None:
        with folder.writer("a/b.bin") as stream:
            stream.write(b"half of the new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken()
    assert folder.files() == {"a/b.bin": 3}
    assert folder.read("a/b.bin") == b"old"
    folder.write("a/b.bin", b"new one")
    assert folder.read("a/b.bin") == b"new one"
    with pytest.raises(FileNotFoundError):
        folder.read("c")


def test_temporaries_of_dead_writers_are_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    mine = tmp_path / temporary_name("x")
    dead = tmp_path / temporary_name("y").replace(f".{os.getpid()}.", ".4194999.")
    elsewhere = tmp_path / ".z.another-host.1.abcdef01.writing"
    for path in (mine, dead, elsewhere):
        path.write_bytes(b"x")
    assert folder.remove_dead_temporaries() == [dead.name]
    assert sorted(folder.remove_dead_temporaries(everything=True)) == sorted([mine.name, elsewhere.name])


def test_a_folder_pickles(tmp_path: Path) -> None:
    Folder(tmp_path).write("x", b"1")
    assert pickle.loads(pickle.dumps(Folder(tmp_path))).read("x") == b"1"


def test_a_full_disk_is_a_clear_error_and_the_build_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan()
    build(tmp_path / "calm", plan)
    root = tmp_path / "full"
    real, calls, at = os.fsync, 0, 0

    def full(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    messages, leftovers = [], []
    for attempt in range(1, 40):
        calls, at = 0, attempt
        try:
            done = create_or_resume(root, plan, lambda: fit(plan))
            for shard in sorted(set(range(len(plan.shards))) - done):
                write_shard(root, shard, rows_of(plan, shard))
            finish(root)
            break
        except StorageFull as error:
            messages.append(str(error))
            leftovers += [name for name in Folder(root).files() if name.endswith(".writing")]
    assert len(messages) > 5
    assert all("no space left" in message for message in messages)
    assert leftovers == []
    assert folder_bytes(root) == folder_bytes(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode != 0,
    reason="mounting a small disk takes a mount namespace of one's own",
)
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    here, output = Path(__file__).parent, tmp_path / "seen.json"
    program = Path(__file__).parents[2] / "benchmarks" / "evidence" / "cache" / "full_disk.py"
    command = [sys.executable, str(program), "--points", "5", "--output", str(output)]
    path = os.pathsep.join([str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, capture_output=True)
    seen = json.loads(output.read_text())
    assert seen["points_at_which_the_disk_was_full"] >= 4
    assert seen["errors"] == {"no space left while writing": seen["points_at_which_the_disk_was_full"]}
    assert seen["finished_with_the_undisturbed_bytes"]


def test_too_little_free_space_is_seen_before_a_unit_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    create_or_resume(tmp_path, plan)
    monkeypatch.setattr(Folder, "free_bytes", lambda self: 1000)
    with pytest.raises(StorageFull, match=r"shard 0 needs about .* bytes more, 1,000 are free"):
        write_shard(tmp_path, 0, rows_of(plan, 0))


def test_a_local_copy_is_bounded_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "remote"
    build(root)
    limit = 90_000
    cache = TargetCache.open(root, local_copy=tmp_path / "copy", local_copy_bytes=limit, max_open=1)
    for index in [0, 13, 3, 7, 2, 11, 0, 5]:
        assert cache.row(index).sample_id == f"sample-{index:03d}"
        assert sum(Folder(tmp_path / "copy").files("shards").values()) <= limit
    with pytest.raises(StorageFull, match="raise the limit"):
        TargetCache.open(root, local_copy=tmp_path / "small", local_copy_bytes=100).row(0)
    shard = root / "shards/unit-000000.arrow"
    data = shard.read_bytes()
    shard.write_bytes(data[:-9] + b"x" + data[-8:])
    record = cache._shards[0]
    with pytest.raises(CacheCorrupt, match=r"unit-000000\.arrow: its SHA-256 is not the committed one, 4 times"):
        LocalCopy(Folder(root), tmp_path / "fresh", pause=0.0).fetch(record)
    assert Folder(tmp_path / "fresh").files("shards") == {}


def test_an_unknown_url_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot open 'ftp://x/y'.*expected a local path, s3"):
        Folder("ftp://x/y")


def test_secrets_in_a_url_are_refused_and_not_shown() -> None:
    for url in ("s3://key:secret@bucket/x", "s3://key:se/cret@bucket/x?scheme=http", "ftp://key:secret@host/x"):
        with pytest.raises(ValueError, match=r"'\w+://\*\*\*@\w+/x") as refused:
            Folder(url)
        assert "cret" not in str(refused.value)
    query = "?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    folder = Folder(f"s3://bucket/caches{query}")
    location = f"s3://bucket/caches/x{query}"
    assert (folder.location("x"), folder.describe("x")) == (location, location)
    assert Folder(location).full("y") == "bucket/caches/x/y"
    assert Folder("gs://anonymous@bucket/caches").full("x") == "bucket/caches/x"


def stat_of(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:  # it got its name since the folder was listed
        return None


def test_processes_share_a_local_copy(tmp_path: Path, forkserver: ForkServerContext) -> None:
    """Four readers, room for two shards: each reads every row right, and the folder never outgrows its limit."""
    build(tmp_path / "remote")
    copy, limit = tmp_path / "copy", 42_000
    readers = [
        forkserver.Process(target=read_through_copy, args=(str(tmp_path / "remote"), str(copy), limit, seed))
        for seed in range(4)
    ]
    for reader in readers:
        reader.start()
    largest, watched = 0, LocalCopy(Folder(tmp_path / "remote"), copy, max_bytes=limit)
    while any(reader.is_alive() for reader in readers):
        with watched._lock("room"):  # nothing is removed or reserved meanwhile; what is renamed keeps its inode
            sizes = {stat.st_ino: stat.st_size for stat in map(stat_of, (copy / "shards").iterdir()) if stat}
        largest = max(largest, sum(sizes.values()))
        time.sleep(0.01)
    assert [reader.exitcode for reader in readers] == [0] * 4
    assert 0 < largest <= limit


def test_a_reader_s_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of mapped shards are given back: a thousand reads of 30 MB hold no more than the bound."""
    process = psutil.Process()
    samples = [(f"sample-{number:03d}", 4000) for number in range(32)]
    build(tmp_path, make_plan(samples=samples, tokens_per_shard=8_000))
    monkeypatch.setattr(target_cache, "MAPPED_BYTES", 4 << 20)
    cache = TargetCache.open(tmp_path, check=False)
    cache.raw_row(0)
    before = process.memory_info().shared
    most = 0
    for index in range(1000):
        cache.raw_row(index * 7 % len(cache))
        most = max(most, process.memory_info().shared - before)
    assert sum(record["bytes"] for record in cache._shards.values()) > 28_000_000
    assert most < 8 << 20
