"""A Ray session of the run's own: private, on loopback, quick to start, and gone without a trace when it ends.

`ray_session()` starts an embedded one-node cluster, or joins the cluster at `address`, or, when this process is
itself a submitted Ray job, the cluster that runs the job. A session inside a session uses the outer one.

What Ray would otherwise leave or open, and what happens here:

* It makes its temporary folder writable for everybody. The session's folder is this user's alone (mode 0700); Ray's is
  inside it, beside the session's token and lock.
* It writes `~/.ray/auth_token`, and every later head on the machine enforces it. The session has its own token file.
* It binds every interface. An embedded session stays on 127.0.0.1.
* It keeps session folders under `/tmp/ray` for ever. The session's folder goes with it, and the folders of sessions
  that were killed go when the next one starts, with whatever process of theirs is still alive: Ray's agents try for
  a minute to report to a head that is gone, and a worker that has not noticed yet must not write beside its successor.
  Ray's logs of a session that failed are kept in `directory`.
* It waits for ever when this machine's raylet dies, and ends the process with a stack when the control service does.
  A thread looks after both, interrupts the wait, and the session raises `ClusterLost`.
"""

from __future__ import annotations

import _thread
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ClusterError, ClusterLost, NoCluster
from cluster.ray_private import (
    LONGEST_SOCKET_PATH,
    SOCKET_BELOW_TEMPORARY,
    raylets_last_words_unheard,
    reload_environment,
    start_node,
)

LOOPBACK = "127.0.0.1"
DEFAULT_OBJECT_STORE_BYTES = 200 * 1024**2
_PREFIX = "dspark-ray-"
_RAYS_FOLDER = "r"  # in the session's own: short, as the path of a socket may not be long
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
_watch: _Watch | None = None


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
    kept_as: Callable[[str], str] = str,
) -> Iterator[RaySession]:
    """Run the body with Ray connected, and disconnect (ending an embedded cluster) afterwards.

    Args:
        address: `host:port` of a running cluster (its token in `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).
            None starts an embedded one, or uses the cluster of the Ray job that this process is.
        num_cpus, num_gpus: logical resources of an embedded cluster; None takes what the machine has.
        object_store_bytes: shared memory of an embedded cluster, 200 MiB by default (states travel on disk).
        directory: where Ray's logs go if the body raises; None drops them.
        kept_as: what becomes of their text there, such as the same without secrets.

    Raises:
        NoCluster: no cluster answers at `address`.
        ClusterLost: the cluster went away in the middle; what the body raised for that is its cause.
        ClusterError: the temporary folder's path is too long for the sockets of an embedded cluster.
    """
    import ray

    if ray.is_initialized():
        yield _describe(None)
        return
    if address is None and inside_ray_job():
        address = "auto"
    if address is not None:
        with environment(QUIET_ENVIRONMENT):
            reload_environment()
            _require_listener(address)
            try:
                with sigterm_left_alone():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
                session = _describe(None)
                with _watched(_JoinedCluster(session.address).fault):
                    yield session
            finally:
                ray.shutdown()
        return
    with _private_folder() as temporary:
        variables = {**QUIET_ENVIRONMENT, **EMBEDDED_ENVIRONMENT, **private_token(temporary)}
        node = _embedded_node(temporary, num_cpus, num_gpus, object_store_bytes)
        try:
            with environment(variables), node:
                yield _describe(temporary)
        except Exception:
            _keep_logs(temporary / _RAYS_FOLDER, directory, kept_as)
            raise
        finally:
            reload_environment()


@contextlib.contextmanager
def _embedded_node(
    temporary: Path, num_cpus: int | None, num_gpus: int | None, object_store_bytes: int | None
) -> Iterator[None]:
    global _embedded
    import ray

    reload_environment()
    (temporary / _RAYS_FOLDER).mkdir()
    node = start_node(
        temporary / _RAYS_FOLDER,
        address=LOOPBACK,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        object_store_bytes=object_store_bytes or DEFAULT_OBJECT_STORE_BYTES,
    )

    def fault() -> str | None:
        dead = [name for name, _ in node.dead_processes()]
        return f"Ray's {' and '.join(dead)} ended on this machine" if dead else None

    try:
        with sigterm_left_alone(), raylets_last_words_unheard():
            ray.init(
                address=node.gcs_address,
                _node_ip_address=LOOPBACK,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        _embedded = True
        with _watched(fault):
            yield
    finally:
        _embedded = False
        ray.shutdown()
        node.kill_all_processes(check_alive=False, allow_graceful=True)


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A new folder of this user's alone, with a lock that is held for the session's life; the dead ones' are removed.

    Raises ClusterError where the temporary folder's path leaves no room for a socket's.
    """
    _sweep()
    require_short_path(f"{tempfile.gettempdir()}/{_PREFIX}12345678")
    temporary = Path(tempfile.mkdtemp(prefix=_PREFIX))
    with open(temporary / "lock.new", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(temporary / "lock.new", temporary / "lock")  # the sweep of another session finds it locked
        try:
            yield temporary
        finally:
            _end_orphans(temporary)
            shutil.rmtree(temporary, ignore_errors=True)


def require_short_path(folder: str) -> None:
    """Raises ClusterError if Ray's sockets below `folder` would have paths longer than the system allows."""
    room = LONGEST_SOCKET_PATH - len(f"/{_RAYS_FOLDER}{SOCKET_BELOW_TEMPORARY}")
    if (length := len(os.fsencode(folder))) > room:
        too_much = length - room
        raise ClusterError(
            f"the path of the temporary folder, {tempfile.gettempdir()}, is {too_much} bytes too long for the sockets "
            "that Ray puts there; set TMPDIR to a folder with a shorter path, such as /tmp"
        )


class _Watch:
    """A thread that asks `fault` every half second what is wrong, and interrupts the main thread when something is.

    The interrupt is the one of Ctrl-C, as it alone comes out of every wait of Ray's.
    """

    def __init__(self, fault: Callable[[], str | None]) -> None:
        self._fault = fault
        self._ended = threading.Event()
        self.found: str | None = None
        self._interrupts = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._look, name="ray-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.5):
            if (found := self._fault()) is not None:
                self.found = found
                if self._interrupts and not self._ended.is_set():
                    _thread.interrupt_main()
                return

    def fault(self) -> str | None:
        """What is wrong; asked anew if the thread has found nothing yet."""
        return self.found or self._fault()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(10.0)


def cluster_is_lost() -> bool:
    """Whether the session's cluster is known to be gone: nothing that needs it should be waited for."""
    return _watch is not None and _watch.found is not None


@contextlib.contextmanager
def _watched(fault: Callable[[], str | None]) -> Iterator[None]:
    """Raise `ClusterLost` out of the body, and not what it does to the code in it, when the cluster goes away."""
    global _watch
    watch = _watch = _Watch(fault)
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if (found := watch.fault()) is not None:
            raise ClusterLost(
                f"the Ray cluster is gone: {found} (killed from outside, or for want of memory?). What is complete "
                "stays: the same command goes on from there"
            ) from error
        raise
    finally:
        watch.end()
        _watch = None


class _JoinedCluster:
    """Looks after a cluster that is someone else's: its control service, and this machine's raylet."""

    PATIENCE = 30.0  # seconds that the control service may be away: it can come back

    def __init__(self, address: str) -> None:
        import ray

        self._address = address
        self._node = ray.get_runtime_context().get_node_id()
        self._well = time.monotonic()
        self._asked = 0.0

    def fault(self) -> str | None:
        if time.monotonic() - self._asked < 5.0:
            return None
        self._asked = time.monotonic()
        import ray
        from ray.exceptions import RayError

        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        except (OSError, RayError) as error:
            away = time.monotonic() - self._well
            return f"no answer from {self._address} for {away:.0f} s ({error})" if away > self.PATIENCE else None
        self._well = time.monotonic()
        return None if self._node in alive else "Ray's raylet ended on this machine"


def private_token(folder: Path) -> dict[str, str]:
    """Write a fresh token (mode 0600) into `folder`; the variables that make Ray use it."""
    path = folder / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


@contextlib.contextmanager
def sigterm_left_alone() -> Iterator[None]:
    """Let `ray.init` leave this process with the answer to SIGTERM that it had.

    Ray's own in Python kills its servers first and then waits for them, a minute long; the one in C++ prints a stack,
    and aborts the process three seconds later. Whoever runs a session ends it in order when a handler raises.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # looks the same to Python, and takes it back from C++


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the body; what was there before comes back."""
    before = dict(os.environ)
    if "RAY_AUTH_TOKEN_PATH" in values:
        os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _require_listener(address: str) -> None:
    """Ray itself would wait for minutes on an address where nothing listens."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise NoCluster(
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


def _keep_logs(temporary: Path, directory: str | os.PathLike[str] | None, kept_as: Callable[[str], str]) -> None:
    logs = temporary / "session_latest" / "logs"
    if directory is None or not logs.is_dir():
        return
    target = Path(directory) / "ray-logs"
    shutil.rmtree(target, ignore_errors=True)
    for path in logs.rglob("*"):
        if path.is_file():
            kept = target / path.relative_to(logs)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(kept_as(path.read_text(errors="replace")))


def _sweep() -> None:
    """End and remove what is left of this user's sessions whose process is gone: nobody holds their lock.

    A folder that others may write to is left alone: its lock says nothing.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
                continue
            with open(folder / "lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _end_orphans(folder)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _end_orphans(folder: Path, patience: float = 30.0) -> None:
    """End the other processes of a session that is over, and wait until they are gone.

    They are those that hold one of its logs open for writing: neither their parents nor their environments, which
    Ray's process titles write over, tell whose they are. Without /proc nothing is done.
    """
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        processes = [process for process in Path("/proc").glob("[0-9]*") if process.name != str(os.getpid())]
        orphans = [int(process.name) for process in processes if _writes_below(process, folder)]
        if not orphans:
            return
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        time.sleep(0.05)


def _writes_below(process: Path, folder: Path) -> bool:
    """Whether a process has a log of the session open for writing; False for one that is gone or another user's."""
    prefix = f"{os.path.realpath(folder)}/{_RAYS_FOLDER}/session_"
    try:
        links = list((process / "fd").iterdir())
    except OSError:
        return False
    for link in links:
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(prefix) and link.lstat().st_mode & 0o200:
                return True
    return False
