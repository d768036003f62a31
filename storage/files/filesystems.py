"""One folder, wherever it lies: a local path, `s3://bucket/path` or `gs://bucket/path`.

A file appears under its name either whole or not at all. Locally that takes a temporary name, fsync and rename; for an
object store it is written to a local temporary file first, and uploaded when it is whole. What an object store answers
with an error is tried again with growing pauses; the error that remains names the file and how often it was tried.

Credentials come from the environment as the stores' own tools read them; in a URL they are refused.
`AWS_ENDPOINT_URL`, or the query of the URL (`s3://bucket/path?endpoint_override=host:port&scheme=http`; the same for
`gs://`), leads to another server.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from storage.errors import MissingFile, NotAllowed, StorageError, StorageFull, StoreFailed, UnsafeName
from storage.files.masking import mask, refuse
from storage.files.names import checked_name, path_inside

TEMPORARY_SUFFIX = ".writing"
GCS_RETRY_SECONDS = 30  # of one attempt within Google's client, whose own default is a quarter of an hour
ATTEMPTS, PAUSE = 5, 0.2  # of a request to an object store; seconds before the second one, doubled for each further
_TEMPORARY = re.compile(r"\..+\.(?P<host>[^.]*)\.(?P<pid>\d{1,10})\.[0-9a-f]+" + re.escape(TEMPORARY_SUFFIX))
CHUNK = 8 << 20  # bytes read or written at a time

Result = TypeVar("Result")


class Folder:
    """A folder on any file system. Names are relative, with forward slashes. Pickles (it reopens itself)."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.url = os.fspath(url)
        if "://" in self.url:
            refuse(self.url, "the address")
            try:
                self._fs, self._path = pafs.FileSystem.from_uri(_with_short_retries(self.url))
            except (pa.ArrowInvalid, OSError) as error:  # no such scheme; no such bucket, or no way to its store
                shown = f"cannot open {mask(self.url)!r}: {mask(str(error))}"
                raise StorageError(f"{shown}; expected a local path, s3://... or gs://...") from error
            if ".." in self._path.split("/"):
                raise StorageError(f"{mask(self.url)}: a store has no folder above another; leave `..` out")
        else:
            self._fs, self._path = pafs.LocalFileSystem(), os.path.abspath(os.path.expanduser(self.url))
        self._path = self._path.rstrip("/") or "/"
        self.is_local = isinstance(self._fs, pafs.LocalFileSystem)

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"])  # type: ignore[misc]

    def __str__(self) -> str:
        return mask(self.url)

    def full(self, name: str) -> str:
        """The path of `name` on this folder's file system. UnsafeName for one that would climb out of the folder."""
        if name.startswith("/") or "\0" in name or ".." in name.split("/"):
            raise UnsafeName(f"{self}: {name[:80]!r} is not in this folder")
        return f"{self._path.rstrip('/')}/{name}" if name else self._path

    def inside(self, name: object, source: str) -> str:
        """`name`, which the file `source` gives, once it is sure to lie in this folder; see `storage.files.names`."""
        if self.is_local:
            path_inside(self._path, name, source)
        return checked_name(name, source)

    @property
    def resolved(self) -> str:
        """One text for one place: the path with links and `..` resolved, or the store's kind, bucket and path."""
        return os.path.realpath(self._path) if self.is_local else f"{self._fs.type_name}://{self._path}"

    def location(self, name: str = "") -> str:
        """Path or URL of something in the folder."""
        place, mark, query = self.url.partition("?") if not self.is_local else (self.url, "", "")
        return f"{place.rstrip('/')}/{name}{mark}{query}" if name else self.url

    def local_path(self, name: str = "") -> Path:
        """The path of `name` for code that needs a real file; only for local folders."""
        if not self.is_local:
            raise StorageError(f"{self} is not on a local file system; make a local copy first")
        return Path(self.full(name))

    def make(self, name: str = "") -> None:
        """Create the folder, or one below it, if it is not there. An object store has none to create."""
        if self.is_local:
            self._fs.create_dir(self.full(name), recursive=True)

    def exists(self, name: str = "") -> bool:
        return self._info(name).type != pafs.FileType.NotFound

    def is_file(self, name: str = "") -> bool:
        return self._info(name).type == pafs.FileType.File

    def size(self, name: str) -> int:
        """Bytes in the file; FileNotFoundError if there is none."""
        info = self._info(name)
        if info.type != pafs.FileType.File:
            raise MissingFile(f"{self.describe(name)} does not exist")
        return int(info.size)

    def _info(self, name: str) -> pafs.FileInfo:
        return self._patiently(name, lambda: self._fs.get_file_info(self.full(name)))

    def describe(self, name: str) -> str:
        """The place of `name` for a message: without secrets."""
        return mask(self.location(name))

    def files(self, name: str = "", *, recursive: bool = True) -> dict[str, int]:
        """Files below `name` with their sizes in bytes, sorted by name; temporary ones included."""
        selector = pafs.FileSelector(self.full(name), recursive=recursive, allow_not_found=True)
        found = self._patiently(name, lambda: self._fs.get_file_info(selector))
        prefix = len(self._path.rstrip("/")) + 1
        return dict(sorted((i.path[prefix:], int(i.size)) for i in found if i.type == pafs.FileType.File))

    def read(self, name: str) -> bytes:
        """The whole file; FileNotFoundError if there is none."""

        def read() -> bytes:
            with self._fs.open_input_file(self.full(name)) as stream:
                return _exactly(stream, stream.size())

        return self._patiently(name, read)

    def open_input(self, name: str, *, memory_map: bool = True) -> pa.NativeFile:
        """A file to read from at any position; mapped into memory where it is local."""
        if self.is_local and memory_map and self.size(name) > 0:
            return pa.memory_map(self.full(name))
        return self._patiently(name, lambda: self._fs.open_input_file(self.full(name)))

    def chunks(self, name: str) -> Iterator[bytes]:
        """The file from begin to end in pieces; a piece that fails is asked for again."""
        stream = self.open_input(name, memory_map=False)
        size, place = stream.size(), 0

        def read() -> bytes:
            nonlocal stream
            try:
                stream.seek(place)
                return _exactly(stream, min(CHUNK, size - place))
            except OSError:
                with suppress(OSError):
                    stream = self._fs.open_input_file(self.full(name))
                raise

        with stream:
            while place < size:
                piece = self._patiently(name, read)
                place += len(piece)
                yield piece

    def _patiently(
        self,
        name: str,
        request: Callable[[], Result],
        final: tuple[type[OSError], ...] = (FileNotFoundError, PermissionError),
    ) -> Result:
        """The request's result, tried again if this is an object store, except after an error that is `final`."""
        if self.is_local:
            return request()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return request()
            except final as error:
                kind = NotAllowed if isinstance(error, PermissionError) else MissingFile
                raise kind(f"{self.describe(name)}: {mask(str(error))}") from error
            except (OSError, pa.ArrowInvalid) as error:  # the latter is what a store says of a broken-off upload
                if attempt == ATTEMPTS:
                    reason = mask(str(error))
                    raise StoreFailed(f"{self.describe(name)}: no success in {ATTEMPTS} attempts: {reason}") from error
            time.sleep(PAUSE * 2 ** (attempt - 1))
        raise AssertionError

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is either the old one or the whole new one at any moment, and durable on return."""
        with self.writer(name) as stream:
            stream.write(data)

    @contextmanager
    def writer(self, name: str) -> Iterator[IO[bytes]]:
        """A stream, readable too, whose bytes appear as `name` when the block ends without an error, and never else."""
        if not self.is_local:
            with self._spooled(name) as spool:
                yield spool
            return
        final = self.local_path(name)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(temporary_name(final.name))
        try:
            with full_disk_named(str(final)):
                with open(temporary, "x+b") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, final)
                sync_folder(final.parent)
        except BaseException:
            _remove_quietly(temporary)
            raise

    @contextmanager
    def _spooled(self, name: str) -> Iterator[IO[bytes]]:
        """A local file without a name, which a killed process leaves nothing of, uploaded at the end."""
        where = f"{tempfile.gettempdir()}, the way to {self.describe(name)} (TMPDIR names another folder)"
        with full_disk_named(where), tempfile.TemporaryFile() as spool:
            yield spool
            size = spool.tell()
            # Half an upload may be forgotten by the store: "not found" is then no last word.
            self._patiently(name, lambda: self._upload(name, spool), final=(PermissionError,))
        if self.size(name) != size:
            raise StoreFailed(f"{self.describe(name)}: {self.size(name)} bytes arrived of {size}; start again")

    def _upload(self, name: str, source: IO[bytes]) -> None:
        source.seek(0)
        stream = self._fs.open_output_stream(self.full(name))
        try:
            while piece := source.read(CHUNK):
                stream.write(piece)
            stream.close()
        except OSError:
            # Dropping the stream completes the upload with what arrived.
            with suppress(OSError):
                stream.close()
            with suppress(OSError):
                self._fs.delete_file(self.full(name))
            raise

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens if it is not there."""
        with suppress(FileNotFoundError):
            self._patiently(name, lambda: self._fs.delete_file(self.full(name)))

    def free_bytes(self) -> int | None:
        """Free bytes where this folder lies; None for an object store."""
        if not self.is_local:
            return None
        path = Path(self._path)
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Make a local folder, and keep other processes that ask for the same out of it for the length of the block.

        ValueError while another one writes there. The kernel gives the lock back when its holder ends, however it
        ends; an object store has none, and neither have some network file systems. What stays empty is removed.
        """
        if not self.is_local:
            yield
            return
        self.make()
        handle = os.open(self.local_path(), os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise StorageError(f"another process is writing to {self}: wait for it, or give another folder") from None
        except OSError:  # no locks on folders here
            pass
        try:
            yield
        finally:
            os.close(handle)
            with suppress(OSError):  # it holds something
                os.rmdir(self.local_path())

    def remove_dead_temporaries(self, *, everything: bool = False) -> list[str]:
        """Remove temporary files whose writer is gone (or all of them, when nobody else can be writing)."""
        if not self.is_local:
            return []
        dead = [name for name in self.files() if is_temporary(name) and (everything or not _writer_lives(name))]
        for name in dead:
            self.remove(name)
        return dead


@contextmanager
def full_disk_named(where: str) -> Iterator[None]:
    """StorageFull instead of the system's error when there is no space left while something is written."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space left while writing {where}: free some space and start again; what is committed stays"
            ) from error
        raise


def temporary_name(final_name: str) -> str:
    """A hidden name beside the final one that says which process on which host is writing it."""
    host = socket.gethostname().replace(".", "-")
    return f".{final_name}.{host}.{os.getpid()}.{uuid.uuid4().hex[:8]}{TEMPORARY_SUFFIX}"


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable, or what a file holds."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_temporary(name: str) -> bool:
    """Whether `temporary_name` made it; any other file that happens to end like one is somebody's own."""
    return _TEMPORARY.fullmatch(name.rpartition("/")[2]) is not None


def _writer_lives(name: str) -> bool:
    writer = _TEMPORARY.fullmatch(name.rpartition("/")[2])
    if writer is None or writer["host"] != socket.gethostname().replace(".", "-"):
        return True  # another machine's: only `finish` may remove it
    try:
        os.kill(int(writer["pid"]), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _exactly(stream: pa.NativeFile, size: int) -> bytes:
    """So many bytes from where the stream stands; OSError if it ends before."""
    data = bytes(stream.read(size))
    if len(data) != size:
        raise OSError(f"{len(data)} bytes came of {size}")
    return data


def _with_short_retries(url: str) -> str:
    """A `gs://` URL whose requests give up in time for our own attempts, unless it says when."""
    if not url.startswith(("gs://", "gcs://")) or "retry_limit_seconds=" in url:
        return url
    return f"{url}{'&' if '?' in url else '?'}retry_limit_seconds={GCS_RETRY_SECONDS}"
