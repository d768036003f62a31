"""The pool delivers every unit once, whatever dies, and names what cannot be done."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from pool_workers import AlwaysDies, CannotStart, DiesOnce, Fails, Marked, Squarer

from cluster.session import RaySession
from cluster.work_pool import WorkersFailed, WorkItemFailed, run_work_items

pytestmark = [pytest.mark.usefixtures("session"), pytest.mark.timeout(120)]


def collect(make_worker, units, **options):
    results: dict[int, int] = {}

    def on_result(unit: int, result: int) -> None:
        assert unit not in results
        results[unit] = result

    options.setdefault("num_workers", 2)
    summary = run_work_items(make_worker, units, on_result=on_result, **options)
    return results, summary


def test_every_unit_is_done_once():
    results, summary = collect(Squarer, list(range(50)))
    assert results == {n: n * n for n in range(50)}
    assert (summary.items, summary.repeated, summary.workers_lost) == (50, 0, 0)


def test_no_units_and_fewer_units_than_workers():
    assert collect(Squarer, [])[0] == {}
    assert collect(Squarer, [7])[0] == {7: 49}


def test_a_unit_whose_worker_dies_is_done_again(tmp_path: Path):
    results, summary = collect(functools.partial(DiesOnce, str(tmp_path)), range(10))
    assert results == {n: n * n for n in range(10)}
    assert 1 <= summary.repeated <= 2, "only what the worker held is done again"
    assert summary.workers_lost == 1


def test_workers_killed_from_outside(tmp_path: Path):
    """kill -9 of whichever process has just begun a unit, three times."""
    killed: set[int] = set()

    def kill() -> None:
        while len(killed) < 3:
            for mark in tmp_path.iterdir():
                pid = int(mark.suffix[1:])
                if pid not in killed:
                    killed.add(pid)
                    os.kill(pid, signal.SIGKILL)
                    break
            time.sleep(0.1)

    killer = threading.Thread(target=kill)
    killer.start()
    results, summary = collect(functools.partial(Marked, str(tmp_path)), range(150))
    killer.join()
    assert results == {n: n * n for n in range(150)}
    assert summary.workers_lost == 3
    started = Counter(mark.stem for mark in tmp_path.iterdir())
    assert sum(started.values()) - 150 <= 3, "only units in progress are repeated"


def test_a_unit_that_kills_every_worker_is_named():
    with pytest.raises(
        WorkItemFailed, match=r"(?s)work item number 2 failed after 2 attempts.*the worker died"
    ) as failure:
        collect(AlwaysDies, range(6), max_retries=1, item_name=lambda unit: f"number {unit}")
    assert (failure.value.item, failure.value.attempts) == ("number 2", 2)


def test_passing_failures_are_retried_and_lasting_ones_are_not(tmp_path: Path):
    worker = functools.partial(Fails, str(tmp_path))
    results, summary = collect(worker, [0, 4, 5])
    assert results == {0: 0, 4: 16, 5: 25}
    assert summary.repeated == 2
    with pytest.raises(WorkItemFailed, match="sample 17 is not finite") as failure:
        collect(worker, [0, 1])
    assert failure.value.attempts == 1
    assert isinstance(failure.value.__cause__, ValueError)
    assert "workers.py" in failure.value.detail, "the worker's own traceback is part of the error"


@pytest.mark.parametrize(
    ("error", "starts"),
    [
        (RuntimeError("the peer went away"), 2),
        (ValueError("no such model"), 1),
        (ImportError("no such package"), 1),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1),
    ],
)
def test_workers_that_cannot_start(tmp_path: Path, error: Exception, starts: int):
    with pytest.raises(WorkersFailed, match=str(error).replace("[", r"\[")) as failure:
        collect(functools.partial(CannotStart, str(tmp_path), error), [1], num_workers=1, max_retries=1)
    assert type(failure.value.__cause__) is type(error)
    assert len(list(tmp_path.iterdir())) == starts, "what will not go away is not tried again"


def test_few_units_are_in_flight():
    pulled = 0
    done = 0

    def source():
        nonlocal pulled
        for n in range(40):
            pulled += 1
            assert pulled - done <= 2 * 2 + 2
            yield n

    def on_result(unit: int, result: int) -> None:
        nonlocal done
        done += 1

    run_work_items(Squarer, source(), num_workers=2, on_result=on_result)
    assert done == 40


def test_a_worker_that_fits_no_node_is_refused(session: RaySession):
    with pytest.raises(ValueError, match="no node of the Ray cluster"):
        collect(Squarer, [1], cpus_per_worker=session.cpus + 1)
    with pytest.raises(ValueError, match="gpus_per_worker"):
        collect(Squarer, [1], gpus_per_worker=1)
