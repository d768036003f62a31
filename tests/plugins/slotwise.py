"""A drafter of one file, as somebody outside would write it: one linear map from (state, anchor) to all slots at once.

Every slot's state is a part of W [norm(fc(hidden states at anchor - 1)); embedding of the anchor]. B rows, N blocks,
G slots, M new tokens, d hidden size, m captured layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dspark.config import DrafterConfig
from dspark.models.backbone import RMSNorm
from dspark.models.base import NO_HEADS, Choose, Drafter, OutputWeights
from dspark.models.draft_cache import DraftCache
from dspark.registry import algorithms


@algorithms.register("slotwise")
class Slotwise(Drafter):
    title = "Slotwise"
    architectures: ClassVar[Mapping[str, str]] = {"SlotwiseModel": "qwen3"}
    settings: ClassVar[Mapping[str, Any]] = {"num_draft_layers": 1}
    loss: ClassVar[Mapping[str, float]] = {"ce": 0.5, "l1": 0.5}
    fixed: ClassVar[Mapping[str, Any]] = {**NO_HEADS, "block_layout": "anchor-first"}
    options: ClassVar[Mapping[str, Any]] = {"state_scale": 1.0}
    needs_mask_token = False
    first_anchor = 1  # a block reads the state before its anchor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([nn.Linear(2 * size, config.block_size * size, bias=False)])
        self.norm = RMSNorm(size, config.rms_norm_eps)

    def project_context(self, hidden_states: Tensor) -> Tensor:
        return self.hidden_norm(super().project_context(hidden_states)) * self.config.options["state_scale"]

    def _slots(self, states: Tensor, anchor_ids: Tensor) -> Tensor:
        """[N, G, d] of the states before N anchors."""
        both = torch.cat([states, self.embed_tokens(anchor_ids)], dim=-1)
        return self.norm(self.layers[0](both).unflatten(-1, (self.block_size, -1)))

    def block_states(self, batch: Any) -> Tensor:
        context = self.project_context(batch.hidden_states)
        return self._slots(context[batch.block_anchor - 1], batch.input_ids[batch.block_anchor])

    def new_cache(self, rows: int, capacity: int = 256) -> DraftCache:
        cache = super().new_cache(rows, capacity)
        cache.last_states = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return cache

    @torch.no_grad()
    def write_context(
        self, cache: DraftCache, hidden_states: Tensor, token_rows: Tensor, positions: Tensor, next_ids: Tensor
    ) -> None:
        cache.keep_last_states(token_rows.to(cache.device), self.project_context(hidden_states.to(cache.device)))

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        cache: DraftCache,
        slots: int,
        choose: Choose,
        weights: OutputWeights,
    ) -> None:
        assert cache.last_states is not None
        states = self._slots(cache.last_states[: len(anchor_ids)], anchor_ids.to(self.device))
        for slot in range(slots):
            choose(self.base_logits(states[:, slot], weights.head))
