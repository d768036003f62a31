"""A Ray session of the run's own: private, on loopback, quick to start, and gone without a trace when it ends.

`ray_session()` starts an embedded one-node cluster, or joins the cluster at `address`, or, when this process is
itself a submitted Ray job, the cluster that runs the job. A session inside a session uses the outer one.

What Ray would otherwise leave or open, and what happens here:

* It writes `~/.ray/auth_token`, and every later head on the machine enforces it. The session has its own token file.
* It binds every interface. An embedded session stays on 127.0.0.1.
* It starts an autoscaler, a dashboard server, a metrics agent and a log monitor, which on two cores is half of its
  start-up time. An embedded session needs none of them.
* It keeps session folders under `/tmp/ray` for ever. The session's folder goes with it, and the folders of sessions
  that were killed go when the next one starts, with whatever process of theirs is still alive: Ray's agents try for
  a minute to report to a head that is gone, and a worker that has not noticed yet must not write beside its successor.
  Ray's logs of a session that failed are kept in `directory`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

LOOPBACK = "127.0.0.1"
DEFAULT_OBJECT_STORE_BYTES = 200 * 1024**2
_PREFIX = "dspark-ray-"
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# Read by Ray when it starts, in the driver and in every process below it.
QUIET_ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's 15 starves the workers on a machine that does anything else
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # also how long the end of a training goes unnoticed
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
}

# Ray moves 127.0.0.1 to the outward address except on macOS and Windows, for which it has this switch.
LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
# On one machine nobody announces that a node will be taken away.
EMBEDDED_ENVIRONMENT = {
    **LOOPBACK_ENVIRONMENT,
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}

_embedded = False


@dataclass(frozen=True, kw_only=True)
class RaySession:
    """A running session. `temporary` is its private folder, None when it belongs to someone else."""

    address: str
    cpus: float
    gpus: float
    temporary: Path | None


def is_embedded() -> bool:
    """Whether the current session is a cluster of this process's own."""
    return _embedded


def inside_ray_job() -> bool:
    """Whether this process is the entry point of a submitted Ray job."""
    return _JOB_VARIABLE in os.environ


@contextlib.contextmanager
def ray_session(
    address: str | None = None,
    *,
    num_cpus: int | None = None,
    num_gpus: int | None = None,
    object_store_bytes: int | None = None,
    directory: str | os.PathLike[str] | None = None,
    worker_logs: bool = False,
) -> Iterator[RaySession]:
    """Run the body with Ray connected, and disconnect (ending an embedded cluster) afterwards.

    Args:
        address: `host:port` of a running cluster (its token in `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).
            None starts an embedded one, or uses the cluster of the Ray job that this process is.
        num_cpus, num_gpus: logical resources of an embedded cluster; None takes what the machine has.
        object_store_bytes: shared memory of an embedded cluster, 200 MiB by default (states travel on disk).
        directory: where Ray's logs go if the body raises; None drops them.
        worker_logs: repeat what workers print on this terminal (costs one more process).

    Raises:
        ConnectionError: no cluster answers at `address`.
    """
    global _embedded
    import ray

    if ray.is_initialized():
        yield _describe(None)
        return
    if address is None and inside_ray_job():
        address = "auto"
    if address is not None:
        with environment(QUIET_ENVIRONMENT):
            reload_settings()
            _require_listener(address)
            try:
                with signals_left_alone():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=worker_logs)
                yield _describe(None)
            finally:
                ray.shutdown()
        return

    _sweep()
    temporary = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = open(temporary / "lock.new", "w")  # noqa: SIM115 - held for the session's life: it tells the sweep so
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(temporary / "lock.new", temporary / "lock")
    try:
        variables = {**QUIET_ENVIRONMENT, **EMBEDDED_ENVIRONMENT, **private_token(temporary)}
        with environment(variables), lean_node(log_monitor=worker_logs):
            reload_settings()
            try:
                with signals_left_alone():
                    ray.init(
                        address="local",
                        num_cpus=num_cpus,
                        num_gpus=num_gpus,
                        object_store_memory=object_store_bytes or DEFAULT_OBJECT_STORE_BYTES,
                        include_dashboard=False,
                        logging_level=logging.ERROR,
                        log_to_driver=worker_logs,
                        _temp_dir=str(temporary),
                        _node_ip_address=LOOPBACK,
                    )
                _embedded = True
                yield _describe(temporary)
            except Exception:
                ray.shutdown()
                _keep_logs(temporary, directory)
                raise
            finally:
                _embedded = False
                ray.shutdown()
        reload_settings()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        lock.close()


def private_token(folder: Path) -> dict[str, str]:
    """Write a fresh token (mode 0600) into `folder`; the variables that make Ray use it."""
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


@contextlib.contextmanager
def lean_node(*, log_monitor: bool) -> Iterator[None]:
    """Let `ray.init` start a node without the helper processes that an embedded cluster does not use.

    Ray has no option for any of these; it slims its agent only when the dashboard's packages are missing.
    """
    from ray._private import node, utils

    def skip(*_: Any, **__: Any) -> None:
        return None

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(node.Node, "start_monitor", skip))
        patches.enter_context(mock.patch.object(node.Node, "start_api_server", skip))
        if not log_monitor:
            patches.enter_context(mock.patch.object(node.Node, "start_log_monitor", skip))
        absent = ImportError("not wanted in an embedded cluster")
        patches.enter_context(mock.patch.object(utils, "get_dashboard_dependency_error", return_value=absent))
        yield


@contextlib.contextmanager
def signals_left_alone() -> Iterator[None]:
    """Let `ray.init` leave this process with the answer to SIGTERM that it had.

    Ray's own in Python kills its servers first and then waits for them, a minute long; the one in C++ prints a stack,
    and aborts the process three seconds later. Whoever runs a session ends it in order when a handler raises.
    """
    from ray._private import utils

    before = signal.getsignal(signal.SIGTERM)
    try:
        with mock.patch.object(utils, "set_sigterm_handler", return_value=None):
            yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # looks the same to Python, and takes it back from C++


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the body; what was there before comes back."""
    with mock.patch.dict(os.environ):
        if "RAY_AUTH_TOKEN_PATH" in values:
            os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(values)
        yield


def reload_settings() -> None:
    """Make Ray, which reads them once, read the variables of authentication and of loopback again."""
    from ray import _raylet
    from ray._private import ray_constants

    ray_constants.ENABLE_RAY_CLUSTER = ray_constants.env_bool(
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, not ray_constants.IS_WINDOWS_OR_OSX
    )

    core: Any = _raylet  # compiled; its stubs leave these out
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


def _require_listener(address: str) -> None:
    """Ray itself would wait for minutes on an address where nothing listens."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster answered at {address!r} ({error}); give host:port of a head that runs "
            "(`ray start --head` prints it), or leave the address out to run on this machine alone"
        ) from error


def _describe(temporary: Path | None) -> RaySession:
    import ray

    resources = ray.cluster_resources()
    return RaySession(
        address=ray.get_runtime_context().gcs_address,
        cpus=float(resources.get("CPU", 0)),
        gpus=float(resources.get("GPU", 0)),
        temporary=temporary,
    )


def _keep_logs(temporary: Path, directory: str | os.PathLike[str] | None) -> None:
    logs = temporary / "session_latest" / "logs"
    if directory is None or not logs.is_dir():
        return
    target = Path(directory) / "ray-logs"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(logs, target, ignore_dangling_symlinks=True)


def _sweep() -> None:
    """End and remove what is left of sessions whose process is gone: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            with open(folder / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_orphans(folder)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _end_orphans(folder: Path, patience: float = 30.0) -> None:
    """End the processes of a dead session, and wait until they are gone.

    They are those that hold one of its logs open for writing: neither their parents nor their environments, which
    Ray's process titles write over, tell whose they are. Without /proc nothing is done.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        orphans = [int(process.name) for process in Path("/proc").glob("[0-9]*") if _writes_below(process, folder)]
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        time.sleep(0.05)


def _writes_below(process: Path, folder: Path) -> bool:
    """Whether a process has a log of the session open for writing; False for one that is gone or another user's."""
    prefix = f"{os.path.realpath(folder)}/session_"
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return False
    for link in links:
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(prefix) and link.lstat().st_mode & 0o200:
                return True
    return False
