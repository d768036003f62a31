"""Which training recipe gives the longest drafts: one setting changed at a time, all else the same.

1. Take a run's conversations, cache and settings.
2. Train a drafter for each recipe and seed, by the product's own training loop in this process.
3. Decode the evaluation prompts with each, at every temperature of the settings; rounds are kept as an evaluation keeps
   them.
4. Compare each recipe with the first: mean accepted length of the domains, paired by prompt, seeds pooled, with a 95%
   interval from drawing prompts of each domain again.

What is done is not done again: the same command goes on where it stopped.

    python benchmarks/recipes.py configs/quickstart.yaml [KEY=VALUE ...] --output OUT.json
        [--recipes NAME ...] [--seeds 0 1] [--prompts 48 48] [--threads 1] [--work runs/recipes]
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.data.conversations import read_prompts
from pipelines.evaluation.round_log import EventLog, columns, read_events
from pipelines.settings import load_settings
from pipelines.stages.decoding import FULL, DecodePlan, DecodeWorker, work_items
from pipelines.stages.train import count_steps
from pipelines.target_spec import resolve_target
from pipelines.training.loop import FINAL, train_rank
from pipelines.training.task import TrainingTask
from storage.cache.target_cache import TargetCache

SOFT_CE = "train.loss.ce=0 train.loss.l1=0 train.loss.soft_ce=1"
RESIDUAL = "drafter.context_residual=true"
RECIPES = {
    "default": "",
    "soft cross-entropy": SOFT_CE,
    "context residual": RESIDUAL,
    "context residual, soft cross-entropy": f"{RESIDUAL} {SOFT_CE}",
    "soft cross-entropy, then L1": "train.loss.soft_ce_warmup_ratio=0.5",
    "matched initial logits": "drafter.match_initial_logits=true",
    "d-pace": "train.loss.slot_weighting=d-pace",
    "d-pace, cross-entropy": "train.loss.slot_weighting=d-pace train.loss.ce=1 train.loss.l1=0",
    "acceptance": "train.loss.slot_weighting=acceptance",
    "EAGLE-3": "drafter.algorithm=eagle3",
}
DRAWS = 10_000


def train(options: argparse.Namespace, name: str, seed: int) -> Path:
    """The drafter of a recipe and seed, trained unless it is there; its folder."""
    output = options.work / "drafters" / name.replace(" ", "-") / str(seed)
    if (output / FINAL).exists():
        return output / FINAL
    # The seed decides the weights' start, the order of rows and the anchors; the cache stays the run's.
    settings = load_settings(options.config, [*shlex.split(RECIPES[name]), f"run.seed={seed}", *options.override])
    cache = str(Path(settings.run.directory, "cache"))
    task = TrainingTask(
        settings=settings,
        spec=resolve_target(settings),
        cache=cache,
        output=str(output),
        total_steps=count_steps(settings, len(TargetCache.open(cache))),
        threads=options.threads,
    )
    output.mkdir(parents=True, exist_ok=True)
    train_rank({"task": task})
    for step in output.glob("step-*"):
        shutil.rmtree(step)
    return output / FINAL


def decode(options: argparse.Namespace, key: str, drafter: Path) -> None:
    """Every prompt at every temperature, as far as it is not done yet."""
    settings = load_settings(options.config, options.override)
    sources = [source.model_copy(update={"limit": max(options.prompts)}) for source in settings.data.evaluation]
    prompts = read_prompts(sources, "evaluation").prompts
    plan = DecodePlan(
        settings=settings,
        spec=resolve_target(settings),
        folder=str(options.work / "evaluation"),
        circumstances={},
        drafter=str(drafter),
        baselines={key: str(drafter)},
        max_new_tokens=settings.evaluate.max_new_tokens,
        batch_size=settings.evaluate.batch_size,
    )
    items = []
    for temperature, count in zip(settings.evaluate.temperatures, options.prompts, strict=True):
        section = settings.evaluate.model_copy(update={"temperatures": (temperature,), "seeds": (0,)})
        items += work_items(section, prompts[:count], "evaluation", lambda _: [(key, FULL)])
    folder = EventLog(plan.folder, plan.circumstances).folder
    if todo := [item for item in items if not folder.exists(item.file)]:
        worker = DecodeWorker(plan)
        for item in todo:
            worker.run(item)


class Lengths:
    """Committed tokens and rounds of each prompt at a temperature, by recipe and seed.

    Prompts that a recipe and seed has not decoded count for none.
    """

    def __init__(self, events: dict[str, np.ndarray], temperature: float, keys: list[str]) -> None:
        use = (events["temperature"] == temperature) & np.isin(events["drafter"], keys)
        names, of_round = np.unique(events["prompt_id"][use], return_inverse=True)
        drafter, committed = events["drafter"][use], events["committed"][use]
        self._rounds = {key: np.bincount(of_round[drafter == key], minlength=len(names)) for key in keys}
        self._tokens = {
            key: np.bincount(of_round[drafter == key], committed[drafter == key], minlength=len(names)) for key in keys
        }
        complete = np.all([rounds > 0 for rounds in self._rounds.values()], axis=0)
        domains = np.array([str(events["domain"][use][of_round == index][0]) for index in range(len(names))])
        self._groups = [np.flatnonzero((domains == domain) & complete) for domain in np.unique(domains[complete])]
        rng = np.random.default_rng(0)
        self._draws = [
            rng.multinomial(len(group), np.full(len(group), 1 / len(group)), DRAWS) for group in self._groups
        ]
        self.prompts = int(complete.sum())

    def of(self, *keys: str) -> tuple[float, np.ndarray]:
        """Mean accepted length of the domains, and its bootstrap draws."""
        tokens, rounds = (np.sum([each[key] for key in keys], axis=0) for each in (self._tokens, self._rounds))
        parts = [tokens[group].sum() / rounds[group].sum() for group in self._groups]
        drawn = [
            (draws @ tokens[group]) / (draws @ rounds[group])
            for draws, group in zip(self._draws, self._groups, strict=True)
        ]
        return float(np.mean(parts)), np.mean(drawn, axis=0)


def summary(options: argparse.Namespace) -> dict[str, Any]:
    """Figures of every recipe, and its differences to the first."""
    folder = options.work / "evaluation"
    EventLog(str(folder), {}).merge()
    events, rows = columns(read_events(folder / "events-all.parquet")), []
    keys = {name: [f"{name}/{seed}" for seed in options.seeds] for name in options.recipes}
    first = options.recipes[0]
    for temperature in sorted(set(events["temperature"])):
        for name in options.recipes:
            lengths = Lengths(events, temperature, [*dict.fromkeys(keys[first] + keys[name])])
            (base, base_draws), (value, draws) = lengths.of(*keys[first]), lengths.of(*keys[name])
            low, high = np.quantile(draws / base_draws - 1, [0.025, 0.975])
            rows.append(
                {
                    "recipe": name,
                    "settings": RECIPES[name],
                    "temperature": float(temperature),
                    "prompts": lengths.prompts,
                    "accepted_length": round(value, 4),
                    f"accepted_length_of_{first}": round(base, 4),
                    "by_seed": {key.rpartition("/")[2]: round(lengths.of(key)[0], 4) for key in keys[name]},
                    "against_first": round(value / base - 1, 4),
                    "interval_95": [round(float(low), 4), round(float(high), 4)],
                }
            )
    return {
        "command": shlex.join(["python", "benchmarks/recipes.py", *sys.argv[1:]]),
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "seeds": options.seeds,
        "figures": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a settings file whose run has a finished cache")
    parser.add_argument("override", nargs="*", help="KEY=VALUE for every recipe")
    parser.add_argument("--work", type=Path, default=Path("runs/recipes"), help="drafters and rounds")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--prompts", type=int, nargs="+", default=[48, 48], help="of each temperature of the settings")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.override.append(f"cluster.threads_per_worker={options.threads}")
    for seed in options.seeds:
        for name in options.recipes:
            began = time.perf_counter()
            drafter = train(options, name, seed)
            trained = time.perf_counter()
            decode(options, f"{name}/{seed}", drafter)
            print(f"{name}, seed {seed}: trained in {trained - began:.0f} s", flush=True)
    found = summary(options)
    for row in found["figures"]:
        low, high = row["interval_95"]
        print(
            f"T={row['temperature']:g} {row['recipe']}: {row['accepted_length']:.3f} "
            f"({100 * row['against_first']:+.1f}%, {100 * low:+.1f} to {100 * high:+.1f})"
        )
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
