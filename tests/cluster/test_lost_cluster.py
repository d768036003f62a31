"""A cluster that goes away under the work is noticed soon and said in one message; one that shrinks is worked on."""

from __future__ import annotations

import functools
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from pool_workers import Marked, Sleeper
from second_node import end_node

from cluster.session import RaySession, _JoinedCluster, _watched
from cluster.work_pool import run_work_items

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

HERE = Path(__file__).parent

# A process of its own: the control service's end would end this one with it.
POOL = """
import sys
from pool_workers import Sleeper
from cluster.session import ClusterLost, ray_session
from cluster.work_pool import run_work_items

try:
    with ray_session(num_cpus=2) as session:
        print("ready", flush=True)
        run_work_items(Sleeper, [1, 2, 3], num_workers=2, on_result=print)
except ClusterLost as lost:
    print("lost:", lost)
    print("left:", session.temporary.exists())
"""
GROUP = """
import sys
from group_work import count
from cluster.session import ClusterLost, ray_session
from cluster.train_group import run_group

try:
    with ray_session(num_cpus=2) as session:
        print("ready", flush=True)
        config = {"folder": sys.argv[1], "steps": 10**6, "pause": 0.1}
        run_group(count, config, num_workers=1, cpus_per_worker=0.5, storage_path=sys.argv[1])
except ClusterLost as lost:
    print("lost:", lost)
    print("left:", session.temporary.exists())
"""


@pytest.mark.parametrize(("text", "process"), [(POOL, "raylet"), (POOL, "gcs_server"), (GROUP, "gcs_server")])
def test_a_dead_server_of_rays_ends_the_run_with_one_message(text: str, process: str, tmp_path: Path):
    variables = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "SLEEPERS": str(tmp_path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text), str(tmp_path)],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "ready\n"
    while not list(tmp_path.glob("*ed-*")):  # a worker has begun
        assert owner.poll() is None
        time.sleep(0.1)
    below = psutil.Process(owner.pid).children(recursive=True)
    (victim,) = [child for child in below if child.name() == process]
    victim.kill()
    said, complained = owner.communicate(timeout=60)
    assert owner.returncode == 0, complained
    assert said == (
        f"lost: the Ray cluster is gone: Ray's {process} ended on this machine (killed from outside, or for want of "
        "memory?). What is complete stays: the same command goes on from there\nleft: False\n"
    )
    _, alive = psutil.wait_procs(below, timeout=5)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def test_units_of_a_lost_node_are_done_on_the_one_that_is_left(
    second_node: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """It goes while its workers are in the middle of a unit; twenty more units come after."""
    results: dict[int, int] = {}
    lost: list[int] = []

    def lose() -> None:
        top = psutil.Process(second_node.pid)
        while not {mark.suffix for mark in tmp_path.iterdir()} & {f".{p.pid}" for p in top.children(recursive=True)}:
            time.sleep(0.05)
        end_node(second_node)
        lost.append(len(results))

    def units() -> Iterator[int]:
        for n in itertools.count():
            if lost and n > lost[0] + 20:
                return
            yield n

    thread = threading.Thread(target=lose)
    thread.start()
    work = functools.partial(Marked, str(tmp_path))
    summary = run_work_items(work, units(), num_workers=4, on_result=results.__setitem__)
    thread.join()
    assert results == {n: n * n for n in range(len(results))}
    assert len(results) > lost[0] + 20
    assert 1 <= summary.workers_lost <= 3


def test_a_cluster_without_room_for_any_worker_left_is_said(
    second_node: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers that only the lost node could hold would otherwise be waited for, in silence and for ever."""
    monkeypatch.setattr("cluster.work_pool.LOOK_AROUND_SECONDS", 1.0)

    def lose() -> None:
        while not list(tmp_path.iterdir()):
            time.sleep(0.05)
        end_node(second_node)

    thread = threading.Thread(target=lose)
    thread.start()
    with pytest.raises(ValueError, match="no node of the Ray cluster has them"):
        run_work_items(
            functools.partial(Sleeper, str(tmp_path)),
            [1, 2],
            num_workers=1,
            on_result=print,
            cpus_per_worker=3,
        )
    thread.join()


def test_a_joined_cluster_may_be_away_for_a_moment_but_not_for_long(session: RaySession):
    joined = _JoinedCluster(session.address)

    def look() -> str | None:
        joined._asked = 0.0
        return joined.fault()

    assert look() is None
    joined._address = "127.0.0.1:1"
    assert look() is None, "it may come back"
    joined._well -= joined.PATIENCE
    assert "no answer from 127.0.0.1:1 for 3" in (look() or "")
    joined._address, joined._node = session.address, "another"
    assert "raylet ended" in (look() or "")


def test_an_interrupt_of_the_users_stays_one():
    with pytest.raises(KeyboardInterrupt), _watched(lambda: None):
        raise KeyboardInterrupt
