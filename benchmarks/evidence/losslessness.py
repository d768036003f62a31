"""Losslessness by statistics, in full; the result is stored as JSON and the everyday test is a short form of it.

    python benchmarks/evidence/losslessness.py --sequences 200000 --output docs/evidence/losslessness.json

1. Every length policy and plain decoding, at temperatures 0.7 and 1.0: sampled sequences of three tokens against exact
   enumeration, by Pearson's chi-squared test at 0.001.
2. Two wrong rules, accepting without the residual and Appendix A's retrospective scheduler, must be rejected by it.
3. Prints a table; ends with status 1 if anything is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lossless_cases import POLICIES, against_enumeration, retrospective, without_the_residual

from dspark.decoding.sampling import SamplingConfig
from pipelines.provenance import code_revision

LENGTH = 3
LEVEL = 0.001


def record(rule: str, temperature: float, found: tuple[float, int], begin: float, *, lossless: bool) -> dict[str, Any]:
    statistic, freedom = found
    # The upper tail of the chi-squared distribution is a regularised incomplete gamma function.
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    p = float(torch.special.gammaincc(half[0], half[1]))
    row = {
        "rule": rule,
        "temperature": temperature,
        "statistic": round(statistic, 3),
        "degrees_of_freedom": freedom,
        "p": p,
        "rejected": p < LEVEL,
        "should_be_rejected": not lossless,
        "seconds": round(time.monotonic() - begin, 1),
    }
    print(f"{rule:>24}  T={temperature:g}  chi2={statistic:9.1f} ({freedom})  p={p:.3g}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=200_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for temperature in (0.7, 1.0):
        sampling = SamplingConfig(temperature=temperature)
        for name, make in [("plain decoding", None), *POLICIES.items()]:
            begin = time.monotonic()
            policy = None if make is None else make()
            found = against_enumeration(policy, sampling, options.sequences, LENGTH, drafting=make is not None)
            rows.append(record(name, temperature, found, begin, lossless=True))
        begin = time.monotonic()
        with without_the_residual():
            found = against_enumeration(POLICIES["full"](), sampling, options.sequences, LENGTH, drafting=True)
        rows.append(record("without the residual", temperature, found, begin, lossless=False))
    begin = time.monotonic()
    found = retrospective(min(options.sequences, 20_000))
    rows.append(record("retrospective scheduler", 1.0, found, begin, lossless=False))
    wrong = [row["rule"] for row in rows if row["rejected"] != row["should_be_rejected"]]
    result = {
        "test": f"Pearson's chi-squared against exact enumeration, rejected below {LEVEL}",
        "sequences": options.sequences,
        "tokens_a_sequence": LENGTH,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/evidence/losslessness.py --sequences {options.sequences}",
        **code_revision(),
        "rows": rows,
        "not_as_expected": wrong,
    }
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    print("as expected" if not wrong else f"not as expected: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
