"""What a rank of the training group gets, and what its settings become: drafter, engine, steps."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.engine_settings import DeepSpeedSettings
from dspark.config import DrafterConfig
from pipelines.settings import Settings
from pipelines.target_spec import TargetSpec
from pipelines.training.loader import Rows, StepPlan
from storage.cache.target_cache import TargetCache


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """What a rank needs; picklable."""

    settings: Settings
    spec: TargetSpec
    cache: str
    output: str
    total_steps: int
    threads: int  # of torch, in each rank

    def open_cache(self) -> TargetCache:
        """The cache; shards of a remote one come through the bounded local copy."""
        train = self.settings.train
        return TargetCache.open(self.cache, local_copy=train.local_copy, local_copy_bytes=train.local_copy_bytes)


def drafter_config(settings: Settings, spec: TargetSpec) -> DrafterConfig:
    """The drafter that these settings ask for, for this target."""
    given = {"mask_token_id": spec.mask_token_id, "target_layer_ids": spec.target_layer_ids}
    trained = {"num_anchors": settings.train.num_anchors, "position_decay": settings.train.loss.position_decay}
    return DrafterConfig.for_target(spec.text_config, **(settings.drafter.parts | given | trained))


def engine_settings(settings: Settings) -> DeepSpeedSettings:
    train = settings.train
    return DeepSpeedSettings(
        learning_rate=train.learning_rate,
        warmup_ratio=train.warmup_ratio,
        lr_scheduler_type=train.lr_scheduler_type,
        optimizer=train.optimizer,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        precision="bf16" if train.precision == "bfloat16" else "fp32",
        accumulate_fp32=train.accumulate_float32,
        zero_stage=train.zero_stage,
        overrides=train.deepspeed,
    )


def step_plan(settings: Settings, rows: Rows, total_steps: int, first_anchor: int = 0) -> StepPlan:
    train = settings.train
    return StepPlan(
        rows=rows,
        seed=settings.run.seed,
        global_batch_size=train.global_batch_size,
        num_anchors=train.num_anchors,
        anchor_rule=train.anchor_rule,
        first_anchor=first_anchor,
        block_size=settings.drafter.block_size,
        position_decay=train.loss.position_decay if train.loss.config.slot_weighting is None else None,
        max_tokens_per_micro_batch=train.max_tokens_per_micro_batch,
        total_steps=total_steps,
        shuffle_window=train.shuffle_window,
    )
