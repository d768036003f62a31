"""A whole run with a toy target as a process of its own: to start, to kill with -9, to finish and to look into."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pyarrow.parquet as pq
import yaml

from pipelines import cli
from storage.cache.target_cache import TargetCache

ROOT = Path(__file__).parents[2]
STAGES = ("regenerate", "cache", "train", "calibrate", "evaluate", "report", "publish")
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
PROMPTS = {"train": 8, "calibration": 3, "evaluation": 3}


def write_config(folder: Path, target: Path, prompts: dict[str, int] = PROMPTS, cache_workers: int = 1) -> Path:
    """Prompts of three splits and a settings file for the toy target, cut into many small work units."""
    for split, count in prompts.items():
        rows = (
            {"id": f"{split}-{i}", "domain": "ab"[i % 2], "turns": [f"{split} {'!' * (i % 5)}{i}?"]}
            for i in range(count)
        )
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "extends": str(ROOT / "configs" / "tiny.yaml"),
        "run": {"directory": str(folder / "run")},
        "target": {"model": str(target), "device": "auto"},
        "data": {
            **{split: [{"source": str(folder / f"{split}.jsonl")}] for split in PROMPTS},
            "min_supervised_tokens": 1,
        },
        "regenerate": {"temperature": 1.0, "batch_size": 2, "prompts_per_work_item": 2},
        "cache": {"tokens_per_shard": 64, "num_workers": cache_workers},
        "drafter": {"block_size": 3, "markov_rank": 4, "draft_vocab_size": 128, "target_layer_ids": [0]},
        "train": {
            "max_steps": 6,
            "num_train_epochs": 3,
            "save_steps": 1,
            "num_anchors": 4,
            "max_tokens_per_micro_batch": 512,
        },
        "calibrate": {"max_new_tokens": 12, "batch_size": 1},
        "evaluate": {"max_new_tokens": 12, "batch_size": 1},
        "tracking": {"wandb": "disabled"},
        "cluster": {"num_cpus": 2, "cpus_per_worker": 1},
    }
    path = folder / "toy.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def dspark(*arguments: str) -> int:
    """The exit code of the command line in this process."""
    try:
        cli.main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def start(config: Path, directory: Path, command: str = "run") -> subprocess.Popen[str]:
    """`dspark run`, or another command, in a session of its own; what it says goes to a file beside the run."""
    line = [sys.executable, "-m", "pipelines.cli", command, str(config), f"run.directory={directory}", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(directory.with_suffix(".log"), "a") as log:
        return subprocess.Popen(
            line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )


def finish(config: Path, directory: Path, command: str = "run") -> dict[str, str]:
    """Run to the end; what became of each stage ("done" or "skipped")."""
    process = start(config, directory, command)
    output, _ = process.communicate()
    assert process.returncode == 0, directory.with_suffix(".log").read_text()[-4000:]
    return {stage["stage"]: stage["state"] for stage in json.loads(output)["stages"]}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A point of a run: so many seconds after a start begins with `stage`, the record of which is open by then."""

    stage: str
    seconds: float


def stage_seconds(directory: Path) -> dict[str, float]:
    """How long each stage of a finished run took."""
    return {stage: record["seconds"] for stage, record in _summary(directory)["stages"].items()}


def draw_moments(seconds: dict[str, float], count: int, seed: int) -> list[Moment]:
    """Moments spread uniformly over a run that took so long, in their order."""
    random, moments = Random(seed), []
    for at in sorted(random.uniform(0, sum(seconds.values())) for _ in range(count)):
        for stage in STAGES:
            if at < seconds[stage]:
                moments.append(Moment(stage=stage, seconds=at))
                break
            at -= seconds[stage]
    return moments


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What a `kill -9` met: the processes `below` the run; those that do work were gone after `seconds_until_gone`.

    That is None where nobody watched.
    """

    stage: str
    into_stage: float
    below: tuple[psutil.Process, ...]
    seconds_until_gone: float | None
    ray_folders: frozenset[str]


def kill_at(process: subprocess.Popen[str], directory: Path, moment: Moment, patience: float = 60) -> Kill:
    """`kill -9` of the main process of a run just started, at the moment, or when its stage completes before that.

    Where an earlier start has completed the stage, the next one that is not complete takes its place. Everything below
    the process is left to itself. With `patience` it is watched until it is gone; AssertionError for what lives on
    after so many seconds. Ray's two agents, which do no work, are not watched: they try for a minute to report what
    happened to a head that is gone, unless the next start ends them.
    """
    later = STAGES[STAGES.index(moment.stage) :]
    stage = next((name for name in later if not _is_complete(_record(directory, name))), STAGES[-1])
    record, log, begins = _record(directory, stage), directory.with_suffix(".log"), f"== {stage}\n"
    earlier = log.read_text().count(begins)
    while log.read_text().count(begins) == earlier:
        _require_running(process, directory)
        time.sleep(0.02)
    reached = time.monotonic()
    while time.monotonic() - reached < moment.seconds and not _is_complete(record):
        _require_running(process, directory)
        time.sleep(0.02)
    below = psutil.Process(process.pid).children(recursive=True)
    folders = {found for child in below for found in _ray_folders(child)}
    working = [child for child in below if _name(child) not in AGENTS]
    process.kill()
    process.wait()
    killed = time.monotonic()
    assert process.stdout is not None
    process.stdout.close()
    while patience and (left := alive(working)):
        assert time.monotonic() - killed < patience, f"still alive {patience:g} seconds after the kill: {left}"
        time.sleep(0.05)
    return Kill(
        stage=stage,
        into_stage=round(killed - reached, 2),
        below=tuple(below),
        seconds_until_gone=round(time.monotonic() - killed, 2) if patience else None,
        ray_folders=frozenset(folders),
    )


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that still run."""
    return [process for process in processes if _runs(process)]


def remains(kills: Iterable[Kill]) -> list[str]:
    """What is left of killed runs outside their directories once a later one has finished: processes, Ray's folders."""
    found = []
    for kill in kills:
        found += [str(process) for process in alive(kill.below)]
        found += [folder for folder in sorted(kill.ray_folders) if Path(folder).exists()]
    return found


def report_figures(directory: Path) -> dict[str, Any]:
    """The figures of the report that must not depend on how often the run was interrupted."""
    report = json.loads((directory / "report" / "report.json").read_text())
    steps = report["training"]["series"]["loss"]
    return {**{key: report[key] for key in ("accepted_length", "positions", "equality")}, "loss": steps}


def sample_ids(directory: Path) -> dict[str, Counter[str]]:
    """How often each sample stands in what the stages made."""
    lines = (directory / "conversations" / "train.jsonl").read_text().splitlines()
    found = {
        "conversations": Counter(json.loads(line)["id"] for line in lines),
        "cache": Counter(TargetCache.open(str(directory / "cache")).sample_ids),
    }
    for stage in ("calibration", "evaluation"):
        table = pq.read_table(directory / stage / "completions-all.parquet")
        columns = ("prompt_id", "turn", "drafter", "temperature", "seed")
        rows = zip(*(table.column(name).to_pylist() for name in columns), strict=True)
        found[stage] = Counter("/".join(map(str, row)) for row in rows)
    return found


def leftovers(directory: Path) -> list[str]:
    """Files and folders in a finished run that only an interrupted writer can have left."""
    marks = (".writing", ".tmp", ".previous")
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.name.endswith(marks))


def _summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "run.json").read_text())


def _record(directory: Path, stage: str) -> Path:
    return directory / "stages" / f"{stage}.json"


def _is_complete(record: Path) -> bool:
    return record.exists() and json.loads(record.read_text())["complete"]


def _require_running(process: subprocess.Popen[str], directory: Path) -> None:
    if process.poll() is not None:
        raise AssertionError(f"the run ended by itself:\n{directory.with_suffix('.log').read_text()[-4000:]}")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def _ray_folders(process: psutil.Process) -> list[str]:
    try:
        return re.findall(r"/[^\s=,]*dspark-ray-\w+", " ".join(process.cmdline()))
    except psutil.NoSuchProcess:
        return []
