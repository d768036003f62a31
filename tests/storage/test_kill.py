"""SIGKILL anywhere in a build: the cache ends as the undisturbed one, byte for byte; readers see whole shards."""

from __future__ import annotations

import random
import signal
from multiprocessing.context import ForkServerContext as ForkServer
from pathlib import Path

import pytest
from cache_builders import SAMPLES, build, folder_bytes, make_plan, make_row
from killed_writers import build_until_killed

from storage.cache.commits import MANIFEST
from storage.cache.target_cache import TargetCache


def check_partial(root: Path) -> None:
    """Every visible row is right."""
    if not (root / MANIFEST).exists():
        return
    cache = TargetCache.open(root, partial=True)
    lengths = dict(SAMPLES)
    for row in cache:
        assert len(row.input_ids) == lengths[row.sample_id]
        assert row.input_ids.tolist() == make_row(row.sample_id, lengths[row.sample_id]).input_ids.tolist()
    assert cache.verify() == []


def kill_and_finish(context: ForkServer, root: Path, codec: str, events: list[int]) -> int:
    """Start builds that die at the events given, then one that does not; returns the number of kills."""
    plan, kills = make_plan(codec), 0
    for event in [*events, -1]:
        process = context.Process(target=build_until_killed, args=(str(root), plan, event))
        process.start()
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
        kills += process.exitcode == -signal.SIGKILL
        check_partial(root)
    assert process.exitcode == 0
    return kills


def test_killed_builds_end_in_the_same_bytes(tmp_path: Path, forkserver: ForkServer) -> None:
    build(tmp_path / "calm", make_plan("transform"))
    events = [random.Random(7).randrange(3, 14) for _ in range(10)]
    assert kill_and_finish(forkserver, tmp_path / "killed", "transform", events) == 10
    assert folder_bytes(tmp_path / "killed") == folder_bytes(tmp_path / "calm")


@pytest.mark.slow
def test_every_step_of_a_build_survives_a_kill(tmp_path: Path, forkserver: ForkServer) -> None:
    build(tmp_path / "calm")
    calm = folder_bytes(tmp_path / "calm")
    event, kills = 0, 1
    while kills:
        root = tmp_path / f"killed-{event}"
        kills = kill_and_finish(forkserver, root, "bf16", [event])
        assert folder_bytes(root) == calm, f"killed at event {event}"
        event += 1 if event < 24 else 5  # the first steps all, then every fifth
    assert event > 60
