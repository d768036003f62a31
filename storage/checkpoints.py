"""Checkpoints that are complete or invisible.

Files go into a folder with a temporary name, are synced, the folder is renamed to `step-XXXXXXXX`, and `COMPLETE.json`
with the SHA-256 of every file comes last. A folder without that record, or with one that does not match, is not a
checkpoint: whatever was killed, the newest complete one is found.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, with_config
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from typing_extensions import TypedDict

from storage.cache.records import seal, unseal
from storage.cache.schema import STRICT, Count, Sha256, checked, parse_json
from storage.errors import CheckpointCorrupt, MissingFile, StorageCorrupt, StorageError
from storage.files.filesystems import TEMPORARY_SUFFIX, Folder, full_disk_named, sync_folder, temporary_name
from storage.files.names import path_inside

COMPLETE, TENSORS, STATE = "COMPLETE.json", "tensors.safetensors", "state.json"
_NAME = re.compile(r"step-(\d{8,18})")


class _File(TypedDict):
    bytes: Count
    sha256: Sha256


@with_config(STRICT)
class _Record(TypedDict):
    step: Count
    metric: Annotated[float, Field(allow_inf_nan=False)] | None
    files: dict[str, _File]


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A complete checkpoint: where it is, after which step, and its score if it has one."""

    path: Path
    step: int
    metric: float | None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved: tensors and JSON state by name."""

    path: Path
    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]


def save_checkpoint(
    root: str | PathLike[str],
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    metric: float | None = None,
    keep_last: int = 3,
) -> Path:
    """Write one checkpoint, and remove all but the newest `keep_last` and the best; returns its folder.

    `state` must be JSON. `metric`: a score, the higher the better; None leaves the checkpoint out of the ranking. A
    complete checkpoint of the same step is replaced.
    """
    if metric is not None and not math.isfinite(metric):
        raise StorageError(
            f"metric = {metric} of checkpoint {step} is not finite; pass None to leave it out of the ranking"
        )
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    final = root / f"step-{step:08d}"
    folder = root / temporary_name(final.name)
    try:
        with full_disk_named(str(final)):
            folder.mkdir()
            shared = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(shared, folder / TENSORS)
            (folder / STATE).write_text(json.dumps(dict(state), sort_keys=True, indent=1, allow_nan=False))
            (folder / TENSORS).chmod((folder / STATE).stat().st_mode)  # safetensors leaves it to its owner alone
            files = {}
            for name in (STATE, TENSORS):
                sync_folder(folder / name)
                files[name] = {"bytes": (folder / name).stat().st_size, "sha256": _sha256(folder / name)}
            sync_folder(folder)
            if final.exists():
                _discard(final)
            os.rename(folder, final)
            sync_folder(root)
            Folder(final).write(COMPLETE, seal({"step": step, "metric": metric, "files": files}))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    infos = complete_checkpoints(root)
    kept = {info.path for info in infos[-keep_last:]} | {best_checkpoint(root)}
    for info in infos:
        if info.path not in kept:
            _discard(info.path)
    return final


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def complete_checkpoints(root: str | PathLike[str]) -> list[CheckpointInfo]:
    """All complete checkpoints by step: sound record, every file present in its recorded size."""
    root = Path(root)
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        record = _complete_record(path) if match else None
        if record is not None and match is not None and record["step"] == int(match[1]):
            found.append(CheckpointInfo(path=path, step=record["step"], metric=record["metric"]))
    return sorted(found, key=lambda info: info.step)


def _record(path: Path) -> dict[str, Any]:
    """The checkpoint's COMPLETE.json, every name in it inside the folder. StorageCorrupt, or FileNotFoundError."""
    source = str(path / COMPLETE)
    record = unseal(path_inside(path, COMPLETE, source).read_bytes(), source)
    checked(_Record, record, source, "remove this folder to use the checkpoint before it")
    for name in record["files"]:
        path_inside(path, name, source)
    return record


def _complete_record(path: Path) -> dict[str, Any] | None:
    try:
        record = _record(path)
        sizes = {name: (path / name).stat().st_size for name in record["files"]}
    except (OSError, StorageCorrupt):
        return None
    return record if all(sizes[name] == entry["bytes"] for name, entry in record["files"].items()) else None


def newest_checkpoint(root: str | PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step, or None. A damaged one is passed over."""
    return next((info.path for info in reversed(complete_checkpoints(root)) if not damaged_files(info.path)), None)


def best_checkpoint(root: str | PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest metric (the later one of equals), or None if none has a metric."""
    scored = [info for info in complete_checkpoints(root) if info.metric is not None]
    return max(scored, key=lambda info: (info.metric, info.step)).path if scored else None


def damaged_files(path: str | PathLike[str]) -> list[str]:
    """Files of a checkpoint that are missing or whose SHA-256 is not the recorded one."""
    path = Path(path)
    try:
        record = _record(path)
    except (OSError, StorageCorrupt):
        return [COMPLETE]
    damaged = []
    for name, entry in record["files"].items():
        try:
            if _sha256(path / name) != entry["sha256"]:
                damaged.append(name)
        except FileNotFoundError:
            damaged.append(name)
    return damaged


def load_checkpoint(path: str | PathLike[str], *, check_hashes: bool = True) -> Checkpoint:
    """Read a checkpoint that `save_checkpoint` wrote. CheckpointCorrupt names damaged files."""
    path = Path(path)
    if not path.is_dir():
        raise MissingFile(f"no checkpoint at {path}; check the path, or train first")
    damaged = damaged_files(path) if check_hashes else []
    if damaged:
        raise CheckpointCorrupt(
            f"{path}: {', '.join(damaged)} missing or damaged; remove this folder to use the checkpoint before it"
        )
    try:
        return Checkpoint(
            path=path,
            step=_record(path)["step"],
            tensors=load_file(path / TENSORS),
            state=parse_json((path / STATE).read_bytes(), str(path / STATE)),
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({error}); remove it to use the one before it") from error


def remove_leftovers(root: str | PathLike[str]) -> list[Path]:
    """Remove what killed writers left. Call it before training starts, when nobody writes here."""
    root = Path(root)
    complete = {info.path for info in complete_checkpoints(root)}
    removed = []
    for path in root.iterdir() if root.is_dir() else ():
        unfinished = _NAME.fullmatch(path.name) and path not in complete and not (path / COMPLETE).exists()
        temporary = path.name.startswith(".step-") and path.name.endswith(TEMPORARY_SUFFIX)
        if path.is_dir() and not path.is_symlink() and (temporary or unfinished):
            shutil.rmtree(path)
            removed.append(path)
    return removed


def _discard(path: Path) -> None:
    """Make a checkpoint invisible before its files go, so that a kill in between leaves no half of one."""
    (path / COMPLETE).unlink(missing_ok=True)
    shutil.rmtree(path)
