"""The training log: one JSON line for every so many steps, without gaps or repeats however often training resumes."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import distributed

from cluster.engine import StepResult
from dspark.losses.losses import add_sums, metrics_of
from pipelines.tracking.local_log import LocalLog, parse_rows
from storage.files.filesystems import Folder

LOG, VALIDATION = "log.jsonl", "validation.jsonl"


@dataclass(kw_only=True)
class StepTotals:
    """What the next line of the log tells, and counts over the whole training; one rank's share of it.

    Checkpoints keep it, so that a training resumed between two lines writes the line of an undisturbed one.
    """

    skipped_steps: int = 0  # over the whole training, as on every rank
    bad_in_a_row: int = 0
    steps: int = 0  # since the last line, as everything below
    seconds: float = 0.0
    waited: float = 0.0  # seconds that the loop waited for the loader
    finite_steps: int = 0
    loss: float = 0.0  # summed over the finite steps, each already over all ranks
    sums: dict[str, float] = field(default_factory=dict)

    def count(self, loss: float, sums: dict[str, float], *, finite: bool, seconds: float, waited: float) -> None:
        """One more step; what a skipped one computed is left out of the sums."""
        self.steps += 1
        self.seconds += seconds
        self.waited += waited
        self.skipped_steps += not finite
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + 1
        if finite:
            self.finite_steps += 1
            self.loss += loss
            self.sums = add_sums(self.sums, sums)

    def next_line(self) -> StepTotals:
        """Empty totals for the line after this one."""
        return StepTotals(skipped_steps=self.skipped_steps, bad_in_a_row=self.bad_in_a_row)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def resumed_log(folder: Path, name: str, first: int) -> LocalLog:
    """The log without the lines that a training resumed after `first` steps will write again."""
    log = LocalLog(Folder(folder), name)
    log.rewrite([row for row in log.rows() if row["step"] is not None and row["step"] <= first])
    return log


def train_line(step: int, epoch: int, totals: StepTotals, result: StepResult, memory_bytes: float) -> dict[str, Any]:
    """A line of the log. `totals.sums` are over all ranks; the last step's learning rate and gradient norm."""
    sums = totals.sums
    metrics = metrics_of(sums) if sums.get("weight") else {}
    seconds = max(totals.seconds, 1e-9)
    return {
        "step": step,
        "epoch": epoch,
        "loss": totals.loss / totals.finite_steps if totals.finite_steps else None,
        **metrics,
        "learning_rate": result.learning_rate,
        "gradient_norm": result.gradient_norm if math.isfinite(result.gradient_norm) else None,
        "skipped_steps": totals.skipped_steps,
        "slots_per_second": sums.get("slots", 0.0) / seconds,
        "tokens_per_second": sums.get("context_tokens", 0.0) / seconds,
        "anchors": sums.get("blocks", 0.0),
        "seconds_per_step": totals.seconds / max(totals.steps, 1),
        "loader_wait_share": totals.waited / seconds,
        "memory_bytes": memory_bytes,
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a training log; a damaged one (a kill cut it off) is left out."""
    return [row for row in parse_rows(path.read_bytes()) if row["step"] is not None] if path.exists() else []


def training_rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of both logs; figures of the validation conversations as `validation_NAME`."""
    validation = [
        {key if key == "step" else f"validation_{key}": value for key, value in line.items()}
        for line in read_log(folder / VALIDATION)
    ]
    return [*read_log(folder / LOG), *validation]


def over_ranks(sums: dict[str, float]) -> dict[str, float]:
    """Each value added up over all ranks."""
    parts: list[dict[str, float]] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(parts, sums)
    keys = {key: None for part in parts for key in part}
    return {key: math.fsum(part.get(key, 0.0) for part in parts) for key in keys}
