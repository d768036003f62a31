"""A head of a test's own, to which jobs are sent, and the wait for a job's end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cluster import jobs
from cluster.ray_private import reload_environment
from cluster.session import LOOPBACK, LOOPBACK_ENVIRONMENT, QUIET_ENVIRONMENT, environment, private_token


def wait(job: str, *, address: str, timeout: float, poll_seconds: float = 0.5) -> str:
    """The job's last status, once it has ended.

    Raises:
        TimeoutError: it still runs after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while (state := jobs.status(job, address=address)) not in jobs.FINISHED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"job {job} is still {state} after {timeout:g} s")
        time.sleep(poll_seconds)
    return state


@dataclass(frozen=True, kw_only=True)
class Head:
    """A running head: where jobs are sent, where drivers connect, the variables with its token, and its process."""

    jobs_address: str
    address: str
    environment: dict[str, str]
    pid: int
    directory: Path


@contextlib.contextmanager
def start_head(*, num_cpus: int = 2, object_store_bytes: int = 200 * 1024**2, timeout: float = 120.0) -> Iterator[Head]:
    """A head of this process's own on loopback, with free ports, a fresh token and a folder that goes with it.

    The token's variables are set in this process for the body. It is `ray start --head --block` in a process group of
    its own, ended by its id, and jobs that still run end with it: `ray stop` would end every Ray on the machine.

    Raises:
        TimeoutError: it did not answer in `timeout` seconds; the message ends with what it printed.
    """
    directory = Path(tempfile.mkdtemp(prefix="dspark-head-"))
    (directory / "r").mkdir()  # Ray's own, which it makes writable for everybody
    gcs, dashboard, agent, client = _free_ports(4)
    variables = {**QUIET_ENVIRONMENT, **LOOPBACK_ENVIRONMENT, **private_token(directory)}
    interpreter = Path(sys.executable).parent  # `python` in a job is then this one, as in an activated environment
    variables["PATH"] = os.pathsep.join([str(interpreter), os.environ.get("PATH", os.defpath)])
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *(f"--node-ip-address={LOOPBACK}", f"--port={gcs}", f"--temp-dir={directory / 'r'}"),
        *("--include-dashboard=true", f"--dashboard-host={LOOPBACK}", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"),
        *(f"--num-cpus={num_cpus}", f"--object-store-memory={object_store_bytes}"),
    ]
    output = directory / "head.log"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(reload_environment)
        stack.enter_context(environment(variables))
        reload_environment()
        with open(output, "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent
            )
        stack.callback(_end, process)
        jobs_address = f"http://{LOOPBACK}:{dashboard}"
        _await_head(process, jobs_address, output, timeout)
        yield Head(
            jobs_address=jobs_address,
            address=f"{LOOPBACK}:{gcs}",
            environment=variables,
            pid=process.pid,
            directory=directory,
        )


def _await_head(process: subprocess.Popen[bytes], address: str, output: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            jobs._client(address).list_jobs()
            return
        except Exception as error:  # not up yet: the client raises whatever its HTTP layer raises
            if process.poll() is not None or time.monotonic() > deadline:
                said = output.read_text()[-2000:]
                raise TimeoutError(f"no Ray head came up at {address} ({error}); it said:\n{said}") from error
        time.sleep(0.3)


def _die_with_parent() -> None:
    """Have Linux end the head when this process is killed and cannot do it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the head, which Ray's processes do not outlive, and whatever is left below it.

    Jobs have process groups of their own, and what watches them ends with the head.
    """
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for left in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()
    process.wait()


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, from a range outside the one that the system hands out next."""
    ports: list[int] = []
    while len(ports) < count:
        port = 20000 + secrets.randbelow(10000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            ports.append(port)
    return ports
