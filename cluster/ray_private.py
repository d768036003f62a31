"""Everything of Ray that is not its public interface, and why each piece is needed.

The one module that may import from `ray._private`, `ray._raylet`, `ray.experimental` and `ray.train.v2._internal`;
`tests/cluster/test_ray_private.py` holds it against the version that `pyproject.toml` pins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LONGEST_SOCKET_PATH = 107  # bytes of a unix socket's path on Linux, without the closing zero
SOCKET_BELOW_TEMPORARY = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"


def start_node(
    temporary: Path,
    *,
    address: str,
    num_cpus: int | None,
    num_gpus: int | None,
    object_store_bytes: int,
) -> Any:
    """Start the head of a one-node cluster on `address`: `ray.init` has no option to leave its helpers out.

    Those are an autoscaler, a dashboard server, a metrics agent and a log monitor, on two cores half of the start-up
    time. Ray slims its agent only when the dashboard's packages are missing, so it is told that they are.
    """
    from ray._private import utils
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class LeanNode(Node):
        def start_api_server(self, **_: Any) -> None:
            """No dashboard: this node has one user, who has its address."""

    parameters = RayParams(
        node_ip_address=address,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_memory=object_store_bytes,
        temp_dir=str(temporary),
        include_dashboard=False,
        include_log_monitor=False,  # type: ignore[arg-type] # annotated as a string, used as what it is
        no_monitor=True,
    )
    absent = ImportError("not wanted in an embedded cluster")
    with _replaced(utils, "get_dashboard_dependency_error", lambda: absent):
        return LeanNode(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)


@contextlib.contextmanager
def raylets_last_words_unheard() -> Iterator[None]:
    """Let `ray.init` start no thread that prints, on standard output, a page of the log of a raylet that died."""
    from ray._private import worker

    with _replaced(worker, "listen_error_messages", lambda *_: None):
        yield


def leave_out_helpers(trainer: Any, *, embedded: bool) -> None:
    """Start no helper actors that have nothing to do here, each seconds of a small machine, and leave Ctrl-C alone.

    No Ray Data set is handed over, so none has to be served. An embedded cluster ends with this process, placement
    groups and all: nobody needs to wait for the controller's death to remove them (Ray's helper would, besides, ask a
    dashboard that is not there). Ray's own answer to Ctrl-C aborts the workers where they stand.
    """
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

    idle = (DatasetsCallback, PlacementGroupCleanerCallback) if embedded else (DatasetsCallback,)
    usual = trainer._create_default_callbacks
    trainer._create_default_callbacks = lambda: [callback for callback in usual() if not isinstance(callback, idle)]
    trainer._register_sigint_handler = lambda controller: None


def put_in_cluster(key: str, value: bytes) -> None:
    """Keep a small value in the cluster's control service: an actor for it would take a second to start."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, overwrite=True)


def get_from_cluster(key: str) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    return _internal_kv_get(key)


def files_to_send(folder: Path, not_sent: Sequence[str]) -> dict[Path, int]:
    """Bytes of each file below `folder` that Ray would pack as a job's working directory, ignore files obeyed."""
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    sizes: dict[Path, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder)] = path.stat().st_size

    _dir_travel(folder, [_get_excludes(folder, list(not_sent))], note, include_gitignore=True)
    return sizes


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)


def reload_environment() -> None:
    """Make Ray, which reads them once, read the variables of authentication and of loopback again."""
    from ray import _raylet
    from ray._private import ray_constants

    constants: Any = ray_constants
    constants.ENABLE_RAY_CLUSTER = constants.env_bool(
        constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not constants.IS_WINDOWS_OR_OSX
    )
    core: Any = _raylet  # compiled; its stubs leave these out
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
