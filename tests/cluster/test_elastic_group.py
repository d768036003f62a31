"""An elastic group loses a node for good, and goes on with the ranks that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from group_work import count

from cluster.session import RaySession
from cluster.train_group import run_group

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(900)]


# `ray start` would take the machine's outer address; this stays on loopback, as the embedded head does.
SECOND_NODE = """
import sys, time
from ray._private.node import Node
from ray._private.parameter import RayParams
params = RayParams(
    gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=2, num_gpus=0, object_store_memory=80 * 2**20,
    min_worker_port=0, max_worker_port=0, include_log_monitor=False,
)
Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
time.sleep(1e6)
"""


@pytest.fixture
def second_node(session: RaySession) -> Iterator[subprocess.Popen[bytes]]:
    """One more raylet with two CPUs, on this machine; it ends with its process group."""
    command = [sys.executable, "-c", SECOND_NODE, session.address]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL) as node:
        try:
            deadline = time.monotonic() + 60
            while ray.cluster_resources().get("CPU", 0) < 4:
                assert node.poll() is None, "the second node ended"
                assert time.monotonic() < deadline, "the second node did not join"
                time.sleep(0.1)
            yield node
        finally:
            _end(node)


def _end(node: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(node.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    node.wait()


def test_a_lost_node_leaves_a_smaller_group(second_node: subprocess.Popen[bytes], tmp_path: Path):
    """Each rank takes two CPUs, so the ranks are on two nodes; the file counts on without a gap."""
    log = tmp_path / "log"

    def lose() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            time.sleep(0.05)
        _end(second_node)

    thread = threading.Thread(target=lose)
    thread.start()
    config = {"folder": str(tmp_path), "steps": 100, "pause": 0.1}
    run_group(
        count,
        config,
        num_workers=2,
        min_workers=1,
        cpus_per_worker=2,
        max_failures=2,
        storage_path=str(tmp_path / "ray"),
    )
    thread.join()
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [int(step) for step, _ in lines] == list(range(100))
    sums = [total for _, total in lines]
    assert set(sums) == {"3", "1"}, "two ranks add up to 3, one to 1"
    assert sums == sorted(sums, reverse=True), "once smaller, it stays so: the node does not come back"
