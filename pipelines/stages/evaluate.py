"""Decode the evaluation prompts, losslessly, and keep every round.

1. Measure what a step costs on this device, or read it (`step_costs.json`).
2. Cut the prompts into units, for every variant (the drafter with whole blocks and with another length policy, the same
   with its sequential head switched off, its first slot alone, plain decoding, other drafters that are named),
   temperature and seed. Ray workers decode them, in batches; each completion is kept as it ends.
3. Let the engine serve a few users with every length policy (`serving/`).
4. Merge: `events-all.parquet`, `completions-all.parquet` and `timings.json` are what every figure comes from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.drafter_folder import published_config
from pipelines.settings import Settings
from pipelines.stages.calibrate import read_calibration
from pipelines.stages.decode_events import (
    DSPARK,
    FULL,
    NO_HEAD,
    ONE_SLOT,
    PLAIN,
    DecodePlan,
    cut,
    decode_all,
    read_split,
)
from pipelines.stages.serving import measure_serving
from pipelines.stages.step_costs import find_step_costs, table_identity
from pipelines.target_spec import resolve_target
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run

TIMINGS = "timings.json"


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """Variants, temperatures, seeds and lengths; the prompts come with the inputs."""
    wanted = settings.evaluate
    fields = {"evaluate": wanted.model_dump(mode="json", exclude={"num_workers"}), "seed": settings.run.seed}
    if wanted.baselines:
        from pipelines.stages.train import weights_identity

        fields["baselines"] = {name: weights_identity(folder) for name, folder in wanted.baselines.items()}
    if wanted.cost.table is not None:
        fields["cost_table"] = table_identity(wanted.cost.table)
    return fields


def check(settings: Settings) -> None:
    """Raises UserError for a baseline that cannot draft for this target, and a table that tells no costs."""
    wanted = settings.evaluate
    for name, folder in wanted.baselines.items():
        published_config(folder, settings, f"evaluate.baselines.{name}")
    if wanted.cost.table is not None:
        table_identity(wanted.cost.table)


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `evaluation/`."""
    from pipelines.evaluation import figures
    from pipelines.evaluation.round_log import read_events

    wanted = settings.evaluate
    folder = Folder(run.location("evaluate"))
    calibration = read_calibration(run)
    prompts = read_split(Path(run.location("regenerate"), "evaluation.jsonl"), "evaluation")
    plan = DecodePlan(
        settings=settings,
        facts=resolve_target(settings),
        folder=run.location("evaluate"),
        circumstances={"identity": run.identity("evaluate")},
        drafter=str(Path(run.location("train"), "final")),
        baselines=wanted.baselines,
        max_new_tokens=wanted.max_new_tokens,
        rows=wanted.batch_size,
        calibration=calibration,
    )
    plan = replace(plan, costs=find_step_costs(plan, reporter))
    units = []
    for temperature in wanted.temperatures:
        # Greedy answers are the same whatever the seed.
        for seed in wanted.seeds if temperature > 0 else wanted.seeds[:1]:
            for variant, policy in decodings(settings, temperature):
                units += cut(
                    prompts,
                    variant=variant,
                    policy=policy,
                    temperature=temperature,
                    seed=seed,
                    split="evaluation",
                    rows=wanted.batch_size,
                )
    records = decode_all(plan, units, wanted.num_workers, reporter)
    served = measure_serving(plan, prompts, settings.drafter.has_confidence_head, reporter)
    timings = _add_up(records)
    skipped = {name: why for record in records for name, why in record["skipped"].items()}
    folder.write(TIMINGS, json.dumps({"timings": timings, "skipped": skipped}, indent=1).encode())
    lengths = figures.accepted_lengths(read_events(folder.full("events-all.parquet")))
    return {
        "prompts": len(prompts),
        "skipped": len(skipped),
        **served,
        "accepted_length": {
            f"{row['drafter']}, {row['domain']}, temperature {row['temperature']:g}": row["value"] for row in lengths
        },
    }


def decodings(settings: Settings, temperature: float) -> list[tuple[str, str]]:
    """(variant, policy) pairs at a temperature. Whole blocks of the drafter are always among them."""
    wanted = settings.evaluate
    has_head = settings.drafter.parts["markov_rank"]
    found = [(PLAIN, FULL)] if wanted.without_drafter else []
    found.append((DSPARK, FULL))
    if wanted.policy != FULL:
        found.append((DSPARK, wanted.policy))
    if wanted.without_sequential_head and has_head and temperature == wanted.temperatures[0]:
        found.append((NO_HEAD, FULL))
    if wanted.one_slot:
        found.append((ONE_SLOT, FULL))
    return found + [(name, FULL) for name in wanted.baselines]


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
