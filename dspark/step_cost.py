"""Measure steps per second against tokens in the verification batch, for the target and device at hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from dspark.kv_cache import RaggedCache, RaggedStep, ragged_forward
from dspark.scheduling import CostTable, SchedulingError

DEFAULT_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)


@torch.inference_mode()
def measure_step_cost(
    target: Any,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    *,
    row_tokens: int = 4,
    context: int = 256,
    repeats: int = 3,
    overhead_seconds: float = 0.0,
    source: str = "",
) -> CostTable:
    """The best of `repeats` verification passes (target, head, argmax) at each batch size in tokens.

    Rows hold `context` tokens already and add up to `row_tokens` each; overhead_seconds, such as a draft's time, is
    added to every step. Sizes are measured in turns, so that a passing load on the machine does not bend the curve.
    """
    if not tokens or min(tokens) < 1 or row_tokens < 1 or repeats < 1:
        raise SchedulingError("a step-cost profile needs batch sizes, row_tokens and repeats of 1 or more")
    sizes = sorted(set(tokens))
    rows = -(-sizes[-1] // row_tokens)
    cache = RaggedCache(target.num_layers, rows, context + row_tokens)
    best = dict.fromkeys(sizes, float("inf"))
    generator = torch.Generator().manual_seed(0)
    # The first turn warms up kernels and storage and is not counted.
    for turn in range(repeats + 1):
        for size in sizes:
            whole, rest = divmod(size, row_tokens)
            counts = [row_tokens] * whole + [rest] * (rest > 0)
            step = RaggedStep(range(len(counts)), [context] * len(counts), counts, target.device)
            ids = torch.randint(0, target.vocab_size, (size,), generator=generator).to(target.device)
            begin = time.perf_counter()
            last, _ = ragged_forward(target, cache, step, ids)
            target.logits(last).argmax(-1).cpu()
            if turn:
                best[size] = min(best[size], time.perf_counter() - begin)
    speeds = tuple(1 / (best[size] + overhead_seconds) for size in sizes)
    return CostTable(tuple(sizes), speeds, source)
