"""Batches come in the plan's order, the same from a thread and from worker processes, within the bound of bytes."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toy_training import ROWS, UNSUPERVISED, Toy

from pipelines.training.loader import Loader, MicroBatchReader, PlannedMicroBatch, Rows, StepPlan, _ThreadAhead
from pipelines.training.task import step_plan
from storage.cache.target_cache import TargetCache

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def cache(toy: Toy) -> TargetCache:
    return TargetCache.open(toy.cache)


@pytest.fixture(scope="module")
def plan(toy: Toy, cache: TargetCache) -> StepPlan:
    return step_plan(toy.task("loader").settings, Rows.of(cache), 7)


def batches(cache: TargetCache, plan: StepPlan, **options: Any) -> Iterator[tuple[int, list[str], torch.Tensor]]:
    reader = MicroBatchReader(dtype=torch.float32, block_size=plan.block_size)
    with Loader(cache, reader, plan, **{"first": 0, **options}) as loader:
        for step in loader.steps():
            for planned in step.micro_batches:
                if planned.rows:
                    batch = loader.batch()
                    yield step.number, batch.sample_ids, batch.hidden_states


def test_a_thread_and_worker_processes_give_the_same_batches(cache: TargetCache, plan: StepPlan):
    from_thread = list(batches(cache, plan))
    from_workers = list(batches(cache, plan, workers=2, max_bytes=1))
    resumed = list(batches(cache, plan, first=3))
    assert [one[:2] for one in from_workers] == [one[:2] for one in from_thread]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(from_workers, from_thread, strict=True))
    assert [one[:2] for one in resumed] == [one[:2] for one in from_thread if one[0] >= 3]


def test_ranks_share_an_epoch_and_leave_out_what_has_no_anchor(cache: TargetCache, plan: StepPlan):
    """An epoch is four batches, of which the last has one conversation."""
    assert plan.steps_in_epoch == 4
    seen = []
    for rank in range(3):
        seen += [name for number, ids, _ in batches(cache, plan, rank=rank, ranks=3) if number < 4 for name in ids]
        assert len({len(plan.step(3, rank=r, ranks=3).micro_batches) for r in range(3)}) == 1
    assert sorted(seen) == sorted(f"toy-{i}" for i in range(ROWS) if i not in (UNSUPERVISED, UNSUPERVISED + 1))


def test_the_thread_holds_no_more_than_the_bound():
    """Micro-batches cost 10; with a bound of 25 two are made before any is taken."""
    made: list[int] = []
    packs = iter([PlannedMicroBatch(rows=(i,), anchors=(np.array([1]),)) for i in range(6)])

    def work(planned: PlannedMicroBatch) -> Any:
        made.append(planned.rows[0])
        return planned.rows[0]

    ahead = _ThreadAhead(work, packs, lambda planned: 10, 25)
    try:
        taken: list[Any] = []
        for expected in (2, 3, 4):
            deadline = time.monotonic() + 60
            while len(made) < expected and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.05)
            assert made == list(range(expected))
            taken.append(next(ahead))
        assert taken == [0, 1, 2]
    finally:
        ahead.close()
    assert not any(thread.name.startswith("loader") for thread in threading.enumerate())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_reading_raises_is_raised_where_the_batch_is_wanted(
    plan: StepPlan, toy: Toy, tmp_path: Path, workers: int
):
    shutil.copytree(toy.cache, tmp_path / "cache")
    shard = sorted((tmp_path / "cache" / "shards").iterdir())[0]
    data = bytearray(shard.read_bytes())
    middle = slice(len(data) // 3, len(data) // 3 + 64)
    data[middle] = bytes(byte ^ 255 for byte in data[middle])
    shard.write_bytes(bytes(data))
    with pytest.raises(ValueError, match=r"checksum differs|cannot be read"):
        list(batches(TargetCache.open(tmp_path / "cache"), plan, workers=workers))


def test_held_out_conversations_are_the_same_ones_in_every_cache(cache: TargetCache):
    index = Rows.of(cache)
    trained, validation = index.split(3)
    assert len(trained) == ROWS - 3
    assert not set(trained.sample_ids) & set(validation.sample_ids)
    _, again = index.subset(range(ROWS - 1, -1, -1)).split(3)
    assert set(again.sample_ids) == set(validation.sample_ids)
    assert [index.sample_ids[row] for row in validation.numbers] == list(validation.sample_ids)


def test_a_windowed_shuffle_opens_few_shards_at_a_time(cache: TargetCache, plan: StepPlan):
    windowed = replace(plan, shuffle_window=1)
    shards = windowed.rows.shards
    assert len(set(shards)) > 3
    for number in range(windowed.steps_in_epoch):
        rows = [row for planned in windowed.step(number).micro_batches for row in planned.rows]
        assert len({shards[row] for row in rows}) <= 3  # of the three rows a shard has
