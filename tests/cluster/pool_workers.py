"""Workers for the pool's tests. They leave marks on disk, so that the tests see what ran where."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


class Squarer:
    """Squares its unit."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder)

    def run(self, unit: int) -> int:
        return unit * unit


class Marked(Squarer):
    """Writes its process id beside the unit before it starts, and takes its time."""

    def run(self, unit: int) -> int:
        (self.folder / f"{unit}.{os.getpid()}").touch()
        time.sleep(0.05)
        return unit * unit


class DiesOnce(Squarer):
    """Kills its own process at unit 3, the first time."""

    def run(self, unit: int) -> int:
        mark = self.folder / "died"
        if unit == 3 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return unit * unit


class AlwaysDies(Squarer):
    """Unit 2 kills every worker that tries it."""

    def run(self, unit: int) -> int:
        if unit == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return unit * unit


class Fails(Squarer):
    """Unit 1 is wrong for good; unit 4 fails now and then: twice."""

    def run(self, unit: int) -> int:
        if unit == 1:
            raise ValueError("a state of sample 17 is not finite")
        if unit == 4:
            mark = self.folder / f"attempt-{len(list(self.folder.glob('attempt-*')))}"
            mark.touch()
            if mark.name != "attempt-2":
                raise OSError("the network went away")
        return unit * unit


class CannotStart:
    """Fails while it loads, and counts how often."""

    def __init__(self, folder: str, error: Exception) -> None:
        (Path(folder) / f"started-{os.getpid()}").touch()
        raise error

    def run(self, unit: int) -> int:
        return unit


class Sleeper:
    """Marks that it has begun, and never ends."""

    def __init__(self, folder: str = "") -> None:
        self.folder = Path(folder or os.environ["SLEEPERS"])

    def run(self, unit: int) -> int:
        (self.folder / f"started-{unit}").touch()
        time.sleep(1e6)
        return unit
