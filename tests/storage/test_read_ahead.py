"""Decoding in other processes: the same rows in the same order, bounded, and whatever happens there is told here."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import read_ahead_work as work
import torch
from cache_builders import SAMPLES, build, make_plan

from storage.cache.read_ahead import ReadAhead, WorkerDied
from storage.cache.records import CacheCorrupt
from storage.cache.target_cache import TargetCache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> TargetCache:
    root = tmp_path_factory.mktemp("cache")
    build(root, make_plan("transform"))
    return TargetCache.open(root)


def nothing(item: object) -> int:
    return 1


def test_rows_ahead_are_the_rows(cache: TargetCache) -> None:
    order = [5, 0, 13, 1, 1, 7, 2]
    for here, ahead in zip(cache.rows(order), cache.rows(order, workers=2, max_bytes=100_000), strict=True):
        assert (here.sample_id, here.spans, here.extra) == (ahead.sample_id, ahead.spans, ahead.extra)
        for name in ("input_ids", "hidden_states", "teacher_positions", "last_hidden_state"):
            assert torch.equal(getattr(here, name), getattr(ahead, name))


def test_work_arranges_rows_in_the_worker(cache: TargetCache) -> None:
    groups = [(0, 3), (5,), (2, 1, 13)]
    with ReadAhead(cache, groups, work.join, cost=cache.decoded_bytes, workers=2) as ahead:
        for group, got in zip(groups, ahead, strict=True):
            wanted = work.join(cache, group)
            assert got["ids"] == wanted["ids"]
            assert torch.equal(got["hidden_states"], wanted["hidden_states"])
            assert got["lengths"].tolist() == wanted["lengths"].tolist()
            assert got["nothing"].shape == (0, 3)
            assert got["scalar"] == 7.0
            got["hidden_states"] += 1  # the memory is the reader's own


def test_rows_for_another_device_are_decoded_there(cache: TargetCache) -> None:
    for row in cache.rows([0, 4], workers=1, device="meta"):
        assert row.hidden_states.device.type == "meta"


def test_coded_rows_can_be_decoded_here(cache: TargetCache) -> None:
    for index, columns in enumerate(ReadAhead(cache, range(4), work.raw, cost=nothing)):
        assert torch.equal(cache.decode(columns).hidden_states, cache.row(index).hidden_states)


def test_no_more_is_made_than_the_bound_allows(cache: TargetCache, tmp_path: Path) -> None:
    items = [(str(tmp_path), number) for number in range(12)]
    with ReadAhead(cache, items, work.note, cost=lambda item: 10, workers=2, max_bytes=45) as ahead:
        for taken in range(12):
            assert next(ahead) == taken
            assert ahead._held <= 45
            started = {int(path.name) for path in tmp_path.iterdir()}
            assert len(started) <= taken + 1 + 4
        with pytest.raises(StopIteration):
            next(ahead)


def test_one_item_may_be_larger_than_the_bound(cache: TargetCache) -> None:
    assert len(list(cache.rows([3, 12, 3], workers=1, max_bytes=1))) == 3


def test_an_error_comes_at_its_turn_with_its_traceback(cache: TargetCache) -> None:
    ahead = ReadAhead(cache, range(6), work.fail_at, cost=nothing)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three") as caught:
        next(ahead)
    assert "fail_at" in caught.value.__notes__[0]
    with pytest.raises(StopIteration):
        next(ahead)


def test_damage_is_told_by_file_and_row(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / "shards/unit-000000.arrow"
    data = path.read_bytes()
    at = data.index(bytes(TargetCache.open(tmp_path).raw_row(2)["context"]))
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(CacheCorrupt, match=r"unit-000000\.arrow, row 2 \('sample-002'\)"):
        list(TargetCache.open(tmp_path).rows(range(3), workers=1))


def test_a_dead_worker_is_replaced_and_nothing_is_lost(cache: TargetCache, tmp_path: Path) -> None:
    items = [(str(tmp_path / "mark"), number) for number in range(9)]
    assert list(ReadAhead(cache, items, work.die_once, cost=nothing, workers=2)) == list(range(9))
    assert (tmp_path / "mark").exists()


def test_a_worker_that_always_dies_is_an_error(cache: TargetCache) -> None:
    with pytest.raises(WorkerDied, match="SIGKILL at item 0, 2 times"):
        list(ReadAhead(cache, [4, 5], work.die, cost=nothing))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_their_reader(cache: TargetCache, tmp_path: Path) -> None:
    program = (
        f"import sys, os, signal, time; sys.path[:] = {sys.path!r}\n"
        "import read_ahead_work as work\n"
        "from storage.cache.target_cache import ReadAhead, TargetCache\n"
        f"cache = TargetCache.open({cache.folder.url!r})\n"
        f"ahead = ReadAhead(cache, [({str(tmp_path)!r}, 0)], work.slow, cost=lambda item: 1)\n"
        "ahead._hand_out()\n"
        f"while not os.listdir({str(tmp_path)!r}): time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
    (mark,) = tmp_path.iterdir()
    for _ in range(200):
        if not Path(f"/proc/{mark.name}").exists():
            return
        time.sleep(0.05)
    os.kill(int(mark.name), 9)
    pytest.fail("the worker outlived its reader")


def test_bad_bounds_are_refused(cache: TargetCache) -> None:
    with pytest.raises(ValueError, match="workers = 0"):
        ReadAhead(cache, [1], work.raw, cost=nothing, workers=0)
    assert cache.decoded_bytes(0) == SAMPLES[0][1] * (2 * 4 * 32 + 16)
    assert cache.decoded_bytes([0, 2]) == cache.decoded_bytes(0) + cache.decoded_bytes(2)


def test_workers_end_quietly(cache: TargetCache, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        assert len(list(cache.rows(range(4), workers=2))) == 4
    assert capfd.readouterr().err == ""
