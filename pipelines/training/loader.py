"""Packed batches of the steps to come: read, decoded and packed ahead of need, within a bound of bytes.

Worker processes do it (`storage.cache.read_ahead`), or a thread of this process where none are asked for. A pack's
size is known from its rows' lengths before anything is read, so the bound holds whatever the readers do.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.packing import DenseTeacher, PackedBatch, Sample, pack
from pipelines.training.batches import Pack, Step, StepPlan
from pipelines.training.teacher import Finish, teacher_of
from storage.cache.read_ahead import ReadAhead

if TYPE_CHECKING:
    from storage.cache.target_cache import TargetCache


class PackReader:
    """From a planned pack to a packed batch. Pickles: every worker process has its own.

    `log_normalizers` [P] of a teacher with P states, where it is given, is asked once a row and remembered for later
    epochs. `finish`: the target's upper layers, for a cache whose teacher is recomputed.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        block_size: int,
        log_normalizers: Callable[[DenseTeacher], Tensor] | None = None,
        finish: Finish | None = None,
    ) -> None:
        self.dtype, self._block_size, self._log_normalizers = dtype, block_size, log_normalizers
        self._finish = finish
        self._known: dict[int, Tensor] = {}

    def __call__(self, cache: TargetCache, planned: Pack) -> PackedBatch:
        """The pack's rows, decoded and put back to back."""
        return pack([self._sample(cache, row) for row in planned.rows], planned.anchors, self._block_size)

    def _sample(self, cache: TargetCache, row: int) -> Sample:
        stored = cache.row(row, dtype=self.dtype)
        teacher = teacher_of(stored, self._finish)
        if self._log_normalizers is not None and isinstance(teacher, DenseTeacher):
            if row not in self._known:
                self._known[row] = self._log_normalizers(teacher)
            teacher.log_normalizers = self._known[row]
        return Sample(
            sample_id=stored.sample_id,
            input_ids=stored.input_ids,
            spans=stored.spans,
            features=stored.features,
            teacher_positions=stored.teacher_positions,
            teacher=teacher,
        )


class Loader:
    """The steps from `first` on, and the batches of their packs; use it in a `with` block.

    Args:
        workers: processes that decode; 0 decodes in a thread of this one.
        max_bytes: states that are being decoded or wait to be used, in all; a single pack may exceed it when alone.
        pin: page-lock the batches, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        cache: TargetCache,
        reader: PackReader,
        plan: StepPlan,
        *,
        first: int,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        max_bytes: int = 1 << 30,
        pin: bool = False,
    ) -> None:
        self._cache, self._reader, self.plan, self._pin = cache, reader, plan, pin
        self._range, self._share = range(first, plan.total_steps), {"rank": rank, "ranks": ranks}
        self._planned: dict[int, Step] = {}
        self._stand_in: PackedBatch | None = None
        self._batches: ReadAhead[Pack, PackedBatch] | _ThreadAhead
        packs, cost = self._packs(), self._cost
        if workers:
            self._batches = ReadAhead(cache, packs, reader, cost=cost, workers=workers, max_bytes=max_bytes)
        else:
            threads_own = copy(cache)  # an open cache serves one thread
            self._batches = _ThreadAhead(lambda planned: reader(threads_own, planned), packs, cost, max_bytes)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def steps(self) -> Iterator[Step]:
        """The steps of this rank. Take one `batch` for each pack of a step that has rows before the next step."""
        for number in self._range:
            known = self._planned.pop(number) if number in self._planned else None
            yield known or self.plan.step(number, **self._share)

    def batch(self) -> PackedBatch:
        """The batch of the next pack that has rows; waits until it is there, and raises what reading it raised."""
        batch = next(self._batches)
        return batch.pin_memory() if self._pin else batch

    def now(self, planned: Pack) -> PackedBatch:
        """The batch of a pack outside the plan, read at once."""
        return self._reader(self._cache, planned)

    def stand_in(self) -> PackedBatch:
        """One block of the shortest sample that has any, for a rank without a pack where every rank has to compute."""
        if self._stand_in is None:
            self._stand_in = self.now(self.plan.smallest_pack())
        return self._stand_in

    def _packs(self) -> Iterator[Pack]:
        """What is read, in order; steps planned here are kept for `steps`."""
        for number in self._range:
            self._planned[number] = step = self.plan.step(number, **self._share)
            yield from (planned for planned in step.packs if planned.rows)

    def _cost(self, planned: Pack) -> int:
        return self._cache.decoded_bytes(planned.rows, dtype=self._reader.dtype)


class _ThreadAhead:
    """`ReadAhead` in a thread: results of `work` on `packs` in their order, at most `max_bytes` of them waiting."""

    def __init__(
        self,
        work: Callable[[Pack], PackedBatch],
        packs: Iterator[Pack],
        cost: Callable[[Pack], int],
        max_bytes: int,
    ) -> None:
        self._work, self._packs, self._cost, self._max_bytes = work, packs, cost, max_bytes
        self._ready: deque[tuple[int, PackedBatch]] = deque()
        self._held = 0
        self._ended: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    def __next__(self) -> PackedBatch:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended is not None)
            if not self._ready:
                assert self._ended is not None
                raise self._ended
            cost, batch = self._ready.popleft()
            self._held -= cost
            self._changed.notify_all()
            return batch

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        ended: BaseException = StopIteration()
        try:
            for planned in self._packs:
                cost = self._cost(planned)
                with self._changed:
                    while not self._closed and self._held and self._held + cost > self._max_bytes:
                        self._changed.wait()
                    if self._closed:
                        return
                    self._held += cost
                batch = self._work(planned)
                with self._changed:
                    self._ready.append((cost, batch))
                    self._changed.notify_all()
        except BaseException as error:  # handed to the consumer, which raises it
            ended = error
        with self._changed:
            self._ended = ended
            self._changed.notify_all()
