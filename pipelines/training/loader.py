"""From the cache to micro-batches: which rows each rank computes in each step, read and decoded ahead of need.

1. The global batch of the step (`storage.order`): which samples.
2. Their anchors (`dspark.losses.anchors`): drawn by (seed, epoch, sample), so the loss's normaliser is known now.
3. Micro-batches of bounded work, as many for every rank, dealt by work. All this reads no hidden state.
4. Rows are read, decoded and put back to back by worker processes (`storage.cache.read_ahead`) or a thread. A
   micro-batch's size is known from its rows' lengths, so what waits to be used stays within a bound of bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dspark.losses.anchors import AnchorRule, anchors_weight, draw_anchors, loss_mask_of
from dspark.losses.micro_batch import MicroBatch, Teacher, make_micro_batch, plan_micro_batches
from pipelines.errors import UserError
from storage.cache.read_ahead import ReadAhead
from storage.order import global_batches, position, steps_per_epoch

if TYPE_CHECKING:
    from storage.cache.shards import StoredRow
    from storage.cache.target_cache import TargetCache

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What is known of a cache's rows without their states; `numbers` and `shards` say where each of them is."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    spans: tuple[Spans, ...]
    numbers: tuple[int, ...]
    shards: tuple[int, ...]

    @classmethod
    def of(cls, cache: TargetCache) -> Rows:
        counts = cache.rows_per_shard
        return cls(
            sample_ids=tuple(cache.sample_ids),
            lengths=tuple(int(n) for n in cache.lengths),
            spans=tuple(tuple(cache.spans(row)) for row in range(len(cache))),
            numbers=tuple(range(len(cache))),
            shards=tuple(np.repeat(np.arange(len(counts)), counts).tolist()),
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def subset(self, places: Sequence[int]) -> Rows:
        """The rows at these places, in this order."""
        names = [field.name for field in dataclasses.fields(self)]
        return Rows(**{name: tuple(getattr(self, name)[i] for i in places) for name in names})

    def split(self, count: int) -> tuple[Rows, Rows]:
        """(rows to train on, `count` for validation): the ids with the smallest hashes, whatever else is there."""
        hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self.sample_ids]
        order = sorted(range(len(self)), key=lambda place: hashes[place])
        return self.subset(sorted(order[count:])), self.subset(sorted(order[:count]))

    @property
    def rows_per_shard(self) -> tuple[int, ...]:
        """Rows in each shard that has any, in the cache's order."""
        return tuple(np.unique(self.shards, return_counts=True)[1].tolist())


@dataclass(frozen=True, kw_only=True)
class PlannedMicroBatch:
    """Numbers of rows of the cache, and where the blocks of each start."""

    rows: tuple[int, ...]
    anchors: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one rank. `normalizer` is the slot weight of the whole global batch."""

    number: int
    epoch: int
    normalizer: float
    micro_batches: tuple[PlannedMicroBatch, ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The steps of a training run: a pure function of the settings, the cache's rows and the step."""

    rows: Rows
    seed: int
    global_batch_size: int
    num_anchors: int
    anchor_rule: AnchorRule
    first_anchor: int = 0  # the drafter's
    block_size: int
    position_decay: float | None  # None: a step's loss is divided by its blocks
    max_tokens_per_micro_batch: int
    total_steps: int
    shuffle_window: int | None = None  # shards that a shuffle mixes; None: all of them

    @property
    def steps_in_epoch(self) -> int:
        return steps_per_epoch(len(self.rows), self.global_batch_size)

    def step(self, number: int, *, rank: int = 0, ranks: int = 1) -> Step:
        """What `rank` of `ranks` does in the 0-based step. Every rank gets the same number of micro-batches."""
        epoch, place = position(number, self.steps_in_epoch)
        members = [int(row) for row in self._batches(epoch)[place]]
        anchors, weight = [], 0.0
        for row in members:
            mask, chosen = self._draw(row, epoch)
            anchors.append(chosen)
            if len(chosen):
                weight += anchors_weight(mask, chosen, self.block_size, self.position_decay)
        planned = plan_micro_batches(
            [self.rows.lengths[row] for row in members],
            [len(chosen) for chosen in anchors],
            block_size=self.block_size,
            max_tokens=self.max_tokens_per_micro_batch,
            ranks=ranks,
        )
        mine = tuple(
            PlannedMicroBatch(
                rows=tuple(self.rows.numbers[members[i]] for i in group), anchors=tuple(anchors[i] for i in group)
            )
            for group in planned[rank::ranks]
        )
        return Step(number=number, epoch=epoch, normalizer=weight, micro_batches=mine)

    def smallest(self) -> PlannedMicroBatch:
        """The first block of the shortest sample that has any. ValueError if none has."""
        for row in np.argsort(self.rows.lengths, kind="stable").tolist():
            _, chosen = self._draw(row, 0)
            if len(chosen):
                return PlannedMicroBatch(rows=(self.rows.numbers[row],), anchors=(chosen[:1],))
        raise UserError("no sample has a position where a block may start: nothing is supervised")

    def _draw(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """A sample's loss mask and the anchors of this epoch."""
        mask = loss_mask_of(self.rows.spans[row], self.rows.lengths[row])
        chosen = draw_anchors(
            mask,
            self.num_anchors,
            seed=self.seed,
            epoch=epoch,
            sample_id=self.rows.sample_ids[row],
            rule=self.anchor_rule,
            first=self.first_anchor,
        )
        return mask, chosen

    def _batches(self, epoch: int) -> list[np.ndarray]:
        shards = None if self.shuffle_window is None else self.rows.rows_per_shard
        return _global_batches(len(self.rows), self.global_batch_size, self.seed, epoch, shards, self.shuffle_window)


@lru_cache(maxsize=4)
def _global_batches(
    samples: int, batch_size: int, seed: int, epoch: int, shards: tuple[int, ...] | None, window: int | None
) -> list[np.ndarray]:
    return global_batches(samples, batch_size, seed=seed, epoch=epoch, rows_per_shard=shards, window=window)


class MicroBatchReader:
    """From a planned micro-batch to a real one. Pickles: every worker process has its own.

    `log_normalizers` [P] of a teacher, where it is given, is asked once a row and remembered for later epochs.
    `upper_layers`: from the last captured layer's output to last hidden states, for a teacher that is recomputed.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        block_size: int,
        log_normalizers: Callable[[Teacher], Tensor] | None = None,
        upper_layers: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.dtype, self._block_size = dtype, block_size
        self._log_normalizers, self._upper_layers = log_normalizers, upper_layers
        self._known: dict[int, Tensor] = {}

    def __call__(self, cache: TargetCache, planned: PlannedMicroBatch) -> MicroBatch:
        """The rows, decoded and put back to back."""
        rows = [self._row(cache, number) for number in planned.rows]
        return make_micro_batch(rows, planned.anchors, self._block_size)

    def _row(self, cache: TargetCache, number: int) -> StoredRow:
        row = cache.row(number, dtype=self.dtype)
        teacher = row.teacher
        if teacher is None:
            return row
        if teacher.source is not None:
            if self._upper_layers is None:
                raise UserError(f"sample {row.sample_id!r}: its teacher is recomputed by the target's upper layers")
            upper = self._upper_layers
            teacher = teacher.recomputed(lambda source: upper(source).to(self.dtype), row.teacher_positions)
        if self._log_normalizers is not None and teacher.tail_mass is None:
            if number not in self._known:
                dense = Teacher(
                    last_hidden_state=teacher.last_hidden_state, top_ids=teacher.top_ids, top_values=teacher.top_values
                )
                self._known[number] = self._log_normalizers(dense)
            teacher = dataclasses.replace(teacher, log_normalizers=self._known[number])
        return dataclasses.replace(row, teacher=teacher)


class Loader:
    """The steps from `first` on, and their micro-batches; use it in a `with` block.

    Args:
        workers: processes that decode; 0 decodes in a thread of this one.
        max_bytes: states that are being decoded or wait to be used, in all; a single micro-batch always may.
        pin: page-lock the micro-batches, for asynchronous copies to a GPU.
    """

    def __init__(
        self,
        cache: TargetCache,
        reader: MicroBatchReader,
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
        self._dummy: MicroBatch | None = None
        self._batches: ReadAhead[PlannedMicroBatch, MicroBatch] | _ThreadAhead
        planned, cost = self._planned_ahead(), self._cost
        if workers:
            self._batches = ReadAhead(cache, planned, reader, cost=cost, workers=workers, max_bytes=max_bytes)
        else:
            threads_own = copy(cache)  # an open cache serves one thread
            self._batches = _ThreadAhead(lambda item: reader(threads_own, item), planned, cost, max_bytes)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def steps(self) -> Iterator[Step]:
        """The steps of this rank. Take one `batch` for each micro-batch that has rows before the next step."""
        for number in self._range:
            known = self._planned.pop(number) if number in self._planned else None
            yield known or self.plan.step(number, **self._share)

    def batch(self) -> MicroBatch:
        """The next micro-batch that has rows; waits until it is there, and raises what reading it raised."""
        batch = next(self._batches)
        return batch.pin_memory() if self._pin else batch

    def now(self, planned: PlannedMicroBatch) -> MicroBatch:
        """A micro-batch outside the plan, read at once."""
        return self._reader(self._cache, planned)

    def dummy_batch(self) -> MicroBatch:
        """One block of the shortest sample that has any, for a rank without work where every rank has to compute."""
        if self._dummy is None:
            self._dummy = self.now(self.plan.smallest())
        return self._dummy

    def _planned_ahead(self) -> Iterator[PlannedMicroBatch]:
        """What is read, in order; steps planned here are kept for `steps`."""
        for number in self._range:
            self._planned[number] = step = self.plan.step(number, **self._share)
            yield from (planned for planned in step.micro_batches if planned.rows)

    def _cost(self, planned: PlannedMicroBatch) -> int:
        return self._cache.decoded_bytes(planned.rows, dtype=self._reader.dtype)


class _ThreadAhead:
    """`ReadAhead` in a thread: results of `work` on `items` in their order, at most `max_bytes` of them waiting."""

    def __init__(
        self,
        work: Callable[[PlannedMicroBatch], MicroBatch],
        items: Iterator[PlannedMicroBatch],
        cost: Callable[[PlannedMicroBatch], int],
        max_bytes: int,
    ) -> None:
        self._work, self._items, self._cost, self._max_bytes = work, items, cost, max_bytes
        self._thread = ThreadPoolExecutor(1, "loader")
        self._ahead: deque[tuple[int, Future[MicroBatch]]] = deque()
        self._next: PlannedMicroBatch | None = None
        self._hand_out()

    def __next__(self) -> MicroBatch:
        if not self._ahead:
            raise StopIteration
        batch = self._ahead[0][1].result()
        self._ahead.popleft()
        self._hand_out()
        return batch

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _hand_out(self) -> None:
        while (item := self._next or next(self._items, None)) is not None:
            self._next, cost = item, self._cost(item)
            if self._ahead and sum(held for held, _ in self._ahead) + cost > self._max_bytes:
                return
            self._ahead.append((cost, self._thread.submit(self._work, item)))
            self._next = None
