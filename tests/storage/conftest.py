from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from hypothesis import settings

# A shared machine makes single examples slow now and then; the suite's own time limit still holds.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.fixture(scope="session")
def forkserver() -> ForkServerContext:
    """Processes that start in milliseconds because torch is imported already where they fork from."""
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_writers"])
    return context
