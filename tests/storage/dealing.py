"""A global batch dealt to ranks by the number of tokens, as a trainer would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def deal(batch: np.ndarray, lengths: Sequence[int] | np.ndarray, ranks: int) -> list[np.ndarray]:
    """Split one global batch among ranks so that token counts come out even.

    `lengths[i]` is the work of sample i (indexed by sample, not by place in the batch). Longest first, each to the
    rank with the least work so far; sample counts differ by at most one. Ties go to the lower index: deterministic.
    A rank may get nothing from a short batch and must still take the step.
    """
    batch = np.asarray(batch, np.int64)
    work = np.asarray(lengths)[batch].astype(np.int64)
    most = -(-len(batch) // ranks)
    full_ranks = len(batch) - (most - 1) * ranks  # so many ranks may hold `most` samples, the others one fewer
    hands: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in np.lexsort((batch, -work)):
        filled = sum(len(hand) == most for hand in hands)
        limit = most if filled < full_ranks else most - 1
        rank = min((r for r in range(ranks) if len(hands[r]) < limit), key=lambda r: (loads[r], len(hands[r]), r))
        hands[rank].append(int(batch[place]))
        loads[rank] += int(work[place])
    return [np.array(hand, np.int64) for hand in hands]
