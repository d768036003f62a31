"""One embedded Ray session for the tests of a module that want one: starting it is most of their time."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.session import RaySession, ray_session


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    """Ray's processes inherit the path on which the tests' workers are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        with ray_session(num_cpus=2) as started:
            yield started
