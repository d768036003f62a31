"""Where blocks start, and what each of their slots is trained on.

Shapes: S tokens of one sequence, A anchors, G block slots.

Everything here is a pure function of token ids, a supervision mask and a key, so that the number of blocks and the
weight of a batch are known before any state is read, and do not depend on which worker asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

AnchorRule = Literal["paper", "any_prefix"]
MAX_BLOCK_SIZE = 64


def supervised_mask(spans: Sequence[tuple[int, int]], length: int) -> NDArray[np.bool_]:
    """Half-open supervised spans as a mask [S].

    Raises:
        ValueError: a span is reversed or leaves the sequence.
    """
    mask = np.zeros(length, dtype=bool)
    for start, end in spans:
        if not 0 <= start <= end <= length:
            raise ValueError(f"supervised span ({start}, {end}) does not fit a sequence of {length} tokens")
        mask[start:end] = True
    return mask


def eligible_anchors(supervised: NDArray[np.bool_], *, rule: AnchorRule = "paper", first: int = 0) -> NDArray[np.int64]:
    """Positions at which a block may start, ascending, from `first` on (a drafter's `first_anchor`).

    `paper`: the anchor and the token after it are supervised. `any_prefix`: the token after it is supervised, which
    also admits the last token of a prompt, a block that a server meets only when it drafts straight from the prompt.
    """
    supervised = np.asarray(supervised, dtype=bool)
    if rule not in ("paper", "any_prefix"):
        raise ValueError(f"anchor_rule is {rule!r}; allowed: 'paper', 'any_prefix' (option `train.anchor_rule`)")
    next_supervised = supervised[1:]
    eligible = next_supervised & supervised[:-1] if rule == "paper" else next_supervised
    positions = np.flatnonzero(eligible).astype(np.int64)
    return positions[positions >= first]


def _mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection of 64-bit words whose output bits look independent."""
    values = values ^ (values >> np.uint64(30))
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = values ^ (values >> np.uint64(27))
    values = values * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw_anchors(
    supervised: NDArray[np.bool_],
    num_anchors: int,
    *,
    seed: int,
    epoch: int,
    sample_id: str,
    rule: AnchorRule = "paper",
    first: int = 0,
) -> NDArray[np.int64]:
    """At most `num_anchors` distinct eligible positions, uniformly at random, ascending.

    Every eligible position gets a 64-bit number from (seed, epoch, sample, position) and the smallest win. The draw
    therefore does not depend on the order of samples, and a larger `num_anchors` only adds anchors to a smaller one.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors is {num_anchors}; allowed: 1 or more (option `train.num_anchors`)")
    eligible = eligible_anchors(supervised, rule=rule, first=first)
    if len(eligible) <= num_anchors:
        return eligible
    digest = hashlib.blake2b(f"{seed}\x1f{epoch}\x1f{sample_id}".encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "little"))
    with np.errstate(over="ignore"):
        counters = key + (eligible.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        ranks = _mix64(counters)
    return np.sort(eligible[np.argpartition(ranks, num_anchors - 1)[:num_anchors]])


@dataclass(frozen=True, kw_only=True)
class BlockLabels:
    """What the blocks of one sequence are fed and trained on.

    Slot k (from 0) of a block at anchor a is fed the token at a+k, and predicts the token at a+k+1; its teacher is the
    target's last state at a+k. Where a slot is not supervised its label and teacher position are 0.
    """

    previous_ids: NDArray[np.int64]  # [A, G]
    label_ids: NDArray[np.int64]  # [A, G]
    supervised: NDArray[np.bool_]  # [A, G]
    teacher_positions: NDArray[np.int64]  # [A, G]


def block_labels(
    input_ids: NDArray[np.int64], supervised: NDArray[np.bool_], anchors: NDArray[np.int64], block_size: int
) -> BlockLabels:
    """Labels of every slot; a block is supervised up to its first label outside the sequence or the spans."""
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size is {block_size}; allowed: 1 to {MAX_BLOCK_SIZE} (option `drafter.block_size`)")
    input_ids = np.asarray(input_ids, dtype=np.int64)
    supervised = np.asarray(supervised, dtype=bool)
    anchors = np.asarray(anchors, dtype=np.int64)
    length = len(input_ids)
    if supervised.shape != input_ids.shape:
        raise ValueError(f"the supervision mask has shape {supervised.shape}, the token ids {input_ids.shape}")
    if len(anchors) and not 0 <= anchors.min() <= anchors.max() < length:
        raise ValueError(f"anchors span {anchors.min()}..{anchors.max()}, outside a sequence of {length} tokens")
    slots = anchors[:, None] + np.arange(block_size)  # [A, G] position fed to each slot
    inside = slots + 1 < length
    label_at = np.where(inside, slots + 1, 0)
    mask = np.logical_and.accumulate(inside & supervised[label_at], axis=1)
    fed = slots < length
    return BlockLabels(
        previous_ids=np.where(fed, input_ids[np.where(fed, slots, 0)], 0),
        label_ids=np.where(mask, input_ids[label_at], 0),
        supervised=mask,
        teacher_positions=np.where(mask, slots, 0),
    )


def weight_by_length(block_size: int, position_decay: float) -> NDArray[np.float64]:
    """Weight of a block by its number of supervised slots [G+1]: the running sum of exp(-k / position_decay)."""
    if position_decay <= 0:
        raise ValueError(
            f"position_decay is {position_decay}; allowed: above 0, infinite for equal weights "
            "(option `train.loss.position_decay`)"
        )
    weights = np.exp(-np.arange(block_size) / position_decay)
    return np.concatenate([[0.0], np.cumsum(weights)])


def anchors_weight(
    supervised: NDArray[np.bool_], anchors: NDArray[np.int64], block_size: int, position_decay: float
) -> float:
    """Loss weight of all blocks of one sequence, from the mask alone.

    Summed over the samples of a global batch it is the normaliser of that step's loss.
    """
    dummy_ids = np.zeros(len(supervised), dtype=np.int64)
    lengths = block_labels(dummy_ids, supervised, anchors, block_size).supervised.sum(axis=1)
    return float(weight_by_length(block_size, position_decay)[lengths].sum())
