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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cluster.engine import DeepSpeedSettings, Engine
from dspark.config import DrafterConfig
from dspark.contract import Contract
from dspark.draft_vocabulary import most_frequent_tokens
from dspark.drafter import save_drafter
from dspark.losses import LossConfig, add_sums, fused_loss, metrics_of, output_head_of
from dspark.packing import PackedBatch
from dspark.starting_weights import build_drafter
from pipelines.settings import Settings
from pipelines.stages.workers import open_target
from pipelines.target_facts import TargetFacts
from pipelines.training.batches import Loader, SampleIndex, Step, StepPlan
from storage.checkpoints import adopt_folder as adopt_checkpoint
from storage.checkpoints import load_checkpoint, newest_checkpoint, remove_leftovers, save_checkpoint, shared_folder
from storage.target_cache import TargetCache

if TYPE_CHECKING:
    from dspark.drafter import Drafter

LOG, FINAL = "log.jsonl", "final"
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

    def forward(self, batch: PackedBatch, normalizer: float) -> tuple[Tensor, dict[str, float]]:
        states = self.drafter.block_states(batch)
        result = fused_loss(self.drafter, states, batch, self.config, normalizer=normalizer, head=self._head)
        return result.loss, result.sums

    def zero(self) -> Tensor:
        """A loss of zero that touches every trainable parameter, for a rank without a block in this step."""
        return sum((p.sum() * 0.0 for p in self.parameters() if p.requires_grad), torch.zeros(()))


def train_rank(config: dict[str, Any]) -> None:
    """Entry point of each worker."""
    task: TrainingTask = config["task"]
    settings = task.settings
    if settings.cluster.threads_per_worker is not None:
        torch.set_num_threads(settings.cluster.threads_per_worker)
    cache = TargetCache.open(task.cache)
    ours = Contract.from_dict(task.facts.contract(settings, with_block=True))
    ours.require_same(Contract.from_dict(cache.contract), ours="these settings", theirs="cache")
    index = SampleIndex.of(cache)
    drafter = _build(task, cache)
    module = BlockLoss(drafter, LossConfig(**settings.train.loss.model_dump()))
    engine = Engine(module, engine_settings(settings, task.total_steps))
    output = Path(task.output)
    if engine.rank == 0:
        remove_leftovers(output)
    engine.barrier()
    _resume(engine, drafter, output, settings)
    plan = step_plan(settings, index, task.total_steps)
    dtype = torch.float32 if settings.train.precision == "float32" else torch.bfloat16
    loader = Loader(cache, plan, first=engine.steps, rank=engine.rank, ranks=engine.ranks, dtype=dtype)
    log = TrainingLog(output / LOG, engine) if engine.rank == 0 else None
    _steps(task, engine, module, loader, log)
    if engine.rank == 0:
        folder = output / FINAL
        save_drafter(drafter, folder, task.facts.text_config)
        (folder / "contract.json").write_text(json.dumps(ours.to_dict(), indent=2) + "\n")
    engine.barrier()


def _steps(task: TrainingTask, engine: Engine, module: BlockLoss, loader: Loader, log: TrainingLog | None) -> None:
    train = task.settings.train
    sums: dict[str, float] = {}
    bad = tokens = 0
    since, waited, clock = engine.steps, 0.0, time.perf_counter()
    asked = clock
    for step, batches in loader:
        waited += time.perf_counter() - asked
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if batch is None:
                engine.backward(module.zero().to(engine.device), last=last)
                continue
            loss, found = engine.deepspeed(batch.to(engine.device), step.normalizer)
            engine.backward(loss, last=last)
            sums = add_sums(sums, found)
            tokens += batch.num_context_tokens
        rate = engine.learning_rate
        norm = engine.step() if batches else 0.0
        bad = 0 if math.isfinite(norm) else bad + 1
        if bad >= BAD_STEPS:
            names = [name for batch in batches if batch is not None for name in batch.sample_ids]
            raise TrainingCannotGoOn(
                f"the gradient was not finite in {bad} steps in a row, the last one with samples {names[:8]}: lower "
                "train.learning_rate, or look at these rows with `dspark cache sample`"
            )
        done = step.number + 1
        final = done == task.total_steps
        if done % train.log_every == 0 or final:
            seconds = time.perf_counter() - clock
            totals = engine.sum_over_ranks({**sums, "context_tokens": float(tokens)})
            if log is not None:
                log.write(step, totals, norm, rate, seconds=seconds, waited=waited, steps=done - since)
            sums, tokens, since, waited, clock = {}, 0, done, 0.0, time.perf_counter()
        if done % train.checkpoint_every == 0 or final:
            _save(engine, task)
        asked = time.perf_counter()


class TrainingLog:
    """One JSON line for every `log_every` steps; a resumed training drops the lines that it will write again."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._path, self._engine = path, engine
        kept = [line for line in read_log(path) if line["step"] <= engine.steps]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)

    def write(
        self,
        step: Step,
        sums: dict[str, float],
        norm: float,
        rate: float,
        *,
        seconds: float,
        waited: float,
        steps: int,
    ) -> None:
        loss = LossConfig(**self._engine.module.config.__dict__)
        metrics = metrics_of(sums) if sums.get("weight") else {}
        total = sum(getattr(loss, term) * metrics.get(term, 0.0) for term in ("ce", "l1", "confidence"))
        line = {
            "step": step.number + 1,
            "epoch": step.epoch,
            "loss": total,
            **metrics,
            "learning_rate": rate,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "skipped_steps": self._engine.skipped,
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


def engine_settings(settings: Settings, total_steps: int) -> DeepSpeedSettings:
    train = settings.train
    return DeepSpeedSettings(
        total_steps=total_steps,
        learning_rate=train.learning_rate,
        warmup_ratio=train.warmup_ratio,
        schedule=train.schedule,
        optimizer=train.optimizer,  # type: ignore[arg-type]
        weight_decay=train.weight_decay,
        clip=train.clip,
        precision=train.precision,
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
    drafted = None
    if config.draft_vocab_size is not None:
        counts = torch.zeros(config.vocab_size, dtype=torch.long)
        for index in range(len(cache)):
            row = cache.raw_row(index)
            ids, edges = torch.as_tensor(row["input_ids"]).long(), [int(edge) for edge in row["spans"]]
            for start, end in zip(edges[::2], edges[1::2], strict=True):
                counts += torch.bincount(ids[start:end], minlength=config.vocab_size)
        drafted = most_frequent_tokens(counts, config.draft_vocab_size, always=task.facts.stop_token_ids)
    return build_drafter(
        config, target, start=settings.drafter.initial_weights, seed=settings.run.seed, draft_token_ids=drafted
    )


def _trainable(drafter: Drafter) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in drafter.named_parameters() if p.requires_grad}


def _save(engine: Engine, task: TrainingTask) -> None:
    drafter: Any = engine.module.drafter
    output, keep = Path(task.output), task.settings.train.keep_last
    if engine.portable:
        if engine.rank == 0:
            state = engine.state()
            optimizer = state.pop("optimizer")
            save_checkpoint(
                output, engine.steps, _trainable(drafter), state, objects={"optimizer": optimizer}, keep_last=keep
            )
    else:
        folder = shared_folder(output, engine.steps)
        engine.save_sharded(str(folder))
        engine.barrier()
        if engine.rank == 0:
            adopt_checkpoint(output, engine.steps, folder, keep_last=keep)
    engine.barrier()


def _resume(engine: Engine, drafter: Drafter, output: Path, settings: Settings) -> None:
    newest = newest_checkpoint(output)
    if newest is None:
        return
    if not engine.portable:
        engine.load_sharded(str(newest))
        return
    checkpoint = load_checkpoint(newest)
    with torch.no_grad():
        for name, parameter in _trainable(drafter).items():
            parameter.copy_(checkpoint.tensors[name])
    engine.load_state({**checkpoint.state, "optimizer": checkpoint.objects["optimizer"]})
