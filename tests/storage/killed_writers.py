"""What processes of the tests do, writers that end themselves by SIGKILL above all; the fork server imports it once."""

from __future__ import annotations

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from cache_builders import SAMPLES, fit, make_row, rows_of

from storage.cache.target_cache import CachePlan, TargetCache, create_or_resume, finish, write_shard
from storage.checkpoints import complete_checkpoints, save_checkpoint

LENGTH_OF = dict(SAMPLES)


def build_until_killed(root: str, plan: CachePlan, event: int) -> None:
    """Build, and die by SIGKILL at the given event: a row handed over, or either side of a sync or a rename."""
    counter = itertools.count()

    def maybe_die() -> None:
        if next(counter) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            maybe_die()
            result = function(*args, **kwargs)
            maybe_die()
            return result

        return wrapped

    os.fsync, os.replace = around(os.fsync), around(os.replace)  # type: ignore[assignment]
    torch.set_num_threads(1)
    done = create_or_resume(root, plan, lambda: fit(plan))
    for shard in range(len(plan.shards)):
        if shard not in done:
            write_shard(root, shard, (row for row in rows_of(plan, shard) if maybe_die() is None))
    finish(root)


def save(root: Path, step: int, **options: object) -> Path:
    tensors = {"weight": torch.full((4, 3), float(step)), "tied": torch.arange(5).to(torch.bfloat16)}
    return save_checkpoint(root, step, tensors, {"epoch": 1, "rate": 0.1 * step}, **options)  # type: ignore[arg-type]


def save_until_killed(root: str, event: int) -> None:
    count = -1

    def around(function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            nonlocal count
            for after in (False, True):
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                if not after:
                    result = function(*args, **kwargs)
            return result

        return wrapped

    for name in ("fsync", "replace", "rename", "unlink", "rmdir"):
        setattr(os, name, around(getattr(os, name)))
    step = max((info.step for info in complete_checkpoints(root)), default=-1)
    while True:
        step += 1
        save(Path(root), step, keep_last=2)


def read_through_copy(root: str, copy: str, limit: int, seed: int) -> None:
    """Read every row twice in an order of one's own through a local copy that others use too."""
    torch.set_num_threads(1)
    cache = TargetCache.open(root, local_copy=copy, local_copy_bytes=limit)
    order = 2 * list(range(len(cache)))
    random.Random(seed).shuffle(order)
    for index in order:
        exact = make_row(*SAMPLES[index])
        assert torch.equal(cache.row(index).hidden_states, exact.hidden_states.flatten(1))  # type: ignore[union-attr]


@dataclass(frozen=True)
class Kill:
    """The end of a `victim` ("driver" or "worker"): so many seconds after its event of that number."""

    victim: str
    event: int
    delay: float


class Events:
    """Counts rows handed over and either side of each sync, rename and wait of this process; ends it at one of them."""

    def __init__(self, kill: Kill | None) -> None:
        self.count, self._kill = 0, kill
        for name in ("fsync", "replace", "waitpid"):
            setattr(os, name, self._around(getattr(os, name)))

    def happened(self) -> None:
        if self._kill is not None and self.count == self._kill.event:
            threading.Timer(self._kill.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        self.count += 1

    def _around(self, function: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object) -> object:
            self.happened()
            result = function(*arguments)
            self.happened()
            return result

        return wrapped


def drive(root: str, plan: CachePlan, workers: int, kill: Kill | None = None, counts: str | None = None) -> None:
    """A driver and its workers, each a process of its own: workers write shards, a dead one's are given to the next.

    With `counts`, a folder, processes leave the number of their events there, and word of a worker's death.
    """
    torch.set_num_threads(1)
    events = Events(kill if kill is not None and kill.victim == "driver" else None)
    create_or_resume(root, plan, lambda: fit(plan))
    while left := sorted(set(range(len(plan.shards))) - create_or_resume(root, plan)):
        children = []
        for number in range(workers):
            child = os.fork()
            if not child:
                _work(root, plan, left[number::workers], kill if number == 0 else None, counts)
            children.append(child)
        for child in children:
            _, status = os.waitpid(child, 0)
            if os.WIFSIGNALED(status) and counts:
                (Path(counts) / "worker-killed").touch()
        kill = None
    finish(root)
    if counts:
        (Path(counts) / "driver").write_text(str(events.count))


def _work(root: str, plan: CachePlan, shards: list[int], kill: Kill | None, counts: str | None) -> NoReturn:
    try:
        events = Events(kill if kill is not None and kill.victim == "worker" else None)
        for shard in shards:
            write_shard(root, shard, (row for row in rows_of(plan, shard) if events.happened() is None))
        if counts:
            (Path(counts) / "worker").write_text(str(events.count))
    finally:
        os._exit(0)


def read_on(root: str, findings: str) -> None:
    """Read all that a reader can see, again and again, and compare; opens and rows are counted in `findings`."""
    torch.set_num_threads(1)
    opens = rows = 0
    while not Path(f"{findings}.stop").exists():
        try:
            cache = TargetCache.open(root, partial=True)
        except FileNotFoundError:  # not begun
            time.sleep(0.002)
            continue
        opens += 1
        for index, sample_id in enumerate(cache.sample_ids):
            row, exact = cache.row(index), make_row(sample_id, LENGTH_OF[sample_id])
            assert row.input_ids.tolist() == exact.input_ids.tolist()
            assert row.spans == tuple(exact.spans)
            rows += 1
        time.sleep(0.05)
    Path(findings).write_text(f"{opens} {rows}")
