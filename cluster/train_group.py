"""A group of training workers on Ray Train, restarted from its last checkpoint when a worker is lost.

The training function finds its own newest checkpoint when it starts; this module sees to it that it is started again.
SIGTERM (a preempted machine, `kill`) and SIGINT (Ctrl-C) ask the workers to stop: they see it through `stop_wanted()`,
write a checkpoint and return, and `run_group` raises `TrainingStopped`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from cluster.errors import ClusterError, is_retryable
from cluster.ray_private import get_from_cluster, leave_out_helpers, put_in_cluster
from cluster.session import cluster_is_lost, is_embedded

_KEY = "dspark_group"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_current: str | None = None


class TrainingFailed(RuntimeError):
    """Training stopped for good; the message holds the worker's error, and so does `__cause__` where it is known."""


class TrainingStopped(RuntimeError):
    """The workers stopped because they were asked to, by the signal `number`; the training can be resumed."""

    def __init__(self, number: int) -> None:
        self.number = number
        name = signal.Signals(number).name
        super().__init__(f"training was asked to stop ({name}) and has written a checkpoint; run it again to go on")


def run_group(
    train_fn: Callable[[dict[str, Any]], None],
    config: Mapping[str, Any],
    *,
    num_workers: int,
    min_workers: int | None = None,
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    max_failures: int = 3,
    storage_path: str,
    name: str = "group",
) -> None:
    """Run `train_fn(config)` on `num_workers` ranks with a torch process group (nccl on GPUs, gloo elsewhere).

    Args:
        train_fn, config: picklable. They are unpacked in the workers only: Ray's controller imports none of them.
        min_workers: makes the group elastic. It starts, and goes on after a loss, with as many workers between this and
            `num_workers` as the cluster has room for, and grows again once there is more. None waits for all of them.
        max_failures: how often the whole group is started again after a worker was lost.
        storage_path: folder, or `s3://` and the like, for the small records that Ray Train keeps.

    Raises:
        TrainingFailed: `train_fn` raised an error that is not retryable (`cluster.errors`), or workers were lost more
            than `max_failures` times.
        TrainingStopped: SIGTERM or SIGINT arrived and the workers returned.
        ClusterError: the cluster has fewer CPUs or GPUs than the group wants.
    """
    from ray import cloudpickle
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from cluster.process_group import ProcessGroupConfig

    fewest = num_workers if min_workers is None else min_workers
    _require_room(fewest, cpus_per_worker, use_gpu)
    resources: dict[str, float] = {"CPU": cpus_per_worker, **({"GPU": 1} if use_gpu else {})}
    group = uuid.uuid4().hex
    trainer: Any = TorchTrainer(
        _enter,
        train_loop_config={"group": group, "work": cloudpickle.dumps((train_fn, dict(config)))},
        torch_config=ProcessGroupConfig(backend="nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(
            num_workers=(fewest, num_workers) if fewest < num_workers else num_workers,  # type: ignore[arg-type]
            use_gpu=use_gpu,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path if "://" in storage_path else os.path.abspath(storage_path),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    leave_out_helpers(trainer, embedded=is_embedded())
    with _asking_to_stop(group) as received:
        try:
            result = trainer.fit()
            error = getattr(result, "error", None)
        except Exception as raised:  # Ray wraps it in classes that differ between releases
            error = raised
    if told := _get(group, "error"):
        text, cause = cloudpickle.loads(told)
        raise TrainingFailed(text) from cause
    if error is not None:
        raise TrainingFailed(_cause(error)) from error
    if received:
        raise TrainingStopped(received[0])


def stop_wanted() -> bool:
    """Whether this rank has heard that training is to stop. Ranks hear it at different steps: agree before acting."""
    return _current is not None and _get(_current, "stop") is not None


def _enter(loop: dict[str, Any]) -> None:
    """What Ray Train runs on each rank."""
    from ray import cloudpickle
    from torch import distributed

    global _current
    group = loop["group"]
    if _get(group, "error") is not None:
        return  # the group was started again after an error that would only come again
    train_fn, config = cloudpickle.loads(loop["work"])
    _current = group
    try:
        train_fn(config)
    except Exception as error:
        if not is_retryable(error):
            text = "".join(traceback.format_exception(error))
            _put(group, "error", _pickled(text, error))
        raise
    distributed.destroy_process_group()


def _pickled(text: str, error: BaseException) -> bytes:
    from ray import cloudpickle

    error = error.with_traceback(None)
    try:
        packed: bytes = cloudpickle.dumps((text, error))
        cloudpickle.loads(packed)
    except Exception:  # an exception class may refuse to be pickled or made again; its text is enough then
        packed = cloudpickle.dumps((text, None))
    return packed


@contextlib.contextmanager
def _asking_to_stop(group: str) -> Iterator[list[int]]:
    """Pass the first signal to stop on to the workers; the next one ends the training where it stands.

    Yields the numbers of the signals that have arrived.
    """
    received: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1 or cluster_is_lost():
            raise KeyboardInterrupt
        _put(group, "stop", b"1")

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, on_signal) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _put(group: str, key: str, value: bytes) -> None:
    put_in_cluster(f"{_KEY}:{group}:{key}", value)


def _get(group: str, key: str) -> bytes | None:
    return get_from_cluster(f"{_KEY}:{group}:{key}")


def _require_room(num_workers: int, cpus: float, use_gpu: bool) -> None:
    """Without room Ray Train would wait for ever."""
    import ray

    have = ray.cluster_resources()
    wanted = {"CPU": num_workers * cpus, "GPU": num_workers if use_gpu else 0}
    short = {key: value for key, value in wanted.items() if value > have.get(key, 0)}
    if short:
        text = ", ".join(f"{value:g} {key}s of {have.get(key, 0):g}" for key, value in short.items())
        raise ClusterError(
            f"{num_workers} training workers want {text} in the Ray cluster; lower the number of workers or of "
            "CPUs per worker, give an embedded cluster more logical CPUs, or add nodes"
        )


def _cause(error: BaseException) -> str:
    """The worker's own message out of Ray's wrapping."""
    failures = getattr(error, "worker_failures", None)
    if failures:
        rank, failure = next(iter(failures.items()))
        return f"rank {rank}: {failure}"
    return str(error)
