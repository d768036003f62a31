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
from typing import Annotated, Any, Literal

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
    """What was saved: tensors, JSON state, and torch objects (optimizer state and the like) by name."""

    path: Path
    step: int
    tensors: dict[str, torch.Tensor]
    state: dict[str, Any]
    objects: dict[str, Any]


def checkpoint_name(step: int) -> str:
    if step < 0:
        raise StorageError(f"step = {step}: a checkpoint's step is 0 or more")
    return f"step-{step:08d}"


def save_checkpoint(
    root: str | PathLike[str],
    step: int,
    tensors: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    *,
    objects: Mapping[str, Any] | None = None,
    metric: float | None = None,
    better: Literal["higher", "lower"] = "higher",
    keep_last: int = 3,
    keep_best: int = 1,
) -> Path:
    """Write one checkpoint and remove superseded ones; returns its folder.

    `state` must be JSON. `objects` are torch-saved as `<name>.pt` and must hold tensors and plain containers only
    (they are loaded with weights_only=True).
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    folder = root / temporary_name(checkpoint_name(step))
    try:
        with full_disk_named(str(root / checkpoint_name(step))):
            folder.mkdir()
            shared = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
            save_file(shared, folder / TENSORS)
            (folder / STATE).write_text(json.dumps(dict(state), sort_keys=True, indent=1, allow_nan=False))
            (folder / TENSORS).chmod((folder / STATE).stat().st_mode)  # safetensors leaves it to its owner alone
            for name, value in (objects or {}).items():
                torch.save(value, folder / f"{name}.pt")
            return adopt_folder(
                root, step, folder, metric=metric, better=better, keep_last=keep_last, keep_best=keep_best
            )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def shared_folder(root: str | PathLike[str], step: int) -> Path:
    """A folder for several processes to write one checkpoint into, before one of them calls `adopt_folder`."""
    return Path(root) / f".{checkpoint_name(step)}.shared{TEMPORARY_SUFFIX}"


def adopt_folder(
    root: str | PathLike[str],
    step: int,
    folder: str | PathLike[str],
    *,
    metric: float | None = None,
    better: Literal["higher", "lower"] = "higher",
    keep_last: int = 3,
    keep_best: int = 1,
) -> Path:
    """Make a folder that somebody else filled (DeepSpeed, say) the complete checkpoint of that step; moves it.

    Call it on one rank, after every rank has finished writing. A complete checkpoint of the same step is replaced.
    """
    root, folder = Path(root), Path(folder)
    if metric is not None and not math.isfinite(metric):
        raise StorageError(
            f"metric = {metric} of checkpoint {step} is not finite; pass None to leave it out of the ranking"
        )
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != COMPLETE):
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {
                "bytes": path.stat().st_size,
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
            }
    if not files:
        raise MissingFile(f"{folder} holds no files; nothing to make a checkpoint of")
    for inner in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(inner)
    final = root / checkpoint_name(step)
    if final.resolve() != folder.resolve():
        if final.exists():
            _discard(final)
        os.rename(folder, final)
        sync_folder(root)
    Folder(final).write(COMPLETE, seal({"step": step, "metric": metric, "better": better, "files": files}))
    prune(root, keep_last=keep_last, keep_best=keep_best, better=better)
    return final


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


def newest_checkpoint(root: str | PathLike[str], *, check_hashes: bool = True) -> Path | None:
    """The complete checkpoint with the highest step, or None. With `check_hashes` a damaged one is passed over."""
    for info in reversed(complete_checkpoints(root)):
        if not check_hashes or not damaged_files(info.path):
            return info.path
    return None


def best_checkpoint(root: str | PathLike[str], *, better: Literal["higher", "lower"] = "higher") -> Path | None:
    """The complete checkpoint with the best metric (the later one of equals), or None if none has a metric."""
    ranked = _ranked(complete_checkpoints(root), better)
    return ranked[0].path if ranked else None


def _ranked(infos: list[CheckpointInfo], better: str) -> list[CheckpointInfo]:
    scored = [info for info in infos if info.metric is not None]
    sign = -1.0 if better == "higher" else 1.0
    return sorted(scored, key=lambda info: (sign * (info.metric or 0.0), -info.step))


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
            with open(path / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                    damaged.append(name)
        except FileNotFoundError:
            damaged.append(name)
    return damaged


def load_checkpoint(
    path: str | PathLike[str], *, device: str = "cpu", objects: bool = True, check_hashes: bool = True
) -> Checkpoint:
    """Read a checkpoint that `save_checkpoint` wrote. CheckpointCorrupt names damaged files."""
    path = Path(path)
    if not path.is_dir():
        raise MissingFile(f"no checkpoint at {path}; check the path, or train first")
    damaged = damaged_files(path) if check_hashes else []
    if damaged:
        raise CheckpointCorrupt(
            f"{path}: {', '.join(damaged)} missing or damaged; remove this folder to use the checkpoint before it"
        )
    record, stored = _record(path), {}
    try:
        for name in sorted(record["files"]) if objects else ():  # what is not recorded was not written by us
            if name.endswith(".pt") and "/" not in name:
                stored[Path(name).stem] = _load_tensors(path / name, device)
        return Checkpoint(
            path=path,
            step=record["step"],
            tensors=load_file(path / TENSORS, device=device),
            state=parse_json((path / STATE).read_bytes(), str(path / STATE)),
            objects=stored,
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read ({error}); remove it to use the one before it") from error


def _load_tensors(file: Path, device: str) -> Any:
    """Tensors and plain values of a `.pt` file. Raises CheckpointCorrupt for anything else."""
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # damaged bytes make torch's unpickler fail in any way, with an IndexError too
        raise CheckpointCorrupt(
            f"{file} cannot be read ({type(error).__name__}: {error}); remove its checkpoint to use the one before"
        ) from error


def prune(
    root: str | PathLike[str],
    *,
    keep_last: int = 3,
    keep_best: int = 1,
    better: Literal["higher", "lower"] = "higher",
) -> list[Path]:
    """Remove all but the newest `keep_last` and the best `keep_best` complete checkpoints; returns what was removed."""
    if keep_last < 1:
        raise StorageError(f"keep_last = {keep_last}: at least the newest checkpoint is kept")
    infos = complete_checkpoints(root)
    kept = {info.path for info in infos[-keep_last:]} | {info.path for info in _ranked(infos, better)[:keep_best]}
    removed = [info.path for info in infos if info.path not in kept]
    for path in removed:
        _discard(path)
    return removed


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
