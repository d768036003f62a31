"""One more node for a cluster on this machine, so that a test can lose it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import ray

# `ray start` would take the machine's outer address; this stays on loopback, as the embedded head does.
NODE = """
import sys, time
from ray._private.node import Node
from ray._private.parameter import RayParams
params = RayParams(
    gcs_address=sys.argv[1], node_ip_address="127.0.0.1", num_cpus=3, num_gpus=0, object_store_memory=80 * 2**20,
    min_worker_port=0, max_worker_port=0, include_log_monitor=False,
)
Node(params, head=False, shutdown_at_exit=False, spawn_reaper=False)
time.sleep(1e6)
"""


@contextmanager
def start_node(address: str) -> Iterator[subprocess.Popen[bytes]]:
    """A raylet with three CPUs that has joined the cluster at `address`; it ends with its process group."""
    before = _alive()
    command = [sys.executable, "-c", NODE, address]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as node:
        try:
            deadline = time.monotonic() + 60
            while not _alive() - before:
                assert node.poll() is None, "the second node ended"
                assert time.monotonic() < deadline, "the second node did not join"
                time.sleep(0.1)
            yield node
        finally:
            end_node(node)


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def end_node(node: subprocess.Popen[bytes]) -> None:
    """Kill the node's raylet and all that it started."""
    if node.poll() is None:
        for process in (*psutil.Process(node.pid).children(recursive=True), psutil.Process(node.pid)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.wait()
