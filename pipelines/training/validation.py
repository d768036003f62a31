"""Validation on conversations of the cache that are not trained on: always the same blocks of the same samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dspark.losses.losses import add_sums, metrics_of
from pipelines.errors import UserError
from pipelines.training.log import VALIDATION, over_ranks, resumed_log

if TYPE_CHECKING:
    from cluster.engine import TrainEngine
    from pipelines.training.loader import Loader, Rows
    from pipelines.training.task import TrainingTask


class Validation:
    """Losses, expected accepted length and confidence errors of the validation conversations, in `validation.jsonl`."""

    def __init__(self, task: TrainingTask, engine: TrainEngine, loader: Loader, rows: Rows, first: int) -> None:
        plan = replace(loader.plan, rows=rows, total_steps=1, global_batch_size=len(rows), shuffle_window=None)
        self._step = plan.step(0, rank=engine.rank, ranks=engine.world_size)
        if not self._step.normalizer:
            raise UserError(
                f"none of the {len(rows)} validation conversations has a position where a block may start: raise "
                "train.validation_samples, or set it to 0"
            )
        self._engine, self._loader, self._every = engine, loader, task.settings.train.eval_steps
        self._log = resumed_log(Path(task.output), VALIDATION, first) if engine.rank == 0 else None

    def is_due(self, done: int, saving: bool, final: bool) -> bool:
        """Whether to evaluate after so many steps: at every checkpoint, or at each multiple of `eval_steps`."""
        return final or (saving if self._every is None else done % self._every == 0)

    @torch.no_grad()
    def evaluate(self, done: int) -> float:
        """Evaluate and write a line; the expected accepted length, by which the best checkpoint is kept."""
        sums, loss = {"loss": 0.0}, 0.0
        for planned in self._step.micro_batches:
            if planned.rows:
                batch = self._loader.now(planned).to(self._engine.device)
                part, found = self._engine.deepspeed(batch, self._step.normalizer)
                loss += float(part)
                sums = add_sums(sums, found)
            elif self._engine.settings.zero_stage == 3:
                self._engine.deepspeed(self._loader.dummy_batch().to(self._engine.device), 1.0)
        sums = over_ranks({**sums, "loss": loss})
        metrics = metrics_of({key: value for key, value in sums.items() if key != "loss"})
        if self._log is not None:
            self._log.append({"step": done, "loss": sums["loss"], **metrics})
        return metrics["tau_probabilistic"]
