"""Train a small module on WORLD ranks in every ZeRO stage and leave the states in OUT: `engine_ranks.py WORLD OUT`.

The ranks are forked after the slow imports. Half of each training is saved, and taken up by the next call's world size.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn

from cluster.engine import TrainEngine, _import_deepspeed, build_engine
from cluster.engine_settings import DeepSpeedSettings

STEPS, HALF, MICRO_BATCHES, CLIP, RATE = 20, 10, 8, 0.5, 1e-2


class Net(nn.Module):
    """A loss as a forward pass; one layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
        self.side = nn.Linear(6, 5)  # declared last, used first: gradients come in another order than parameters
        self.head = nn.Linear(5, 1, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        y = self.head(self.side(x) + self.body(x)).float()
        return (y**2).sum() / (3 * MICRO_BATCHES)


def batches_of(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(3, 6, generator=generator) for _ in range(MICRO_BATCHES)]


def settings_of(stage: int, precision: str) -> DeepSpeedSettings:
    accumulating = precision == "bf16+"  # adds up in fp32
    return DeepSpeedSettings(
        zero_stage=stage,
        precision="bf16" if accumulating else precision,
        accumulate_fp32=accumulating,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        weight_decay=0.1,
        warmup_ratio=0.2,
    )


def train(engine: TrainEngine, first: int, last: int, rank: int, ranks: int) -> None:
    for step in range(first, last):
        mine = batches_of(step)[rank::ranks]
        result = engine.train_step(step, mine)
        assert not result.skipped


def save(engine: TrainEngine, path: Path) -> None:
    state = engine.state()
    assert bool(state) == (engine.rank == 0)
    if engine.rank == 0:
        torch.save(state, path)


def run(rank: int, ranks: int, out: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{out}/store-{ranks}", rank=rank, world_size=ranks)
    os.environ["LOCAL_RANK"] = str(rank)
    cases = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "bf16+")]
    for stage, precision in cases if ranks < 8 else [(1, "fp32")]:
        name = f"{precision}-stage{stage}"
        engine = build_engine(Net(), settings_of(stage, precision), STEPS)
        train(engine, 0, HALF, rank, ranks)
        save(engine, out / f"half-{ranks}-{name}.pt")
        train(engine, HALF, STEPS, rank, ranks)
        save(engine, out / f"full-{ranks}-{name}.pt")
        # Take up what half the ranks, and another stage, left; without optimizer steps before.
        if ranks > 1 and precision == "fp32":
            engine = build_engine(Net(), settings_of(stage, precision), STEPS)
            engine.load(torch.load(out / f"half-{ranks // 2}-fp32-stage{(stage + 1) % 4}.pt"))
            train(engine, HALF, STEPS, rank, ranks)
            save(engine, out / f"resumed-{ranks}-{name}.pt")
        uneven(rank, ranks, out, stage, precision)
    distributed.destroy_process_group()


def uneven(rank: int, ranks: int, out: Path, stage: int, precision: str) -> None:
    """All the work on the last rank, none elsewhere; and a step whose gradient is not finite there."""
    engine = build_engine(Net(), settings_of(stage, precision), STEPS)

    def dummy_loss() -> torch.Tensor:
        return engine.deepspeed(batches_of(7)[0])

    for step in range(3):
        engine.train_step(step, batches_of(step) if rank == ranks - 1 else [], dummy_loss=dummy_loss)
    before = engine.weights()
    bad = [batches_of(3)[0] * float("nan")] if rank == ranks - 1 else batches_of(3)[:1]
    assert engine.train_step(3, bad).skipped, f"stage {stage} in {precision}"
    after = engine.weights()
    assert all(torch.equal(before[key], after[key]) for key in before)
    save(engine, out / f"uneven-{ranks}-{precision}-stage{stage}.pt")


def main(ranks: int, out: Path) -> int:
    torch.set_num_threads(1)
    _import_deepspeed()
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run(rank, ranks, out)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])))
