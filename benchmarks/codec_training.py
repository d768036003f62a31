"""Does a drafter notice the codec? The same drafter from the exact cache and from coded ones, judged on exact states.

Steps:
1. Take a run's exact cache (bf16 hidden states and teacher) and its held-out prompts.
2. Train a pilot on a tenth of the rows; its context projection gives the components that are stored.
3. Code the cache for every arm, and train the same drafter from each with the arm's teacher in the loss, for each seed:
   same start, same batches, same anchors, plain AdamW with the pipeline's schedule.
4. Fold each drafter and decode the held-out prompts greedily: mean accepted length of each prompt. Greedy decoding is
   lossless, so the target's answers and states are the same for every drafter: they are recorded once, exactly, and the
   decoder's own proposer drafts against them round by round; for one drafter the live target decodes as well, to show
   that the rounds are the same. Beside it, the expected accepted length at temperature 1 at fixed anchors.
5. Write the differences to the exact arm, paired by prompt and seed, with bootstrap intervals, and for scale what the
   drafter reaches before training and with its hidden states set to zero.

What is done is not done again, so the command goes on where it stopped; two of them with other --arms or --seeds may
work side by side in one --work folder once the pilot is there, and the whole command then only sums up.

    python benchmarks/codec_training.py SETTINGS.yaml --output OUT.json --work FOLDER [--seeds 0 1 2] [--arms NAME ...]
        [--arm 'fine={"hidden_states": "projected", "hidden_states_options": {"step": 0.25}, "width": 1.5,
                      "teacher": "bf16"}']
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec_experiment import ARMS, Arm, Experiment, components

from pipelines.data.conversations import evenly_spaced
from pipelines.settings import Settings, load_settings


def compare(ours: dict[str, Any], exact: dict[str, Any], figure: str) -> dict[str, Any]:
    """Relative difference of the means, paired by seed and prompt, with a 95% interval from 10,000 bootstrap draws."""
    a = np.array([[ours[s][p][figure] for p in sorted(ours[s])] for s in sorted(ours)])
    b = np.array([[exact[s][p][figure] for p in sorted(ours[s])] for s in sorted(ours)])
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(10_000):
        prompts = generator.integers(0, a.shape[1], a.shape[1])
        draws.append(a[:, prompts].mean() / b[:, prompts].mean() - 1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return {
        "mean": round(float(a.mean()), 4),
        "by_seed": [round(float(x), 4) for x in a.mean(1)],
        "exact_by_seed": [round(float(x), 4) for x in b.mean(1)],
        "relative_difference": round(float(a.mean() / b.mean() - 1), 5),
        "interval_95": [round(float(low), 5), round(float(high), 5)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("settings")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--arms", nargs="+", default=["exact", "default", "small"], metavar="NAME", help=f"of {list(ARMS)}"
    )
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=JSON", help="one more, by its fields")
    parser.add_argument("--rows", type=int, help="conversations to train on, spread evenly; default: all")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--pilot-steps", type=int, default=96)
    parser.add_argument("--limit", type=int, help="stop after so many drafters; the same command goes on")
    options = parser.parse_args()
    arms = ARMS | {name: Arm(**json.loads(fields)) for name, _, fields in (arm.partition("=") for arm in options.arm)}
    options.arms += [name for name in arms if name not in ARMS]
    if unknown := set(options.arms) - set(arms):
        parser.error(f"no arm is named {', '.join(sorted(unknown))}; choose from {', '.join(arms)}")
    settings = load_settings(options.settings)
    torch.set_num_threads(settings.cluster.threads_per_worker or settings.cluster.cpus_per_worker)
    experiment = Experiment(settings, options.work)
    results = Results(options.work / "results.json")
    every = evenly_spaced(range(len(experiment.exact)), options.rows or len(experiment.exact))
    tenth = every[::10]
    experiment.held_out()
    pilot = options.work / "pilot"
    if "pilot" not in results.known:
        cache = experiment.code("pilot", ARMS["exact"], tenth, None)
        made = experiment.train(cache, 1000, options.pilot_steps, pilot)
        results.put("pilot", {**made, "rows": len(tenth), "judged": experiment.judge(pilot)})
    made_now = 0
    for seed in options.seeds:
        for name in options.arms:
            key = f"{name}/{seed}"
            if key in results.known:
                continue
            if options.limit is not None and made_now >= options.limit:
                raise SystemExit(3)
            made_now += 1
            arm, found = arms[name], None
            if arm.width is not None:
                found = components(experiment, pilot, tenth, round(arm.width * experiment.spec.hidden_size))
            cache = experiment.code(name, arm, every, found)
            folder = options.work / "drafters" / key
            made = experiment.train(cache, seed, options.steps, folder)
            info = cache.info()
            sizes = {"bytes_per_token": info["bytes_per_token"], "codecs": info["codecs"]}
            results.put(key, {**made, **sizes, "judged": experiment.judge(folder)})
            print(
                key,
                {
                    k: round(float(np.mean([p[k] for p in results.known[key]["judged"].values()])), 4)
                    for k in ("accepted", "expected")
                },
                flush=True,
            )
    if "untrained" not in results.known:
        start = options.work / "drafters" / "untrained"
        experiment.train(experiment.code("exact", ARMS["exact"], every, None), options.seeds[0], 0, start)
        results.put("untrained", {"judged": experiment.judge(start)})
        folder = options.work / "drafters" / f"exact/{options.seeds[0]}"
        results.put("features zeroed", {"judged": experiment.judge(folder, zeroed=True)})
        results.put("live", experiment.check_replay(folder))
    options.output.write_text(json.dumps(summary(results.known, options, settings), indent=1) + "\n")


class Results:
    """What is done already, in a file that several processes may add to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def put(self, key: str, value: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{self._path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                self.known = json.loads(self._path.read_text())
            self.known[key] = value
            self._path.write_text(json.dumps(self.known))


def summary(known: dict[str, Any], options: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    """What the documents quote."""

    def of(name: str) -> dict[str, Any]:
        return {str(seed): known[f"{name}/{seed}"]["judged"] for seed in options.seeds}

    def means(judged: dict[str, Any]) -> dict[str, float]:
        return {k: round(float(np.mean([p[k] for p in judged.values()])), 4) for k in ("accepted", "expected")}

    arms = {}
    for name in options.arms:
        first = known[f"{name}/{options.seeds[0]}"]
        arms[name] = {
            "bytes_per_token": first["bytes_per_token"],
            "codecs": {
                part: {k: c[k] for k in ("name", "settings", "measured")} for part, c in first["codecs"].items()
            },
            **{figure: compare(of(name), of("exact"), figure) for figure in ("accepted", "expected")},
        }
    return {
        "command": "python " + " ".join(sys.argv),
        "conversations": options.rows,
        "prompts": len(known["pilot"]["judged"]),
        "rounds": {n: sum(p["rounds"] for s in of(n).values() for p in s.values()) for n in options.arms},
        "steps": options.steps,
        "pilot": {**{k: known["pilot"][k] for k in ("steps", "rows", "seconds")}, **means(known["pilot"]["judged"])},
        "untrained": means(known["untrained"]["judged"]),
        "live_decoding": known["live"],
        "features_zeroed": means(known["features zeroed"]["judged"]),
        "arms": arms,
        "settings": {
            "train": settings.train.model_dump(mode="json"),
            "drafter": settings.drafter.model_dump(mode="json"),
        },
    }


if __name__ == "__main__":
    main()
