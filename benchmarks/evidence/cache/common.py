"""What the programs here share: where results go, what they ran on, and a cache with several batches a shard."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cache_builders import make_plan

from storage.cache.target_cache import CachePlan

LONG_SAMPLES = [(f"sample-{number:03d}", 2000 + 137 * number) for number in range(24)]


def large_plan(codec: str = "bf16") -> CachePlan:
    """24 sequences of 2,000 to 5,151 tokens in 3 shards of several record batches: 20 MB in bf16."""
    return make_plan(codec, samples=LONG_SAMPLES, tokens_per_shard=30_000)


def parser(description: str | None) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--output", type=Path, required=True, help="the JSON file to write")
    result.add_argument("--seed", type=int, default=0)
    return result


def record(output: Path, run: Callable[[], dict[str, Any]]) -> None:
    """Run, and keep what was found with the command, the time it took and the machine."""
    started = time.monotonic()
    found = run()
    result = {
        "command": " ".join(["PYTHONPATH=tests/storage", "python", *sys.argv]),
        **found,
        "seconds": round(time.monotonic() - started, 1),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
