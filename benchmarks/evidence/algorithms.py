"""DSpark (Markov and RNN head), DFlash and EAGLE-3 at equal steps: the paper's Table 1 in small, by `dspark compare`.

1. Take the conversations and the cache of a finished run, and its settings; nothing of it is changed.
2. Train each drafter for each seed, by the product's own training loop in this process.
3. Compare the four of each seed at temperature 0 and 1 (`WORK/compare-SEED`), and keep what the comparison says beside
   the paper's ratios.
4. With `--results`, write the table between the marks in that Markdown file.

What is done is not done again: the same command goes on where it stopped.

    python benchmarks/evidence/algorithms.py configs/quickstart.yaml [KEY=VALUE ...] --work FOLDER --output OUT.json
        [--seeds 0 1] [--prompts 24] [--results docs/results.md]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from pipelines.compare import compare, comparison_settings, find_contenders
from pipelines.progress import Reporter
from pipelines.reporting.markdown import markdown_table
from pipelines.settings import load_settings
from pipelines.stages.train import count_steps
from pipelines.target_spec import resolve_target
from pipelines.training.loop import FINAL, train_rank
from pipelines.training.task import TrainingTask
from storage.cache.target_cache import TargetCache

ALGORITHMS = {
    "dspark-markov": [],
    "dspark-rnn": ["drafter.markov_head_type=rnn", "drafter.draft_vocab_size=null"],  # it drafts from all tokens
    "dflash": ["drafter.algorithm=dflash"],
    "eagle3": ["drafter.algorithm=eagle3"],
}
# By how much the paper's DSpark is ahead in accepted length, mean of domains, over three Qwen3 targets.
PAPER = {"dflash": "16 to 18%", "eagle3": "27 to 31%"}
BEGIN, END = "<!-- algorithms: generated -->", "<!-- algorithms: end -->"


def train(options: argparse.Namespace, name: str, seed: int) -> Path:
    """The drafter's folder; it is trained unless it is there. The seed decides its start, its batches and anchors."""
    output = options.work / "drafters" / f"{name}-{seed}"
    if not (output / FINAL).exists():
        settings = load_settings(options.config, [*ALGORITHMS[name], *options.override, f"run.seed={seed}"])
        cache = str(Path(settings.run.directory, "cache"))
        steps = count_steps(settings, len(TargetCache.open(cache)))
        output.mkdir(parents=True, exist_ok=True)
        task = TrainingTask(
            settings=settings,
            spec=resolve_target(settings),
            cache=cache,
            output=str(output),
            total_steps=steps,
            threads=options.threads,
        )
        train_rank({"task": task})
        for step in output.glob("step-*"):
            shutil.rmtree(step)
    return Path(output / FINAL)


def table(found: dict[str, Any]) -> str:
    """A row a drafter, seed and temperature: accepted length, DSpark (Markov) against it, the paper's ratio."""
    rows = []
    for seed, report in found["by_seed"].items():
        gains = {(row["drafter"], row["temperature"]): row for row in report["gains"] if row["domain"] == "mean"}
        for row in report["accepted_length"]:
            if row["domain"] == "mean":
                gain = gains.get((row["drafter"], row["temperature"]))
                interval = (
                    ""
                    if gain is None or gain["low"] is None
                    else (f" ({100 * gain['low']:+.1f} to {100 * gain['high']:+.1f})")
                )
                rows.append(
                    [
                        row["drafter"],
                        seed,
                        f"{row['temperature']:g}",
                        f"{row['value']:.2f}",
                        "–" if gain is None else f"{100 * gain['value']:+.1f}%{interval}",
                        PAPER.get(row["drafter"], "–"),
                    ]
                )
    head = [
        "drafter",
        "seed",
        "temperature",
        "accepted length",
        "against dspark-markov (95%)",
        "paper: DSpark ahead by",
    ]
    told = [f"- Seed {seed}. {text}" for seed, report in found["by_seed"].items() for text in report["account"]]
    return "\n".join([*markdown_table(head, rows), "", *told])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a settings file whose run has a finished cache")
    parser.add_argument("override", nargs="*", metavar="KEY=VALUE", help="settings of every drafter")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"paper": PAPER, "by_seed": {}}
    for seed in options.seeds:
        words = [f"{name}={train(options, name, seed)}" for name in ALGORITHMS]
        contenders = find_contenders(words)
        place = str(options.work / f"compare-{seed}")
        settings = comparison_settings(
            contenders, options.config, [*options.override, "evaluate.temperatures=[0.0,1.0]"], place
        )
        found["by_seed"][str(seed)] = compare(contenders, settings, Reporter(), prompts=options.prompts)
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if options.results is not None:
        text = options.results.read_text()
        before, after = text.partition(BEGIN)[0], text.partition(END)[2]
        options.results.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    main()
