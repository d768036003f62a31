"""Learning-rate schedules, pure functions of the step: a resumed run cannot differ from an undisturbed one."""

from __future__ import annotations

import math
from typing import Literal

from cluster.errors import ClusterError

Schedule = Literal["cosine", "wsd", "constant"]


def learning_rate_factor(
    step: int,
    total_steps: int,
    *,
    schedule: Schedule = "cosine",
    warmup_ratio: float = 0.04,
    final_ratio: float = 0.0,
    decay_ratio: float = 0.2,
) -> float:
    """The share of the peak learning rate that step `step` (0-based, of `total_steps`) uses.

    The first `warmup_ratio` of the steps rise linearly to 1. Then "cosine" falls to `final_ratio` along half a cosine;
    "wsd" (warm-up, stable, decay) stays at 1 and falls to `final_ratio` linearly over the last `decay_ratio` of the
    steps; "constant" stays.
    """
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        share = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return final_ratio + (1.0 - final_ratio) * 0.5 * (1.0 + math.cos(math.pi * share))
    if schedule == "wsd":
        decay = max(1, math.ceil(decay_ratio * total_steps))
        share = min(1.0, max(0.0, (step - (total_steps - decay)) / decay))
        return 1.0 - (1.0 - final_ratio) * share
    raise ClusterError(f"schedule {schedule!r}: choose cosine, wsd or constant")
