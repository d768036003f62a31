"""The DeepSpeed engine: the same step however the global batch is split, and state that outlives ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cluster.engine import release_freed_memory
from cluster.engine_settings import DeepSpeedSettings, learning_rate_factor
from cluster.train_group import run_group


def training(steps: int) -> Callable[[dict[str, Any]], None]:
    """A training function that travels by value: three parameters, eight micro-batches a step dealt to the ranks."""

    def train(config: dict[str, Any]) -> None:
        import torch
        from torch import distributed

        from cluster.engine import build_engine
        from cluster.engine_settings import DeepSpeedSettings

        torch.manual_seed(0)
        torch.set_num_threads(1)
        module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
        module[0].bias.requires_grad_(False)
        settings = DeepSpeedSettings(zero_stage=config["zero_stage"], learning_rate=1e-2, max_grad_norm=0.5)
        engine = build_engine(module, settings, 6)
        first = 0
        if config["resume"] is not None:
            saved = torch.load(config["resume"], weights_only=True)
            engine.load(saved["state"])
            first = saved["step"]
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        for step in range(first, first + steps):
            generator = torch.Generator().manual_seed(step)
            batches = [torch.randn(3, 6, generator=generator) for _ in range(8)]
            engine.train_step(step, batches[rank::ranks], lambda x: (module(x) ** 2).sum() / 24)
        state = engine.state()
        if rank == 0:
            torch.save({"state": state, "step": first + steps}, config["output"])

    return train


def trained(folder: Path, name: str, *, ranks: int, stage: int, steps: int = 6, resume: Path | None = None) -> Path:
    output = folder / f"{name}.pt"
    config = {"zero_stage": stage, "output": str(output), "resume": None if resume is None else str(resume)}
    run_group(training(steps), config, num_workers=ranks, cpus_per_worker=0.5, storage_path=str(folder / name))
    return output


def weights(path: Path) -> dict[str, torch.Tensor]:
    state = torch.load(path, weights_only=True)["state"]
    return {name: tensor for name, tensor in state.items() if name.startswith("weight/")}


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_ranks_and_stages_take_the_same_steps_and_resume_one_another(tmp_path: Path) -> None:
    alone = trained(tmp_path, "alone", ranks=1, stage=0)
    halfway = trained(tmp_path, "halfway", ranks=2, stage=1, steps=3)
    resumed = trained(tmp_path, "resumed", ranks=1, stage=0, steps=3, resume=halfway)
    expected = weights(alone)
    assert set(expected) == {"weight/0.weight", "weight/2.weight", "weight/2.bias"}
    for name, tensor in weights(resumed).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-5, rtol=0)


def test_schedule_warms_up_and_falls() -> None:
    factors = [learning_rate_factor(step, 100, warmup_ratio=0.1) for step in range(100)]
    assert factors[:10] == sorted(factors[:10])
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert max(factors) == 1.0
    assert 0 <= factors[-1] < 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_stage": 4}, "zero_stage"),
        ({"precision": "bf16", "zero_stage": 0}, "zero_stage to 1"),
        ({"overrides": {"gradient_accumulation_steps": 2}}, "gradient_accumulation_steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeepSpeedSettings(**change)


def test_overrides_of_the_deepspeed_json_are_merged_key_by_key() -> None:
    overrides = {"zero_optimization": {"reduce_bucket_size": 1000}, "wall_clock_breakdown": True}
    plain = DeepSpeedSettings(zero_stage=2).to_json()
    config = DeepSpeedSettings(zero_stage=2, overrides=overrides).to_json()
    assert config["zero_optimization"] == {**plain["zero_optimization"], "reduce_bucket_size": 1000}
    assert config == {**plain, **config, "wall_clock_breakdown": True}
    assert plain["zero_optimization"]["stage"] == config["zero_optimization"]["stage"] == 2


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the C library gives nothing back on request")
def test_freed_pages_go_back_once_they_are_many():
    def resident() -> int:
        return psutil.Process().memory_info().rss

    blocks = [bytes(65_536) + bytes([index % 256]) for index in range(3_000)]
    kept = blocks[::10]  # what lies between two kept ones is no end of the heap that goes back by itself
    blocks.clear()
    before = resident()
    release_freed_memory(beyond=2**40)
    assert resident() > before - 2**25
    release_freed_memory(beyond=-(2**40))
    assert resident() < before - 2**26
    assert len(kept) == 300
