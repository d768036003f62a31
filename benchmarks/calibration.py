"""Calibration of a finished run's drafter, judged on prompts that each table was not fitted on.

1. Take the fully verified rounds of the run's calibration and evaluation prompts at one decoding temperature.
2. Deal the prompts to ten folds; every round is read with a table fitted on the other nine.
3. Print the expected calibration error by method: mean over slots, by slot, and what exact probabilities would show.

    python benchmarks/calibration.py RUN [--temperature 1.0] [--folds 10]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dspark.calibration import (
    BINS,
    DEFAULT_GRID,
    METHODS,
    Floats,
    calibration_errors,
    fit_table,
    read_table,
    survival,
)
from pipelines.evaluation.figures import noise_floor, round_table
from pipelines.evaluation.round_log import columns, read_events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--folds", type=int, default=10)
    options = parser.parse_args()
    events = pa.concat_tables(
        [read_events(options.run / stage / "events-all.parquet") for stage in ("calibration", "evaluation")]
    )
    own = pc.and_(pc.equal(events["drafter"], "dspark"), pc.equal(events["policy"], "full"))
    events = events.filter(pc.and_(own, pc.equal(events["temperature"], options.temperature)))
    rows = columns(events)
    table = round_table(rows)
    prompts = len(set(rows["prompt_id"]))
    print(f"{len(events)} rounds of {prompts} prompts at temperature {options.temperature:g}, {options.folds} folds\n")
    slots = " | ".join(str(slot + 1) for slot in range(table.slots))
    print(f"| calibration | ECE | if exactly right | {slots} |\n| --- |{' ---: |' * (table.slots + 2)}")
    for name, chances in cross_validated(rows, DEFAULT_GRID, BINS, options.folds).items():
        errors = calibration_errors(chances, rows["accepted"], rows["reached"])
        floor = noise_floor(table, chances)
        by_slot = " | ".join(f"{error:.2%}" for error in errors)
        print(f"| {name} | {np.nanmean(errors):.2%} | {floor:.2%} | {by_slot} |")


def cross_validated(rows: Mapping[str, np.ndarray], grid: Floats, bins: int, folds: int = 10) -> dict[str, Floats]:
    """Survivals [R, G] by method, each round's from a table that was fitted without its prompt.

    The prompts are dealt to the folds at random, by a fixed seed.
    """
    prompts, owner = np.unique(rows["prompt_id"], return_inverse=True)
    fold = np.random.default_rng(0).permutation(len(prompts))[owner] % folds
    logits = rows["confidence_logits"].astype(np.float64)
    found = {name: survival(logits) for name in ("none", *METHODS)}
    for number in np.unique(fold):
        own = fold == number
        table = fit_table({name: values[~own] for name, values in rows.items()}, 1.0, grid, bins)
        for method in METHODS:
            found[method][own] = read_table(table, method).survival(logits[own])
    return found


if __name__ == "__main__":
    main()
