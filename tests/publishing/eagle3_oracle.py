"""The second reader of EAGLE-3 folders: see `oracle`.

Legend: S context tokens, G draft tokens, d hidden size, m captured layers, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from oracle import Draft, Reader
from torch import Tensor


class Eagle3Reader(Reader):
    """One layer, one token after the other: the state at t goes with the token at t+1 and gives the token at t+2."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__(config, tensors)
        self.block_size = config["ttt_length"]

    @torch.no_grad()
    def draft(self, token_ids: Sequence[int], hidden_states: Tensor) -> Draft:
        states = hidden_states.float() @ self._weight("fc").T  # [S, d]
        following = list(token_ids[1:])
        logits, tokens = [], []
        for _ in range(self.block_size):
            out = self._step(torch.tensor(following), states)
            row = self._logits(self._norm(out, "norm"))
            tokens.append(int(row.argmax()))
            logits.append(row)
            # The drafter's own output stands for the state that the target has not made yet.
            following.append(tokens[-1])
            states = torch.cat([states, out[None]])
        return Draft(tokens, torch.stack(logits), None)

    def _step(self, following: Tensor, states: Tensor) -> Tensor:
        """The layer's output [d] at the last position, which sees all positions."""
        name, where = "layers.0.", torch.arange(len(states))
        embedded = self._norm(self.tensors["embed_tokens.weight"][following], name + "input_layernorm")
        x = torch.cat([embedded, self._norm(states, name + "hidden_norm")], dim=-1)
        attention = name + "self_attn."
        heads = (-1, self.head_dim)
        query = self._norm(self._linear(attention + "q_proj", x[-1:]).unflatten(-1, heads), attention + "q_norm")
        keys = self._norm(self._linear(attention + "k_proj", x).unflatten(-1, heads), attention + "k_norm")
        values = self._linear(attention + "v_proj", x).unflatten(-1, heads)
        query, keys = self._rotate(query, where[-1:]), self._rotate(keys, where)
        groups = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", query, keys) * self.head_dim**-0.5, dim=-1)
        attended = self._linear(attention + "o_proj", torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        out = states[-1] + attended[0]
        return out + self._mlp(name + "mlp.", self._norm(out, name + "post_attention_layernorm"))
