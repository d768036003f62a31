"""One folder, wherever it lies: a local path, `s3://bucket/path` or `gs://bucket/path`.

A file appears under its name either whole or not at all. Locally that takes a temporary name, fsync and rename;
an object store shows an object only once its upload is closed.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs as pafs

TEMPORARY_SUFFIX = ".writing"


class StorageFull(ValueError):
    """No room for what is to be written: the disk is full, or a configured limit is reached."""


class Folder:
    """A folder on any file system. Names are relative, with forward slashes. Pickles (it reopens itself)."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if "://" in self.url:
            try:
                self._fs, self._path = pafs.FileSystem.from_uri(self.url)
            except pa.ArrowInvalid as error:
                raise ValueError(
                    f"cannot open {self.url!r}: {error}; expected a local path, s3://... or gs://..."
                ) from error
        else:
            self._fs, self._path = pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(self.url))
        self._path = self._path.rstrip("/")
        self.is_local = isinstance(self._fs, pafs.LocalFileSystem)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])  # type: ignore[misc]

    def __str__(self) -> str:
        return self.url

    def full(self, name: str) -> str:
        """The path of `name` on this folder's file system."""
        return f"{self._path}/{name}" if name else self._path

    def child(self, name: str) -> Folder:
        """A folder below this one."""
        return Folder(f"{self.url.rstrip('/')}/{name}")

    def local_path(self, name: str = "") -> Path:
        """The path of `name` for code that needs a real file; only for local folders."""
        if not self.is_local:
            raise ValueError(f"{self.url} is not on a local file system; make a local copy first")
        return Path(self.full(name))

    def make(self, name: str = "") -> None:
        """Create the folder, or one below it, if it is not there."""
        self._fs.create_dir(self.full(name), recursive=True)

    def exists(self, name: str = "") -> bool:
        return self._fs.get_file_info(self.full(name)).type != pafs.FileType.NotFound

    def size(self, name: str) -> int:
        """Bytes in the file; FileNotFoundError if there is none."""
        info = self._fs.get_file_info(self.full(name))
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(f"{self.describe(name)} does not exist")
        return int(info.size)

    def describe(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}"

    def files(self, name: str = "", *, recursive: bool = True) -> dict[str, int]:
        """Files below `name` with their sizes in bytes, sorted by name; temporary ones included."""
        selector = pafs.FileSelector(self.full(name), recursive=recursive, allow_not_found=True)
        infos = [info for info in self._fs.get_file_info(selector) if info.type == pafs.FileType.File]
        prefix = len(self._path) + 1
        return dict(sorted((info.path[prefix:], int(info.size)) for info in infos))

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""
        with self._fs.open_input_file(self.full(name)) as stream:
            return bytes(stream.read())

    def open_input(self, name: str, *, memory_map: bool = True) -> pa.NativeFile:
        """A file to read from at any position; mapped into memory where it is local."""
        if self.is_local and memory_map and self.size(name) > 0:
            return pa.memory_map(self.full(name))
        return self._fs.open_input_file(self.full(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is either the old one or the whole new one at any moment, and durable on return."""
        with self.writer(name) as stream:
            stream.write(data)

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """A stream whose bytes appear as `name` when the block ends without an error, and never otherwise."""
        if not self.is_local:
            stream = self._fs.open_output_stream(self.full(name))
            try:
                yield stream
            except BaseException:
                abort = getattr(stream, "abort", None)
                if abort is not None:
                    abort()
                raise
            stream.close()
            return
        final = self.local_path(name)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(temporary_name(final.name))
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, final)
            sync_folder(final.parent)
        except OSError as error:
            _remove_quietly(temporary)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(
                    f"no space left while writing {final} ({self.free_bytes() or 0:,} bytes free): free some space and "
                    "start again; what is committed stays"
                ) from error
            raise
        except BaseException:
            _remove_quietly(temporary)
            raise

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            self._fs.delete_file(self.full(name))

    def free_bytes(self) -> int | None:
        """Free bytes where this folder lies; None for an object store."""
        if not self.is_local:
            return None
        path = Path(self._path)
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def remove_dead_temporaries(self, *, everything: bool = False) -> list[str]:
        """Remove temporary files whose writer is gone (or all of them, when nobody else can be writing)."""
        if not self.is_local:
            return []
        removed = []
        for name in self.files():
            if name.endswith(TEMPORARY_SUFFIX) and (everything or not _writer_lives(name)):
                self.remove(name)
                removed.append(name)
        return removed


def temporary_name(final_name: str) -> str:
    """A hidden name beside the final one that says which process on which host is writing it."""
    host = socket.gethostname().replace(".", "-")
    return f".{final_name}.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _writer_lives(name: str) -> bool:
    host, pid = name.removesuffix(TEMPORARY_SUFFIX).rsplit(".", 3)[-3:-1]
    if host != socket.gethostname().replace(".", "-"):
        return True  # another machine's: only `finish` may remove it
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError):
        return True
    return True


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
