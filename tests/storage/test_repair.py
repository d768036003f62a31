"""Damaged shards leave a cache, and building it again gives the undisturbed bytes."""

import shutil
from pathlib import Path

import pytest
from cache_builders import build, make_plan

from storage.cache.commits import COMPLETE, commit_name, shard_name
from storage.cache.records import CacheCorrupt
from storage.cache.repair import discard_damaged
from storage.cache.verify import verify


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("cache")
    build(root, make_plan("int8"))
    return root


@pytest.fixture
def cache(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "cache")
    return tmp_path / "cache"


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_damaged_units_are_built_again_and_no_other(sound: Path, cache: Path) -> None:
    flipped = bytearray((cache / shard_name(1)).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    (cache / shard_name(1)).write_bytes(flipped)
    (cache / commit_name(0)).unlink()
    (cache / "state.json").write_text("{}")
    kept = (cache / shard_name(2)).stat().st_mtime_ns
    assert {shard_name(1), commit_name(0), "state.json"} == {problem.file for problem in discard_damaged(cache)}
    assert [name for name in (COMPLETE, shard_name(0), commit_name(1)) if (cache / name).exists()] == []
    build(cache, make_plan("int8"))
    assert (cache / shard_name(2)).stat().st_mtime_ns == kept
    assert verify(cache) == []
    assert contents(cache) == contents(sound)


def test_a_sound_cache_is_left_alone(sound: Path) -> None:
    assert discard_damaged(sound) == []
    assert verify(sound) == []


def test_a_damaged_sample_list_takes_nothing_away(cache: Path) -> None:
    (cache / "samples.arrow").write_bytes(b"not this")
    before = contents(cache)
    with pytest.raises(CacheCorrupt, match="whole cache is to be built anew"):
        discard_damaged(cache)
    assert contents(cache) == before
