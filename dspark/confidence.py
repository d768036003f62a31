"""The confidence head: the probability that a slot is accepted given that all before it were."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w [h_k; W1[x_{k-1}]] + b), or of h_k alone. Gives logits."""

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
