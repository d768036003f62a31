"""DeepSpeed, set up from a few settings, with gradients that are summed and never averaged.

The caller's losses are already divided by the weight of the whole global batch, so the gradient of a step is the plain
sum over micro-batches and ranks. DeepSpeed averages over ranks: `Engine.backward` multiplies the loss by their number.
Every micro-batch but the last of a step is inside an accumulation boundary; a step may have any number of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class DeepSpeedSettings:
    """`overrides` are laid over the generated DeepSpeed JSON, key by key."""

    total_steps: int
    learning_rate: float
    warmup_ratio: float = 0.04
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: float = 0.0
    clip: float = 1.0
    precision: Precision = "float32"
    zero_stage: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.zero_stage <= 3:
            raise ValueError(f"zero_stage is {self.zero_stage}; allowed: 0, 1, 2, 3 (option `train.zero_stage`)")
        if self.total_steps < 1:
            raise ValueError(f"total_steps is {self.total_steps}; a training has one step at least")


def learning_rate_factor(step: int, settings: DeepSpeedSettings) -> float:
    """Factor on the learning rate in the 0-based step: linear warm-up, then cosine to 0, constant, or WSD.

    WSD (warm-up, stable, decay) falls linearly to 0 over the last fifth.
    """
    total = settings.total_steps
    warmup = math.ceil(settings.warmup_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "wsd":
        decay = max(math.ceil(total / 5), 1)
        return min(1.0, (total - step) / decay)
    return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


def deepspeed_json(settings: DeepSpeedSettings, ranks: int) -> dict[str, Any]:
    """What `deepspeed.initialize` gets. Micro-batches are the caller's packs, so their sizes mean nothing here."""
    values: dict[str, Any] = {
        "train_batch_size": ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip,
        "zero_optimization": {"stage": settings.zero_stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }
    if settings.precision == "bfloat16":
        values["bf16"] = {"enabled": True}
    return _merged(values, settings.overrides)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def make_optimizer(parameters: Iterable[nn.Parameter], settings: DeepSpeedSettings) -> torch.optim.Optimizer:
    """A PyTorch optimizer: DeepSpeed's own would compile for minutes on a CPU."""
    chosen = list(parameters)
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(chosen, lr=rate, momentum=0.9, weight_decay=decay)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(chosen, lr=rate, betas=(0.9, 0.95), weight_decay=decay)


class Engine:
    """A module whose trainable parameters DeepSpeed owns. One `step` is: `backward` for each pack, then `step`."""

    def __init__(self, module: nn.Module, settings: DeepSpeedSettings) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
        import deepspeed
        import deepspeed.ops

        # Skips the compilation of a shared-memory kernel that takes a minute and that gloo does not need.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        from deepspeed import comm

        if not comm.is_initialized():
            deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
        self.settings = settings
        self.rank, self.ranks = comm.get_rank(), comm.get_world_size()
        parameters = [p for p in module.parameters() if p.requires_grad]
        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = make_optimizer(parameters, settings)
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            model_parameters=parameters,
            optimizer=self.optimizer,
            config=deepspeed_json(settings, self.ranks),
        )
        self.module: nn.Module = self.deepspeed.module
        self.device = self.deepspeed.device
        self.steps = 0
        self.skipped = 0

    @property
    def learning_rate(self) -> float:
        """Of the step to come."""
        return self.settings.learning_rate * learning_rate_factor(self.steps, self.settings)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add a pack's gradient. `last` marks the final pack of the step, at which ranks exchange theirs."""
        self.deepspeed.set_gradient_accumulation_boundary(last)
        self.deepspeed.backward(loss * self.ranks)

    def step(self) -> float:
        """Clip, update, and return the gradient's norm. Nothing is updated when it is not finite."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = self.learning_rate
        norm = self._gradient_norm()
        if not math.isfinite(norm):
            self.skipped += 1
            self.deepspeed.zero_grad()
            if hasattr(self.deepspeed.optimizer, "zero_grad"):
                self.deepspeed.optimizer.zero_grad()
        else:
            self.deepspeed.step()
        self.steps += 1
        return norm

    def _gradient_norm(self) -> float:
        """Before clipping. Where ranks hold whole gradients it is computed here; else DeepSpeed's of the last step."""
        if self.settings.zero_stage == 0 and self.settings.precision == "float32":
            norms = [p.grad.norm() for p in self.names if p.grad is not None]
            return float(torch.stack(norms).norm()) if norms else 0.0
        norm = self.deepspeed.get_global_grad_norm()
        return 0.0 if norm is None else float(norm)

    @property
    def portable(self) -> bool:
        """Whether every rank holds the whole state, so that a checkpoint does not depend on the number of ranks."""
        return self.settings.zero_stage == 0 and self.settings.precision == "float32"

    def state(self) -> dict[str, Any]:
        """Optimizer state by parameter name, for any number of ranks; only where `portable`."""
        states = {name: dict(self.optimizer.state[p]) for p, name in self.names.items() if p in self.optimizer.state}
        return {"optimizer": states, "steps": self.steps, "skipped": self.skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave; parameters are loaded by the caller."""
        by_name = {name: p for p, name in self.names.items()}
        missing = sorted(set(by_name) - set(state["optimizer"])) if state["steps"] > state["skipped"] else []
        if missing:
            raise ValueError(f"the checkpoint lacks the optimizer state of {', '.join(missing[:5])}")
        for name, values in state["optimizer"].items():
            self.optimizer.state[by_name[name]] = {key: _clone(value) for key, value in values.items()}
        self.steps, self.skipped = int(state["steps"]), int(state["skipped"])

    def save_sharded(self, folder: str) -> None:
        """Every rank writes its part of DeepSpeed's own checkpoint; where not `portable`."""
        extra = {"steps": self.steps, "skipped": self.skipped}
        self.deepspeed.save_checkpoint(folder, tag="state", client_state=extra, exclude_frozen_parameters=True)

    def load_sharded(self, folder: str) -> None:
        """Take up a checkpoint of `save_sharded`, on as many ranks as wrote it."""
        path, extra = self.deepspeed.load_checkpoint(folder, tag="state", load_module_strict=False)
        if path is None:
            raise ValueError(f"DeepSpeed could not read the checkpoint in {folder}")
        self.steps, self.skipped = int(extra["steps"]), int(extra["skipped"])

    def sum_over_ranks(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Each value added up over all ranks; every rank must have the same keys or none."""
        if self.ranks == 1:
            return dict(sums)
        from torch import distributed

        parts: list[dict[str, float]] = [{} for _ in range(self.ranks)]
        distributed.all_gather_object(parts, dict(sums))
        keys = {key for part in parts for key in part}
        return {key: math.fsum(part.get(key, 0.0) for part in parts) for key in keys}

    def barrier(self) -> None:
        from torch import distributed

        if self.ranks > 1:
            distributed.barrier()


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
