"""What the Ray workers of several stages share: opening the target, and how many of it fit on a machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.session import ray_session
from cluster.work_pool import WorkersFailed, WorkItemFailed, run_work_items
from dspark.decoding.target import Target
from dspark.decoding.target_checks import check_identity, check_target
from pipelines.errors import UserError, for_the_user
from pipelines.json_files import write_json
from pipelines.target_spec import local_folder
from storage.files.filesystems import Folder
from storage.files.masking import mask

if TYPE_CHECKING:
    from pipelines.json_files import write_json
    from pipelines.settings import Settings
from pipelines.target_spec import TargetSpec

Item = TypeVar("Item")
TARGET_CHECK = "target-check.json"


def open_target(settings: Settings, spec: TargetSpec) -> Target:
    """The target as this run reads it: local folder, capture layers, dtype and device of the settings.

    Its opening check is done once a run: `target-check.json` in the run's directory keeps what it found. Raises
    TargetError for a target that is not read as it computes.
    """
    import torch

    torch.set_num_threads(settings.cluster.threads_per_worker or settings.cluster.cpus_per_worker)
    section = settings.target
    target = Target.open(
        local_folder(spec),
        dtype=section.dtype,
        device=section.device,
        target_layer_ids=spec.target_layer_ids,
        attn_implementation=section.attn_implementation,
        trust_remote_code=section.trust_remote_code,
        check=False,
    )
    run = Folder(settings.run.directory)
    identity = {"name": spec.name, **spec.hashes, **check_identity(target)}
    if _kept_identity(run) != identity:
        record = {"identity": identity, "differences": asdict(check_target(target))}
        if run.exists("run.json"):
            write_json(run, TARGET_CHECK, record)
    return target


def _kept_identity(run: Folder) -> Any:
    """Of the target that was checked; None where there is no such record, or a damaged one."""
    if not run.exists(TARGET_CHECK):
        return None
    try:
        return dict(json.loads(run.read(TARGET_CHECK)))["identity"]
    except (KeyError, TypeError, ValueError):
        return None


@contextmanager
def session(settings: Settings, logs: str) -> Iterator[None]:
    """The run's Ray session; `logs` is where Ray's own logs go when something fails."""
    cluster = settings.cluster
    with ray_session(
        cluster.address,
        num_cpus=cluster.num_cpus,
        num_gpus=cluster.num_gpus,
        object_store_bytes=cluster.object_store_bytes,
        directory=None if "://" in logs else logs,
        kept_as=mask,
    ):
        yield


def on_pool(
    settings: Settings,
    make_worker: Callable[[], Any],
    items: Iterable[Item],
    *,
    workers: int,
    on_result: Callable[[Item, Any], None],
    item_name: Callable[[Item], str],
) -> None:
    """Do `items` on a pool of workers with the resources that the settings give each of them.

    Raises UserError for what is the user's to mend, wherever a worker met it.
    """
    cluster = settings.cluster
    try:
        run_work_items(
            partial(_Worker, make_worker, settings.run.directory),
            items,
            num_workers=workers,
            cpus_per_worker=cluster.cpus_per_worker,
            gpus_per_worker=cluster.gpus_per_worker,
            on_result=on_result,
            item_name=item_name,
        )
    except (WorkItemFailed, WorkersFailed) as failed:
        if isinstance(failed.__cause__, UserError):
            raise UserError(str(failed.__cause__)) from failed
        raise


class _Worker:
    """A stage's worker whose errors for the user arrive as such: which they are shows only where they are raised."""

    def __init__(self, make_worker: Callable[[], Any], directory: str) -> None:
        self._directory = directory
        with for_the_user(directory):
            self._worker = make_worker()

    def run(self, item: Any) -> Any:
        with for_the_user(self._directory):
            return self._worker.run(item)
