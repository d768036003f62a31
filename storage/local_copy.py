"""Shards of a remote cache kept on local disk: checked when they arrive, the longest unused removed at the limit."""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Mapping
from os import PathLike, utime
from typing import Any

from storage.filesystems import Folder, StorageFull
from storage.records import CacheCorrupt


class LocalCopy:
    """Fetches shards to a folder of at most `max_bytes` (None: no limit). Several processes may share the folder."""

    def __init__(
        self,
        remote: Folder,
        path: str | PathLike[str] | None,
        *,
        max_bytes: int | None = None,
        attempts: int = 4,
        pause: float = 0.5,
    ) -> None:
        self.remote, self.max_bytes, self.attempts, self.pause = remote, max_bytes, attempts, pause
        if path is None:
            path = f"{tempfile.gettempdir()}/dspark-shards-{hashlib.sha256(remote.url.encode()).hexdigest()[:16]}"
        self.local = Folder(path)
        self.local.make("shards")

    def fetch(self, record: Mapping[str, Any]) -> Folder:
        """Make sure that the record's shard is in the local folder, whole and unaltered; returns that folder."""
        name = record["shard"]
        if self._here(record):
            utime(self.local.local_path(name))
            return self.local
        self._make_room(record["bytes"], keep=name)
        last: Exception | None = None
        for attempt in range(self.attempts):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                data = self.remote.read(name)
            except FileNotFoundError as error:
                raise CacheCorrupt(f"{self.remote.describe(name)} is missing; verify the cache") from error
            except OSError as error:
                last = error
                continue
            if hashlib.sha256(data).hexdigest() == record["sha256"]:
                self.local.write(name, data)
                return self.local
            last = CacheCorrupt(f"{self.remote.describe(name)}: its SHA-256 is not the committed one")
        assert last is not None
        if isinstance(last, CacheCorrupt):
            raise last
        raise OSError(
            f"{self.remote.describe(name)} could not be fetched in {self.attempts} attempts: {last}"
        ) from last

    def _here(self, record: Mapping[str, Any]) -> bool:
        """A shard is only ever renamed into place after its hash was checked, so its size tells enough."""
        try:
            return self.local.size(record["shard"]) == record["bytes"]
        except FileNotFoundError:
            return False

    def _make_room(self, needed: int, *, keep: str) -> None:
        if self.max_bytes is None:
            return
        if needed > self.max_bytes:
            raise StorageFull(
                f"a shard of {needed:,} bytes does not fit into a local copy of {self.max_bytes:,}: raise the limit"
            )
        sizes = self.local.files("shards")
        used = sum(sizes.values())
        for name in sorted(sizes, key=lambda n: self.local.local_path(n).stat().st_mtime):
            if used + needed <= self.max_bytes:
                return
            if name != keep:
                self.local.remove(name)
                used -= sizes[name]
