"""A group of training workers on Ray Train, restarted from its last checkpoint when a worker is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any


class TrainingFailed(RuntimeError):
    """Training stopped for good; the message holds the worker's error."""


def run_group(
    train_fn: Callable[[dict[str, Any]], None],
    config: Mapping[str, Any],
    *,
    num_workers: int,
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    max_failures: int = 3,
    storage_path: str,
    name: str = "group",
) -> None:
    """Run `train_fn(config)` on `num_workers` ranks with a torch process group (nccl on GPUs, gloo elsewhere).

    `train_fn` finds its own last checkpoint when it starts: after a worker is lost the whole group starts again, at
    most `max_failures` times.

    Raises:
        TrainingFailed: a worker raised, or was lost more often than that.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    resources: dict[str, float] = {"CPU": cpus_per_worker}
    if use_gpu:
        resources["GPU"] = 1
    trainer = TorchTrainer(
        train_fn,
        train_loop_config=dict(config),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu, resources_per_worker=resources),
        run_config=RunConfig(
            name=name,
            storage_path=os.path.abspath(storage_path),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    try:
        result = trainer.fit()
    except Exception as error:  # Ray wraps the worker's error in classes of its own, which differ between releases
        raise TrainingFailed(_cause(error)) from error
    if getattr(result, "error", None) is not None:
        raise TrainingFailed(_cause(result.error)) from result.error


def _cause(error: BaseException | None) -> str:
    """The worker's own message out of Ray's wrapping."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, failure = next(iter(failures.items()))
        return f"rank {rank}: {failure}"
    return str(error)
