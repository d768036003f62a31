"""Checkpoints of a training: written now and then, in the background if wanted, and taken up by any number of ranks.

A checkpoint holds the trainable weights and the optimizer's state by parameter name, the step, and what the
next line of the log tells. The position in the sample order, the seeds and the learning rate follow from the step.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed

from pipelines.training.log import StepTotals
from storage.checkpoints import best_checkpoint, load_checkpoint, newest_checkpoint, remove_leftovers, save_checkpoint

if TYPE_CHECKING:
    from cluster.engine import TrainEngine
    from pipelines.settings.schema import TrainSettings


class Checkpoints:
    """Every method is called by all ranks together; leaving the `with` block waits for what is still being written."""

    def __init__(self, engine: TrainEngine, folder: Path, settings: TrainSettings) -> None:
        self._engine, self._folder, self._settings = engine, folder, settings
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._wait(raising=kind is None)

    def resume(self) -> tuple[int, StepTotals]:
        """Take up the newest complete checkpoint; the step to go on with, and the totals (sums on rank 0 alone)."""
        if self._engine.rank == 0:
            remove_leftovers(self._folder)
        distributed.barrier()
        newest = newest_checkpoint(self._folder)
        if newest is None:
            return 0, StepTotals()
        checkpoint = load_checkpoint(newest, check_hashes=False)  # `newest_checkpoint` has checked them
        self._engine.load(checkpoint.tensors)
        totals = StepTotals(**checkpoint.state["totals"])
        if self._engine.rank != 0:
            totals.sums = {}
        return int(checkpoint.state["step"]), totals

    def save(self, step: int, totals: StepTotals, sums: Mapping[str, float], score: float | None) -> None:
        """Write the checkpoint of the state after `step` steps; `sums` are the totals' over all ranks.

        Raises OSError or StorageFull for this checkpoint, or for an earlier one written in the background.
        """
        tensors = self._engine.state()
        self._wait()
        if self._engine.rank != 0:
            return
        state = {"step": step, "totals": {**totals.to_dict(), "sums": dict(sums)}}
        if self._settings.checkpoint_in_background:
            self._writer = threading.Thread(target=self._write_quietly, args=(step, tensors, state, score))
            self._writer.start()
        else:
            self._write(step, tensors, state, score)

    def take_best(self) -> None:
        """Go back to the weights with the best score, where any checkpoint has one."""
        best = best_checkpoint(self._folder)
        if best is not None:
            self._engine.load(load_checkpoint(best).tensors)

    def _write(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], score: float | None) -> None:
        save_checkpoint(
            self._folder,
            step,
            tensors,
            state,
            metric=score,
            keep_last=self._settings.save_total_limit,
        )

    def _write_quietly(self, *arguments: Any) -> None:
        try:
            self._write(*arguments)
        except BaseException as error:  # raised by the next `_wait`, in the thread that trains
            self._error = error

    def _wait(self, *, raising: bool = True) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None and raising:
            raise error
