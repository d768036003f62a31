"""A session is private, stays on loopback, nests, and leaves nothing behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from cluster.ray_private import SOCKET_BELOW_TEMPORARY
from cluster.session import _sweep, ray_session

pytestmark = pytest.mark.timeout(120)

HOME = Path.home() / ".ray"


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def test_private_loopback_nested_and_gone(listening_on):
    import ray

    home_before = HOME.exists()
    environment = dict(os.environ)
    for _ in range(2):  # a second session in the same process has another token
        with ray_session(num_cpus=2) as outer:
            assert outer.cpus == 2
            assert outer.temporary is not None
            assert (outer.temporary / "token").stat().st_mode & 0o777 == 0o600
            assert outer.temporary.stat().st_mode & 0o777 == 0o700, "Ray's folder in it is writable for everybody"
            assert (outer.temporary / "r").is_dir()
            with ray_session() as inner:
                assert inner.address == outer.address
            assert ray.is_initialized()
            pid = ray.get(ray.remote(lambda: os.getpid()).remote())
            assert listening_on(os.getpid()) <= {"127.0.0.1", "::1"}
        assert not ray.is_initialized()
        assert not outer.temporary.exists()
        assert not psutil.pid_exists(pid)
    assert HOME.exists() == home_before
    assert dict(os.environ) == environment


def test_logs_of_a_failed_session_are_kept(tmp_path: Path):
    with pytest.raises(KeyError), ray_session(num_cpus=1, directory=tmp_path):
        raise KeyError("oh")
    assert (tmp_path / "ray-logs" / "raylet.out").exists()


def test_unreachable_address():
    with pytest.raises(ConnectionError, match=r"no Ray cluster answered at '127.0.0.1:1'"), ray_session("127.0.0.1:1"):
        pass


def test_two_at_once_and_the_remains_of_a_killed_one():
    """Two processes hold sessions of their own; one is killed with -9; the next session clears its folder away."""
    script = textwrap.dedent(
        """
        import sys
        from cluster.session import _sweep, ray_session
        with ray_session(num_cpus=1) as session:
            import ray
            assert ray.get(ray.remote(lambda: 7).remote()) == 7
            print(session.address, session.temporary, flush=True)
            sys.stdin.readline()
        """
    )
    holders = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = [holder.stdout.readline().split() for holder in holders]
    addresses, folders = zip(*lines, strict=True)
    assert addresses[0] != addresses[1]
    below = psutil.Process(holders[0].pid).children(recursive=True)
    working = [process for process in below if process.name() not in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")]
    holders[0].send_signal(signal.SIGKILL)
    holders[0].wait()
    deadline = time.monotonic() + 60
    while (alive := [p for p in working if runs(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive == [], "a killed driver takes its cluster with it"
    assert Path(folders[0]).exists()
    with ray_session(num_cpus=1):
        assert not Path(folders[0]).exists()
        assert [p for p in below if runs(p)] == [], "what it left alive is ended with it"
        assert Path(folders[1]).exists(), "the living one's folder is left alone"
    holders[1].communicate("\n")
    assert holders[1].returncode == 0
    assert not Path(folders[1]).exists()


def test_what_lives_on_of_a_killed_session_is_ended_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker that does not notice its session's end (here: a sleeping process) would write beside its successor."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, alive, shared = (tmp_path / f"dspark-ray-{name}" for name in ("dead", "alive", "shared"))
    sleepers = {}
    for folder in (dead, alive, shared):
        folder.mkdir(mode=0o700)
        (folder / "lock").touch()
        logs = folder / "r" / "session_1" / "logs"
        logs.mkdir(parents=True)
        with open(logs / "worker.out", "w") as log:
            sleepers[folder] = subprocess.Popen(["sleep", "60"], stdout=log)
    reader = subprocess.Popen(["tail", "-f", dead / "r" / "session_1" / "logs" / "worker.out"])
    shared.chmod(0o777)  # somebody else may have replaced its lock
    with open(alive / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep()
    assert sleepers[dead].wait(timeout=10) == -signal.SIGKILL
    assert not dead.exists()
    assert alive.exists()
    for spared in (sleepers[alive], sleepers[shared], reader):
        assert spared.poll() is None
        spared.kill()
        spared.wait()


def test_a_temporary_folder_whose_path_is_too_long_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/{'long' * 10}")
    with pytest.raises(ValueError, match=r"is \d+ bytes too long for the sockets .* set TMPDIR"), ray_session():
        pass


def test_the_longest_path_that_is_accepted_has_room_for_rays_sockets(monkeypatch: pytest.MonkeyPatch):
    """Ray's own names, of a session that runs, against what is reckoned for them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        room = 107 - len(f"{top}/") - len("/dspark-ray-12345678/r") - len(SOCKET_BELOW_TEMPORARY)
        folder = Path(top, "x" * room)
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with ray_session(num_cpus=1) as session:
            assert session.temporary is not None
            sockets = [str(path) for path in session.temporary.glob("r/session_2*/sockets/*")]
        assert len(sockets) >= 2
        assert max(map(len, sockets)) <= 107


def test_sigterm_is_left_to_the_process_and_the_session_ends_in_order():
    """Ray's own handlers would abort the process, or let it wait for servers that they have killed."""
    text = """
        import os, signal, time
        from cluster.session import ray_session

        def interrupt(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGTERM, interrupt)
        try:
            with ray_session(num_cpus=1) as session:
                import ray
                slow = ray.remote(lambda: time.sleep(600)).remote()
                signal.setitimer(signal.ITIMER_REAL, 1)
                signal.signal(signal.SIGALRM, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
                ray.get(slow)
        except KeyboardInterrupt:
            time.sleep(4)  # longer than Ray's abort would take
            print("ended", session.temporary.exists(), ray.is_initialized())
    """
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ended False False\n"), done.stderr
    assert "SIGTERM" not in done.stderr
