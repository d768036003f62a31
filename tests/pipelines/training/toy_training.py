"""A small training to run, kill and compare: a random target, a cache of its own text, ranks forked from one process.

The ranks run what the training group's workers run (`pipelines.training.loop.train_rank`), over gloo.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from toy_target import write_gguf

from cluster.engine import _import_deepspeed
from dspark.decoding.target import Target
from pipelines.data.gguf_file import convert_llama
from pipelines.settings import Settings, settings_from_dict
from pipelines.stages.train import count_steps
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.training.task import TrainingTask
from pipelines.workers import open_target
from storage.cache.target_cache import CachePlan, CacheRow, CodecSpec, create_or_resume, finish, write_shard

ROWS, PROMPT, ANSWER = 13, 6, 22
UNSUPERVISED, ONE_TOKEN, EVERYTHING = 3, 4, 5  # rows of which no token, a single one, and all are supervised


def toy_settings(
    folder: Path, target: Path, *, drafter: dict[str, Any] | None = None, plugins: Sequence[str] = (), **train: Any
) -> Settings:
    """Six steps over 13 conversations in batches of 4: the last batch of an epoch has one."""
    values = {
        "plugins": list(plugins),
        "run": {"directory": str(folder)},
        "target": {"model": str(target), "dtype": "float32", "device": "cpu"},
        "drafter": {
            "num_draft_layers": 2,
            "block_size": 3,
            "markov_rank": 4,
            "draft_vocab_size": 128,
            "target_layer_ids": [-1, 0],
            **(drafter or {}),
        },
        "train": {
            "max_steps": 6,
            "global_batch_size": 4,
            "num_anchors": 5,
            "learning_rate": 3e-3,
            "precision": "float32",
            "zero_stage": 0,
            "max_tokens_per_micro_batch": 64,
            "save_steps": 2,
            "logging_steps": 1,
            "validation_samples": 2,
            **train,
        },
        "cache": {"hidden_states_codec": "bf16", "teacher_codec": "bf16"},
    }
    return settings_from_dict(values)


def make_target(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_gguf(folder / "toy.gguf", tied=True)
    convert_llama(folder / "toy.gguf", folder)
    (folder / "toy.gguf").unlink()
    return folder


@torch.no_grad()
def make_cache(root: Path, settings: Settings, spec: TargetSpec) -> None:
    """Text that the target sampled, with its states."""
    target = open_target(settings, spec)
    torch.manual_seed(0)
    ids = torch.randint(3, target.vocab_size, (ROWS, PROMPT))
    for _ in range(ANSWER):
        ids = torch.cat([ids, _logits(target, ids)[:, -1].softmax(-1).multinomial(1)], dim=1)
    captured = target.capture(ids)
    rows = []
    for number in range(ROWS):
        length = PROMPT + ANSWER - number % 5
        start = 0 if number == EVERYTHING else PROMPT
        end = {UNSUPERVISED: PROMPT, ONE_TOKEN: PROMPT + 1}.get(number, length)
        rows.append(
            CacheRow(
                sample_id=f"toy-{number}",
                input_ids=ids[number, :length],
                spans=[(start, end)] if end > start else [],
                hidden_states=captured.hidden_states[number, :length].unflatten(-1, (len(spec.target_layer_ids), -1)),
                last_hidden_state=captured.last_hidden_state[number, :length],
            )
        )
    plan = CachePlan(
        contract=spec.contract(settings, with_block=False),
        num_layers=len(spec.target_layer_ids),
        hidden_size=spec.hidden_size,
        samples=[(row.sample_id, len(row.input_ids)) for row in rows],
        hidden_states=CodecSpec(name="bf16"),
        teacher=CodecSpec(name="bf16"),
        tokens_per_shard=100,
    )
    create_or_resume(root, plan)
    for unit, (start, stop) in enumerate(plan.shards):
        write_shard(root, unit, rows[start:stop])
    finish(root)


def _logits(target: Target, ids: torch.Tensor) -> torch.Tensor:
    return target.lm_head(target.capture(ids).last_hidden_state)


class Toy:
    """The target and the cache; `task` makes a training of its own on them."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = folder
        self.target = make_target(folder / "target")
        self.spec = resolve_target(toy_settings(folder, self.target))
        self.cache = folder / "cache"
        make_cache(self.cache, toy_settings(folder, self.target), self.spec)

    def task(self, name: str, *, cache: Path | None = None, **train: Any) -> TrainingTask:
        output = self.folder / name
        output.mkdir(exist_ok=True)
        settings = toy_settings(self.folder, self.target, **train)
        return TrainingTask(
            settings=settings,
            spec=self.spec,
            cache=str(cache or self.cache),
            output=str(output),
            total_steps=count_steps(settings, ROWS),
            threads=1,
        )


def start(task: TrainingTask, ranks: int = 1, prepare: Callable[[], None] | None = None) -> list[int]:
    """Fork the ranks; their process ids. `prepare` runs in each before it trains."""
    _import_deepspeed()
    store = tempfile.mktemp(prefix="store-", dir=task.output)
    return [_fork(task, rank, ranks, store, prepare) for rank in range(ranks)]


def _fork(task: TrainingTask, rank: int, ranks: int, store: str, prepare: Callable[[], None] | None) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with open(Path(task.output) / f"rank-{rank}.err", "w") as errors:
            os.dup2(errors.fileno(), 2)
            os.dup2(errors.fileno(), 1)
            sys.stdout = sys.stderr = errors
            try:
                _train(task, rank, ranks, store, prepare)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
    finally:
        os._exit(code)


def _train(task: TrainingTask, rank: int, ranks: int, store: str, prepare: Callable[[], None] | None) -> None:
    from torch import distributed

    from pipelines.training.loop import train_rank

    os.environ["LOCAL_RANK"] = str(rank)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    if prepare is not None:
        prepare()
    train_rank({"task": task})
    distributed.destroy_process_group()


def wait(children: list[int], timeout: float = 120) -> list[int]:
    """Exit codes; the ranks left after a timeout, or after one of them failed, are killed."""
    deadline, codes = time.monotonic() + timeout, dict.fromkeys(children)
    while None in codes.values():
        for child in [child for child, code in codes.items() if code is None]:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        failed = any(codes.values())
        if failed or time.monotonic() > deadline:
            for child in [child for child, code in codes.items() if code is None]:
                os.kill(child, signal.SIGKILL)
                codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        time.sleep(0.01)
    return [code for code in codes.values() if code is not None]


def train(task: TrainingTask, ranks: int = 1, prepare: Callable[[], None] | None = None) -> None:
    """Train to the end. AssertionError with the ranks' errors if one fails."""
    codes = wait(start(task, ranks, prepare))
    errors = "\n".join(path.read_text()[-3000:] for path in sorted(Path(task.output).glob("rank-*.err")))
    assert codes == [0] * ranks, f"{codes}\n{errors}"
