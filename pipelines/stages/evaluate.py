"""Decode the evaluation prompts, losslessly, and keep every round.

1. Measure what a step costs on this device, or read it (`step_costs.json`).
2. Cut the prompts into work items, for every temperature, seed and variant: the drafter with whole blocks and with
   another length policy, the same with its sequential head switched off, its first slot alone, plain decoding, other
   drafters that are named. Ray workers decode them, in batches; each completion is kept as it ends.
3. Let the engine serve a few users with every length policy (`serving/`).
4. Merge: `events-all.parquet`, `completions-all.parquet` and `timings.json` are what every figure comes from.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.drafter_folder import published_config
from pipelines.evaluation import figures
from pipelines.evaluation.round_log import EVENTS, read_events
from pipelines.json_files import write_json
from pipelines.records import DecodedItem, read_record
from pipelines.settings import Settings
from pipelines.stages.calibrate import read_calibration
from pipelines.stages.decoding import (
    DSPARK,
    FULL,
    NO_HEAD,
    ONE_SLOT,
    PLAIN,
    DecodeWorker,
    decode_all,
    make_plan,
    read_split,
    work_items,
)
from pipelines.stages.serving import measure_serving
from pipelines.stages.step_costs import find_step_costs, table_identity
from pipelines.stages.train import weights_identity
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run

TIMINGS = "timings.json"


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """Variants, temperatures, seeds and lengths; the prompts come with the inputs."""
    section = settings.evaluate
    fields = {"evaluate": section.model_dump(mode="json", exclude={"num_workers"}), "seed": settings.run.seed}
    if section.baselines:
        fields["baselines"] = {name: weights_identity(folder) for name, folder in section.baselines.items()}
    if section.cost.table is not None:
        fields["cost_table"] = table_identity(section.cost.table)
    return fields


def check(settings: Settings) -> None:
    """Raises UserError for a baseline that cannot draft for this target, and a table that tells no costs."""
    section = settings.evaluate
    for name, folder in section.baselines.items():
        published_config(folder, settings, f"evaluate.baselines.{name}")
    if section.cost.table is not None:
        table_identity(section.cost.table)


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `evaluation/`."""
    section, calibration = settings.evaluate, read_calibration(run)
    folder = Folder(run.location("evaluate"))
    prompts = read_split(Path(run.location("regenerate"), "evaluation.jsonl"), "evaluation")
    plan = make_plan(run, "evaluate", section, baselines=section.baselines, calibration=calibration)
    plan = replace(plan, costs=find_step_costs(plan, reporter))
    items = work_items(section, prompts, "evaluation", partial(decodings, settings))
    what = "decoding the evaluation prompts"
    workers = section.num_workers
    decode_all(plan, DecodeWorker, items, workers=workers, what=what, unit="prompts", reporter=reporter)
    cure = "remove it and run the same command again, which decodes these prompts anew"
    records = [read_record(folder, item.file, DecodedItem, cure).model_dump() for item in items]
    served = measure_serving(plan, prompts, settings.drafter.has_confidence_head, reporter)
    timings = _add_up(records)
    skipped = {name: why for record in records for name, why in record["skipped"].items()}
    write_json(folder, TIMINGS, {"timings": timings, "skipped": skipped})
    lengths = figures.accepted_lengths(read_events(folder.full(EVENTS)))
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
    section = settings.evaluate
    has_head = settings.drafter.parts["markov_rank"]
    found = [(PLAIN, FULL)] if section.without_drafter else []
    found.append((DSPARK, FULL))
    if section.policy != FULL:
        found.append((DSPARK, section.policy))
    if section.without_sequential_head and has_head and temperature == section.temperatures[0]:
        found.append((NO_HEAD, FULL))
    if section.one_slot:
        found.append((ONE_SLOT, FULL))
    return found + [(name, FULL) for name in section.baselines]


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
