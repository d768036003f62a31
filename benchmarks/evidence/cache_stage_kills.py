"""Kill the cache stage's driver and its Ray workers at random moments; every finished cache equals an undisturbed one.

    python benchmarks/evidence/cache_stage_kills.py --kills 200 --seed 0 --output docs/evidence/cache-stage-kills.json

1. A toy target answers its prompts once; from these conversations one cache is built undisturbed.
2. From the same conversations caches are built with `dspark cache` and two Ray workers. `kill -9` meets the driver, at
   moments drawn uniformly over the time that what is left of the build should take, by the undisturbed one, or one of
   the workers, drawn in the same way over their part of that time, in turn. A worker's death leaves the driver at work,
   and the next kill follows; the driver's is followed by a new start at once, whatever still runs below it. After ten
   kills, or at every other one once all shards are committed, a build is left alone, started again if need be.
3. A reader opens the cache all the while and compares each row, once it sees it, with the undisturbed one by its
   verified checksum. The finished folder must equal the undisturbed one in every file, and verify.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from subprocess import Popen
from typing import Any

import psutil
from result_file import keep
from toy_target import write_gguf
from whole_run import finish, start, write_config

from pipelines.data.gguf_file import convert_llama
from storage.cache.target_cache import TargetCache, is_finished, verify

KILLS_A_BUILD = 10
WORKER = "ray::_Host"  # what Ray calls the process of a pool's actor
PROMPTS = {"train": 500, "calibration": 1, "evaluation": 1}


class Reader(threading.Thread):
    """Reads what a reader can see of a cache that is being built, and compares it with the finished one."""

    def __init__(self, root: Path, calm: TargetCache) -> None:
        super().__init__(daemon=True)
        self._root, self._ended = root, threading.Event()
        self._rows = {calm.sample_ids[index]: calm.raw_row(index)["checksum"] for index in range(len(calm))}
        self._seen: set[str] = set()
        self.opens = 0
        self.wrong: list[str] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._read_on()
        except BaseException as error:
            self.failure = error

    def _read_on(self) -> None:
        while not self._ended.wait(0.2):
            try:
                cache = TargetCache.open(self._root, partial=True)
            except FileNotFoundError:  # not begun
                continue
            self.opens += 1
            for index, sample_id in enumerate(cache.sample_ids):
                if sample_id not in self._seen and cache.raw_row(index)["checksum"] != self._rows[sample_id]:
                    self.wrong.append(sample_id)
                self._seen.add(sample_id)

    @property
    def rows(self) -> int:
        """How many different rows it has read."""
        return len(self._seen)

    def end(self) -> None:
        self._ended.set()
        self.join()
        if self.failure is not None:
            raise self.failure


def kill(process: Popen[str], victim: str, moment: float) -> bool:
    """Kill the driver so many seconds from now, or one of its workers once there have been any for so long in all.

    False if the build ended before that.
    """
    driver, waited, before = psutil.Process(process.pid), 0.0, time.monotonic()
    while process.poll() is None:
        victims, now = _workers(driver) if victim == "worker" else [driver], time.monotonic()
        waited, before = waited + (now - before if victims else 0.0), now
        if victims and waited >= moment:
            with suppress(psutil.NoSuchProcess):
                victims[int(moment * 1000) % len(victims)].kill()
                return True
        time.sleep(0.01)
    return False


def _workers(driver: psutil.Process) -> list[psutil.Process]:
    found = []
    for child in driver.children(recursive=True):
        try:
            if any(name.startswith(WORKER) for name in (child.name(), *child.cmdline()[:1])):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return sorted(found, key=lambda child: child.pid)


def shards(root: Path) -> tuple[int, int]:
    """How many shards are committed, and of how many; none of one before there is a manifest."""
    if not (root / "manifest.json").exists():
        return 0, 1
    return len(list((root / "commits").glob("unit-*.json"))), json.loads((root / "manifest.json").read_text())["units"]


def progress(root: Path) -> str:
    """How far a build had come."""
    committed, planned = shards(root)
    if not (root / "manifest.json").exists():
        return "before the manifest"
    if is_finished(root):
        return "after the finish"
    if not committed:
        return "none"
    return "all shards committed" if committed == planned else f"some of {planned} shards committed"


def units_left(root: Path) -> float:
    """The share of the shards that are not committed."""
    committed, planned = shards(root)
    return 1 - committed / planned


def digests(root: Path) -> dict[str, str]:
    """SHA-256 of every file below the folder."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _undisturbed(process: Popen[str]) -> dict[str, float]:
    """How long a build took, and how long of that there were workers."""
    began, driver, present = time.monotonic(), psutil.Process(process.pid), 0.0
    before = began
    while process.poll() is None:
        now = time.monotonic()
        present, before = present + (now - before if _workers(driver) else 0.0), now
        time.sleep(0.01)
    assert process.returncode == 0
    return {"driver": time.monotonic() - began, "worker": present}


def sweep(folder: Path, wanted: int, seed: int, limit: float) -> dict[str, Any]:
    """The result as JSON values; raises AssertionError for a cache that differs or a row read wrong.

    `wanted` kills, or as many as fit into `limit` seconds.
    """
    target = folder / "target"
    target.mkdir()
    write_gguf(folder / "toy.gguf", tied=True)
    convert_llama(folder / "toy.gguf", target)
    config = write_config(folder, target, prompts=PROMPTS, cache_workers=2)
    answered = folder / "answered"
    finish(config, answered, "regenerate")
    calm = folder / "calm"
    shutil.copytree(answered, calm)
    seconds = _undisturbed(start(config, calm, "cache"))
    expected, reference = digests(calm / "cache"), TargetCache.open(calm / "cache")
    random, kills, met, totals = Random(seed), Counter[str](), Counter[str](), Counter[str]()
    end = time.monotonic() + limit
    while kills.total() < wanted and time.monotonic() < end:
        run = folder / f"build-{totals['builds']}"
        shutil.copytree(answered, run)
        reader = Reader(run / "cache", reference)
        reader.start()
        process, starting = start(config, run, "cache"), True
        for number in range(KILLS_A_BUILD):
            if is_finished(run / "cache") or (number and not units_left(run / "cache") and random.random() < 0.5):
                break
            if process.poll() is not None:  # it gave up: too many deaths met one shard
                totals["starts_that_gave_up"] += process.returncode != 0
                process, starting = start(config, run, "cache"), True
            victim = ("driver", "worker")[(totals["builds"] + number) % 2]
            ahead = seconds["worker"] * units_left(run / "cache")
            if starting and victim == "driver":
                ahead += seconds["driver"] - seconds["worker"]
            if not kill(process, victim, random.uniform(0, max(1.0, ahead))):
                continue
            kills[victim] += 1
            met[progress(run / "cache")] += 1
            starting = victim == "driver"
            if starting:
                process.wait()
                process = start(config, run, "cache")
        process.communicate()
        if process.returncode:
            totals["starts_that_gave_up"] += 1
            finish(config, run, "cache")
        reader.end()
        assert not reader.wrong, f"a reader saw wrong rows in {run}: {reader.wrong}"
        assert digests(run / "cache") == expected, f"{run} differs from the undisturbed cache"
        assert verify(run / "cache") == []
        totals["builds"] += 1
        totals["opens"] += reader.opens
        totals["rows"] += reader.rows
        shutil.rmtree(run)
        print(f"{kills.total()} kills, {totals['builds']} builds: {dict(met)}", flush=True)
    return {
        "kills": dict(kills),
        "progress_when_killed": dict(sorted(met.items())),
        "builds_finished_with_the_undisturbed_bytes": totals["builds"],
        "starts_that_gave_up": totals["starts_that_gave_up"],
        "reader_opens_meanwhile": totals["opens"],
        "rows_read_meanwhile_all_right": totals["rows"],
        "undisturbed_build_seconds": round(seconds["driver"], 1),
        "seconds_with_workers": round(seconds["worker"], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--limit", type=float, default=7200, help="seconds; what was seen by then is stored")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/cache-stage-kills.json"))
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = sweep(Path(folder), arguments.kills, arguments.seed, arguments.limit)
    result = {"seed": arguments.seed, **result, "seconds": round(time.monotonic() - began, 1)}
    keep(result, arguments.output, arguments.seed)
    print(json.dumps(result, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
