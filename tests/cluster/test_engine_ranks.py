"""Steps depend on neither ranks, accumulation nor ZeRO stage, and states move between them; against a plain loop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import engine_ranks
import pytest
import torch

from cluster.engine_settings import learning_rate_factor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What 1, 2, 4 and 8 ranks with 8, 4, 2 and 1 micro-batches each leave behind."""
    out = tmp_path_factory.mktemp("states")
    for ranks in (1, 2, 4, 8):
        done = subprocess.run(
            [sys.executable, engine_ranks.__file__, str(ranks), str(out)], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return out


def plain_training(steps: int) -> dict[str, torch.Tensor]:
    """AdamW over whole batches with clipping and the schedule, and nothing else."""
    net = engine_ranks.Net()
    names = {name: p for name, p in net.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(names.values(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = engine_ranks.RATE * learning_rate_factor(step, engine_ranks.STEPS, warmup_ratio=0.2)
        optimizer.zero_grad()
        torch.stack([net(batch) for batch in engine_ranks.batches_of(step)]).sum().backward()
        torch.nn.utils.clip_grad_norm_(names.values(), engine_ranks.CLIP)
        optimizer.step()
    return {f"weight/{name}": p.detach() for name, p in names.items()}


def farthest(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert {key for key in state if key.startswith("weight/")} == set(expected)
    return max(float((state[key] - value).abs().max()) for key, value in expected.items())


def load(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt", weights_only=True)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_split_takes_the_steps_of_a_plain_loop(states: Path, ranks: int):
    expected = plain_training(engine_ranks.STEPS)
    for stage in STAGES if ranks < 8 else (1,):
        assert farthest(load(states, f"full-{ranks}-fp32-stage{stage}"), expected) < 1e-6


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_half_the_ranks_of_another_stage_are_taken_up(states: Path, ranks: int):
    expected = plain_training(engine_ranks.STEPS)
    for stage in STAGES if ranks < 8 else (1,):
        assert farthest(load(states, f"resumed-{ranks}-fp32-stage{stage}"), expected) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bf16_keeps_fp32_masters_that_follow_the_plain_loop(states: Path, ranks: int):
    expected = plain_training(engine_ranks.STEPS)
    for name in ("bf16-stage1", "bf16-stage2", "bf16-stage3", "bf16+-stage1"):
        state = load(states, f"full-{ranks}-{name}")
        assert farthest(state, expected) < 0.01
        assert any(not torch.equal(w, w.bfloat16().float()) for k, w in state.items() if k.startswith("weight/"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_without_work_and_skipped_steps_change_nothing(states: Path, ranks: int):
    """Three steps with all the work on the last rank; the fourth, not finite there, was skipped everywhere."""
    expected = plain_training(3)
    for stage in STAGES:
        assert farthest(load(states, f"uneven-{ranks}-fp32-stage{stage}"), expected) < 1e-6
    for name in ("bf16-stage1", "bf16-stage2", "bf16-stage3", "bf16+-stage1"):
        assert farthest(load(states, f"uneven-{ranks}-{name}"), expected) < 0.01


def test_the_state_holds_what_is_trained_and_nothing_frozen(states: Path):
    state = load(states, "half-2-fp32-stage2")
    trained = {f"{layer}.{kind}" for layer in ("body.0", "body.2", "side") for kind in ("weight", "bias")}
    assert set(state) == {f"{key}/{name}" for key in ("weight", "exp_avg", "exp_avg_sq") for name in trained} | {
        "scalar/step"
    }
    assert float(state["scalar/step"]) == engine_ranks.HALF
