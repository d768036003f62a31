"""A disk that is full at fifty points of one build: a clear error each time, nothing half visible, and on it goes.

The disk is a tmpfs in a mount namespace of its own (`unshare -rm`, which needs no rights), grown each time by
a fiftieth of what the build needs. The builder does not look at the free space here, so that the system's own ENOSPC
meets it in the middle of shards and records; that it does look otherwise is checked at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cache_builders import build, folder_bytes
from common import large_plan, parser, record

from storage.cache.target_cache import TargetCache, verify
from storage.files.filesystems import Folder, StorageFull

INSIDE = "DSPARK_TEST_TMPFS"


def resize(disk: Path, size: int) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"remount,size={size}", "tmpfs", str(disk)], check=True)


@contextmanager
def small_disk() -> Iterator[tuple[Path, Path]]:
    """A tmpfs, and a folder beside it."""
    with tempfile.TemporaryDirectory() as scratch:
        disk, beside = Path(scratch) / "disk", Path(scratch) / "beside"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4096", "tmpfs", str(disk)], check=True)
        try:
            yield disk, beside
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def fill_up(points: int) -> dict[str, Any]:
    plan = large_plan()
    with small_disk() as (disk, calm):
        build(calm, plan)
        needed = sum(path.stat().st_size for path in calm.rglob("*") if path.is_file())
        root = disk / "cache"
        messages: Counter[str] = Counter()
        committed: list[int] = []
        full = 0
        for point in range(1, 4 * points):
            resize(disk, needed * point // points)
            try:
                with patch.object(Folder, "free_bytes", lambda self: None):
                    build(root, plan)
                break
            except StorageFull as error:
                full += 1
                messages[str(error).split(str(disk))[0].strip()] += 1
            assert not list(root.rglob("*.writing")), "a half-written file is left"
            if (root / "manifest.json").exists():
                assert verify(root) == []
                committed.append(len(TargetCache.open(root, partial=True)))
        assert folder_bytes(root) == folder_bytes(calm)
        resize(disk, needed * 2)
        other = disk / "other"
        with open(disk / "ballast", "wb") as file:
            file.write(b"x" * (needed // 2))
        try:
            build(other, plan)
            raise AssertionError("the build started although it cannot fit")
        except StorageFull as error:
            before = str(error).replace(str(disk), "DISK")
        shards = other / "shards"
        assert not shards.exists() or not list(shards.iterdir())
        return {
            "bytes": needed,
            "points_at_which_the_disk_was_full": full,
            "errors": dict(messages),
            "rows_committed_after_each": committed,
            "finished_with_the_undisturbed_bytes": True,
            "seen_before_anything_is_captured": before,
        }


def in_a_namespace() -> int:
    """This program again, where it may mount; its exit code."""
    command = ["unshare", "-rm", sys.executable, *sys.argv]
    return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--points", type=int, default=50)
    options = arguments.parse_args()
    if INSIDE not in os.environ:
        raise SystemExit(in_a_namespace())
    record(options.output, lambda: fill_up(options.points))


if __name__ == "__main__":
    main()
