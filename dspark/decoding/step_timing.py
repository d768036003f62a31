"""Measure what a decoding step costs: the target's pass by tokens in the batch, the draft by rows.

Reading and using the tables needs no torch: `dspark.decoding.step_costs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from dspark.decoding.kv_cache import RaggedCache, RaggedStep, ragged_forward
from dspark.decoding.proposers import Committed, Proposer
from dspark.decoding.sampling import SamplingConfig, verify
from dspark.decoding.step_costs import CostTable, SchedulingError, StepCosts

Size = TypeVar("Size", bound=Hashable)
DEFAULT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)


def measure_step_costs(
    target: Any,
    proposer: Proposer | None = None,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    *,
    row_tokens: int = 4,
    context: int = 256,
    repeats: int = 3,
    sampling: SamplingConfig | None = None,
    source: str = "",
) -> StepCosts:
    """The best of `repeats` passes at each batch size: the target's by tokens, the proposer's by rows.

    Rows hold `context` tokens already and add up to `row_tokens` each (the anchor and its drafts). Sizes are measured
    in turns, so that a passing load on the machine does not bend the curve.
    """
    if not tokens or min(tokens) < 1 or row_tokens < 1 or repeats < 1 or context < 1:
        raise SchedulingError("a step-cost profile needs batch sizes, row_tokens, context and repeats of 1 or more")
    sampling = sampling or SamplingConfig()
    sizes = sorted(set(tokens))
    passes = _Passes(target, -(-sizes[-1] // row_tokens), row_tokens, context, sampling)
    seconds = _best(sizes, repeats, passes.verify)
    table = CostTable(tuple(sizes), tuple(1 / seconds[size] for size in sizes), source)
    rows = sorted({-(-size // row_tokens) for size in sizes})
    drafts = {} if proposer is None else _best(rows, repeats, passes.drafts_of(proposer))
    conditions = {
        "row_tokens": row_tokens,
        "context": context,
        "repeats": repeats,
        "temperature": sampling.temperature,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
    }
    return StepCosts(table, tuple(drafts), tuple(drafts.values()), conditions)


def measure_rounds(
    target: Any, proposers: Mapping[str, Proposer], rows: Sequence[int], *, context: int = 256, repeats: int = 3
) -> dict[str, dict[int, float]]:
    """Seconds of a greedy round's parts by batch size, the best of `repeats`: a draft of each proposer, and `verify`.

    The target verifies whole blocks: rows x (slots + 1) tokens, with `context` tokens before them. All parts are
    measured in turns, so that two proposers differ by what they do and not by when they did it.
    """
    width = 1 + max(proposer.block_size for proposer in proposers.values())
    passes = _Passes(target, max(rows), width, context, SamplingConfig())
    work = {name: passes.drafts_of(proposer) for name, proposer in proposers.items()}
    work["verify"] = lambda count: passes.verify(count * width)
    turns = [(name, count) for count in sorted(set(rows)) for name in work]
    best = _best(turns, repeats, lambda turn: work[turn[0]](turn[1]))
    return {name: {count: best[name, count] for count in sorted(set(rows))} for name in work}


def _best(sizes: Sequence[Size], repeats: int, work: Callable[[Size], None]) -> dict[Size, float]:
    best = dict.fromkeys(sizes, float("inf"))
    # The first turn warms up kernels and storage and is not counted.
    for turn in range(repeats + 1):
        for size in sizes:
            begin = time.perf_counter()
            work(size)
            if turn:
                best[size] = min(best[size], time.perf_counter() - begin)
    return best


class _Passes:
    """Steps on storage that holds nothing of interest: time does not depend on what tokens say."""

    def __init__(self, target: Any, rows: int, row_tokens: int, context: int, sampling: SamplingConfig) -> None:
        self.target, self.row_tokens, self.context, self.sampling = target, row_tokens, context, sampling
        self.cache = RaggedCache(target.num_layers, rows, context + row_tokens)
        self.generator = torch.Generator().manual_seed(0)

    def _ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(0, self.target.vocab_size, shape, generator=self.generator).to(self.target.device)

    def _uniforms(self, *shape: int) -> torch.Tensor | None:
        if self.sampling.greedy:
            return None
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.target.device)

    @torch.inference_mode()
    def verify(self, size: int) -> None:
        """One pass over `size` tokens, its head and the acceptance rule."""
        whole, rest = divmod(size, self.row_tokens)
        counts = [self.row_tokens] * whole + [rest] * (rest > 0)
        step = RaggedStep(range(len(counts)), [self.context] * len(counts), counts, self.target.device)
        last, _ = ragged_forward(self.target, self.cache, step, self._ids(size))
        logits = step.padded(self.target.logits(last))
        drafts = self._ids(len(counts), step.width - 1)
        probs = None
        if not self.sampling.greedy:
            vocabulary = logits.shape[-1]
            probs = torch.full((*drafts.shape, vocabulary), 1 / vocabulary, device=logits.device)
        u = self._uniforms(len(counts), step.width)
        verify(logits, drafts, probs, torch.tensor(counts, device=logits.device) - 1, self.sampling, u, u)

    def drafts_of(self, proposer: Proposer) -> Callable[[int], None]:
        """One block for so many rows, and the taking in of the states that a round commits."""
        most = self.cache.rows
        proposer.open(most, self.context + self.row_tokens)
        width = len(self.target.layer_ids) * self.target.hidden_size
        nothing = torch.zeros(1, width, dtype=self.target.dtype, device=self.target.device)
        hidden_states = nothing.expand(most * self.context, width)
        ids = self._ids(most * self.context)
        rows, counts = list(range(most)), [self.context] * most
        anchors = self._ids(most).tolist()
        proposer.extend(Committed(rows, [0] * most, counts, hidden_states, ids, anchors))
        slots = proposer.block_size

        @torch.inference_mode()
        def draft(count: int) -> None:
            u = self._uniforms(count, slots)
            proposal = proposer.propose(anchors[:count], [self.context] * count, slots, self.sampling, u)
            proposal.token_ids.cpu()
            kept = min(2, self.row_tokens)
            committed = (hidden_states[: count * kept], ids[: count * kept], anchors[:count])
            proposer.extend(Committed(rows[:count], [self.context] * count, [kept] * count, *committed))

        return draft
