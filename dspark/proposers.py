"""What the decoder asks of a drafter: to propose, and to be told what was committed.

A new drafter implements `Proposer` (four methods) and registers with `register_proposer`, or is handed to the decoder
as a `Proposer` itself.

B live rows, N packed tokens, G block slots, V vocabulary, m captured layers, d hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.sampling import SamplingConfig


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
    features: Tensor | None  # [N, m*d]
    token_ids: Tensor  # [N] i64
    anchors: list[int]  # the token after the last of each row, not in the target's cache yet


class Proposer(ABC):
    """Drafts for rows that are addressed by their place in the batch."""

    block_size: int
    has_confidence: bool = False
    needs_features: bool = True

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

        draws [B, slots] are the uniforms that decide the tokens (`sampling.draw`); None when greedy.
        """

    @abstractmethod
    def move_row(self, source: int, to: int) -> None:
        """Row `source` takes the place of row `to`, which has ended."""


_FACTORIES: dict[str, Callable[[Any, Any], Proposer]] = {}


def register_proposer(class_name: str, factory: Callable[[Any, Any], Proposer]) -> None:
    """Let the decoder accept modules of this class name: factory(module, target) gives their proposer."""
    _FACTORIES[class_name] = factory


def proposer_for(drafter: Any, target: Any) -> Proposer:
    """The proposer of a drafter module, or the proposer itself."""
    if isinstance(drafter, Proposer):
        return drafter
    for kind in type(drafter).__mro__:
        if kind.__name__ in _FACTORIES:
            return _FACTORIES[kind.__name__](drafter, target)
    raise TypeError(f"{type(drafter).__name__} is no drafter that the decoder knows: {', '.join(sorted(_FACTORIES))}")


class ScriptedProposer(Proposer):
    """Proposes what a function of the committed tokens says: for tests, baselines and n-gram drafters.

    script(history [n], slots) -> (token ids, optional logits [slots, V], optional confidence logits [slots]). Without
    logits the draft counts as certain, which is lossless and rejects as often as the target disagrees.
    """

    needs_features = False

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
