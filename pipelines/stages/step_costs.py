"""What a decoding step costs: measured by a worker, or read from a file, and kept beside the evaluation's events.

1. Which temperatures need it: the serving comparison's, and every one when a scheduler decodes.
2. Read `evaluate.cost.table`, or let one worker, alone, measure target and drafter at each of these temperatures.
3. Keep `step_costs.json`, a table a temperature; it is not measured again.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dspark.decoding.proposers import proposer_for
from dspark.decoding.sampling import SamplingConfig
from dspark.decoding.step_costs import StepCosts
from dspark.decoding.step_timing import measure_step_costs
from pipelines.errors import UserError
from pipelines.json_files import write_json
from pipelines.provenance import hardware
from pipelines.settings.schema import EvaluateSettings
from pipelines.stages.decoding import DSPARK, DecodePlan, DecodeWorker
from pipelines.workers import on_pool, session
from storage.files.filesystems import Folder

if TYPE_CHECKING:
    from pipelines.progress import Reporter

STEP_COSTS = "step_costs.json"
# What a file that is no step-cost table makes of reading it.
BROKEN = (OSError, ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError)
SCHEDULERS = ("scheduler", "two-steps-behind")


def serving_temperature(evaluate: EvaluateSettings) -> float | None:
    """The decoding temperature of the serving comparison; None without one."""
    if evaluate.serving is None:
        return None
    return evaluate.temperatures[-1] if evaluate.serving.temperature is None else evaluate.serving.temperature


def needed_temperatures(evaluate: EvaluateSettings) -> list[float]:
    needed = set(evaluate.temperatures) if evaluate.policy in SCHEDULERS else set()
    if (served := serving_temperature(evaluate)) is not None:
        needed.add(served)
    return sorted(needed)


def table_identity(path: str) -> dict[str, Any]:
    """A table that was measured elsewhere counts by its content. Raises UserError if it is not a step-cost table."""
    try:
        return StepCosts.from_dict(json.loads(Path(path).expanduser().read_text())).to_dict()
    except BROKEN as error:
        raise UserError(
            f'evaluate.cost.table: {path} is no step-cost table ({error}); expected JSON with "tokens" and '
            '"steps_per_second", lists of equal length, and if measured "draft": {"rows": [...], "seconds": [...]}'
        ) from error


def find_step_costs(plan: DecodePlan, reporter: Reporter) -> dict[float, dict[str, Any]]:
    """Step costs by decoding temperature, as `StepCosts.to_dict` gives them."""
    folder, evaluate = Folder(plan.folder), plan.settings.evaluate
    temperatures = needed_temperatures(evaluate)
    if folder.exists(STEP_COSTS):
        return read_step_costs(folder)
    if not temperatures:
        return {}
    found: dict[float, dict[str, Any]] = {}
    if evaluate.cost.table is not None:
        read = table_identity(evaluate.cost.table)
        found = {key: {**read, "source": read["source"] or evaluate.cost.table} for key in temperatures}
    else:
        with session(plan.settings, plan.folder), reporter.task("measuring step costs", len(temperatures)) as task:

            def finished(temperature: float, costs: dict[str, Any]) -> None:
                found[temperature] = costs
                task.advance(1)

            on_pool(
                plan.settings,
                partial(CostWorker, plan),
                temperatures,
                workers=1,
                on_result=finished,
                item_name=lambda temperature: f"step costs at temperature {temperature:g}",
            )
    rows = [{"temperature": temperature, **costs} for temperature, costs in sorted(found.items())]
    write_json(folder, STEP_COSTS, rows)
    return found


def read_step_costs(folder: Folder) -> dict[float, dict[str, Any]]:
    """What `find_step_costs` kept; empty when nothing needed it."""
    if not folder.exists(STEP_COSTS):
        return {}
    try:
        rows = {float(row.pop("temperature")): row for row in json.loads(folder.read(STEP_COSTS))}
        return {temperature: StepCosts.from_dict(row).to_dict() for temperature, row in rows.items()}
    except BROKEN as error:
        raise UserError(
            f"{folder.describe(STEP_COSTS)} holds no step costs ({error}): remove it and run the same command again, "
            "which measures them anew"
        ) from error


class CostWorker(DecodeWorker):
    """Measures target and drafter at one temperature after the other."""

    def run(self, temperature: float) -> dict[str, Any]:  # type: ignore[override]
        section = self.plan.settings.evaluate.cost
        costs = measure_step_costs(
            self.target,
            proposer_for(self.drafters[DSPARK][1], self.target),
            section.tokens,
            context=section.context,
            repeats=section.repeats,
            sampling=SamplingConfig(temperature=temperature),
            source="measured on this run's device",
        )
        found = costs.to_dict()
        found["conditions"] |= {"dtype": self.plan.settings.target.dtype, "hardware": hardware()}
        return found
