"""An elastic group loses a node for good, and goes on with the ranks that are left."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest
from group_work import count
from second_node import end_node

from cluster.train_group import run_group

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(900)]


def test_a_lost_node_leaves_a_smaller_group(second_node: subprocess.Popen[bytes], tmp_path: Path):
    """Each rank takes two CPUs, so the ranks are on two nodes; the file counts on without a gap."""
    log = tmp_path / "log"

    def lose() -> None:
        while not log.exists() or len(log.read_text().splitlines()) < 3:
            time.sleep(0.05)
        end_node(second_node)

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
