"""What each rank computes in each step: a pure function of the settings, the cache's rows and the step.

1. The global batch of the step (`storage.order`): which samples.
2. Their anchors (`dspark.anchors`): drawn by (seed, epoch, sample), so the loss's normaliser is known now.
3. Packs of at most a budget of work, as many for every rank, dealt by work.

Nothing here reads a state; `loader` does, ahead of need.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dspark.anchors import anchors_weight, draw_anchors, supervised_mask
from dspark.packing import plan_packs
from storage.order import global_batches, position, steps_per_epoch

if TYPE_CHECKING:
    from storage.cache.target_cache import TargetCache

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class SampleIndex:
    """What is known of samples without their states; `rows` and `shards` say where in the cache each of them is."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    spans: tuple[Spans, ...]
    rows: tuple[int, ...]
    shards: tuple[int, ...]

    @classmethod
    def of(cls, cache: TargetCache) -> SampleIndex:
        counts = cache.rows_per_shard
        return cls(
            sample_ids=tuple(cache.sample_ids),
            lengths=tuple(int(n) for n in cache.lengths),
            spans=tuple(tuple(cache.spans(row)) for row in range(len(cache))),
            rows=tuple(range(len(cache))),
            shards=tuple(np.repeat(np.arange(len(counts)), counts).tolist()),
        )

    def __len__(self) -> int:
        return len(self.sample_ids)

    def subset(self, places: Sequence[int]) -> SampleIndex:
        """The samples at these places, in this order."""
        fields = ("sample_ids", "lengths", "spans", "rows", "shards")
        return SampleIndex(**{name: tuple(getattr(self, name)[i] for i in places) for name in fields})

    def held_out(self, count: int) -> tuple[SampleIndex, SampleIndex]:
        """(samples to train on, `count` samples held out): the ids with the smallest hashes, whatever else is there."""
        hashes = [hashlib.blake2b(name.encode(), digest_size=8).digest() for name in self.sample_ids]
        order = sorted(range(len(self)), key=lambda place: hashes[place])
        return self.subset(sorted(order[count:])), self.subset(sorted(order[:count]))

    @property
    def rows_per_shard(self) -> tuple[int, ...]:
        """Samples in each shard that has any, in the cache's order."""
        return tuple(np.unique(self.shards, return_counts=True)[1].tolist())


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
    first_anchor: int = 0  # the drafter's
    block_size: int
    position_decay: float
    pack_budget: int
    total_steps: int
    shuffle_window: int | None = None  # shards that a shuffle mixes; None: all of them

    @property
    def steps_in_epoch(self) -> int:
        return steps_per_epoch(len(self.index), self.global_batch_size)

    def step(self, number: int, *, rank: int = 0, ranks: int = 1) -> Step:
        """What `rank` of `ranks` does in the 0-based step. Every rank gets the same number of packs."""
        epoch, place = position(number, self.steps_in_epoch)
        rows = [int(row) for row in self._batches(epoch)[place]]
        anchors, weight = [], 0.0
        for row in rows:
            mask, chosen = self._draw(row, epoch)
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
            Pack(rows=tuple(self.index.rows[rows[i]] for i in members), anchors=tuple(anchors[i] for i in members))
            for members in planned[rank::ranks]
        ]
        return Step(number=number, epoch=epoch, normalizer=weight, packs=tuple(mine))

    def smallest_pack(self) -> Pack:
        """The first block of the shortest sample that has any. ValueError if none has."""
        for row in np.argsort(self.index.lengths, kind="stable").tolist():
            _, chosen = self._draw(row, 0)
            if len(chosen):
                return Pack(rows=(self.index.rows[row],), anchors=(chosen[:1],))
        raise ValueError("no sample has a position where a block may start: nothing is supervised")

    def _draw(self, row: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """A sample's supervision mask and the anchors of this epoch."""
        mask = supervised_mask(self.index.spans[row], self.index.lengths[row])
        name, rule = self.index.sample_ids[row], self.anchor_rule
        chosen = draw_anchors(
            mask,
            self.num_anchors,
            seed=self.seed,
            epoch=epoch,
            sample_id=name,
            rule=rule,  # type: ignore[arg-type]
            first=self.first_anchor,
        )
        return mask, chosen

    def _batches(self, epoch: int) -> list[np.ndarray]:
        shards = None if self.shuffle_window is None else self.index.rows_per_shard
        return _global_batches(len(self.index), self.global_batch_size, self.seed, epoch, shards, self.shuffle_window)


@lru_cache(maxsize=4)
def _global_batches(
    samples: int, batch_size: int, seed: int, epoch: int, shards: tuple[int, ...] | None, window: int | None
) -> list[np.ndarray]:
    return global_batches(samples, batch_size, seed=seed, epoch=epoch, rows_per_shard=shards, window=window)
