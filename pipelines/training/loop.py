"""What every rank of the training group does.

1. Open the cache and compare its contract with the drafter's.
2. Build the drafter, with the target's frozen embedding and head, and hand its trainable part to DeepSpeed.
3. Take up the newest complete checkpoint, if there is one.
4. For each step: forward and backward over this rank's micro-batches, one update; now and then a line in the
   log, validation, a checkpoint.
5. Write the drafter in its published layout.
"""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from cluster.engine import StepResult, TrainEngine, build_engine
from cluster.errors import NonRetryableError
from cluster.train_group import stop_wanted
from dspark.contract import Contract
from dspark.losses.fused_loss import BlockLoss
from dspark.losses.losses import add_sums
from dspark.losses.micro_batch import MicroBatch
from dspark.losses.teacher_check import with_own_teacher
from dspark.manifest import new_folder
from dspark.models.checkpoint import save_drafter
from pipelines.training.checkpoints import Checkpoints
from pipelines.training.loader import Loader, MicroBatchReader, PlannedMicroBatch, Rows, Step
from pipelines.training.log import LOG, StepTotals, over_ranks, resumed_log, train_line
from pipelines.training.model import make_drafter, parameter_groups, speed_up, teacher_normalizers, upper_layers
from pipelines.training.sanity_checks import SanityChecks, check_masks
from pipelines.training.task import TrainingTask, engine_settings, step_plan
from pipelines.training.validation import Validation
from pipelines.workers import open_target

FINAL = "final"


class TrainingCannotGoOn(NonRetryableError):
    """Training went wrong in a way that more of it will not mend; the message says how."""


def train_rank(config: dict[str, Any]) -> None:
    """Entry point of each worker."""
    task: TrainingTask = config["task"]
    train, output = task.settings.train, Path(task.output)
    cache = task.open_cache()
    ours = Contract.from_dict(task.spec.contract(task.settings, with_block=True))
    ours.require_same(Contract.from_dict(cache.contract), ours="these settings", theirs="cache")
    trained, held_back = Rows.of(cache).split(train.validation_samples)

    module = BlockLoss(make_drafter(task, cache), train.loss.config)
    speed_up(module.drafter, train)
    torch.set_num_threads(task.threads)
    groups = parameter_groups(module, train.layer_decay)
    engine = build_engine(module, engine_settings(task.settings), task.total_steps, groups=groups)
    with engine.whole():
        module.take_head()

    checkpoints = Checkpoints(engine, output, train)
    first, totals = checkpoints.resume()
    plan = step_plan(task.settings, trained, task.total_steps, module.drafter.first_anchor)
    dtype = torch.float32 if train.precision == "float32" else torch.bfloat16
    reader = MicroBatchReader(
        dtype=dtype,
        block_size=plan.block_size,
        log_normalizers=teacher_normalizers(module),
        upper_layers=upper_layers(task, cache),
    )
    loader = Loader(
        cache,
        reader,
        plan,
        first=first,
        rank=engine.rank,
        ranks=engine.world_size,
        workers=train.dataloader_num_workers,
        max_bytes=train.loader_bytes,
        pin=engine.device.type == "cuda",
    )
    with loader, checkpoints:
        validation = Validation(task, engine, loader, held_back, first) if len(held_back) else None
        training = Training(
            task, engine, loader, checkpoints, validation, _sanity_checks(task, engine, module, loader, first)
        )
        finished = training.run(first, totals)
        if not finished:
            return
    if train.load_best_model_at_end:
        checkpoints.take_best()
    _publish(task, engine, module, ours)


class Training:
    """The steps of one rank."""

    def __init__(
        self,
        task: TrainingTask,
        engine: TrainEngine,
        loader: Loader,
        checkpoints: Checkpoints,
        validation: Validation | None,
        checks: SanityChecks | None,
    ) -> None:
        self.task, self.engine, self.loader = task, engine, loader
        self.checkpoints, self.validation, self.checks = checkpoints, validation, checks
        self._waited = 0.0
        self._sums: dict[str, float] = {}
        self._samples: list[str] = []  # of the step, on this rank
        self._bad_samples: list[str] = []

    def run(self, first: int, totals: StepTotals) -> bool:
        """Every step that is left; False when it was asked to stop before the last, with a checkpoint written."""
        train, total = self.task.settings.train, self.task.total_steps
        log = resumed_log(Path(self.task.output), LOG, first) if self.engine.rank == 0 else None
        clock = time.perf_counter()
        for step in self.loader.steps():
            result = self._step(step)
            finite = math.isfinite(result.loss) and not result.skipped
            seconds, clock = time.perf_counter() - clock, time.perf_counter()
            totals.count(result.loss, self._sums, finite=finite, seconds=seconds, waited=self._waited)
            if totals.bad_in_a_row >= train.max_bad_steps:
                self._give_up(step, totals)
            done = step.number + 1
            final = done == total
            if done % train.logging_steps == 0 or final:
                totals.sums = over_ranks(totals.sums)
                memory = self._peak_memory()
                if log is not None and self.checks is not None:
                    line = train_line(done, step.epoch, totals, result, memory)
                    log.append({**line, "warnings": self.checks.at(done, line.get("acceptance@0"))})
                totals = totals.next_line()
            stopping = self.engine.agree(stop_wanted()) and not final
            saving = done % train.save_steps == 0 or final
            score = None
            if self.validation is not None and self.validation.is_due(done, saving, final):
                score = self.validation.evaluate(done)
            if saving or stopping:
                self.checkpoints.save(done, totals, over_ranks(totals.sums), score)
            if stopping:
                return False
            clock = time.perf_counter()
        return True

    def _step(self, step: Step) -> StepResult:
        self._sums, self._waited, self._samples, self._bad_samples = {}, 0.0, [], []

        def loss_of(planned: PlannedMicroBatch) -> Tensor:
            asked = time.perf_counter()
            batch = self.loader.batch()
            self._waited += time.perf_counter() - asked
            progress = step.number / self.task.total_steps
            batch = batch.to(self.engine.device, non_blocking=True)
            loss, sums = self.engine.deepspeed(batch, step.normalizer, progress)
            self._samples += batch.sample_ids
            if not all(map(math.isfinite, sums.values())):
                self._bad_samples += batch.sample_ids
            self._sums = add_sums(self._sums, {**sums, "context_tokens": float(batch.num_context_tokens)})
            return loss

        planned = [one for one in step.micro_batches if one.rows]
        return self.engine.train_step(step.number, planned, loss_of, dummy_loss=self._dummy_loss)

    def _dummy_loss(self) -> Tensor:
        """From ZeRO stage 2 on a rank without a micro-batch computes one block, which counts nothing."""
        return self.engine.deepspeed(self.loader.dummy_batch().to(self.engine.device), 1.0)[0]

    def _give_up(self, step: Step, totals: StepTotals) -> None:
        """Say which samples had a loss that is not finite; all of the step where only the gradient was not."""
        names = sorted(self._names(self._bad_samples)) or sorted(self._names(self._samples))
        raise TrainingCannotGoOn(
            f"the loss or its gradient was not finite in {totals.bad_in_a_row} steps in a row, the last one (step "
            f"{step.number + 1}) with samples {', '.join(names[:8])}{', …' if len(names) > 8 else ''}: lower "
            "train.learning_rate, or look at these rows with `dspark cache sample`"
        )

    def _names(self, mine: list[str]) -> set[str]:
        found: list[list[str]] = [[] for _ in range(self.engine.world_size)]
        distributed.all_gather_object(found, mine)
        return {name for part in found for name in part}

    def _peak_memory(self) -> float:
        """The most bytes that any rank has used: of the GPU, or resident where there is none."""
        if self.engine.device.type == "cuda":
            mine = torch.cuda.max_memory_allocated()
        else:
            mine = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found: list[int] = [0] * self.engine.world_size
        distributed.all_gather_object(found, mine)
        return float(max(found))


def _sanity_checks(
    task: TrainingTask, engine: TrainEngine, module: BlockLoss, loader: Loader, first: int
) -> SanityChecks | None:
    """On rank 0, with the first micro-batch there is."""
    if engine.rank != 0:
        return None
    plan, train = loader.plan, task.settings.train
    check_masks(plan)
    planned = (one for number in range(plan.total_steps) for one in plan.step(number).micro_batches if one.rows)
    batch = loader.now(next(planned, None) or plan.smallest()).to(engine.device)
    warmup = math.ceil(train.warmup_ratio * task.total_steps)

    def targets_own(batch: MicroBatch) -> MicroBatch:
        return with_own_teacher(batch, open_target(task.settings, task.spec))

    return SanityChecks(
        plan, batch, module.head, targets_own, warmup_steps=warmup, first=first, first_line=train.logging_steps
    )


def _publish(task: TrainingTask, engine: TrainEngine, module: BlockLoss, contract: Contract) -> None:
    """The drafter in its published layout, as `final/`."""
    folder = Path(task.output) / FINAL
    with engine.whole():
        if engine.rank == 0:
            with new_folder(folder) as staging:
                save_drafter(module.drafter, staging, task.spec.text_config)
                contract.write(staging)
    distributed.barrier()
