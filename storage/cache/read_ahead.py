"""Work on a cache done in other processes ahead of need: results in order, memory within a bound.

A loader hands over what it will want (rows, micro-batches, whatever its `work` understands) as an iterable; worker
processes read, decode and arrange it, and only the finished tensors cross over, through anonymous shared memory that is
freed with the tensors. Nothing is kept in /dev/shm, which containers keep small. A worker ends with the process it
serves.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch

from storage.errors import StorageError

Source = TypeVar("Source")
Item = TypeVar("Item")
Result = TypeVar("Result")

ITEMS_PER_WORKER = 16  # handed over at a time, whatever the byte bound allows
DEATHS_PER_ITEM = 2  # a worker that dies is replaced, and its items done again, so often
ALIGNMENT = 64


class WorkerDied(RuntimeError):
    """A worker process ended (out of memory, killed) again and again at the same item."""


@dataclass(eq=False)
class _Job(Generic[Item]):
    number: int
    item: Item
    cost: int
    deaths: int = 0
    outcome: tuple[bool, Any] | None = None


class ReadAhead(Generic[Item, Result]):
    """Iterates over `work(cache, item)` of every item, in the items' order, computed by worker processes.

    Args:
        cache: a `TargetCache`, or whatever else `work` reads; each worker has a copy that was pickled.
        work: an importable function or a partial of one. It may return tensors on the CPU, numpy arrays and anything
            that pickles; an exception of its own is raised here when its item's turn comes.
        cost: bytes that an item's result takes, at most; `TargetCache.decoded_bytes` bounds rows.
        max_bytes: results that are being made or wait to be taken cost no more than this (a single one always may).
        workers: processes; each opens the cache for itself and decodes on one thread.

    Raises:
        WorkerDied: on iteration, if the same item lost its worker `DEATHS_PER_ITEM` times.
    """

    def __init__(
        self,
        cache: Source,
        items: Iterable[Item],
        work: Callable[[Source, Item], Result],
        *,
        cost: Callable[[Item], int],
        workers: int = 1,
        max_bytes: int = 1 << 30,
    ) -> None:
        if workers < 1 or max_bytes < 1:
            raise StorageError(f"workers = {workers} and max_bytes = {max_bytes}: both must be at least 1")
        self._setup = (cache, work)
        self._cost, self._max_bytes = cost, max_bytes
        self._items = enumerate(items)
        self._next: _Job[Item] | None = None
        self._ahead: deque[_Job[Item]] = deque()
        self._held = 0
        self._workers = [_Worker(self._setup) for _ in range(workers)]

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        self._hand_out()
        if not self._ahead:
            self.close()
            raise StopIteration
        job = self._ahead[0]
        while job.outcome is None:
            self._receive()
        self._ahead.popleft()
        self._held -= job.cost
        good, value = job.outcome
        if not good:
            self.close()
            raise value
        self._hand_out()
        return value

    def close(self) -> None:
        """End the workers; what they hold is lost."""
        for worker in self._workers:
            worker.close()
        self._workers, self._items, self._next = [], enumerate(()), None
        self._ahead.clear()
        self._held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self.close()

    def _hand_out(self) -> None:
        while True:
            if self._next is None:
                number, item = next(self._items, (-1, None))
                if number < 0:
                    return
                self._next = _Job(number, item, self._cost(item))  # type: ignore[arg-type]
            worker = min(self._workers, key=lambda worker: sum(job.cost for job in worker.jobs.values()))
            full = self._held + self._next.cost > self._max_bytes or len(worker.jobs) >= ITEMS_PER_WORKER
            if full and self._ahead:
                return
            job, self._next = self._next, None
            self._ahead.append(job)
            self._held += job.cost
            self._give(worker, job)

    def _give(self, worker: _Worker, job: _Job[Item]) -> None:
        worker.jobs[job.number] = job
        try:
            send(worker.connection, pickled((job.number, job.item)))
        except (BrokenPipeError, ConnectionResetError):
            self._replace(worker)

    def _receive(self) -> None:
        """Take the results that are there, at least one."""
        by_connection = {worker.connection: worker for worker in self._workers if worker.jobs}
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                number, good, value = receive(worker.connection)
            except (EOFError, ConnectionResetError):
                self._replace(worker)
                continue
            worker.jobs.pop(number).outcome = (good, value)

    def _replace(self, worker: _Worker) -> None:
        """A new worker in the place of a dead one, for the same jobs; the oldest one is taken to be the cause."""
        code = worker.close()
        jobs = list(worker.jobs.values())
        jobs[0].deaths += 1
        if jobs[0].deaths >= DEATHS_PER_ITEM:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise WorkerDied(
                f"a reading worker ended with {how} at item {jobs[0].number}, {DEATHS_PER_ITEM} times in a row: if the "
                "machine ran out of memory, lower max_bytes or the number of workers"
            )
        fresh = _Worker(self._setup)
        self._workers[self._workers.index(worker)] = fresh
        for job in jobs:
            fresh.jobs[job.number] = job
            send(fresh.connection, pickled((job.number, job.item)))


@dataclass(eq=False)
class _Worker:
    setup: tuple[Any, Any]
    jobs: dict[int, _Job[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            start = f"import sys; sys.path[:] = {sys.path!r}; from storage.cache.read_ahead import serve; serve({{}})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", start.format(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )
        self.connection = Connection(ours.detach())
        send(self.connection, pickled(self.setup))

    def close(self) -> int:
        """End the process, if it has not ended; its exit code."""
        self.connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait()


def serve(descriptor: int) -> None:
    """A worker's life: the cache and the work to do, then items until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that reads ends this one
    threading.Thread(target=_end_with_reader, daemon=True).start()
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    try:
        cache, work = receive(connection)
        while True:
            number, item = receive(connection)
            try:
                message = pickled((number, True, work(cache, item)))
            except Exception as error:
                message = pickled((number, False, _portable(error)))
            send(connection, message)
            del message
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # at once: an orderly end would wait for the thread above


def _end_with_reader() -> None:
    """Standard input closes when the process that reads is gone, whatever this one is busy with."""
    while os.read(0, 1):
        pass
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error with its traceback as a note; as a RuntimeError if it does not pickle."""
    trace = "in a reading worker:\n" + "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(trace)
    return error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor:
            if not value.numel():
                return _tensor, (b"", value.dtype, tuple(value.shape))
            flat = value.detach().cpu().reshape(-1)
            if flat.stride(0) != 1:
                flat = torch.empty(len(flat), dtype=flat.dtype).copy_(flat)
            data: Any = flat.view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(data), value.dtype, tuple(value.shape))
        if type(value) is memoryview:
            return memoryview, (pickle.PickleBuffer(value),)
        return NotImplemented


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if len(data) else torch.empty(shape, dtype=dtype)


def pickled(value: Any) -> tuple[bytes, list[memoryview]]:
    """The pickle, and beside it the bytes of arrays and tensors."""
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, 5, buffer_callback=buffers.append).dump(value)
    return stream.getvalue(), [buffer.raw() for buffer in buffers]


def send(connection: Connection, message: tuple[bytes, list[memoryview]]) -> None:
    """The pickle goes through the socket, the bytes beside it into shared memory whose handle follows it."""
    data, views = message
    places, size = [], 0
    for view in views:
        places.append((size, view.nbytes))
        size += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
    connection.send_bytes(pickle.dumps((places, size, data)))
    if not size:
        return
    handle = _shared_memory(size)
    try:
        with mmap.mmap(handle, size) as memory:
            for (start, length), view in zip(places, views, strict=True):
                memory[start : start + length] = view
        send_handle(connection, handle, None)
    finally:
        os.close(handle)


def receive(connection: Connection) -> Any:
    """What `send` sent; tensors lie in the shared memory itself. EOFError when the other end is closed."""
    places, size, data = pickle.loads(connection.recv_bytes())
    whole = memoryview(b"")
    if size:
        handle = recv_handle(connection)
        try:
            whole = memoryview(mmap.mmap(handle, size))
        finally:
            os.close(handle)
    return pickle.loads(data, buffers=[whole[start : start + length] for start, length in places])


def _shared_memory(size: int) -> int:
    """A descriptor of so many bytes without a name."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("dspark-rows")
    else:  # not Linux: a file that is gone from its folder at once
        with tempfile.TemporaryFile() as file:
            handle = os.dup(file.fileno())
    os.ftruncate(handle, size)
    return handle
