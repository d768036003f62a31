"""Calibrate the confidence head: sequential temperature scaling (section 3.2.1 of the DSpark paper), and variants.

1. Decode the calibration prompts with the drafter at each temperature, every slot verified, and keep every round.
2. Fit one table a decoding temperature, on its rounds alone: a temperature a slot, left to right; beside it the
   variant that it is compared with (a shift as well).
3. Write `temperatures.json`, with the errors on the very rounds it was fitted on, named so: the evaluation judges.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.calibration import fit_table
from pipelines.errors import UserError
from pipelines.evaluation.round_log import EVENTS, columns, read_events
from pipelines.json_files import write_json
from pipelines.records import Calibration, read_record
from pipelines.settings import Settings
from pipelines.stages.decoding import DSPARK, FULL, DecodeWorker, decode_all, make_plan, read_split, work_items
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter
    from pipelines.runs.run import Run

TEMPERATURES = "temperatures.json"
GRID = (0.1, 10.0, 161)  # temperatures that are tried: lowest, highest, how many
BINS = 20  # of the expected calibration error
NOTHING = "nothing-to-calibrate.json"


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """How the calibration prompts are decoded and what is fitted; the prompts come with `train`."""
    section = settings.calibrate
    return {
        "calibrate": section.model_dump(mode="json", exclude={"batch_size", "num_workers"}),
        "seed": settings.run.seed,
    }


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `calibration/`."""
    section, folder = settings.calibrate, Folder(run.location("calibrate"))
    if not settings.drafter.has_confidence_head:
        why = "the drafter has no confidence head: nothing to calibrate"
        reporter.say(why)
        write_json(folder, NOTHING, {"why": why})
        return {"temperatures": None}
    prompts = read_split(Path(run.location("regenerate"), "calibration.jsonl"), "calibration")
    items = work_items(section, prompts, "calibration", lambda temperature: [(DSPARK, FULL)])
    plan, what = make_plan(run, "calibrate", section), "decoding the calibration prompts"
    workers = section.num_workers
    decode_all(plan, DecodeWorker, items, workers=workers, what=what, unit="prompts", reporter=reporter)
    rounds = columns(read_events(folder.full(EVENTS)), slots=settings.drafter.block_size)
    grid = np.geomspace(*GRID)
    tables = []
    for temperature in sorted(set(section.temperatures)):
        own = {name: values[rounds["temperature"] == temperature] for name, values in rounds.items()}
        tables.append(fit_table(own, temperature, grid, BINS))
    # What engines read: one table, that of the highest temperature, where confidences vary most.
    shown = tables[-1]
    record = {
        "method": section.method,
        "temperatures": shown["temperatures"],
        "fitted_on": f"{len(prompts)} calibration prompts, {len(section.seeds)} times, at temperature "
        + " and ".join(f"{table['temperature']:g}" for table in tables),
        "rounds": sum(table["rounds"] for table in tables),
        "bins": BINS,
        "ece_on_fitted_rounds": {
            "before": shown["ece_on_fitted_rounds"]["none"],
            "after": shown["ece_on_fitted_rounds"]["temperature"],
        },
        "tables": tables,
    }
    write_json(folder, TEMPERATURES, record)
    return {"temperatures": record["temperatures"], "rounds": record["rounds"]}


def read_calibration(run: Run) -> dict[str, Any] | None:
    """The record of a complete calibration; None when there was nothing to calibrate. Raises UserError for another."""
    folder = Folder(run.location("calibrate"))
    if not folder.exists(TEMPERATURES):
        return None
    cure = f"remove {folder} and run the same command again, which calibrates anew"
    record = read_record(folder, TEMPERATURES, Calibration, cure)
    if record.slots() != {slots := run.settings.drafter.block_size}:
        raise UserError(f"{folder.describe(TEMPERATURES)} is not for blocks of {slots} slots: {cure}")
    return record.model_dump()
