"""Which start learns fastest: random weights or the target's own top layer, for every kind of drafter.

1. Take a run's settings and its finished cache; hold some conversations out, the same for all.
2. Train each kind from each start: the same anchors, micro-batches and schedule, by the settings but for the steps.
3. Measure the expected accepted length on the held-out conversations before, during and after.
4. Print a table, and write it where `--output` says.

    python benchmarks/starting_weights.py configs/quickstart.yaml [--steps 80] [--held-out 24] [--output FILE]

The bigrams that start a Markov head belong to the start from the target.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

import torch

from cluster.engine_settings import learning_rate_factor
from dspark.losses.fused_loss import BlockLoss
from dspark.losses.losses import add_sums, metrics_of
from pipelines.settings import Settings, load_settings
from pipelines.target_spec import resolve_target
from pipelines.training.loader import MicroBatchReader, Rows
from pipelines.training.model import make_drafter, teacher_normalizers
from pipelines.training.task import TrainingTask, step_plan
from storage.cache.target_cache import TargetCache

STARTS = ("random", "target")
KINDS = ("dspark", "dflash", "eagle3")


def settings_of(config: str, kind: str, start: str) -> Settings:
    """The configuration with another kind of drafter, which brings its own loss."""
    return load_settings(config, [f"drafter.algorithm={kind}", f"drafter.initial_weights={start}"])


def train(settings: Settings, cache_folder: str, *, steps: int, held_out: int) -> list[dict[str, float]]:
    """Held-out figures before, at a quarter, half, and the end of the training."""
    cache = TargetCache.open(cache_folder)
    spec = resolve_target(settings)
    task = TrainingTask(
        settings=settings,
        spec=spec,
        cache=cache_folder,
        output="",
        total_steps=steps,
        threads=torch.get_num_threads(),
    )
    trained, kept = Rows.of(cache).split(held_out)
    plan, judge = step_plan(settings, trained, steps), step_plan(settings, kept, 1)
    module = BlockLoss(make_drafter(task, cache), settings.train.loss.config)
    module.take_head()
    reader = MicroBatchReader(
        dtype=torch.float32, block_size=plan.block_size, log_normalizers=teacher_normalizers(module)
    )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.train.learning_rate, weight_decay=0.0)
    marks, figures = {0, steps // 4, steps // 2, steps}, []

    def judged() -> dict[str, float]:
        sums: dict[str, float] = {}
        with torch.no_grad():
            for place in range(judge.steps_in_epoch):
                for planned in judge.step(place).micro_batches:
                    sums = add_sums(sums, module(reader(cache, planned), 1.0)[1])
        return metrics_of(sums)

    for number in range(steps + 1):
        if number in marks:
            found = judged()
            figures.append(
                {"step": number, "tau": found["tau_probabilistic"], "acceptance_at_first_slot": found["acceptance@0"]}
            )
        if number == steps:
            break
        step = plan.step(number)
        optimizer.zero_grad()
        for planned in step.micro_batches:
            module(reader(cache, planned), step.normalizer)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.train.max_grad_norm or torch.inf)
        for group in optimizer.param_groups:
            factor = learning_rate_factor(number, steps, warmup_ratio=settings.train.warmup_ratio)
            group["lr"] = settings.train.learning_rate * factor
        optimizer.step()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a settings file")
    parser.add_argument("--cache", help="a finished target cache; default: that of the settings' run")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--held-out", type=int, default=24, help="conversations")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cache = options.cache or str(Path(load_settings(options.config).run.directory, "cache"))
    rows = []
    print("| drafter | start | step | expected accepted length | acceptance at the first slot | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for kind in options.kinds:
        for start in STARTS:
            began = time.perf_counter()
            settings = settings_of(options.config, kind, start)
            for found in train(settings, cache, steps=options.steps, held_out=options.held_out):
                seconds = round(time.perf_counter() - began, 1)
                rows.append({"drafter": kind, "start": start, **found})
                print(
                    f"| {kind} | {start} | {found['step']} | {found['tau']:.3f} "
                    f"| {found['acceptance_at_first_slot']:.3f} | {seconds} |",
                    flush=True,
                )
    if options.output is not None:
        record = {
            "command": shlex.join(["python", "benchmarks/starting_weights.py", *sys.argv[1:]]),
            "measured": time.strftime("%Y-%m-%d", time.gmtime()),
            "steps": options.steps,
            "held_out_conversations": options.held_out,
            "figures": rows,
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
