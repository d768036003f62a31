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

from dspark.decoding.sampling import SamplingConfig, draw, probabilities


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
    known = ", ".join(sorted(_FACTORIES))
    raise ProposerError(f"{type(drafter).__name__} is no drafter that the decoder knows (it knows {known})")


class ProposerError(ValueError):
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


class _ModuleProposer(Proposer):
    """What drafter modules share: the context cache, the head over the draft vocabulary, the choice of tokens."""

    def __init__(self, drafter: Any, target: Any) -> None:
        _require_fit(drafter, target)
        self.drafter = drafter
        self.block_size = drafter.block_size
        self.has_confidence = drafter.confidence_head is not None
        self.vocab_size = drafter.config.vocab_size
        self.cache: Any = None
        self.vocabulary: Tensor | None = drafter.draft_token_ids
        head = drafter.sequential_head
        self.bias_weight: Tensor | None = None
        if head is not None:
            # Gathered once: row selection in every slot would cost more than the product.
            weight = head.markov_w2.weight
            self.bias_weight = weight if self.vocabulary is None else weight[self.vocabulary]

    def open(self, rows: int, capacity: int) -> None:
        if self.cache is None or self.cache.rows < rows:
            self.cache = self.drafter.new_cache(rows, capacity)

    def move_row(self, source: int, to: int) -> None:
        self.cache.move_row(source, to)

    def _placed(self, committed: Committed) -> tuple[Tensor, Tensor]:
        """Rows [N] and positions [N] of committed tokens; keeps the cache's lengths."""
        counts = torch.tensor(committed.counts)
        segment = torch.repeat_interleave(torch.arange(len(counts)), counts)
        within = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts)[segment]
        rows, starts = torch.tensor(committed.rows), torch.tensor(committed.starts)
        self.cache.lengths[rows] = starts + counts
        return rows[segment], starts[segment] + within

    def _choose(self, logits: Tensor, sampling: SamplingConfig, u: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [B] from logits [B, Vd], and the distribution [B, V] they were drawn from."""
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


class BlockProposer(_ModuleProposer):
    """DSpark and DFlash: one parallel block, then the sequential head slot by slot."""

    def extend(self, committed: Committed) -> None:
        assert committed.features is not None
        rows, positions = self._placed(committed)
        self.drafter.write_context(self.cache, committed.features, rows, positions)

    @torch.inference_mode()
    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        drafter = self.drafter
        previous = torch.tensor(anchors, device=drafter.device)
        states = drafter.draft_states(previous, torch.tensor(positions), self.cache)[:, :slots]
        logits = drafter.base_logits(states, self.vocabulary)
        head = drafter.sequential_head
        carried = None if head is None else head.initial_state(len(anchors))
        before, tokens, kept = [], [], []
        for slot in range(slots):
            scores = logits[:, slot]
            if head is not None:
                assert self.bias_weight is not None
                vectors, carried = head.step_vector(carried, previous, states[:, slot])
                scores = scores + torch.nn.functional.linear(vectors, self.bias_weight)
            before.append(previous)
            previous, probs = self._choose(scores, sampling, None if draws is None else draws[:, slot])
            tokens.append(previous)
            kept.append(probs)
        confidence = drafter.confidence_logits(states, torch.stack(before, dim=1)) if self.has_confidence else None
        return Proposal(torch.stack(tokens, dim=1), _stacked(kept), confidence)


class Eagle3Proposer(_ModuleProposer):
    """EAGLE-3: one step a token."""

    def extend(self, committed: Committed) -> None:
        assert committed.features is not None
        rows, positions = self._placed(committed)
        ends = torch.tensor(committed.counts).cumsum(0) - 1
        following = committed.token_ids.roll(-1).clone()
        following[ends.to(following.device)] = torch.tensor(committed.anchors, device=following.device)
        self.drafter.write_context(self.cache, committed.features, rows, positions, following)

    @torch.inference_mode()
    def propose(
        self, anchors: list[int], positions: list[int], slots: int, sampling: SamplingConfig, draws: Tensor | None
    ) -> Proposal:
        block = self.drafter.begin_block(
            torch.tensor(anchors, device=self.drafter.device), torch.tensor(positions), self.cache
        )
        tokens, kept = [], []
        for slot in range(slots):
            logits = self.drafter.base_logits(block.state, self.vocabulary)
            chosen, probs = self._choose(logits, sampling, None if draws is None else draws[:, slot])
            tokens.append(chosen)
            kept.append(probs)
            if slot + 1 < slots:
                block.feed(chosen)
        return Proposal(torch.stack(tokens, dim=1), _stacked(kept), None)


def _stacked(kept: list[Tensor | None]) -> Tensor | None:
    present = [probs for probs in kept if probs is not None]
    return torch.stack(present, dim=1) if present else None


register_proposer("Drafter", BlockProposer)
register_proposer("Eagle3Drafter", Eagle3Proposer)


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


class NoDrafts(Proposer):
    """Proposes nothing: plain decoding that leaves rounds, for comparisons at the same clock."""

    needs_features = False
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
