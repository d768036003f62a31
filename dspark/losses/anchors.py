"""Where blocks start, and how much they weigh in the loss.

Shapes: S tokens of one sequence, A anchors, G block slots.

Everything here is a pure function of a loss mask and a key, so that the number of blocks and the weight of a batch are
known before any hidden state is read, and do not depend on which worker asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dspark.errors import DsparkError

AnchorRule = Literal["paper", "any_prefix"]
MAX_BLOCK_SIZE = 64


def loss_mask_of(spans: Sequence[tuple[int, int]], length: int) -> NDArray[np.bool_]:
    """The tokens that are labels, from half-open supervised spans: a mask [S].

    Raises:
        DsparkError: a span is reversed or leaves the sequence.
    """
    mask = np.zeros(length, dtype=bool)
    for start, end in spans:
        if not 0 <= start <= end <= length:
            raise DsparkError(f"supervised span ({start}, {end}) does not fit a sequence of {length} tokens")
        mask[start:end] = True
    return mask


def eligible_anchors(loss_mask: NDArray[np.bool_], *, rule: AnchorRule = "paper", first: int = 0) -> NDArray[np.int64]:
    """Positions at which a block may start, ascending, from `first` on (a drafter's `first_anchor`).

    `paper`: the anchor and the token after it are supervised. `any_prefix`: the token after it is supervised, which
    also admits the last token of a prompt, a block that a server meets only when it drafts straight from the prompt.
    """
    loss_mask = np.asarray(loss_mask, dtype=bool)
    if rule not in ("paper", "any_prefix"):
        raise DsparkError(f"anchor_rule is {rule!r}; allowed: 'paper', 'any_prefix' (option `train.anchor_rule`)")
    labelled = loss_mask[1:]
    eligible = labelled & loss_mask[:-1] if rule == "paper" else labelled
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
    loss_mask: NDArray[np.bool_],
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
        raise DsparkError(f"num_anchors is {num_anchors}; allowed: 1 or more (option `train.num_anchors`)")
    eligible = eligible_anchors(loss_mask, rule=rule, first=first)
    if len(eligible) <= num_anchors:
        return eligible
    digest = hashlib.blake2b(f"{seed}\x1f{epoch}\x1f{sample_id}".encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "little"))
    with np.errstate(over="ignore"):
        counters = key + (eligible.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        ranks = _mix64(counters)
    return np.sort(eligible[np.argpartition(ranks, num_anchors - 1)[:num_anchors]])


def weight_by_length(block_size: int, position_decay: float | None) -> NDArray[np.float64]:
    """Weight of a block by its number of supervised slots [G+1]: the running sum of exp(-k / position_decay).

    None: every block with a supervised slot counts once.
    """
    if position_decay is None:
        return np.minimum(np.arange(block_size + 1), 1).astype(np.float64)
    if position_decay <= 0:
        raise DsparkError(
            f"position_decay is {position_decay}; allowed: above 0, infinite for equal weights "
            "(option `train.loss.position_decay`)"
        )
    weights = np.exp(-np.arange(block_size) / position_decay)
    return np.concatenate([[0.0], np.cumsum(weights)])


def anchors_weight(
    loss_mask: NDArray[np.bool_], anchors: NDArray[np.int64], block_size: int, position_decay: float | None
) -> float:
    """Loss weight of all blocks of one sequence, from its loss mask [S] alone.

    Summed over the samples of a global batch it is the normaliser of that step's loss.
    """
    ends = np.append(np.flatnonzero(~np.asarray(loss_mask, dtype=bool)), len(loss_mask))
    first = np.asarray(anchors, dtype=np.int64) + 1  # of a block's labels
    lengths = np.minimum(ends[np.searchsorted(ends, first)] - first, block_size)
    return float(weight_by_length(block_size, position_decay)[lengths].sum())
