"""What the decoder asks of a drafter: to propose, and to be told what was committed.

Every drafter of `dspark.models` has its proposer here; what drafts by other means (an n-gram table, say) implements
`Proposer` and is handed to the decoder as it is.

B live rows, N packed tokens, G block slots, V vocabulary, m captured layers, d hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.decoding.sampling import SamplingConfig, draw, probabilities, require_finite
from dspark.errors import DsparkError
from dspark.models.base import Drafter


@dataclass(frozen=True)
class Proposal:
    """Drafts of a step. G is the number of slots asked for."""

    token_ids: Tensor  # [B, G] i64
    probs: Tensor | None  # [B, G, V] float32, what the tokens were drawn from; None when greedy
    confidence_logits: Tensor | None  # [B, G]


@dataclass(frozen=True)
class Committed:
    """Tokens that now have target states, packed back to back over rows."""

    rows: list[int]
    starts: list[int]  # tokens of each row that were committed before
    counts: list[int]
    hidden_states: Tensor | None  # [N, m*d]
    token_ids: Tensor  # [N] i64
    anchors: list[int]  # the token after the last of each row, not in the target's cache yet


class Proposer(ABC):
    """Drafts for rows that are addressed by their place in the batch."""

    block_size: int
    has_confidence: bool = False
    needs_hidden_states: bool = True

    @abstractmethod
    def open(self, rows: int, capacity: int) -> None:
        """Forget everything and make room for `rows` rows of `capacity` tokens."""

    @abstractmethod
    def extend(self, committed: Committed) -> None:
        """Take in committed tokens; a row whose start is 0 begins anew."""

    @abstractmethod
    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        """Draft `slots` tokens after each anchor at its position, for rows 0..B-1.

        draws [B, slots] are the uniforms that decide the tokens (`sampling.draw`); None when greedy. Raises
        NonFiniteLogits with the row whose tokens cannot be chosen.
        """

    @abstractmethod
    def move_row(self, source: int, to: int) -> None:
        """Row `source` takes the place of row `to`, which has ended."""


def proposer_for(drafter: Any, target: Any) -> Proposer:
    """The proposer of a drafter, or the proposer itself."""
    if isinstance(drafter, Proposer):
        return drafter
    if isinstance(drafter, Drafter):
        return DrafterProposer(drafter, target)
    raise ProposerError(f"{type(drafter).__name__} is no drafter: the decoder takes a Drafter or a Proposer")


class ProposerError(DsparkError):
    """The drafter does not fit the target it is to draft for."""


def _require_fit(drafter: Any, target: Any) -> None:
    config = drafter.config
    pairs = (
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("target_layer_ids", tuple(config.target_layer_ids), tuple(target.layer_ids)),
        ("num_target_layers", config.num_target_layers, target.num_layers),
    )
    wrong = [f"{name} {ours} (target: {theirs})" for name, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise ProposerError(
            f"the drafter was made for another target or other layers: {', '.join(wrong)}; open its own target, "
            "with `target_layer_ids` as in the drafter's config.json"
        )


class DrafterProposer(Proposer):
    """A drafter of `dspark.models`: its context cache, its output weights, the choice of tokens."""

    def __init__(self, drafter: Drafter, target: Any) -> None:
        _require_fit(drafter, target)
        self.drafter = drafter
        self.block_size = drafter.block_size
        self.has_confidence = drafter.confidence_head is not None
        self.vocab_size = drafter.config.vocab_size
        self.cache: Any = None
        self.vocabulary: Tensor | None = drafter.draft_token_ids
        self.weights = drafter.output_weights()

    def open(self, rows: int, capacity: int) -> None:
        if self.cache is None or self.cache.rows < rows:
            self.cache = self.drafter.new_cache(rows, capacity)

    def extend(self, committed: Committed) -> None:
        assert committed.hidden_states is not None
        counts = torch.tensor(committed.counts)
        ends = counts.cumsum(0)
        segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
        within = torch.arange(int(counts.sum())) - (ends - counts)[segment]
        rows, starts = torch.tensor(committed.rows), torch.tensor(committed.starts)
        self.cache.lengths[rows] = starts + counts
        next_ids = committed.token_ids.roll(-1).clone()
        next_ids[(ends - 1).to(next_ids.device)] = torch.tensor(committed.anchors, device=next_ids.device)
        self.drafter.write_context(
            self.cache, committed.hidden_states, rows[segment], starts[segment] + within, next_ids
        )

    @torch.inference_mode()
    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        tokens: list[Tensor] = []
        kept: list[Tensor] = []

        def choose(logits: Tensor) -> Tensor:
            chosen, probs = self._choose(logits, sampling, None if draws is None else draws[:, len(tokens)])
            tokens.append(chosen)
            if probs is not None:
                kept.append(probs)
            return chosen

        anchor_ids = torch.tensor(anchors, device=self.drafter.device)
        confidence = self.drafter.draft(anchor_ids, torch.tensor(positions), self.cache, slots, choose, self.weights)
        return Proposal(torch.stack(tokens, dim=1), torch.stack(kept, dim=1) if kept else None, confidence)

    def move_row(self, source: int, to: int) -> None:
        self.cache.move_row(source, to)

    def _choose(self, logits: Tensor, sampling: SamplingConfig, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] from logits [B, Vd], and the distribution [B, V] they were drawn from. Raises NonFiniteLogits."""
        require_finite(logits)
        if sampling.greedy:
            chosen, probs = logits.argmax(-1), None
        else:
            assert u is not None
            probs = probabilities(logits, sampling)
            chosen = draw(probs, u)
        if self.vocabulary is not None:
            chosen = self.vocabulary[chosen]
            if probs is not None:
                full = probs.new_zeros(len(probs), self.vocab_size)
                full[:, self.vocabulary] = probs
                probs = full
        return chosen, probs


class NoDrafts(Proposer):
    """Proposes nothing: plain decoding that leaves rounds, for comparisons at the same clock."""

    needs_hidden_states = False
    block_size = 0

    def open(self, rows: int, capacity: int) -> None:
        pass

    def extend(self, committed: Committed) -> None:
        pass

    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        raise ProposerError("there are no drafts to propose; verify 0 of them")

    def move_row(self, source: int, to: int) -> None:
        pass
