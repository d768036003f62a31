"""Schedulers against brute force over all length vectors, and how long they take; stored as JSON.

    python benchmarks/evidence/scheduler.py --output docs/evidence/scheduler.json

2,000 random cases of 3 requests and 4 slots, every second one on a jagged step-cost curve; times for 256 requests x 7
slots are the best and the median of 300 calls on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from test_scheduling import compared_with_brute_force, two_steps_behind

from dspark.decoding.scheduling import CostTable, algorithm_1, global_search


def shortfall(values: np.ndarray) -> dict[str, Any]:
    return {"cases": len(values), "mean": float(values.mean()), "most": float(values.max())}


def milliseconds() -> dict[str, dict[str, float]]:
    chances = np.cumprod(np.random.default_rng(1).uniform(0.5, 1, (256, 7)), axis=1)
    sizes = tuple(range(1, 2049, 64))
    cost = CostTable(sizes, tuple(1 / (1 + 0.001 * size) for size in sizes))
    rules = {
        "algorithm 1": lambda: algorithm_1(chances, cost),
        "global search": lambda: global_search(chances, cost),
        "two steps behind": lambda: two_steps_behind(chances, chances, cost),
    }
    found = {}
    for name, rule in rules.items():
        taken = []
        for _ in range(300):
            begin = time.perf_counter()
            rule()
            taken.append(1000 * (time.perf_counter() - begin))
        found[name] = {"best": float(min(taken)), "median": float(np.median(taken))}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = compared_with_brute_force()
    unimodal, jagged = found["unimodal"], found["jagged"]
    result = {
        "command": "python benchmarks/evidence/scheduler.py",
        "cases": len(unimodal),
        "algorithm 1, unimodal": shortfall(found["algorithm 1"][unimodal]),
        "algorithm 1, elsewhere": shortfall(found["algorithm 1"][~unimodal]),
        "algorithm 1, jagged curves": shortfall(found["algorithm 1"][jagged]),
        "two steps behind, unchanged confidences": shortfall(found["behind"]),
        "two steps behind, other confidences, jagged curves": shortfall(found["stale"][jagged]),
        "milliseconds for 256 requests x 7 slots": milliseconds(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
