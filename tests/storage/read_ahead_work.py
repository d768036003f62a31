"""What the workers of the read-ahead tests do; importable, as the real work is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from storage.cache.target_cache import TargetCache


def join(cache: TargetCache, rows: tuple[int, ...]) -> dict[str, Any]:
    """The rows' states back to back, as a loader packs them."""
    found = [cache.row(row) for row in rows]
    return {
        "ids": [row.sample_id for row in found],
        "hidden_states": torch.cat([row.hidden_states for row in found]),
        "lengths": np.array([len(row.input_ids) for row in found]),
        "nothing": torch.empty(0, 3),
        "scalar": torch.tensor(7.0),
    }


def raw(cache: TargetCache, row: int) -> dict[str, Any]:
    return cache.raw_row(row)


def fail_at(cache: TargetCache, row: int) -> int:
    if row == 3:
        raise KeyError("three")
    return row


def die_once(cache: TargetCache, item: tuple[str, int]) -> int:
    """The first process that meets row 5 dies; the next one finds its mark and goes on."""
    mark, row = Path(item[0]), item[1]
    if row == 5 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row


def die(cache: TargetCache, row: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return row


def note(cache: TargetCache, item: tuple[str, int]) -> int:
    """Leave a file that says that this item was done."""
    (Path(item[0]) / str(item[1])).touch()
    return item[1]


def slow(cache: TargetCache, item: tuple[str, int]) -> int:
    (Path(item[0]) / str(os.getpid())).touch()
    time.sleep(600)
    return item[1]
