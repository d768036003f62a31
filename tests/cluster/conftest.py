"""One embedded Ray session for the tests of a module that want one: starting it is most of their time."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from second_node import start_node

from cluster.session import RaySession, ray_session


@pytest.fixture(scope="session")
def listening_on() -> Callable[[int], set[str]]:
    """The addresses on which a process and everything below it listen."""

    def addresses(pid: int) -> set[str]:
        top = psutil.Process(pid)
        found = set()
        for process in [top, *top.children(recursive=True)]:
            try:
                sockets = process.net_connections("tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {s.laddr.ip.removeprefix("::ffff:") for s in sockets if s.status == psutil.CONN_LISTEN}
        return found

    return addresses


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """Ray's processes inherit the path on which the tests' workers are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with ray_session(num_cpus=2) as started:
            yield started


@pytest.fixture
def second_node(session: RaySession) -> Iterator[subprocess.Popen[bytes]]:
    """One more raylet with three CPUs, on this machine."""
    with start_node(session.address) as node:
        yield node
