"""What every rank of the training group does.

1. Open the cache and compare its contract with the drafter's.
2. Build the drafter, with the target's frozen embedding and head, and hand its trainable part to DeepSpeed.
3. Take up the newest complete checkpoint, if there is one.
4. For each step: forward and backward over this rank's packs, one update, a line in the log, a checkpoint now and then.
5. Write the drafter in its published layout.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from cluster.engine import StepResult, TrainEngine, build_engine
from cluster.engine_settings import DeepSpeedSettings
from cluster.train_group import stop_wanted
from dspark.bigrams import bigram_counts
from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.draft_vocabulary import most_frequent_tokens
from dspark.drafter import save_drafter
from dspark.losses import LossConfig, add_sums, fused_loss, metrics_of, output_head_of
from dspark.output_head import log_normalizers
from dspark.packing import PackedBatch
from dspark.starting_weights import build_drafter
from pipelines.settings import Settings
from pipelines.stages.workers import open_target
from pipelines.target_facts import TargetFacts
from pipelines.training.batches import Loader, SampleIndex, Step, StepPlan
from storage.checkpoints import load_checkpoint, newest_checkpoint, remove_leftovers, save_checkpoint
from storage.target_cache import TargetCache

if TYPE_CHECKING:
    from dspark.drafter import Drafter

LOG, FINAL = "log.jsonl", "final"
BIGRAM_ROWS = 20_000  # rows whose token statistics choose the draft vocabulary and start the Markov head
BAD_STEPS = 10  # steps in a row without a finite gradient, after which training stops


class TrainingCannotGoOn(RuntimeError):
    """Training went wrong in a way that more of it will not mend; the message says how."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """What a rank needs; picklable."""

    settings: Settings
    facts: TargetFacts
    cache: str
    output: str
    total_steps: int


class BlockLoss(nn.Module):
    """The drafter with its loss as one forward pass, which is what DeepSpeed wraps."""

    def __init__(self, drafter: Drafter, config: LossConfig) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config
        self._head = output_head_of(drafter)

    def teacher_normalizers(self) -> Callable[[Tensor], Tensor] | None:
        """The teacher's normaliser over the whole vocabulary, worth remembering where the drafter's is smaller.

        On a CPU only: elsewhere the loader would compete with it for what the device does at once.
        """
        if self.drafter.draft_token_ids is None or self.drafter.device.type != "cpu":
            return None
        return partial(log_normalizers, head=self._head)

    def forward(self, batch: PackedBatch, normalizer: float) -> tuple[Tensor, dict[str, float]]:
        states = self.drafter.block_states(batch)
        result = fused_loss(self.drafter, states, batch, self.config, normalizer=normalizer, head=self._head)
        return result.loss, result.sums


def train_rank(config: dict[str, Any]) -> None:
    """Entry point of each worker."""
    task: TrainingTask = config["task"]
    settings = task.settings
    cache = TargetCache.open(task.cache)
    ours = Contract.from_dict(task.facts.contract(settings, with_block=True))
    ours.require_same(Contract.from_dict(cache.contract), ours="these settings", theirs="cache")
    index = SampleIndex.of(cache)
    drafter = _build(task, cache)
    module = BlockLoss(drafter, LossConfig(**settings.train.loss.model_dump()))
    engine = build_engine(module, engine_settings(settings), task.total_steps)
    output = Path(task.output)
    if engine.rank == 0:
        remove_leftovers(output)
    distributed.barrier()
    first = _resume(engine, output)
    plan = step_plan(settings, index, task.total_steps)
    dtype = torch.float32 if settings.train.precision == "float32" else torch.bfloat16
    loader = Loader(
        cache,
        plan,
        first=first,
        rank=engine.rank,
        ranks=engine.world_size,
        dtype=dtype,
        log_normalizers=module.teacher_normalizers(),
    )
    log = TrainingLog(output / LOG, module.config, first) if engine.rank == 0 else None
    if not _steps(task, engine, first, loader, log):
        return
    weights = engine.weights()
    if engine.rank == 0:
        folder = output / FINAL
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(weights[f"weight/{name}"])
        save_drafter(drafter, folder, task.facts.text_config)
        (folder / "contract.json").write_text(json.dumps(ours.to_dict(), indent=2) + "\n")
    distributed.barrier()


def _steps(task: TrainingTask, engine: TrainEngine, first: int, loader: Loader, log: TrainingLog | None) -> bool:
    """Every step that is left; False when it was asked to stop before the last, with a checkpoint written."""
    train = task.settings.train
    sums: dict[str, float] = {}
    bad = skipped = tokens = 0
    since, waited, clock = first, 0.0, time.perf_counter()
    asked = clock
    for step, batches in loader:
        waited += time.perf_counter() - asked
        present = [batch for batch in batches if batch is not None]

        def loss_of(batch: PackedBatch, normalizer: float = step.normalizer) -> Tensor:
            nonlocal sums, tokens
            loss, found = engine.deepspeed(batch.to(engine.device), normalizer)
            sums = add_sums(sums, found)
            tokens += batch.num_context_tokens
            return loss

        result = engine.train_step(step.number, present, loss_of)
        finite = math.isfinite(result.loss) and not result.skipped
        skipped += not finite
        bad = 0 if finite else bad + 1
        if bad >= BAD_STEPS:
            names = [name for batch in present for name in batch.sample_ids]
            raise TrainingCannotGoOn(
                f"the gradient was not finite in {bad} steps in a row, the last one with samples {names[:8]}: lower "
                "train.learning_rate, or look at these rows with `dspark cache sample`"
            )
        done = step.number + 1
        final = done == task.total_steps
        if done % train.log_every == 0 or final:
            seconds = time.perf_counter() - clock
            totals = _over_ranks({**sums, "context_tokens": float(tokens)})
            if log is not None:
                log.write(step, totals, result, skipped, seconds=seconds, waited=waited, steps=done - since)
            sums, tokens, since, waited, clock = {}, 0, done, 0.0, time.perf_counter()
        stopping = _any_rank(stop_wanted()) and not final
        if done % train.checkpoint_every == 0 or final or stopping:
            _save(engine, task, done)
        if stopping:
            return False
        asked = time.perf_counter()
    return True


class TrainingLog:
    """One JSON line for every `log_every` steps; a resumed training drops the lines that it will write again."""

    def __init__(self, path: Path, loss: LossConfig, first: int) -> None:
        self._path, self._loss = path, loss
        kept = [line for line in read_log(path) if line["step"] <= first]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)

    def write(
        self,
        step: Step,
        sums: dict[str, float],
        result: StepResult,
        skipped: int,
        *,
        seconds: float,
        waited: float,
        steps: int,
    ) -> None:
        metrics = metrics_of(sums) if sums.get("weight") else {}
        total = sum(getattr(self._loss, term) * metrics.get(term, 0.0) for term in ("ce", "l1", "confidence"))
        line = {
            "step": step.number + 1,
            "epoch": step.epoch,
            "loss": total,
            **metrics,
            "learning_rate": result.learning_rate,
            "gradient_norm": result.gradient_norm if math.isfinite(result.gradient_norm) else None,
            "skipped_steps": skipped,
            "slots_per_second": sums.get("slots", 0.0) / max(seconds, 1e-9),
            "tokens_per_second": sums["context_tokens"] / max(seconds, 1e-9),
            "anchors": sums.get("blocks", 0.0),
            "seconds_per_step": seconds / max(steps, 1),
            "loader_wait_share": waited / max(seconds, 1e-9),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a training log; a line cut off by a kill is left out."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().split("\n")[:-1]:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def drafter_config(settings: Settings, facts: TargetFacts) -> DrafterConfig:
    """The drafter that these settings ask for, for this target."""
    wanted = settings.drafter
    plain = wanted.algorithm != "dspark"
    return DrafterConfig.for_target(
        facts.text_config,
        mask_token_id=facts.mask_token_id,
        algorithm=wanted.algorithm,
        target_layer_ids=facts.target_layer_ids,
        num_draft_layers=wanted.num_draft_layers,
        block_size=wanted.block_size,
        block_layout=wanted.block_layout,
        num_anchors=settings.train.num_anchors,
        markov_rank=0 if plain else wanted.markov_rank,
        markov_head_type=None if plain else wanted.markov_head_type,
        enable_confidence_head=not plain and wanted.enable_confidence_head,
        confidence_head_with_markov=not plain and wanted.confidence_head_with_markov,
        draft_vocab_size=wanted.draft_vocab_size,
    )


def engine_settings(settings: Settings) -> DeepSpeedSettings:
    train = settings.train
    return DeepSpeedSettings(
        learning_rate=train.learning_rate,
        warmup_ratio=train.warmup_ratio,
        schedule=train.schedule,
        optimizer=train.optimizer,
        weight_decay=train.weight_decay,
        clip=train.clip,
        precision="bf16" if train.precision == "bfloat16" else "fp32",
        zero_stage=train.zero_stage,
        overrides=train.deepspeed,
    )


def step_plan(settings: Settings, index: SampleIndex, total_steps: int) -> StepPlan:
    train = settings.train
    return StepPlan(
        index=index,
        seed=settings.run.seed,
        global_batch_size=train.global_batch_size,
        num_anchors=train.num_anchors,
        anchor_rule=train.anchor_rule,
        block_size=settings.drafter.block_size,
        position_decay=train.loss.position_decay,
        pack_budget=train.pack_budget,
        total_steps=total_steps,
    )


def _build(task: TrainingTask, cache: TargetCache) -> Drafter:
    settings = task.settings
    config = drafter_config(settings, task.facts)
    target = open_target(settings, task.facts)
    previous, following = _supervised_pairs(cache)
    drafted = None
    if config.draft_vocab_size is not None:
        counts = torch.bincount(following, minlength=config.vocab_size)
        drafted = most_frequent_tokens(counts, config.draft_vocab_size, always=task.facts.stop_token_ids)
    return build_drafter(
        config,
        target,
        start=settings.drafter.initial_weights,
        seed=settings.run.seed,
        draft_token_ids=drafted,
        bigrams=bigram_counts(previous, following, config.vocab_size),
    )


def _supervised_pairs(cache: TargetCache) -> tuple[Tensor, Tensor]:
    """Every supervised token of the cache with the token before it: two tensors [E]."""
    previous, following = [], []
    for index in range(min(len(cache), BIGRAM_ROWS)):
        row = cache.raw_row(index)
        ids, edges = torch.as_tensor(row["input_ids"]).long(), [int(edge) for edge in row["spans"]]
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            first = max(start, 1)
            previous.append(ids[first - 1 : end - 1])
            following.append(ids[first:end])
    return torch.cat(previous), torch.cat(following)


def _over_ranks(sums: dict[str, float]) -> dict[str, float]:
    """Each value added up over all ranks."""
    parts: list[dict[str, float]] = [{} for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(parts, sums)
    keys = {key for part in parts for key in part}
    return {key: math.fsum(part.get(key, 0.0) for part in parts) for key in keys}


def _any_rank(flag: bool) -> bool:
    """Whether any rank says so: all of them agree on the step at which they stop."""
    ranks = distributed.get_world_size()
    if ranks == 1:
        return flag
    flags = [False] * ranks
    distributed.all_gather_object(flags, flag)
    return any(flags)


def _save(engine: TrainEngine, task: TrainingTask, step: int) -> None:
    state = engine.state()
    if engine.rank == 0:
        save_checkpoint(task.output, step, state, {"step": step}, keep_last=task.settings.train.keep_last)
    distributed.barrier()


def _resume(engine: TrainEngine, output: Path) -> int:
    """Take up the newest complete checkpoint; returns the step to go on with."""
    newest = newest_checkpoint(output)
    if newest is None:
        return 0
    checkpoint = load_checkpoint(newest)
    engine.load(checkpoint.tensors)
    return int(checkpoint.state["step"])
