"""Training functions for the group's tests: they count in a file, and one thing goes wrong."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from cluster.train_group import stop_wanted


def count(config: dict[str, Any]) -> None:
    """Count to `steps`, one number a line, going on after the last line of the log; die, fail or wait as told."""
    import torch
    from torch import distributed

    rank = distributed.get_rank()
    folder = Path(config["folder"])
    log, started = folder / "log", folder / f"started-{rank}-{os.getpid()}"
    listening = {
        s.laddr.ip.removeprefix("::ffff:")
        for s in psutil.Process().net_connections("tcp")
        if s.status == psutil.CONN_LISTEN
    }
    started.write_text(" ".join(sorted(listening)))
    done = len(log.read_text().splitlines()) if log.exists() else 0
    distributed.barrier()
    for step in range(done, config["steps"]):
        total = torch.tensor([rank + 1.0])
        distributed.all_reduce(total)
        if step == config.get("die_at") and rank == config.get("die_rank", 0) and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == config.get("fail_at"):
            raise ValueError(f"sample 17 of step {step} is bad")
        if rank == 0:
            with log.open("a") as file:
                file.write(f"{step} {float(total):g}\n")
        stop = torch.tensor([float(stop_wanted())])
        distributed.all_reduce(stop)
        if stop.item() > 0:
            return
        time.sleep(config.get("pause", 0.0))
