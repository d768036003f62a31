"""Targets and proposers whose distributions are written down in tables, so that outputs can be enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.proposers import Committed, Proposal, Proposer
from dspark.decoding.sampling import SamplingConfig, draw, probabilities


class TableTarget:
    """The next token's distribution depends on the present token only: table [V, V], rows sum to one."""

    def __init__(self, table: Any) -> None:
        self.log_table = torch.tensor(np.asarray(table), dtype=torch.float64).log()
        self.vocab_size = self.input_vocab_size = self.hidden_size = len(self.log_table)
        self.context_length = 1000
        self.num_layers, self.layer_ids = 1, (0,)
        self.device = torch.device("cpu")
        self.text_config = SimpleNamespace(_attn_implementation="sdpa")

    def decoder(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids, self.vocab_size).double())

    def logits(self, last: Tensor) -> Tensor:
        return self.log_table[last.argmax(-1)]


class TableProposer(Proposer):
    """Drafts from table [V, V]; confidence logits [V] of a slot depend on the token before it."""

    needs_hidden_states = False
    has_confidence = True

    def __init__(self, table: Any, confidence_logits: Any, block_size: int) -> None:
        self.log_table = torch.tensor(np.asarray(table), dtype=torch.float64).log()
        self.confidences = torch.tensor(np.asarray(confidence_logits), dtype=torch.float64)
        self.block_size = block_size

    def open(self, rows: int, capacity: int) -> None:
        pass

    def extend(self, committed: Committed) -> None:
        pass

    def move_row(self, source: int, to: int) -> None:
        pass

    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        previous, tokens, probs, confidences = torch.tensor(anchors), [], [], []
        for slot in range(slots):
            confidences.append(self.confidences[previous])
            logits = self.log_table[previous]
            if draws is None:
                previous = logits.argmax(-1)
            else:
                probs.append(probabilities(logits, sampling))
                previous = draw(probs[-1], draws[:, slot])
            tokens.append(previous)
        stacked = torch.stack(probs, dim=1) if probs else None
        return Proposal(torch.stack(tokens, dim=1), stacked, torch.stack(confidences, dim=1))


def exact_sequences(table: Any, start: int, length: int, sampling: SamplingConfig) -> dict[tuple[int, ...], float]:
    """Probability of every token sequence of this length after `start`, by enumeration in float64."""
    weights = np.asarray(table, dtype=np.float64) ** (1 / sampling.temperature)
    weights /= weights.sum(-1, keepdims=True)
    for row in weights:
        order = np.argsort(-row, kind="stable")
        if sampling.top_k:
            row[order[sampling.top_k :]] = 0
            row /= row.sum()
        ahead = np.cumsum(row[order]) - row[order]
        row[order[ahead >= sampling.top_p]] = 0
        row /= row.sum()
    chances = {}
    for sequence in itertools.product(range(len(weights)), repeat=length):
        path = (start, *sequence)
        chances[sequence] = float(np.prod([weights[a, b] for a, b in itertools.pairwise(path)]))
    return chances


def chi_squared(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; infinite when something impossible happened.

    Cells with an expected count below 5 are pooled.
    """
    total = sum(counts.values())
    statistic, cells, pooled, pooled_expected = 0.0, 0, 0, 0.0
    for outcome, chance in expected.items():
        seen, mean = counts.get(outcome, 0), total * chance
        if chance == 0:
            if seen:
                return float("inf"), 1
        elif mean < 5:
            pooled, pooled_expected = pooled + seen, pooled_expected + mean
        else:
            statistic += (seen - mean) ** 2 / mean
            cells += 1
    if pooled_expected > 1:
        statistic += (pooled - pooled_expected) ** 2 / pooled_expected
        cells += 1
    return statistic, cells - 1


def chi_squared_limit(freedom: int) -> float:
    """The 0.999 quantile (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.0902 * spread**0.5) ** 3


class ScriptedProposer(Proposer):
    """Proposes what a function of the committed tokens says: for tests, baselines and n-gram drafters.

    script(history [n], slots) -> (token ids, optional logits [slots, V], optional confidence logits [slots]). Without
    logits the draft counts as certain, which is lossless and rejects as often as the target disagrees.
    """

    needs_hidden_states = False

    def __init__(
        self, script: Callable[[list[int], int], Any], block_size: int, vocab_size: int, has_confidence: bool = False
    ) -> None:
        self.script, self.block_size, self.vocab_size = script, block_size, vocab_size
        self.has_confidence = has_confidence
        self.histories: list[list[int]] = []

    def open(self, rows: int, capacity: int) -> None:
        self.histories = [[] for _ in range(rows)]

    def extend(self, committed: Committed) -> None:
        tokens = committed.token_ids.tolist()
        for row, start, count in zip(committed.rows, committed.starts, committed.counts, strict=True):
            self.histories[row] = self.histories[row][:start] + tokens[:count]
            del tokens[:count]

    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        ids, confidences = [], []
        for row, anchor in enumerate(anchors):
            assert len(self.histories[row]) == positions[row]
            tokens, confidence = self.script([*self.histories[row], anchor], slots)
            ids.append(list(tokens)[:slots])
            confidences.append(confidence)
        token_ids = torch.tensor(ids)
        probs = None if sampling.greedy else torch.nn.functional.one_hot(token_ids, self.vocab_size).float()
        return Proposal(token_ids, probs, torch.tensor(confidences)[:, :slots] if self.has_confidence else None)

    def move_row(self, source: int, to: int) -> None:
        self.histories[to] = self.histories[source]
