"""Calibrate the confidence head: sequential temperature scaling (section 3.2.1 of the DSpark paper).

1. Decode the calibration prompts with the drafter, every slot verified, and keep every round.
2. Fit one temperature a slot, left to right, on those rounds.
3. Write `temperatures.json`, and the errors on the very rounds it was fitted on, named so: the evaluation judges.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.settings import Settings
from pipelines.stages.decode_events import DSPARK, DecodePlan, cut, decode_all, read_split
from pipelines.target_facts import examine_target
from storage.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.run import Run

TEMPERATURES = "temperatures.json"
NOTHING = "nothing-to-calibrate.json"


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """How the calibration prompts are decoded and how temperatures are sought; the prompts come with `train`."""
    wanted = settings.calibrate
    return {"calibrate": wanted.model_dump(mode="json", exclude={"rows", "workers"}), "seed": settings.run.seed}


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `calibration/`."""
    import numpy as np

    from dspark.calibration import calibration_errors, fit_sequential_temperatures, survival
    from pipelines.reporting.events import columns, read_events

    wanted = settings.calibrate
    folder = Folder(run.location("calibrate"))
    facts = examine_target(settings)
    if not settings.drafter.has_confidence_head:
        why = "the drafter has no confidence head: nothing to calibrate"
        reporter.say(why)
        folder.write(NOTHING, (json.dumps({"why": why}) + "\n").encode())
        return {"temperatures": None}
    prompts = read_split(Path(run.location("regenerate"), "calibration.jsonl"), "calibration")
    plan = DecodePlan(
        settings=settings,
        facts=facts,
        folder=run.location("calibrate"),
        circumstances={"identity": run.identity("calibrate")},
        drafter=str(Path(run.location("train"), "final")),
        max_new_tokens=wanted.max_new_tokens,
        rows=wanted.rows,
    )
    units = cut(prompts, variant=DSPARK, temperature=wanted.temperature, seed=0, split="calibration", rows=wanted.rows)
    decode_all(plan, units, wanted.workers, reporter)
    block = settings.drafter.draft_tokens
    rounds = columns(read_events(folder.full("events-all.parquet")), slots=block)
    logits, accepted, reached = rounds["confidence_logits"], rounds["accepted"], rounds["reached"]
    grid = np.geomspace(wanted.grid_low, wanted.grid_high, wanted.grid_points)
    temperatures = fit_sequential_temperatures(logits, accepted, reached, grid, bins=wanted.bins)
    before = calibration_errors(survival(logits), accepted, reached, wanted.bins)
    after = calibration_errors(survival(logits, temperatures), accepted, reached, wanted.bins)
    record = {
        "method": "sequential temperature scaling",
        "temperatures": [float(value) for value in temperatures],
        "fitted_on": f"{len(prompts)} calibration prompts at temperature {wanted.temperature:g}",
        "rounds": len(logits),
        "bins": wanted.bins,
        "ece_on_fitted_rounds": {"before": _finite(before), "after": _finite(after)},
    }
    folder.write(TEMPERATURES, (json.dumps(record, indent=2) + "\n").encode())
    return {"temperatures": record["temperatures"], "rounds": record["rounds"]}


def _finite(values: Any) -> list[float | None]:
    """JSON has no NaN; a slot without an outcome has no error."""
    return [float(value) if value == value else None for value in values]


def read_calibration(run: Run) -> dict[str, Any] | None:
    """The record of a complete calibration; None when there was nothing to calibrate."""
    folder = Folder(run.location("calibrate"))
    return json.loads(folder.read(TEMPERATURES)) if folder.exists(TEMPERATURES) else None
