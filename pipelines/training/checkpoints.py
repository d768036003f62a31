"""Checkpoints of a training: written now and then, in the background if wanted, and taken up by any number of ranks.

A checkpoint holds the trainable weights and the optimizer's state by parameter name, the step, and what the
next line of the log tells. The position in the sample order, the seeds and the learning rate follow from the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
        self._writer = ThreadPoolExecutor(1, "checkpoints")
        self._writing: Future[Path] | None = None  # what is being written in the background

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.shutdown()
        if kind is None:
            self._wait()

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
        kept = self._settings.save_total_limit
        write = partial(save_checkpoint, self._folder, step, tensors, state, metric=score, keep_last=kept)
        if self._settings.checkpoint_in_background:
            self._writing = self._writer.submit(write)
        else:
            write()

    def take_best(self) -> None:
        """Go back to the weights with the best score, where any checkpoint has one."""
        best = best_checkpoint(self._folder)
        if best is not None:
            self._engine.load(load_checkpoint(best).tensors)

    def _wait(self) -> None:
        """Until the last checkpoint is written; raises what writing it raised."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
