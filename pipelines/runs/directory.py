"""The folder of a run: outputs by stage, `run.json`, and the lock that keeps a second process out.

The folder may be local or on an object store (`s3://`, `gs://`). The lock is local only: it is a record lock, which the
kernel drops when its process dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from pipelines.json_files import write_json
from pipelines.records import Record, read_record
from storage.files.filesystems import Folder

_locked_here: set[str] = set()


class RunDirectory:
    """Paths and small JSON files below one folder. JSON is written atomically."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url).rstrip("/")
        if not self.url or "\0" in self.url:
            raise UserError(f"run.directory: {os.fspath(url)!r} is no place for a run; set it to a folder of its own")
        self.folder = Folder(self.url)

    @property
    def is_local(self) -> bool:
        return self.folder.is_local

    def location(self, name: str = "") -> str:
        """Path or URL of something in the run."""
        if self.is_local:
            return str(self.folder.local_path(name))
        return self.folder.location(name)

    def path(self, name: str = "") -> Path:
        """Local path of something in the run; UserError where the run is on an object store."""
        if not self.is_local:
            raise UserError(f"{self.location(name)} has to be a local path here: set run.directory to a local folder")
        return self.folder.local_path(name)

    def exists(self, name: str) -> bool:
        return self.folder.exists(name)

    def read_json(self, name: str, kind: type[Record]) -> dict[str, Any] | None:
        """The record in a JSON file; None where there is no file. Raises UserError for one of another kind."""
        if not self.folder.exists(name):
            return None
        return read_record(self.folder, name, kind, "restore it, or set another run.directory").model_dump()

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        write_json(self.folder, name, value)

    def is_empty(self, name: str) -> bool:
        """Whether no file stands under `name`."""
        return not self.folder.files(name)

    def move(self, name: str, new_name: str) -> None:
        """Rename a file or folder inside the run. What stands at the new name must be empty folders, or nothing."""
        source, target = self.path(name), self.path(new_name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            for folder, _, _ in os.walk(target, topdown=False):
                os.rmdir(folder)
        os.rename(source, target)

    def remove_leftovers(self) -> None:
        """Remove what killed writers left: files half written, and a folder that was about to be published.

        Only for who holds the lock. What a living process writes stays.
        """
        if not self.is_local:
            return
        self.folder.remove_dead_temporaries()
        for folder in self.path().glob(".*.writing"):
            shutil.rmtree(folder)

    @contextmanager
    def _refused_if_not_writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"run.directory: {self.folder} cannot hold a run ({error}); set it to a folder that can be written"
            ) from error

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. Raises UserError while another one, still alive, holds it."""
        if not self.is_local:
            with self._refused_if_not_writable():
                self.folder.exists("run.json")
            yield
            return
        path = self.path("run.lock")
        key = str(path.resolve())
        if key in _locked_here:  # opening and closing it once more would drop the lock
            raise UserError(f"this process is already running in {self.url}")
        with self._refused_if_not_writable():
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed below; this is about its opening alone
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                raise UserError(
                    f"{self.url} is in use by {file.read().strip() or 'another process'}; wait for it, stop it, or set "
                    "another run.directory"
                ) from None
            _locked_here.add(key)
            try:
                file.truncate(0)
                file.write(
                    f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
                )
                file.flush()
                yield
            finally:
                file.truncate(0)
                _locked_here.discard(key)
