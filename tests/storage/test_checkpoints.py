from __future__ import annotations

import random
import signal
from multiprocessing.context import ForkServerContext as ForkServer
from pathlib import Path

import pytest
import torch
from killed_writers import save, save_until_killed

from storage.checkpoints import (
    CheckpointCorrupt,
    best_checkpoint,
    complete_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    remove_leftovers,
)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    folder = save(tmp_path, 12)
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    loaded = load_checkpoint(folder)
    assert loaded.step == 12
    assert torch.equal(loaded.tensors["weight"], torch.full((4, 3), 12.0))
    assert loaded.tensors["tied"].dtype is torch.bfloat16
    assert loaded.state == {"epoch": 1, "rate": 0.1 * 12}


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, metric in enumerate([1.0, 3.0, 2.0, 2.5, None, 2.9]):
        save(tmp_path, step, metric=metric, keep_last=2)
    assert [info.step for info in complete_checkpoints(tmp_path)] == [1, 4, 5]
    assert best_checkpoint(tmp_path) == tmp_path / "step-00000001"
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000005"
    with pytest.raises(ValueError, match="not finite"):
        save(tmp_path, 6, metric=float("nan"))
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000005"


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 3, metric=1.0)
    save(tmp_path, 3, metric=2.0)
    assert [(info.step, info.metric) for info in complete_checkpoints(tmp_path)] == [(3, 2.0)]


def test_incomplete_and_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path, step, keep_last=9)
    (tmp_path / "step-00000003/COMPLETE.json").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000002"
    path = tmp_path / "step-00000002/tensors.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    with pytest.raises(CheckpointCorrupt, match=r"tensors\.safetensors missing or damaged"):
        load_checkpoint(tmp_path / "step-00000002")
    (tmp_path / "step-00000001/state.json").unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000000"
    assert remove_leftovers(tmp_path) == [tmp_path / "step-00000003"]


def test_a_killed_writer_leaves_the_newest_complete_one(tmp_path: Path, forkserver: ForkServer) -> None:
    generator = random.Random(3)
    best = -1
    for _ in range(12):
        process = forkserver.Process(target=save_until_killed, args=(str(tmp_path), generator.randrange(60)))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL
        newest = newest_checkpoint(tmp_path)
        if newest is None:
            assert best == -1
            continue
        loaded = load_checkpoint(newest)
        assert loaded.step >= best
        assert torch.equal(loaded.tensors["weight"], torch.full((4, 3), float(loaded.step)))
        best = loaded.step
        remove_leftovers(tmp_path)
        assert {p.name for p in tmp_path.iterdir()} == {i.path.name for i in complete_checkpoints(tmp_path)}
    assert best > 3
