"""What a training engine is made from: the settings, the DeepSpeed JSON that they become, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, get_args

from cluster.errors import ClusterError

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "bf16"]
Schedule = Literal["cosine", "wsd", "constant"]
OptimizerName = Literal["adamw", "adam", "nadam", "radam", "sgd"]

# The engine counts micro-batches and normalises by itself; these are not the user's to change.
_RESERVED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "managed_gradient_accumulation",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "prescale_gradients",
    "gradient_predivide_factor",
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """Precision, sharding, optimizer and schedule of a training engine.

    `precision="bf16"` computes in bfloat16 and keeps fp32 master weights (ZeRO stage 1 and up);
    `accumulate_fp32` sums the micro-batches' gradients in fp32 as well (stage 1). `max_grad_norm=0` does not clip.
    The optimizers compile nothing. `overrides` are laid over the generated DeepSpeed JSON, key by key.
    """

    zero_stage: int = 1
    precision: Precision = "fp32"
    accumulate_fp32: bool = False
    max_grad_norm: float = 1.0
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 6e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.9
    epsilon: float = 1e-8
    lr_scheduler_type: Schedule = "cosine"
    warmup_ratio: float = 0.04
    final_ratio: float = 0.0
    decay_ratio: float = 0.2
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
            ("zero_stage", self.zero_stage, (0, 1, 2, 3)),
            ("precision", self.precision, get_args(Precision)),
            ("optimizer", self.optimizer, get_args(OptimizerName)),
            ("lr_scheduler_type", self.lr_scheduler_type, get_args(Schedule)),
        )
        for name, value, allowed in choices:
            if value not in allowed:
                raise ClusterError(f"{name} = {value!r}: choose one of {', '.join(map(str, allowed))}")
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ClusterError(
                "precision = bf16 needs the fp32 master weights that ZeRO keeps: set zero_stage to 1, or precision "
                "to fp32"
            )
        if self.accumulate_fp32 and (self.precision, self.zero_stage) != ("bf16", 1):
            raise ClusterError(
                f"accumulate_fp32 goes with precision = bf16 at zero_stage = 1, not with {self.precision} "
                f"at stage {self.zero_stage}; drop it (fp32 accumulates in fp32 anyway) or change the stage"
            )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0 and self.max_grad_norm >= 0):
            raise ClusterError(
                f"learning_rate = {self.learning_rate} must be positive, max_grad_norm = {self.max_grad_norm} zero (no "
                "clipping) or positive"
            )
        if reserved := sorted(set(self.overrides) & set(_RESERVED)):
            raise ClusterError(
                f"DeepSpeed overrides may not set {', '.join(reserved)}: the engine normalises and clips by itself; "
                "use the training settings of the same meaning"
            )

    def require_known_keys(self) -> None:
        """Raises ClusterError for overrides that DeepSpeed refuses, or does not read in its configuration."""
        if not self.overrides:
            return
        from deepspeed.runtime.config import DeepSpeedConfig

        config = _Watched(self.to_json())
        try:
            DeepSpeedConfig(config)
        except (ValueError, TypeError, AssertionError, AttributeError, KeyError) as error:  # what its sections raise
            raise ClusterError(f"DeepSpeed refuses the overrides {dict(self.overrides)}: {error}") from error
        known = sorted(config.looked_up - set(_RESERVED))
        for key in self.overrides:
            if key not in config.looked_up:
                close = get_close_matches(key, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"it knows {', '.join(known)}"
                raise ClusterError(f"DeepSpeed has no top-level key {key!r}; {hint}")

    def to_json(self) -> dict[str, Any]:
        """The DeepSpeed configuration."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,  # step() ends an accumulation, however many micro-batches it had
            "gradient_clipping": self.max_grad_norm if self.zero_stage else 0.0,  # stage 0: see `_Guarded`
            "zero_optimization": {"stage": self.zero_stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": None,
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
            if self.accumulate_fp32:
                config["data_types"] = {"grad_accum_dtype": "fp32"}
        return _laid_over(config, self.overrides)

    def learning_rate_at(self, step: int, total_steps: int) -> float:
        """The learning rate of step `step` (0-based) for parameters whose group has no `lr_scale`."""
        return self.learning_rate * learning_rate_factor(
            step,
            total_steps,
            schedule=self.lr_scheduler_type,
            warmup_ratio=self.warmup_ratio,
            final_ratio=self.final_ratio,
            decay_ratio=self.decay_ratio,
        )

    def make_optimizer(self, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer over parameter groups ({"params": [...]} and, as wanted, "lr_scale", "weight_decay")."""
        import torch

        common: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        adam = {"betas": self.betas, "eps": self.epsilon}
        kinds: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
            "adamw": (torch.optim.AdamW, {**adam, "fused": True}),
            "adam": (torch.optim.Adam, {**adam, "fused": True}),
            "nadam": (torch.optim.NAdam, {**adam, "decoupled_weight_decay": True}),
            "radam": (torch.optim.RAdam, {**adam, "decoupled_weight_decay": True}),
            "sgd": (torch.optim.SGD, {"momentum": self.momentum, "nesterov": self.momentum > 0}),
        }
        kind, options = kinds[self.optimizer]
        if self.zero_stage == 0:
            kind = type(f"Guarded{kind.__name__}", (_Guarded, kind), {"max_grad_norm": self.max_grad_norm})
        return kind([dict(group) for group in groups], **common, **options)


class _Watched(dict[str, Any]):
    """A DeepSpeed configuration that notes which keys were looked up in it."""

    def __init__(self, values: Mapping[str, Any], looked_up: set[str] | None = None) -> None:
        super().__init__(values)
        self.looked_up: set[str] = set() if looked_up is None else looked_up

    def __copy__(self) -> _Watched:
        return _Watched(self, self.looked_up)

    def __contains__(self, key: object) -> bool:
        self.looked_up.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.looked_up.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.looked_up.add(key)
        return super().get(key, default)

    def keys(self) -> Any:  # of which DeepSpeed asks what they contain
        return self


class _Guarded:
    """Clipping, the gradient's norm and skipping of steps that are not finite: ZeRO has them, stage 0 has not."""

    max_grad_norm = 0.0
    overflow = False
    _global_grad_norm = 0.0

    def step(self, closure: None = None) -> None:
        import torch

        optimizer: Any = self
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        self._global_grad_norm = float(norm)
        self.overflow = not math.isfinite(self._global_grad_norm)
        if self.overflow:
            return
        if self.max_grad_norm > 0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
        super().step(closure)  # type: ignore[misc]


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` wins, mappings are merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _laid_over(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def learning_rate_factor(
    step: int,
    total_steps: int,
    *,
    schedule: Schedule = "cosine",
    warmup_ratio: float = 0.04,
    final_ratio: float = 0.0,
    decay_ratio: float = 0.2,
) -> float:
    """The share of the peak learning rate that step `step` (0-based, of `total_steps`) uses.

    The first `warmup_ratio` of the steps rise linearly to 1. Then "cosine" falls to `final_ratio` along half a cosine;
    "wsd" (warm-up, stable, decay) stays at 1 and falls to `final_ratio` linearly over the last `decay_ratio` of the
    steps; "constant" stays.
    """
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        share = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * share))
    if schedule == "wsd":
        decay = max(1, math.ceil(decay_ratio * total_steps))
        share = min(1.0, max(0.0, (step - (total_steps - decay)) / decay))
        return 1.0 - (1.0 - final_ratio) * share
    raise ClusterError(f"schedule {schedule!r}: choose cosine, wsd or constant")
