"""Which samples make which global batch: a pure function of the seed, the epoch and the batch size.

Ranks, workers and resumes do not enter it. Every sample gets a 64-bit key by hashing (seed, epoch, sample index)
with splitmix64, and the epoch's order is the samples sorted by key: the order can be restated in any language.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from storage.errors import StorageError


def splitmix64(values: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser, elementwise on uint64."""
    with np.errstate(over="ignore"):
        mixed = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def shuffled(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(num_samples), int64."""
    stream = splitmix64(splitmix64(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch % 2**64))
    keys = splitmix64(np.arange(num_samples, dtype=np.uint64) ^ stream)
    return np.argsort(keys, kind="stable").astype(np.int64)


def windowed(rows_per_shard: Sequence[int], window: int, *, seed: int, epoch: int) -> np.ndarray:
    """Shuffle shards, then samples within windows of `window` shards: at most that many shards are open at a time."""
    if window < 1:
        raise StorageError(f"window = {window}: the shuffle window needs at least one shard")
    counts = np.asarray(rows_per_shard, np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    shards = shuffled(len(counts), seed=seed, epoch=epoch)
    pieces = []
    for number, first in enumerate(range(0, len(shards), window)):
        rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in shards[first : first + window]])
        pieces.append(rows[shuffled(len(rows), seed=seed ^ (number + 1) << 32, epoch=epoch)])
    return np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def global_batches(
    num_samples: int,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    rows_per_shard: Sequence[int] | None = None,
    window: int | None = None,
) -> list[np.ndarray]:
    """The epoch's global batches in order, each an int64 array of sample indices.

    The last one may be short: every sample comes once an epoch.
    With `window` (and `rows_per_shard`) the shuffle is windowed, for remote caches.
    """
    if num_samples < 1 or batch_size < 1:
        raise StorageError(f"{num_samples} samples in batches of {batch_size}: both must be at least 1")
    if window is None:
        order = shuffled(num_samples, seed=seed, epoch=epoch)
    else:
        if rows_per_shard is None or sum(rows_per_shard) != num_samples:
            raise StorageError("a windowed shuffle needs rows_per_shard that add up to num_samples")
        order = windowed(rows_per_shard, window, seed=seed, epoch=epoch)
    return [order[start : start + batch_size] for start in range(0, num_samples, batch_size)]


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Number of global batches in an epoch."""
    return -(-num_samples // batch_size)


def position(step: int, steps_in_epoch: int) -> tuple[int, int]:
    """(epoch, batch within it) of a 0-based global step: all that a resumed run needs."""
    return divmod(step, steps_in_epoch)
