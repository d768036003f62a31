"""SIGKILL of a build's driver and of its workers, at random points and at each step of a commit.

The build is the product's own (`create_or_resume`, `write_shard` in two worker processes, `finish`) over precomputed
states of a small random cache, so that hundreds of builds take minutes; no model runs in it. A reader opens the cache
all the while and compares every row that it sees with the exact one. A random point is up to 2 ms after an event drawn
from those of the process: a row handed over, either side of a sync, of a rename, of the wait for a worker. After each
kill the build is started again, and once it is finished the folder must equal an undisturbed build, byte for byte.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from cache_builders import build, folder_bytes, make_plan
from common import parser, record
from killed_writers import Kill, drive, read_on
from test_kill import kill_and_finish

from storage.cache.target_cache import CachePlan, is_finished, verify

CODEC = "int8"
KILLS_A_BUILD = 4  # at most; the build is started again after each, and the last start is left alone
LONGEST_DELAY = 0.002  # seconds between an event and the death that it brings


def start(context: ForkServerContext, root: Path, plan: CachePlan, *further: Any) -> Any:
    process = context.Process(target=drive, args=(str(root), plan, 2, *further))
    process.start()
    return process


def count_events(context: ForkServerContext, folder: Path, plan: CachePlan) -> dict[str, int]:
    """Rows handed over, and sides of syncs, renames and waits, in the driver and in a worker of a build."""
    folder.mkdir()
    process = start(context, folder / "cache", plan, None, str(folder))
    process.join()
    assert process.exitcode == 0
    return {victim: int((folder / victim).read_text()) for victim in ("driver", "worker")}


def stage_of(root: Path, plan: CachePlan) -> str:
    """How far the build had come."""
    if not (root / "manifest.json").exists():
        return "before the manifest"
    if (root / "COMPLETE.json").exists():
        return "after the finish"
    committed = len(list((root / "commits").glob("unit-*.json"))) if (root / "commits").exists() else 0
    return (
        "all shards committed"
        if committed == len(plan.shards)
        else f"{committed} of {len(plan.shards)} shards committed"
    )


def random_kills(context: ForkServerContext, scratch: Path, count: int, seed: int, limit: float) -> dict[str, Any]:
    """`count` kills, or as many as fit into `limit` seconds."""
    plan, generator = make_plan(CODEC, tokens_per_shard=40), random.Random(seed)
    events = count_events(context, scratch / "calm", plan)
    calm = folder_bytes(scratch / "calm" / "cache")
    progress: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    end = time.monotonic() + limit
    while kills.total() < count and time.monotonic() < end:
        number = totals["builds"]
        totals["builds"] += 1
        root, findings = scratch / f"build-{number}", scratch / f"findings-{number}"
        reader = context.Process(target=read_on, args=(str(root), str(findings)))
        reader.start()
        for attempt in range(KILLS_A_BUILD):
            victim, marks = ("driver", "worker")[(number + attempt) % 2], scratch / f"marks-{number}-{attempt}"
            marks.mkdir()
            kill = Kill(victim, generator.randrange(events[victim]), generator.uniform(0, LONGEST_DELAY))
            driver = start(context, root, plan, kill, str(marks))
            driver.join()
            killed = {"driver": driver.exitcode == -signal.SIGKILL, "worker": (marks / "worker-killed").exists()}
            assert killed["driver"] or driver.exitcode == 0
            kills[victim] += killed[victim]
            progress[stage_of(root, plan)] += killed["driver"]
            if is_finished(root):
                break
        last = start(context, root, plan)
        last.join()
        assert last.exitcode == 0, root
        Path(f"{findings}.stop").touch()
        reader.join()
        assert reader.exitcode == 0, f"a reader saw a wrong row in {root}"
        opens, rows = map(int, findings.read_text().split())
        totals["opens"] += opens
        totals["rows"] += rows
        assert folder_bytes(root) == calm, root
        assert verify(root) == []
        shutil.rmtree(root)
    return {
        "kills": dict(kills),
        "builds_finished_with_the_undisturbed_bytes": totals["builds"],
        "progress_when_the_driver_was_killed": dict(sorted(progress.items())),
        "events_of_a_build": events,
        "reader_opens_meanwhile": totals["opens"],
        "rows_read_meanwhile_all_right": totals["rows"],
    }


def kills_at_each_step(context: ForkServerContext, scratch: Path) -> dict[str, Any]:
    plan = make_plan(CODEC)
    build(scratch / "step-calm", plan)
    calm, event = folder_bytes(scratch / "step-calm"), 0
    while kill_and_finish(context, scratch / f"step-{event}", CODEC, [event]):
        assert folder_bytes(scratch / f"step-{event}") == calm, f"killed at event {event}"
        event += 1
    return {"steps": event, "with_the_undisturbed_bytes": event}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--count", type=int, default=200)
    arguments.add_argument("--limit", type=float, default=7200, help="seconds for the kills at random points")
    options = arguments.parse_args()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_writers"])

    def run() -> dict[str, Any]:
        # A killed process loses nothing that it wrote, so the disk does not matter: memory makes the builds quick.
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            at_random = random_kills(context, Path(folder), options.count, options.seed, options.limit)
            print(at_random, flush=True)
            steps = kills_at_each_step(context, Path(folder))
            return {"at_random_points": at_random, "at_each_row_sync_and_rename": steps}

    record(options.output, run)


if __name__ == "__main__":
    main()
