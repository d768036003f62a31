"""The heads on a block's states: sequential heads, and the confidence head.

A sequential head is the bias that the previous token puts on each slot's logits.

N blocks of G slots, B rows, V vocabulary, d hidden, r Markov rank. Every head makes a vector z [..., r] a slot and
adds `z @ W2.T` to the base logits; they differ in z:
vanilla z = W1[x_prev]; gated z = W1[x_prev] * sigmoid(G [h; W1[x_prev]]); rnn z = tanh(output part of a cell's step).
The same numbers come out teacher-forced over a block and step by step.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig
from dspark.registry import sequential_heads

OUTSIDE_BIAS = -1e4  # what the reserved column adds to a token outside the draft vocabulary


class SequentialHead(nn.Module):
    """The interface of every head, where z is W1[x_prev]; the others make more of it."""

    engines: ClassVar[tuple[str, ...]] = ()  # that load a checkpoint with this head
    reserves_column: ClassVar[bool] = False  # z is W1[x_prev] itself, so a column can keep tokens out

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)
        self._reserved: Tensor | None = None

    def embed(self, previous_ids: Tensor) -> Tensor:
        """W1[x_prev] [..., r]; the confidence head reads it too."""
        return self.markov_w1(previous_ids)

    def bias_vectors(self, states: Tensor, previous_ids: Tensor) -> Tensor:
        """z [N, G, r] of teacher-forced blocks: states [N, G, d], previous_ids [N, G]."""
        return self.embed(previous_ids)

    @property
    def reads_previous_token_alone(self) -> bool:
        """Whether z is one for all slots after the same token, as it is here."""
        return type(self).bias_vectors is SequentialHead.bias_vectors

    def step_vector(self, state: Tensor | None, previous_ids: Tensor, h_k: Tensor) -> tuple[Tensor, Tensor | None]:
        """z [B, r] of one slot, and the state for the next one."""
        return self.embed(previous_ids), None

    def initial_state(self, rows: int) -> Tensor | None:
        """The state before slot 0; None where a head keeps none."""
        return None

    def bias(self, vectors: Tensor, weight: Tensor | None = None) -> Tensor:
        """z W2.T [..., V] of vectors z [..., r], or of some rows of W2."""
        return nn.functional.linear(vectors, self.markov_w2.weight if weight is None else weight)

    def reserve_column(self, draft_token_ids: Tensor) -> None:
        """Let the last rank column keep tokens outside `draft_token_ids` from ever being drafted.

        W1's column is 1 and W2's is 0 inside and -1e4 outside, so any engine that knows the vanilla head drafts
        the same tokens. The column gets no gradient.
        """
        first = self._reserved is None
        inside = torch.zeros(self.markov_w2.weight.shape[0], dtype=torch.bool, device=self.markov_w2.weight.device)
        inside[draft_token_ids.to(inside.device)] = True
        self._reserved = inside
        self.restore_reserved_column()
        if first:
            for weight in (self.markov_w1.weight, self.markov_w2.weight):
                weight.register_hook(_without_last_column)

    @property
    def partly_constant(self) -> tuple[Tensor, ...]:
        """Parameters with a column that no optimizer may move; they take no weight decay."""
        return () if self._reserved is None else (self.markov_w1.weight, self.markov_w2.weight)

    @torch.no_grad()
    def restore_reserved_column(self) -> None:
        """Write the reserved column, in the precision that the weights have now."""
        if self._reserved is not None:
            outside = ~self._reserved.to(self.markov_w2.weight.device)
            self.markov_w1.weight[:, -1] = 1.0
            self.markov_w2.weight[:, -1] = outside.to(self.markov_w2.weight.dtype) * OUTSIDE_BIAS


@sequential_heads.register("vanilla")
class VanillaHead(SequentialHead):
    """The Markov head of the paper."""

    engines = ("vLLM", "SGLang", "llama.cpp")
    reserves_column = True


@sequential_heads.register("gated")
class GatedHead(SequentialHead):
    """The embedding is multiplied by sigmoid(G [h_k; W1[x_prev]]) first."""

    engines = ("SGLang",)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def bias_vectors(self, states: Tensor, previous_ids: Tensor) -> Tensor:
        embedded = self.embed(previous_ids)
        return embedded * torch.sigmoid(self.gate_proj(torch.cat([states, embedded], dim=-1)))

    def step_vector(self, state: Tensor | None, previous_ids: Tensor, h_k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.bias_vectors(h_k, previous_ids), None


@sequential_heads.register("rnn")
class RNNHead(SequentialHead):
    """A gated cell over the block: z_k = [s_{k-1}; W1[x_{k-1}]; h_k], its three parts from one linear layer."""

    engines = ("SGLang",)

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def initial_state(self, rows: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(rows, self.rank)

    def step_vector(self, state: Tensor | None, previous_ids: Tensor, h_k: Tensor) -> tuple[Tensor, Tensor | None]:
        if state is None:
            state = self.initial_state(h_k.shape[0])
        return self._cell(state, self.embed(previous_ids), h_k)

    def bias_vectors(self, states: Tensor, previous_ids: Tensor) -> Tensor:
        embedded = self.embed(previous_ids)
        state, vectors = self.initial_state(states.shape[0]), []
        for slot in range(states.shape[1]):
            vector, state = self._cell(state, embedded[:, slot], states[:, slot])
            vectors.append(vector)
        return torch.stack(vectors, dim=1)

    def _cell(self, state: Tensor, embedded: Tensor, h_k: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, h_k], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)


def build_head(config: DrafterConfig) -> SequentialHead | None:
    """The head that `markov_head_type` names; None for rank 0."""
    if config.markov_rank == 0:
        return None
    return sequential_heads[config.markov_head_type or "vanilla"](config)


def _without_last_column(gradient: Tensor) -> Tensor:
    gradient = gradient.clone()
    gradient[:, -1] = 0
    return gradient


class ConfidenceHead(nn.Module):
    """The probability that a slot is accepted given that all before it were.

    c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b), or of h_k alone. Gives logits.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor, embedded: Tensor | None) -> Tensor:
        """states [..., d], embedded [..., r] (the previous token's Markov embedding) to logits [...]."""
        if self.with_markov:
            assert embedded is not None
            states = torch.cat([states, embedded], dim=-1)
        return self.proj(states).squeeze(-1)
