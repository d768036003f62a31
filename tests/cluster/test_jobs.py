"""Submit, watch, read and stop jobs on a private head that leaves nothing behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from private_head import Head, start_head, wait

from cluster import jobs
from cluster.session import ray_session

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with start_head(num_cpus=2) as started:
        yield started
        below = psutil.Process(started.pid).children(recursive=True)
    assert not started.directory.exists()
    assert_gone(below, 20)


def assert_gone(processes: list[psutil.Process], timeout: float) -> None:
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    assert [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []


def python(text: str) -> str:
    return shlex.join([sys.executable, "-c", text])


def sleeping_job(address: str) -> tuple[str, psutil.Process]:
    """A job that runs until it is stopped, and its process."""
    text = "import os, time; print('process', os.getpid(), flush=True); time.sleep(600)"
    job, said = jobs.submit(python(text), address=address), ""
    for more in jobs.logs(job, address=address, follow=True):
        said += more
        if found := re.search(r"^process (\d+)$", said, re.MULTILINE):
            return job, psutil.Process(int(found[1]))
    raise AssertionError(f"the job ended: {said}")


def test_a_job_runs_in_its_folder_and_its_output_comes_back(head: Head, tmp_path: Path):
    (tmp_path / "note.txt").write_text("from the folder")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "big").write_text("stays at home")
    text = "import os; print(open('note.txt').read(), os.environ['COLOUR'], os.path.exists('runs'))"
    job = jobs.submit(python(text), address=head.jobs_address, working_dir=tmp_path, env_vars={"COLOUR": "blue"})
    assert wait(job, address=head.jobs_address, timeout=120) == "SUCCEEDED"
    assert "from the folder blue False" in "".join(jobs.logs(job, address=head.jobs_address, follow=True))
    assert jobs.stop(job, address=head.jobs_address) is False


def test_a_session_inside_a_job_uses_its_cluster(head: Head):
    text = "from cluster.session import ray_session\nwith ray_session() as s: print('cpus', s.cpus, s.temporary)"
    root = str(Path(jobs.__file__).parents[1])
    job = jobs.submit(python(text), address=head.jobs_address, env_vars={"PYTHONPATH": root})
    state = wait(job, address=head.jobs_address, timeout=120)
    said = "".join(jobs.logs(job, address=head.jobs_address))
    assert state == "SUCCEEDED", said
    assert "cpus 2.0 None" in said


def test_a_driver_connects_by_address(head: Head):
    with ray_session(head.address) as session:
        assert session.address == head.address
        assert session.temporary is None


def test_stopping_and_failing(head: Head):
    address = head.jobs_address
    job, _ = sleeping_job(address)
    assert jobs.status(job, address=address) == "RUNNING"
    assert jobs.stop(job, address=address) is True
    assert wait(job, address=address, timeout=120) == "STOPPED"
    failing = jobs.submit(python("raise SystemExit(3)"), address=address, job="the-failing-one")
    assert failing == "the-failing-one"
    assert wait(failing, address=address, timeout=120) == "FAILED"
    assert "3" in jobs.message(failing, address=address)
    with pytest.raises(jobs.JobError, match="the-failing-one"):
        jobs.submit(python("pass"), address=address, job="the-failing-one")


def test_a_running_job_ends_with_its_head():
    with start_head(num_cpus=1) as started:
        _, process = sleeping_job(started.jobs_address)
    assert_gone([process], 20)


def test_mistakes_are_explained(head: Head):
    with pytest.raises(jobs.JobError, match="knows no job 'nobody'"):
        jobs.status("nobody", address=head.jobs_address)
    with pytest.raises(jobs.JobError, match=r"no Ray head answers at http://127\.0\.0\.1:9"):
        jobs.status("nobody", address="http://127.0.0.1:9")


def test_a_head_does_not_outlive_a_killed_owner():
    text = "from private_head import start_head\nwith start_head(num_cpus=1) as h: print(h.pid, flush=True); input()"
    owner = subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[2], Path(__file__).parent)))},
    )
    assert owner.stdout is not None
    head = psutil.Process(int(owner.stdout.readline()))
    folder = Path(next(word for word in head.cmdline() if word.startswith("--temp-dir=")).partition("=")[2]).parent
    below = [head, *head.children(recursive=True)]
    owner.kill()
    owner.wait()
    try:
        assert_gone(below, 120)
    finally:
        shutil.rmtree(folder)


def test_the_head_is_on_loopback_and_private(head: Head, listening_on: Callable[[int], set[str]]):
    assert listening_on(head.pid) <= {"127.0.0.1", "::1"}
    assert (head.directory / "token").stat().st_mode & 0o777 == 0o600
    assert head.directory.stat().st_mode & 0o777 == 0o700
