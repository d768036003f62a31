"""A folder that is complete or not there: made under a temporary name, with `manifest.json`, and moved to its place.

The manifest has the hash of every file, and its own. Whoever reads a file compares it with the manifest first; only
folders from elsewhere may lack one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dspark.errors import DsparkError

MANIFEST = "manifest.json"
FORMAT = "dspark-drafter/2"
UNSEALED_FORMAT = "dspark-native/1"  # of manifests that do not carry their own hash yet
AGAIN = "fetch or publish it again"


class CheckpointError(DsparkError):
    """A drafter's folder cannot be used; the message names the file, what is wrong with it, and the cure."""


@contextmanager
def new_folder(final: Path, **facts: Any) -> Iterator[Path]:
    """A folder to fill, which stands at `final` with its manifest when the block ends. A failure leaves nothing.

    `facts` go into the manifest. Raises CheckpointError where `final` is a symbolic link or a file.
    """
    require_place(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = final.with_name(f".{final.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.writing")
    old = staging.with_suffix(".old.writing")
    staging.mkdir()
    try:
        yield staging
        write_manifest(staging, **facts)
        # A kill between the two renames leaves nothing at `final`, and whoever was making it makes it again.
        if final.exists():
            os.rename(final, old)
        os.rename(staging, final)
        _sync(final.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def require_place(final: Path) -> None:
    """Raises CheckpointError unless a folder can take this place: nothing stands there, or a folder."""
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        kind = "a symbolic link" if final.is_symlink() else "a file"
        raise CheckpointError(f"{final} is {kind}, and a folder is to be written there: move it away")


def write_manifest(folder: Path, **facts: Any) -> dict[str, Any]:
    """Make every file durable and write the manifest last: `facts`, bytes and SHA-256 of each file, its own SHA-256."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / MANIFEST:
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            files[path.relative_to(folder).as_posix()] = {"sha256": digest, "bytes": path.stat().st_size}
    manifest = {"format": FORMAT, **facts, "files": files}
    manifest["sha256"] = _digest(manifest)
    with open(folder / MANIFEST, "w", encoding="utf-8") as out:
        out.write(json.dumps(manifest, indent=2, sort_keys=True) + "\n")
        out.flush()
        os.fsync(out.fileno())
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _sync(inner)
    return manifest


def read_manifest(folder: Path, cure: str = AGAIN) -> dict[str, Any] | None:
    """The manifest as it was written, None where there is none. Raises CheckpointError for one that was changed."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    found = read_json(path, cure)
    sealed = found.get("format") == FORMAT
    content = {key: value for key, value in found.items() if key != "sha256"}
    sound = found.get("sha256") == _digest(content) if sealed else found.get("format") == UNSEALED_FORMAT
    files = found.get("files")
    if not sound or not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
        raise CheckpointError(f"{path} has been changed since it was written: {cure}")
    return found


def damaged_files(folder: str | Path, names: Sequence[str] | None = None, cure: str = AGAIN) -> list[str]:
    """What is wrong with a folder, a line a file; empty when every file (or each of `names`) has its recorded hash.

    Raises CheckpointError for a manifest that is missing or was changed.
    """
    place = Path(folder)
    manifest = read_manifest(place, cure)
    if manifest is None:
        raise CheckpointError(f"{place / MANIFEST} is missing, the folder was not finished: {cure}")
    problems = []
    for name in manifest["files"] if names is None else names:
        entry = manifest["files"].get(name)
        try:
            with open(place / name, "rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError:
            problems.append(f"{place / name} is missing")
            continue
        except OSError as error:
            problems.append(f"{place / name} cannot be read ({error.strerror})")
            continue
        if entry is None or entry["sha256"] != digest:
            problems.append(f"{place / name} has been changed since it was written")
    return problems


def require_intact(
    folder: str | Path, names: Sequence[str] | None = None, *, needs_manifest: bool = True, cure: str = AGAIN
) -> None:
    """Raises CheckpointError unless every file (or each of `names`) is as the manifest says.

    needs_manifest: False lets a folder from elsewhere lack one.
    """
    if not needs_manifest and not os.path.lexists(Path(folder, MANIFEST)):
        return
    if problems := damaged_files(folder, names, cure):
        raise CheckpointError(f"{'; '.join(problems[:4])}: {cure}")


def read_json(path: Path, cure: str = AGAIN) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming file and cure for whatever else stands there."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise CheckpointError(f"{path} cannot be read ({why}): {cure}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object: {cure}")
    return value


def _is_entry(name: str, entry: Any) -> bool:
    inside = not os.path.isabs(name) and ".." not in name.split("/")
    return inside and isinstance(entry, dict) and isinstance(entry.get("sha256"), str)


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
