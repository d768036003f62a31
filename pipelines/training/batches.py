"""What each rank computes in each step: a pure function of the settings, the cache's rows and the step.

1. The global batch of the step (`storage.order`): which samples.
2. Their anchors (`dspark.anchors`): drawn by (seed, epoch, sample), so the loss's normaliser is known now.
3. Packs of at most a budget of work, as many for every rank, dealt by work.

Nothing here reads a state; the loader does, ahead of need, in a thread of its own.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.anchors import anchors_weight, draw_anchors, supervised_mask
from dspark.packing import PackedBatch, Sample, pack, plan_packs
from storage.order import global_batches, position, steps_per_epoch

if TYPE_CHECKING:
    from torch import Tensor

    from storage.target_cache import TargetCache

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """What is known of every row without its states."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    spans: tuple[Spans, ...]

    @classmethod
    def of(cls, cache: TargetCache) -> SampleIndex:
        spans = []
        for index in range(len(cache)):
            flat = [int(edge) for edge in cache.raw_row(index)["spans"]]
            spans.append(tuple(zip(flat[::2], flat[1::2], strict=True)))
        return cls(sample_ids=tuple(cache.sample_ids), lengths=tuple(int(n) for n in cache.lengths), spans=tuple(spans))

    def __len__(self) -> int:
        return len(self.sample_ids)


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One forward pass: rows of the cache, and where the blocks of each start."""

    rows: tuple[int, ...]
    anchors: tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step of one rank. `normalizer` is the slot weight of the whole global batch."""

    number: int
    epoch: int
    normalizer: float
    packs: tuple[Pack, ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The steps of a training run."""

    index: SampleIndex
    seed: int
    global_batch_size: int
    num_anchors: int
    anchor_rule: str
    block_size: int
    position_decay: float
    pack_budget: int
    total_steps: int

    @property
    def steps_in_epoch(self) -> int:
        return steps_per_epoch(len(self.index), self.global_batch_size)

    def step(self, number: int, *, rank: int = 0, ranks: int = 1) -> Step:
        """What `rank` of `ranks` does in the 0-based step. Every rank gets the same number of packs."""
        epoch, place = position(number, self.steps_in_epoch)
        rows = [int(row) for row in _batches(len(self.index), self.global_batch_size, self.seed, epoch)[place]]
        anchors, weight = [], 0.0
        for row in rows:
            mask = supervised_mask(self.index.spans[row], self.index.lengths[row])
            chosen = draw_anchors(
                mask,
                self.num_anchors,
                seed=self.seed,
                epoch=epoch,
                sample_id=self.index.sample_ids[row],
                rule=self.anchor_rule,  # type: ignore[arg-type]
            )
            anchors.append(chosen)
            if len(chosen):
                weight += anchors_weight(mask, chosen, self.block_size, self.position_decay)
        planned = plan_packs(
            [self.index.lengths[row] for row in rows],
            [len(chosen) for chosen in anchors],
            block_size=self.block_size,
            budget=self.pack_budget,
            ranks=ranks,
        )
        mine = [
            Pack(rows=tuple(rows[i] for i in members), anchors=tuple(anchors[i] for i in members))
            for members in planned[rank::ranks]
        ]
        return Step(number=number, epoch=epoch, normalizer=weight, packs=tuple(mine))


@lru_cache(maxsize=4)
def _batches(samples: int, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    return global_batches(samples, batch_size, seed=seed, epoch=epoch)


class Loader:
    """Packed batches of the steps to come, decoded in a thread, at most `ahead` steps before they are needed.

    `log_normalizers` [P] of last states [P, d], where it is given, is asked once a row and remembered for later epochs.
    """

    def __init__(
        self,
        cache: TargetCache,
        plan: StepPlan,
        *,
        first: int,
        rank: int,
        ranks: int,
        dtype: Any,
        ahead: int = 2,
        log_normalizers: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._cache, self._plan, self._dtype = cache, plan, dtype
        self._log_normalizers = log_normalizers
        self._known: dict[int, Tensor] = {}
        self._range = range(first, plan.total_steps)
        self._rank, self._ranks = rank, ranks
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="loader", daemon=True)

    def __iter__(self) -> Iterator[tuple[Step, list[PackedBatch | None]]]:
        """(step, its packed batches); None stands for an empty pack: its rank takes the step with a zero loss."""
        self._thread.start()
        try:
            for _ in self._range:
                item = self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self._stop.set()

    def _fill(self) -> None:
        try:
            for number in self._range:
                step = self._plan.step(number, rank=self._rank, ranks=self._ranks)
                self._put((step, [self._load(planned) for planned in step.packs]))
                if self._stop.is_set():
                    return
        except BaseException as error:  # handed to the consumer, which raises it
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.5)
                return
            except queue.Full:
                continue

    def _load(self, planned: Pack) -> PackedBatch | None:
        if not planned.rows:
            return None
        samples = [self._sample(row) for row in planned.rows]
        return pack(samples, planned.anchors, self._plan.block_size)

    def _sample(self, row: int) -> Sample:
        stored = self._cache.row(row, dtype=self._dtype)
        if self._log_normalizers is not None and row not in self._known:
            self._known[row] = self._log_normalizers(stored.last_states)
        return Sample(
            sample_id=stored.sample_id,
            input_ids=stored.input_ids,
            spans=stored.spans,
            features=stored.features,
            teacher_positions=stored.teacher_positions,
            last_states=stored.last_states,
            log_normalizers=self._known.get(row),
        )
