from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from cache_builders import SAMPLES, build, make_plan

from storage.cache.records import CacheCorrupt, seal, unseal
from storage.cache.target_cache import TargetCache
from storage.cache.verify import examine_shard, verify


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    build(root, make_plan("transform"))
    assert verify(root, workers=2) == []
    return root


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "cache")
    return tmp_path / "cache"


def quick_verify(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`verify`, with suspicious shards examined in this process (a fresh one costs seconds)."""
    from storage.cache import verify as module

    def examine(jobs: list, workers: int) -> list:
        return [problem for job in jobs if not module._is_whole(job) for problem in examine_shard(job)]

    monkeypatch.setattr(module, "_check_shards", examine)
    return [str(problem) for problem in module.verify(root)]


def test_one_flipped_byte_anywhere_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(1)
    files = sorted(path for path in cache.rglob("*") if path.is_file())
    weights = [path.stat().st_size for path in files]
    for _ in range(200):
        path = generator.choices(files, weights)[0] if generator.random() < 0.5 else generator.choice(files)
        data = path.read_bytes()
        place = generator.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << generator.randrange(8))]) + data[place + 1 :])
        problems = quick_verify(cache, monkeypatch)
        assert problems, f"{path.name} byte {place} went unnoticed"
        assert any(path.name in problem for problem in problems), (path.name, problems)
        path.write_bytes(data)
    assert quick_verify(cache, monkeypatch) == []


def test_a_flipped_state_names_its_row_and_is_refused_on_reading(cache: Path) -> None:
    reader = TargetCache.open(cache)
    for index in (3, 9):
        columns = reader.raw_row(index)
        shard, place = reader._opened.samples.locate(index)
        path = cache / f"shards/unit-{shard:06d}.arrow"
        data = path.read_bytes()
        at = data.index(bytes(columns["context"]))
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        (problem,) = verify(cache)  # examined in a process of its own
        assert (problem.row, problem.sample_id, problem.what) == (place, SAMPLES[index][0], "checksum differs")
        with pytest.raises(CacheCorrupt, match=rf"{path.name}, row {place} \('{SAMPLES[index][0]}'\)"):
            TargetCache.open(cache).row(index)
        path.write_bytes(data)


def test_truncation_at_every_batch_border_is_found(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = TargetCache.open(cache)._shards[1]
    path = cache / record["shard"]
    data = path.read_bytes()
    borders = {0, len(data)} | {b["offset"] for b in record["batches"]}
    borders |= {b["offset"] + b["bytes"] for b in record["batches"]}
    for border in sorted(borders):
        for size in (border - 1, border, border + 1):
            if not 0 <= size < len(data):
                continue
            path.write_bytes(data[:size])
            problems = quick_verify(cache, monkeypatch)
            assert any(path.name in p and f"{size} bytes" in p for p in problems), (size, problems)
            with pytest.raises(CacheCorrupt, match=path.name):
                list(TargetCache.open(cache))
    path.write_bytes(data + b"\0")
    assert any(path.name in p for p in quick_verify(cache, monkeypatch))


def test_missing_swapped_and_duplicated_shards_are_found(cache: Path) -> None:
    first, second = cache / "shards/unit-000000.arrow", cache / "shards/unit-000001.arrow"
    a, b = first.read_bytes(), second.read_bytes()
    first.unlink()
    assert [str(p) for p in verify(cache)] == ["shards/unit-000000.arrow: missing (shard 0, 3 rows)"]
    with pytest.raises(CacheCorrupt, match=r"unit-000000\.arrow is missing"):
        TargetCache.open(cache).row(0)
    first.write_bytes(b)
    second.write_bytes(a)
    assert [p.what for p in verify(cache)] == [
        "holds the bytes of shard 1: swapped or duplicated",
        "holds the bytes of shard 0: swapped or duplicated",
    ]
    with pytest.raises(CacheCorrupt):
        list(TargetCache.open(cache))
    first.write_bytes(a)
    second.write_bytes(b)
    (cache / "shards/unit-000099.arrow").write_bytes(a)
    assert [str(p) for p in verify(cache)] == ["shards/unit-000099.arrow: not part of the cache"]


def test_an_edited_manifest_is_found_even_when_sealed_again(cache: Path) -> None:
    path = cache / "manifest.json"
    manifest = unseal(path.read_bytes(), "manifest")
    manifest["fields"]["contract"]["target_layer_ids"] = [0, 1, 4]
    path.write_bytes(seal(manifest))
    assert any(p.file == "manifest.json" for p in verify(cache))
    with pytest.raises(CacheCorrupt, match=r"manifest\.json"):
        TargetCache.open(cache)
    path.write_bytes(path.read_bytes().replace(b"[\n    0,", b"[\n    7,"))
    assert any(p.file == "manifest.json" for p in verify(cache))


def test_a_commit_record_edited_and_sealed_again_is_found(cache: Path) -> None:
    path = cache / "commits/unit-000000.json"
    record = unseal(path.read_bytes(), "record")
    record["rows"] -= 1
    path.write_bytes(seal(record))
    assert [p.file for p in verify(cache)] == ["commits/unit-000000.json"]


def test_temporary_files_are_reported(cache: Path) -> None:
    (cache / "shards/.unit-000000.arrow.host.1.abc.writing").write_bytes(b"half")
    assert [p.what for p in verify(cache)] == ["a temporary file left behind"]
