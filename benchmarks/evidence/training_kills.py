"""Kill one training at random moments, in checkpoint writing among them, finish it, compare it with an undisturbed one.

    python benchmarks/evidence/training_kills.py --kills 30 --output docs/evidence/training-kill-sweep.json

1. Train a toy undisturbed, with a checkpoint after every second step.
2. Start another training of the same, and `kill -9` it at moments drawn uniformly over its steps, or while it starts;
   every third time while a checkpoint is being written. Every second start writes checkpoints in the background.
3. After each kill: the newest complete checkpoint is no older than before, and the log is at most the steps of one
   checkpoint interval (two where they are written in the background) ahead of it.
4. Finish it; weights, optimizer state and log are those of the undisturbed training, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from result_file import keep
from toy_training import Toy, start, train

from pipelines.training.log import LOG, VALIDATION, read_log
from pipelines.training.task import TrainingTask
from storage.checkpoints import complete_checkpoints, load_checkpoint, newest_checkpoint

EVERY = 2
TIMES = ("slots_per_second", "tokens_per_second", "seconds_per_step", "loader_wait_share", "memory_bytes")


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What a kill met: the newest complete checkpoint before the start and after the kill, and the log's last step."""

    after_seconds: float
    writing: bool  # a checkpoint was being written
    in_background: bool
    checkpoint_before: int
    checkpoint_after: int
    logged: int

    @property
    def sound(self) -> bool:
        lost = self.logged - self.checkpoint_after
        return self.checkpoint_after >= self.checkpoint_before and lost <= EVERY * (2 if self.in_background else 1)


def newest_step(task: TrainingTask) -> int:
    complete = complete_checkpoints(task.output)
    return complete[-1].step if complete else 0


def last_line(task: TrainingTask) -> int:
    lines = read_log(Path(task.output, LOG))
    return lines[-1]["step"] if lines else 0


def is_writing(output: Path) -> bool:
    """Whether a checkpoint has begun and is not complete."""
    folders = [path for path in output.iterdir() if path.is_dir() and "step-" in path.name]
    return any(path.name.endswith(".writing") or not (path / "COMPLETE.json").exists() for path in folders)


def kill(task: TrainingTask, at_step: int, seconds: float, *, in_writing: bool) -> Kill:
    """Start the training and kill it so long after its log has reached a step, or at the next checkpoint after that."""
    output, before, began = Path(task.output), newest_step(task), time.monotonic()
    (child,) = start(task)

    def wait_until(reached: Callable[[], bool]) -> None:
        while not reached():
            assert os.waitpid(child, os.WNOHANG) == (0, 0), (output / "rank-0.err").read_text()[-3000:]
            time.sleep(0.0005)

    wait_until(lambda: last_line(task) >= at_step)
    deadline, nearly_done = time.monotonic() + seconds, 0.95 * task.total_steps
    wait_until(lambda: time.monotonic() >= deadline or last_line(task) >= nearly_done)
    if in_writing:
        wait_until(lambda: is_writing(output))
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == -signal.SIGKILL, Path(task.output, "rank-0.err").read_text()[-3000:]
    return Kill(
        after_seconds=round(time.monotonic() - began, 3),
        writing=is_writing(Path(task.output)),
        in_background=task.settings.train.checkpoint_in_background,
        checkpoint_before=before,
        checkpoint_after=newest_step(task),
        logged=last_line(task),
    )


def final_state(task: TrainingTask) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(task.output)
    assert newest is not None
    return load_checkpoint(newest).tensors


def logged(task: TrainingTask, name: str) -> list[dict[str, Any]]:
    lines = read_log(Path(task.output, name))
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def sweep(folder: Path, kills: int, seed: int, steps: int) -> dict[str, Any]:
    """The result as JSON values; `passed` says whether everything held."""
    toy, random = Toy(folder), Random(seed)
    options: dict[str, Any] = {"max_steps": steps, "num_train_epochs": 1e6, "save_steps": EVERY, "eval_steps": 10}
    reference = toy.task("undisturbed", **options)
    began = time.monotonic()
    train(reference)
    fresh = time.monotonic() - began
    per_step = read_log(Path(reference.output, LOG))[-1]["seconds_per_step"]
    setup = max(0.5, fresh - per_step * steps)
    found = []
    for number, place in enumerate(sorted(random.uniform(0, 0.9 * steps) for _ in range(kills))):
        task = toy.task("killed", checkpoint_in_background=number % 2 == 1, **options)
        # Where an earlier kill came later than this place, it meets the start of the training.
        seconds = random.uniform(0, setup if last_line(task) >= place else per_step)
        found.append(kill(task, int(place), seconds, in_writing=number % 3 == 2))
        print(found[-1], flush=True)
    task = toy.task("killed", **options)
    train(task)
    ours, theirs = final_state(task), final_state(reference)
    checks = {
        "every_kill_left_the_newest_checkpoint": all(one.sound for one in found),
        "some_kills_hit_a_checkpoint_in_writing": any(one.writing for one in found),
        "some_kills_hit_training_after_a_checkpoint": any(one.checkpoint_after for one in found),
        "weights_and_optimizer_bit_equal": ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in theirs),
        "log_equal": logged(task, LOG) == logged(reference, LOG),
        "held_out_log_equal": logged(task, VALIDATION) == logged(reference, VALIDATION),
        "no_leftovers": not is_writing(Path(task.output)),
    }
    return {
        "passed": all(checks.values()),
        "checks": checks,
        "seed": seed,
        "steps": steps,
        "save_steps": EVERY,
        "kills": [asdict(one) for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("docs/evidence/training-kill-sweep.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = sweep(Path(folder), arguments.kills, arguments.seed, arguments.steps)
    keep(result, arguments.output, arguments.seed)
    print(json.dumps(result["checks"], indent=1), f"in {arguments.output}", sep="\n")
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
