"""Train the drafter on the target cache.

1. Check that the settings fit the cache and count the steps.
2. Train under DeepSpeed on a Ray Train group, which goes on from the newest checkpoint after any loss.
3. Meanwhile, show its log.

`checkpoints/` holds `step-…` folders (the last ones), `log.jsonl`, and `final/`: the drafter in its published layout.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.train_group import TrainingFailed, TrainingStopped, run_group
from dspark.losses.losses import loss_terms, slot_weightings
from dspark.registry import algorithms, sequential_heads
from pipelines.drafter_folder import published_config
from pipelines.errors import UserError, for_the_user
from pipelines.plugins import plugin_identity
from pipelines.settings import Settings
from pipelines.target_spec import TargetSpec, resolve_target
from pipelines.training.log import LOG, VALIDATION, read_log
from pipelines.training.loop import FINAL, train_rank
from pipelines.training.task import TrainingTask, drafter_config, engine_settings
from pipelines.workers import session
from storage.cache.target_cache import TargetCache
from storage.checkpoints import complete_checkpoints
from storage.order import steps_per_epoch

if TYPE_CHECKING:
    from pipelines.progress import Reporter, Task
    from pipelines.runs.run import Run
    from pipelines.tracking.curves import Curves


# Settings that decide how the work is split, written down and watched, and no step.
HOW_AND_NOT_WHAT = (
    "num_workers",
    "min_workers",
    "max_tokens_per_micro_batch",
    "zero_stage",
    "eval_steps",
    "save_steps",
    "checkpoint_in_background",
    "save_total_limit",
    "logging_steps",
    "max_failures",
    "max_bad_steps",
    "dataloader_num_workers",
    "loader_bytes",
    "local_copy",
    "local_copy_bytes",
    "gradient_checkpointing",
    "torch_compile",
)


def identity(settings: Settings, run: Run) -> dict[str, Any]:
    """The drafter and everything that decides a step; not how the work is split."""
    return {**drafter_fields(settings), "seed": settings.run.seed}


def drafter_fields(settings: Settings) -> dict[str, Any]:
    """What decides a drafter beside its cache and seed, for an identity."""
    drafter = settings.drafter
    heads = [sequential_heads[drafter.markov_head_type]] if drafter.parts["markov_rank"] else []
    loss = settings.train.loss
    parts: list[Any] = [loss_terms[name] for name, weight in loss if weight and name in loss_terms]
    parts += [slot_weightings[loss.slot_weighting]] if loss.slot_weighting is not None else []
    return {
        "contract": resolve_target(settings).contract(settings, with_block=True),
        "drafter": drafter.model_dump(mode="json"),
        "initial_weights": weights_identity(drafter.initial_weights),
        "train": settings.train.model_dump(mode="json", exclude=set(HOW_AND_NOT_WHAT)),
        **plugin_identity(settings.plugins, [algorithms[drafter.algorithm], *heads, *parts]),
    }


def check(settings: Settings) -> None:
    """Raises UserError for starting weights, engine settings and places that a training cannot use."""
    require_shared_folder(settings)
    if (start := settings.drafter.initial_weights) not in ("random", "target"):
        published_config(start, settings, "drafter.initial_weights")
    try:
        engine_settings(settings).require_known_keys()
    except ValueError as error:
        raise UserError(f"train.deepspeed: {error}") from error


def require_shared_folder(settings: Settings) -> None:
    """Raises UserError for a run on an object store, where a training cannot keep its checkpoints."""
    if "://" in settings.run.directory:
        raise UserError(
            f"run.directory is {settings.run.directory}: training (a pilot's too) and the stages after it need a "
            "folder on this machine or on a file system that the cluster shares. An object store can hold what "
            "`dspark regenerate` makes, and `dspark cache` with codecs without a pilot "
            "(cache.hidden_states_codec=transform)"
        )


def execute(settings: Settings, run: Run, reporter: Reporter) -> dict[str, Any]:
    """Make `checkpoints/`."""
    spec, output = resolve_target(settings), Path(run.directory.path("checkpoints"))
    with session(settings, str(output)):
        log = train_on(settings, spec, run.location("cache"), output, reporter, tracker=run.tracker)
    keep = ("loss", "tau_probabilistic", "acceptance@0", "skipped_steps")
    return {"steps": log[-1]["step"], "drafter": f"checkpoints/{FINAL}", **{key: log[-1].get(key) for key in keep}}


def train_on(
    settings: Settings,
    spec: TargetSpec,
    cache: str,
    output: Path,
    reporter: Reporter,
    *,
    name: str = "drafter",
    tracker: Curves | None = None,
) -> list[dict[str, Any]]:
    """Train on a finished cache in the current Ray session, going on with what `output` holds; the log's lines."""
    samples = len(TargetCache.open(cache))
    drafter_config(settings, spec)  # raises for settings that no drafter can have
    total = count_steps(settings, samples)
    cpus = cpus_per_rank(settings)
    task = TrainingTask(
        settings=settings,
        spec=spec,
        cache=cache,
        output=str(output),
        total_steps=total,
        threads=settings.cluster.threads_per_worker or max(1, int(cpus)),
    )
    complete = complete_checkpoints(output)
    start = complete[-1].step if complete else 0
    trained = samples - settings.train.validation_samples
    if trained < settings.train.global_batch_size:
        reporter.say(
            f"warning: train.global_batch_size is {settings.train.global_batch_size} and there are {trained} "
            f"conversations: each step sees all of them, and training has {total} steps. A smaller batch makes more"
        )
    what = f"training the {name} on {trained} conversations"
    with (
        reporter.task(what, total, "steps", start) as shown,
        _following(output, shown, reporter, tracker, start),
    ):
        _run(
            _rank,
            {"task": task},
            num_workers=settings.train.num_workers,
            min_workers=settings.train.min_workers,
            cpus_per_worker=cpus,
            use_gpu=settings.cluster.gpus_per_worker > 0,
            max_failures=settings.train.max_failures,
            storage_path=str(output / "ray"),
        )
    return read_log(output / LOG)


def _run(*arguments: Any, **options: Any) -> None:
    """`run_group`; what is for the user comes as a UserError, and a request to stop goes on to this process."""
    try:
        run_group(*arguments, **options)
    except TrainingStopped as stopped:
        signal.raise_signal(stopped.number)
        raise KeyboardInterrupt from stopped  # where nobody answers to that signal
    except TrainingFailed as failed:
        if isinstance(failed.__cause__, UserError):
            raise UserError(str(failed.__cause__)) from failed
        raise


def _rank(config: dict[str, Any]) -> None:
    """`train_rank`, whose errors for the user arrive as such."""
    with for_the_user(config["task"].settings.run.directory):
        train_rank(config)


def count_steps(settings: Settings, samples: int) -> int:
    """Optimizer steps of the whole training on a cache of so many samples.

    Raises UserError when all of them are held out.
    """
    train = settings.train
    if train.validation_samples >= samples:
        raise UserError(
            f"train.validation_samples={train.validation_samples}, but the cache has {samples} conversations: "
            "leave some to train on"
        )
    steps = max(
        1, round(train.num_train_epochs * steps_per_epoch(samples - train.validation_samples, train.global_batch_size))
    )
    return steps if train.max_steps is None else min(steps, train.max_steps)


def cpus_per_rank(settings: Settings) -> float:
    """`cluster.cpus_per_worker`; on a cluster of this run's own no more than an equal share, so that the ranks fit."""
    cluster = settings.cluster
    if cluster.address is not None:
        return cluster.cpus_per_worker
    share = (cluster.num_cpus or os.cpu_count() or 1) / settings.train.num_workers
    return min(cluster.cpus_per_worker, int(share) if share >= 1 else share)


def weights_identity(start: str) -> str:
    """`random` and `target` speak for themselves; a published drafter counts by its content."""
    if start in ("random", "target"):
        return start
    path = Path(start, "model.safetensors").expanduser()
    if not path.is_file():
        raise UserError(f"{start!r} is no drafter's folder: it has no {path.name}")
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _following(folder: Path, task: Task, reporter: Reporter, tracker: Curves | None, start: int) -> Iterator[None]:
    """Show the newest line of the log every second, say its warnings, and hand new lines to the tracker.

    The tracker first gets the lines up to the checkpoint that a stopped process had no time to hand over.
    """
    stop = threading.Event()
    names = {LOG: "train", VALIDATION: "validation"}
    last = dict.fromkeys(names, start)

    def numbers(name: str, line: dict[str, Any]) -> dict[str, float]:
        return {f"{names[name]}/{key}": value for key, value in line.items() if isinstance(value, int | float)}

    if tracker is not None:
        lines = [(line["step"], numbers(name, line)) for name in names for line in read_log(folder / name)]
        tracker.resume_after(start, lines)

    def show() -> None:
        for name in names:
            new = [line for line in read_log(folder / name) if line["step"] > last[name]]
            for line in new:
                last[name] = line["step"]
                for warning in line.get("warnings", ()):
                    reporter.say(f"warning: {warning}")
                if tracker is not None:
                    tracker.log(numbers(name, line), step=line["step"])
            if new and name == LOG:
                loss = new[-1]["loss"]  # None after nothing but skipped steps
                tau = new[-1].get("tau_probabilistic", 0.0)
                task.update(new[-1]["step"], loss="not finite" if loss is None else loss, tau=tau)
            elif new:
                task.update(task.done, validation_tau=new[-1]["tau_probabilistic"])

    def follow() -> None:
        while not stop.wait(1.0):
            show()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        show()
