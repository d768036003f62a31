"""SIGKILL of a build's driver and of its workers, at random moments and at each step of a commit.

The build is the product's own (`create_or_resume`, `write_unit` in two worker processes, `finish`) over precomputed
states of a small random cache, so that hundreds of builds take minutes; no model runs in it. Readers open the cache all
the while and compare every row that they see with the exact one. After each kill the build is started again, and the
folder must equal that of an undisturbed build byte for byte.
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
from killed_writers import drive, read_on
from test_kill import kill_and_finish

from storage.target_cache import CachePlan, verify

CODEC = "int8"


def start(context: ForkServerContext, root: Path, plan: CachePlan) -> Any:
    process = context.Process(target=drive, args=(str(root), plan, 2))
    process.start()
    return process


def undisturbed(context: ForkServerContext, folder: Path, plan: CachePlan) -> float:
    """Seconds that a build takes once the fork server runs, the slower of two."""
    taken = []
    for number in range(3):
        began = time.monotonic()
        process = start(context, folder / str(number), plan)
        process.join()
        assert process.exitcode == 0
        taken.append(time.monotonic() - began)
    return max(taken[1:])


def stage_of(root: Path, plan: CachePlan) -> str:
    """How far the build had come."""
    if not (root / "manifest.json").exists():
        return "before the manifest"
    if (root / "COMPLETE.json").exists():
        return "after the finish"
    committed = len(list((root / "commits").glob("unit-*.json"))) if (root / "commits").exists() else 0
    return (
        "all units committed" if committed == len(plan.units) else f"{committed} of {len(plan.units)} units committed"
    )


def workers_of(driver: int) -> list[int]:
    """The driver's children that write units."""
    tasks = Path(f"/proc/{driver}/task/{driver}/children")
    try:
        return [int(pid) for pid in tasks.read_text().split()]
    except FileNotFoundError:
        return []


def kill_one(driver: Any, target: str, moment: float, generator: random.Random) -> bool:
    """Kill the driver, or one of its workers, so long after the start; False if there was nothing left to kill."""
    time.sleep(moment)
    victims = [driver.pid] if target == "driver" else workers_of(driver.pid)
    if not victims or not driver.is_alive():
        return False
    try:
        os.kill(generator.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def random_kills(context: ForkServerContext, scratch: Path, count: int, seed: int, limit: float) -> dict[str, Any]:
    """`count` kills, or as many as fit into `limit` seconds."""
    plan, generator = make_plan(CODEC, unit_tokens=40), random.Random(seed)
    duration = undisturbed(context, scratch / "calm", plan)
    calm = folder_bytes(scratch / "calm" / "0")
    stages: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    end = time.monotonic() + limit
    while sum(kills.values()) < count and time.monotonic() < end:
        number = totals["trials"]
        totals["trials"] += 1
        root, findings = scratch / f"trial-{number}", scratch / f"findings-{number}"
        target = ("driver", "worker")[number % 2]
        reader = context.Process(target=read_on, args=(str(root), str(findings)))
        reader.start()
        driver = start(context, root, plan)
        if kill_one(driver, target, generator.uniform(0, duration), generator):
            kills[target] += 1
            stages[stage_of(root, plan)] += 1
        driver.join()
        # Workers of a dead driver may still be at work when the build is started again.
        again = start(context, root, plan)
        again.join()
        assert again.exitcode == 0, root
        Path(f"{findings}.stop").touch()
        reader.join()
        assert reader.exitcode == 0, f"a reader saw a wrong row in {root}"
        opens, rows = map(int, findings.read_text().split())
        totals["opens"] += opens
        totals["rows"] += rows
        time.sleep(0.02)
        assert folder_bytes(root) == calm, root
        assert verify(root) == []
        shutil.rmtree(root)
    return {
        "kills": dict(kills),
        "builds_finished_with_the_undisturbed_bytes": totals["trials"],
        "kills_by_progress": dict(sorted(stages.items())),
        "undisturbed_seconds": round(duration, 3),
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
    arguments.add_argument("--limit", type=float, default=7200, help="seconds for the kills at random moments")
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
            return {"at_random_moments": at_random, "at_each_row_sync_and_rename": steps}

    record(options.output, run)


if __name__ == "__main__":
    main()
