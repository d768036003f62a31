from __future__ import annotations

import numpy as np
import pytest
from dealing import deal
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.order import global_batches, position, shuffled, steps_per_epoch, windowed

MASK = (1 << 64) - 1


def slow_splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def slow_order(count: int, seed: int, epoch: int) -> list[int]:
    """The documented rule again, in plain integers."""
    stream = slow_splitmix(slow_splitmix(seed & MASK) ^ (epoch & MASK))
    return sorted(range(count), key=lambda index: (slow_splitmix(index ^ stream), index))


@given(st.integers(1, 200), st.integers(-5, 2**40), st.integers(0, 50))
def test_the_order_is_the_documented_one(count: int, seed: int, epoch: int) -> None:
    assert shuffled(count, seed=seed, epoch=epoch).tolist() == slow_order(count, seed, epoch)


def test_the_order_never_changes() -> None:
    assert shuffled(8, seed=0, epoch=0).tolist() == slow_order(8, 0, 0)
    first = [shuffled(1000, seed=s, epoch=e)[0] for s in range(3) for e in range(3)]
    assert len(set(first)) > 5  # other seeds and epochs, other orders


@given(
    st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**32), st.integers(0, 9), st.sampled_from([None, 1, 2, 5])
)
def test_every_sample_once_an_epoch(count: int, batch: int, seed: int, epoch: int, window: int | None) -> None:
    shards = [len(part) for part in np.array_split(np.arange(count), min(7, count))]
    batches = global_batches(count, batch, seed=seed, epoch=epoch, rows_per_shard=shards, window=window)
    assert sorted(np.concatenate(batches).tolist()) == list(range(count))
    assert all(len(b) == batch for b in batches[:-1])
    assert len(batches) == steps_per_epoch(count, batch)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 5), st.integers(0, 99))
def test_a_window_bounds_the_open_shards(shards: list[int], window: int, seed: int) -> None:
    order = windowed(shards, window, seed=seed, epoch=3)
    owner = np.repeat(np.arange(len(shards)), shards)[order]
    first, last = {}, {}
    for place, shard in enumerate(owner):
        first.setdefault(shard, place)
        last[shard] = place
    for place in range(len(order)):
        assert sum(first[s] <= place <= last[s] for s in first) <= window


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=64), st.sampled_from([1, 2, 4, 8]))
def test_dealing_splits_without_loss_or_overlap(lengths: list[int], ranks: int) -> None:
    batch = np.arange(len(lengths))[::-1].copy()
    hands = deal(batch, lengths, ranks)
    assert len(hands) == ranks
    assert sorted(np.concatenate(hands).tolist()) == sorted(batch.tolist())
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    again = deal(batch[::-1].copy(), lengths, ranks)
    assert [h.tolist() for h in hands] == [h.tolist() for h in again]  # place in the batch does not matter


def test_dealing_evens_out_the_work() -> None:
    lengths = [1000, 10, 10, 10, 990, 10, 10, 10]
    loads = [int(np.array(lengths)[hand].sum()) for hand in deal(np.arange(8), lengths, 2)]
    assert abs(loads[0] - loads[1]) <= 20


@settings(max_examples=25)
@given(st.integers(20, 120), st.integers(1, 16), st.integers(0, 999), st.data())
def test_the_sequence_does_not_depend_on_world_size_or_resumes(
    count: int, batch: int, seed: int, data: st.DataObject
) -> None:
    lengths = [(7 * i) % 50 + 1 for i in range(count)]
    in_epoch = steps_per_epoch(count, batch)
    total = 2 * in_epoch + 1

    def seen(step: int, ranks: int) -> list[int]:
        epoch, place = position(step, in_epoch)
        chosen = global_batches(count, batch, seed=seed, epoch=epoch)[place]
        place = {int(sample): number for number, sample in enumerate(chosen)}
        return sorted((int(i) for hand in deal(chosen, lengths, ranks) for i in hand), key=place.__getitem__)

    straight = []
    for step in range(total):
        epoch, place = position(step, in_epoch)
        straight.append(global_batches(count, batch, seed=seed, epoch=epoch)[place].tolist())
    cut = data.draw(st.integers(0, total))
    before, after = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([1, 2, 4, 8]))
    resumed = [seen(step, before) for step in range(cut)] + [seen(step, after) for step in range(cut, total)]
    assert resumed == straight


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="rows_per_shard"):
        global_batches(10, 2, seed=0, epoch=0, window=2, rows_per_shard=[3, 3])
    with pytest.raises(ValueError, match="at least 1"):
        global_batches(0, 2, seed=0, epoch=0)
