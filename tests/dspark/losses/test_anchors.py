"""Anchor eligibility, counter-based draws and block labels, against slow restatements."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.losses.anchors import anchors_weight, draw_anchors, eligible_anchors, loss_mask_of
from dspark.losses.micro_batch import block_labels

masks = st.lists(st.booleans(), min_size=1, max_size=60).map(lambda bits: np.array(bits, dtype=bool))


@given(masks)
@settings(deadline=None)
def test_eligibility_restated(mask: np.ndarray) -> None:
    paper = [a for a in range(len(mask) - 1) if mask[a] and mask[a + 1]]
    any_prefix = [a for a in range(len(mask) - 1) if mask[a + 1]]
    assert eligible_anchors(mask).tolist() == paper
    assert eligible_anchors(mask, rule="any_prefix").tolist() == any_prefix


@given(masks, st.integers(1, 70), st.integers(0, 5), st.integers(0, 5))
@settings(deadline=None)
def test_draws_are_distinct_eligible_nested_and_repeatable(mask: np.ndarray, count: int, seed: int, epoch: int) -> None:
    drawn = draw_anchors(mask, count, seed=seed, epoch=epoch, sample_id="a")
    eligible = set(eligible_anchors(mask).tolist())
    assert len(drawn) == min(count, len(eligible))
    assert drawn.tolist() == sorted(set(drawn.tolist()) & eligible)
    assert np.array_equal(drawn, draw_anchors(mask, count, seed=seed, epoch=epoch, sample_id="a"))
    assert set(drawn.tolist()) <= set(draw_anchors(mask, count + 1, seed=seed, epoch=epoch, sample_id="a").tolist())


def test_the_draw_restated_in_plain_integers() -> None:
    """The stream belongs to this project, so no library's upgrade can change a run's anchors."""
    word = 2**64 - 1
    key = int.from_bytes(hashlib.blake2b(b"7\x1f2\x1fsample-0", digest_size=8).digest(), "little")

    def rank(position: int) -> int:
        value = (key + (position + 1) * 0x9E3779B97F4A7C15) & word
        value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ value >> 27) * 0x94D049BB133111EB) & word
        return value ^ value >> 31

    drawn = draw_anchors(np.ones(1000, dtype=bool), 6, seed=7, epoch=2, sample_id="sample-0").tolist()
    assert drawn == sorted(sorted(range(999), key=rank)[:6]) == [162, 310, 508, 674, 755, 872]


def test_draws_are_uniform_and_change_with_every_key() -> None:
    mask = loss_mask_of([(10, 30), (40, 61)], 70)
    eligible = eligible_anchors(mask)
    draws = [draw_anchors(mask, 8, seed=0, epoch=e, sample_id=str(s)) for e in range(50) for s in range(100)]
    counts = np.bincount(np.concatenate(draws), minlength=70)[eligible]
    expected = len(draws) * 8 / len(eligible)
    # Drawing without replacement: each count has variance n p (1-p), and the statistic about len-1 degrees of freedom.
    statistic = ((counts - expected) ** 2 / (expected * (1 - 8 / len(eligible)))).sum()
    assert statistic < len(eligible) + 5 * math.sqrt(2 * len(eligible))
    base = draw_anchors(mask, 8, seed=0, epoch=0, sample_id="0").tolist()
    for other in ({"seed": 1}, {"epoch": 1}, {"sample_id": "1"}):
        assert draw_anchors(mask, 8, **({"seed": 0, "epoch": 0, "sample_id": "0"} | other)).tolist() != base


@given(masks, st.integers(1, 9), st.data())
@settings(deadline=None)
def test_block_labels_restated(mask: np.ndarray, block_size: int, data: st.DataObject) -> None:
    length = len(mask)
    ids = np.array(data.draw(st.lists(st.integers(1, 99), min_size=length, max_size=length)))
    anchors = np.array(sorted(data.draw(st.sets(st.integers(0, length - 1)))), dtype=np.int64)
    labels = block_labels(ids, mask, anchors, block_size)
    for row, anchor in enumerate(anchors):
        alive = True
        for k in range(block_size):
            label = anchor + k + 1
            alive = alive and label < length and bool(mask[label])
            assert labels.loss_mask[row, k] == alive
            assert labels.previous_ids[row, k] == (ids[anchor + k] if anchor + k < length else 0)
            if alive:
                assert labels.labels[row, k] == ids[label]
                assert labels.teacher_positions[row, k] == label - 1
    expected = sum(math.exp(-k / 4) for row in labels.loss_mask for k, on in enumerate(row) if on)
    assert anchors_weight(mask, anchors, block_size, 4.0) == pytest.approx(expected, rel=1e-12)


def test_refusals_name_value_range_and_option() -> None:
    mask = np.ones(8, dtype=bool)
    with pytest.raises(ValueError, match=r"block_size is 65.*1 to 64.*drafter\.block_size"):
        block_labels(np.arange(8), mask, np.array([0]), 65)
    with pytest.raises(ValueError, match=r"num_anchors is 0.*1 or more.*train\.num_anchors"):
        draw_anchors(mask, 0, seed=0, epoch=0, sample_id="a")
    with pytest.raises(ValueError, match=r"anchor_rule is 'all'.*any_prefix"):
        eligible_anchors(mask, rule="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"span \(3, 12\).*8 tokens"):
        loss_mask_of([(3, 12)], 8)
    with pytest.raises(ValueError, match=r"anchors span 9\.\.9"):
        block_labels(np.arange(8), mask, np.array([9]), 4)
