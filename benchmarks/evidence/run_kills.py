"""Kill one run at random moments, finish it, and compare it with an undisturbed run; the result is stored as JSON.

    python benchmarks/evidence/run_kills.py --moments 10 --seed 0 --output docs/evidence/kill-sweep.json

1. Run a toy target's pipeline undisturbed: the reference, and how long each stage takes.
2. Start another run and `kill -9` its main process at moments drawn uniformly over the reference's time; after every
   second kill what works below the process has to end by itself before the run is started again; after the others the
   run is started at once, while it may still be at work.
3. Finish it; compare sample ids, figures and losses, and look for what interrupted writers and
   processes left.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result_file import keep
from toy_target import write_gguf
from whole_run import (
    draw_moments,
    finish,
    kill_at,
    leftovers,
    remains,
    report_figures,
    sample_ids,
    stage_seconds,
    start,
    write_config,
)

from dspark.manifest import damaged_files
from pipelines.data.gguf_file import convert_llama


def sweep(folder: Path, moments: int, seed: int) -> dict[str, Any]:
    """The result as JSON values; `passed` says whether the killed run equals the undisturbed one."""
    target = folder / "target"
    target.mkdir()
    write_gguf(folder / "toy.gguf", tied=True)
    convert_llama(folder / "toy.gguf", target)
    config = write_config(folder, target)
    reference, killed = folder / "undisturbed", folder / "killed"
    began = time.monotonic()
    finish(config, reference)
    seconds = stage_seconds(reference)
    kills = []
    for number, moment in enumerate(draw_moments(seconds, moments, seed)):
        kill = kill_at(start(config, killed), killed, moment, patience=0 if number % 2 else 60)
        kills.append(kill)
        watched = kill.seconds_until_gone is not None
        gone = f"the processes below it were gone {kill.seconds_until_gone} s later" if watched else "started at once"
        print(f"killed in {kill.stage} after {kill.into_stage} s; {gone}", flush=True)
    finish(config, killed)
    ids, expected = sample_ids(killed), sample_ids(reference)
    checks = {
        "every_sample_once": all(set(counts.values()) == {1} for counts in ids.values()),
        "same_samples": ids == expected,
        "same_figures": report_figures(killed) == report_figures(reference),
        "published_verifies": damaged_files(killed / "published") == [],
        "no_leftover_files": leftovers(killed) == [],
        "no_processes_or_ray_folders": remains(kills) == [],
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "seed": seed,
        "kills": [
            {
                "stage": kill.stage,
                "seconds_into_stage": kill.into_stage,
                "processes_below": len(kill.below),
                "seconds_until_gone": kill.seconds_until_gone,
            }
            for kill in kills
        ],
        "samples": {name: len(counts) for name, counts in ids.items()},
        "accepted_length": report_figures(killed)["accepted_length"],
        "undisturbed_stage_seconds": seconds,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--moments", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/kill-sweep.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = sweep(Path(folder), arguments.moments, arguments.seed)
    keep(result, arguments.output, arguments.seed)
    print(json.dumps(result["checks"], indent=1), f"in {arguments.output}", sep="\n")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
