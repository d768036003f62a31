"""Shards of a remote cache kept on local disk: checked when they arrive, the longest unused removed at the limit."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike, utime
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from storage.errors import AGAIN, CacheCorrupt, StorageError, StorageFull
from storage.files.filesystems import Folder, full_disk_named, temporary_name

ATTEMPTS, PAUSE = 4, 0.5  # for a shard that arrives altered; seconds before the second one, doubled for each further
WAIT = 0.1  # seconds between two looks for room
FREE_SHARE = 0.05  # of the disk that is left free where no limit is given


class LocalCopy:
    """Fetches shards to a folder of at most `max_bytes` (None: as long as the disk has room).

    Processes may share the folder: each shard is fetched by one of them, and what it will take is reserved beforehand.
    A shard removed while another process reads it keeps its space until that process opens its next one.
    """

    def __init__(
        self, remote: Folder, path: str | PathLike[str] | None, *, max_bytes: int | None = None, pause: float = PAUSE
    ) -> None:
        self.remote, self.max_bytes, self.pause = remote, max_bytes, pause
        if path is None:
            path = f"{tempfile.gettempdir()}/dspark-shards-{hashlib.sha256(remote.url.encode()).hexdigest()[:16]}"
        self.local = Folder(path)
        if not self.local.is_local:
            raise StorageError(f"the local copy {self.local} is not on this machine: give a folder")
        for name in ("shards", "locks"):
            self.local.make(name)
        self.local.remove_dead_temporaries()

    def fetch(self, record: Mapping[str, Any]) -> Folder:
        """Make sure that the record's shard is in the local folder, whole and unaltered; returns that folder.

        UnsafeName for a record whose shard would lie elsewhere.
        """
        name = self.local.inside(record["shard"], str(self.remote))
        if not self._here(record):
            with self._lock(Path(name).name):
                if not self._here(record):
                    self._fetch(record)
        with suppress(FileNotFoundError):  # another process needed the room already
            utime(self.local.local_path(name))
        return self.local

    def _fetch(self, record: Mapping[str, Any]) -> None:
        name = record["shard"]
        place = self.local.local_path(name)
        temporary = place.with_name(temporary_name(place.name))
        try:
            with full_disk_named(str(place)), open(temporary, "xb") as file:
                self._reserve(temporary, record["bytes"])
                for attempt in range(ATTEMPTS):
                    if attempt:
                        time.sleep(self.pause * 2 ** (attempt - 1))
                    if self._copy(name, file) == record["sha256"]:
                        with self._lock("room"):  # who counts what is taken finds it under one name or the other
                            os.replace(temporary, place)
                        return
        except FileNotFoundError as error:
            raise CacheCorrupt(f"{self.remote.describe(name)} is missing; {AGAIN}") from error
        finally:
            with self._lock("room"):
                temporary.unlink(missing_ok=True)
        raise CacheCorrupt(f"{self.remote.describe(name)}: its SHA-256 is not the committed one, {ATTEMPTS} times")

    def _copy(self, name: str, file: IO[bytes]) -> str:
        """Write the remote file's bytes; their SHA-256."""
        file.seek(0)
        digest = hashlib.sha256()
        for chunk in self.remote.chunks(name):
            digest.update(chunk)
            file.write(chunk)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
        return digest.hexdigest()

    def _here(self, record: Mapping[str, Any]) -> bool:
        """A shard is only ever renamed into place after its hash was checked, so its size tells enough."""
        try:
            return self.local.size(record["shard"]) == record["bytes"]
        except FileNotFoundError:
            return False

    def _reserve(self, temporary: Path, needed: int) -> None:
        """Let the file count as `needed` bytes, once there is room; removes the longest unused shards for it."""
        if self.max_bytes is not None and needed > self.max_bytes:
            raise StorageFull(
                f"a shard of {needed:,} bytes does not fit into a local copy of {self.max_bytes:,}: raise the limit"
            )
        while True:
            with self._lock("room"):
                used = self._make_room(needed)
                if self._fits(used, needed):
                    os.truncate(temporary, needed)
                    return
            if not used:
                break
            time.sleep(WAIT)  # what is left are shards that others are fetching
        raise StorageFull(
            f"no room for a shard of {needed:,} bytes in {self.local}: free some space, or give the local copy another "
            "folder"
        )

    def _make_room(self, needed: int) -> int:
        """Remove the longest unused shards until `needed` bytes fit, or none is left; the bytes that are still used."""
        shards = self._shards()
        used = sum(stat.st_size for stat in shards.values())
        for path in sorted(shards, key=lambda path: shards[path].st_mtime):
            if self._fits(used, needed):
                break
            if not path.name.startswith("."):
                path.unlink(missing_ok=True)
                used -= shards[path].st_size
        return used

    def _shards(self) -> dict[Path, os.stat_result]:
        """What is there, shards that are being fetched included."""
        found = {}
        for path in self.local.local_path("shards").iterdir():
            with suppress(FileNotFoundError):  # what a dead process left, and a new one removes
                found[path] = path.stat()
        return found

    def _fits(self, used: int, needed: int) -> bool:
        if self.max_bytes is not None:
            return used + needed <= self.max_bytes
        disk = os.statvfs(self.local.local_path())
        return disk.f_bavail * disk.f_frsize - needed >= FREE_SHARE * disk.f_blocks * disk.f_frsize

    @contextmanager
    def _lock(self, name: str) -> Iterator[None]:
        """One process at a time; the kernel gives the lock back when its holder ends, however it ends."""
        with FileLock(self.local.local_path(f"locks/{name}")):
            yield
