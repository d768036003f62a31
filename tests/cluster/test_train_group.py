"""The training group restarts after a lost worker, ends at once on a lasting error, and stops when it is asked to."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from group_work import count

from cluster import process_group
from cluster.train_group import TrainingFailed, TrainingStopped, run_group

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("session"), pytest.mark.timeout(300)]


def start(folder: Path, *, ranks: int = 1, max_failures: int = 2, **config: float) -> None:
    run_group(
        count,
        {"folder": str(folder), "steps": 6, **config},
        num_workers=ranks,
        cpus_per_worker=0.5,
        max_failures=max_failures,
        storage_path=str(folder / "ray"),
    )


def lines(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_two_ranks_go_on_after_one_is_killed(tmp_path: Path):
    start(tmp_path, ranks=2, die_at=3, die_rank=0)
    assert sorted(set(lines(tmp_path))) == [f"{step} 3" for step in range(6)]
    started = [mark.read_text() for mark in tmp_path.glob("started-*")]
    assert len(started) == 4, "both ranks were started twice"
    assert set(started) == {"127.0.0.1"}, "the rendezvous store and gloo listen on loopback alone"


def test_the_rendezvous_store_listens_on_the_clusters_address_alone(monkeypatch: pytest.MonkeyPatch):
    """On a cluster that is the machine's address there, and the interface that has it."""
    outer = {a.address: name for name, all_of_it in psutil.net_if_addrs().items() for a in all_of_it if a.family == 2}
    before = psutil.Process().net_connections("tcp")
    for address, interface in outer.items():
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda address=address: address)
        monkeypatch.setattr(process_group, "_store", None)
        where, port = process_group._open_store()
        new = [s for s in psutil.Process().net_connections("tcp") if s.status == psutil.CONN_LISTEN and s not in before]
        assert [(s.laddr.ip, s.laddr.port) for s in new if s.laddr.port == port] == [(where, port)]
        assert where == address
        assert process_group.interface_of(address) == interface
    assert process_group.interface_of("192.0.2.1") is None


def test_a_lasting_error_ends_it_at_once_and_is_told(tmp_path: Path):
    with pytest.raises(TrainingFailed, match="sample 17 of step 2 is bad") as failure:
        start(tmp_path, fail_at=2)
    assert isinstance(failure.value.__cause__, ValueError)
    assert "group_work.py" in str(failure.value)
    assert len(list(tmp_path.glob("started-*"))) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_the_workers_to_stop(tmp_path: Path, number: signal.Signals):
    def terminate() -> None:
        while not (tmp_path / "log").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=terminate)
    thread.start()
    with pytest.raises(TrainingStopped, match="run it again") as stopped:
        start(tmp_path, steps=1000, pause=0.1)
    thread.join()
    assert stopped.value.number == number
    assert 1 <= len(lines(tmp_path)) < 1000
    assert signal.getsignal(number) == before
    start(tmp_path, steps=len(lines(tmp_path)) + 1)


def test_a_group_that_does_not_fit_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="100 training workers want 50 CPUs of 2"):
        start(tmp_path, ranks=100)
