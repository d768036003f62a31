"""Run the tests marked `fuzz` with many examples each, and store how many were tried.

python benchmarks/evidence/fuzz.py --examples 5000 --output docs/evidence/fuzz.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from pipelines.provenance import collect

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"^(tests/\S+::\S+):$", re.MULTILINE)
PASSED = re.compile(r"(\d+) passing")
FAILED = re.compile(r"(\d+) failing")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000, help="of each test")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("tests", nargs="*", default=["tests"])
    options = parser.parse_args()
    command = [sys.executable, "-m", "pytest", "-m", "fuzz", "--hypothesis-profile=fuzz", "--timeout=7200"]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "--hypothesis-show-statistics", *options.tests],
        cwd=ROOT,
        env={**os.environ, "FUZZ_EXAMPLES": str(options.examples)},
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    _, *parts = TEST.split(done.stdout)
    counts = {
        name: {"passing": sum(map(int, PASSED.findall(text))), "failing": sum(map(int, FAILED.findall(text)))}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
    found = collect()
    record = {
        "examples": sum(count["passing"] + count["failing"] for count in counts.values()),
        "failing": sum(count["failing"] for count in counts.values()),
        "seconds": round(time.monotonic() - started),
        "tests": counts,
        "origin": {key: found[key] for key in ("started", "code", "packages", "hardware")},
    }
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['examples']} examples of {len(counts)} tests, {record['failing']} failing")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
