"""Everything of Ray that is not its public interface, and why each piece is needed.

The one module that may import from `ray._private`, `ray._raylet`, `ray.experimental` and `ray.train.v2._internal`;
`tests/cluster/test_ray_private.py` holds it against the version that `pyproject.toml` pins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    log_monitor: bool,
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
        include_log_monitor=log_monitor,  # type: ignore[arg-type] # annotated as a string, used as what it is
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

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not ray_constants.IS_WINDOWS_OR_OSX
    )
    core: Any = _raylet  # compiled; its stubs leave these out
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
