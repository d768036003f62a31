"""Decode the evaluation prompts, losslessly, and keep every round.

1. Cut the prompts into units, for every variant (the drafter, the same with its sequential head switched off, plain
   decoding, a baseline when one is named), temperature and seed.
2. Ray workers decode them, in batches; each completion is kept as it ends.
3. Merge: `events-all.parquet`, `completions-all.parquet` and `timings.json` are what every figure comes from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.settings import Settings
from pipelines.stages.calibrate import read_calibration
from pipelines.stages.decode_events import BASELINE, DSPARK, NO_HEAD, PLAIN, DecodePlan, cut, decode_all, read_split
from pipelines.target_facts import examine_target
from storage.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.run import Run

TIMINGS = "timings.json"


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """Variants, temperatures, seeds and lengths; the prompts come with the inputs."""
    wanted = settings.evaluate
    fields = {"evaluate": wanted.model_dump(mode="json", exclude={"workers"}), "seed": settings.run.seed}
    if wanted.baseline is not None:
        from pipelines.stages.train import weights_identity

        fields["baseline"] = weights_identity(wanted.baseline)
    return fields


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `evaluation/`."""
    from pipelines.reporting import figures
    from pipelines.reporting.events import read_events

    wanted = settings.evaluate
    folder = Folder(run.location("evaluate"))
    calibration = read_calibration(run)
    prompts = read_split(Path(run.location("regenerate"), "evaluation.jsonl"), "evaluation")
    plan = DecodePlan(
        settings=settings,
        facts=examine_target(settings),
        folder=run.location("evaluate"),
        circumstances={"identity": run.identity("evaluate")},
        drafter=str(Path(run.location("train"), "final")),
        baseline=wanted.baseline,
        max_new_tokens=wanted.max_new_tokens,
        rows=wanted.rows,
        temperatures=None if calibration is None else tuple(calibration["temperatures"]),
    )
    variants = [PLAIN] if wanted.plain else []
    variants.append(DSPARK)
    if wanted.without_sequential_head and settings.drafter.algorithm == "dspark":
        variants.append(NO_HEAD)
    if wanted.baseline is not None:
        variants.append(BASELINE)
    units = []
    for temperature in wanted.temperatures:
        for seed in wanted.seeds:
            for variant in variants:
                units += cut(
                    prompts,
                    variant=variant,
                    temperature=temperature,
                    seed=seed,
                    split="evaluation",
                    rows=wanted.rows,
                )
    records = decode_all(plan, units, wanted.workers, reporter)
    timings = _add_up(records)
    skipped = {name: why for record in records for name, why in record["skipped"].items()}
    folder.write(TIMINGS, json.dumps({"timings": timings, "skipped": skipped}, indent=1).encode())
    lengths = figures.accepted_lengths(read_events(folder.full("events-all.parquet")))
    return {
        "prompts": len(prompts),
        "skipped": len(skipped),
        "accepted_length": {
            f"{row['drafter']}, {row['domain']}, temperature {row['temperature']:g}": row["value"] for row in lengths
        },
    }


def _add_up(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One stopwatch record a variant and temperature."""
    totals: dict[tuple[str, float], dict[str, Any]] = {}
    for record in records:
        key = (record["drafter"], record["temperature"])
        total = totals.setdefault(key, {**record, "tokens": 0, "seconds": 0.0})
        total.pop("skipped", None)
        total["tokens"] += record["tokens"]
        total["seconds"] += record["seconds"]
    return list(totals.values())
