"""The parallel drafter: DSpark and DFlash, in either block layout, for every family.

B rows, S sequence, T packed context tokens, N blocks, G draft slots, V vocabulary, d hidden, m captured layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.attention import BlockLayout, Implementation
from dspark.backbone import DraftLayer, RMSNorm, Rotary, initialise
from dspark.confidence import ConfidenceHead
from dspark.config import DrafterConfig, SettingError
from dspark.draft_cache import DraftCache
from dspark.families import FAMILIES
from dspark.packing import PackedBatch
from dspark.sequential_heads import SequentialHead, build_head


class Drafter(nn.Module):
    """Context projection, draft layers, frozen embedding and head of the target, sequential and confidence heads.

    Parameter names are those of the published layout.
    """

    first_anchor = 0  # the first position of a sequence at which a block may start

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.algorithm == "eagle3":
            raise SettingError("algorithm is 'eagle3'; use dspark.eagle3.Eagle3Drafter (option `drafter.algorithm`)")
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.fc = nn.Linear(config.num_features, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers: Any = nn.ModuleList(DraftLayer(config) for _ in range(config.num_draft_layers))
        self.norm = RMSNorm(size, eps)
        self.markov_head = build_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = Rotary(config)
        self.attention: Implementation = "auto"
        self.gradient_checkpointing = False  # keep only the layers' inputs, and compute the rest again going backward
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", None, persistent=False)  # [Vd] ascending; None drafts all of V
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    @property
    def sequential_head(self) -> SequentialHead | None:
        return self.markov_head

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def block_size(self) -> int:
        """Draft tokens a block, G."""
        return self.config.block_size

    # Context

    def project_context(self, features: Tensor) -> Tensor:
        """hidden_norm(fc(features)): [..., m*d] to [..., d].

        Raises SettingError when the features' width is not that of the configured layers.
        """
        require_width(self, features)
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    # Training

    def block_states(self, batch: PackedBatch) -> Tensor:
        """Post-`norm` states [N, G, d] of all packed blocks; slot k is for the token at anchor + k + 1."""
        config = self.config
        slots = config.input_slots
        layout = BlockLayout(
            sequence_starts=batch.sequence_starts,
            block_starts=batch.block_starts,
            block_sequence=batch.block_sequence,
            block_anchor=batch.block_anchor,
            slots=slots,
            implementation=self.attention,
        )
        context = self.project_context(batch.features)
        offsets = torch.arange(slots, device=context.device)
        block_positions = batch.positions[batch.block_anchor][:, None] + offsets
        context_rotation = self.rotary(batch.positions, context.dtype)
        block_rotation = self.rotary(block_positions, context.dtype)
        x = self._block_inputs(batch.input_ids[batch.block_anchor])
        for layer in self.layers:

            def run(x: Tensor, layer: Any = layer) -> Tensor:
                context_kv = layer.self_attn.keys_values(context, context_rotation)

                def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    return layout.attend(q, context_kv, k, v, layer.self_attn.scale)

                return layer(x, block_rotation, attend)

            recomputing = self.gradient_checkpointing and torch.is_grad_enabled()
            x = checkpoint(run, x, use_reentrant=False) if recomputing else run(x)
        return self.norm(x[:, slots - config.block_size :])

    # DeepSpeed and its like wrap `forward`.
    forward = block_states

    # Drafting

    def new_cache(self, rows: int, capacity: int = 256) -> DraftCache:
        """An empty cache of context keys and values for `rows` requests."""
        config = self.config
        return DraftCache(
            layers=config.num_draft_layers,
            rows=rows,
            key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
            capacity=capacity,
        )

    @torch.no_grad()
    def extend_context(
        self,
        cache: DraftCache,
        features: Tensor,
        lengths: Tensor | list[int],
        rows: Tensor | list[int] | None = None,
    ) -> None:
        """Append the first lengths[b] of features [B, S, m*d] to cache row rows[b] (row b when `rows` is None).

        A row's new positions continue where it ends.
        """
        token_rows, slots, source = cache.take_slots(lengths, rows, features.shape[1])
        self.write_context(cache, features.flatten(0, 1)[source.to(features.device)], token_rows, slots)

    @torch.no_grad()
    def write_context(self, cache: DraftCache, features: Tensor, token_rows: Tensor, positions: Tensor) -> None:
        """Put the keys and values of packed features [M, m*d] at cache rows token_rows [M], positions [M].

        The primitive under `extend_context`, for callers that keep count of rows themselves.
        """
        if len(token_rows) == 0:
            return
        cache.reserve(int(positions.max()) + 1)
        token_rows, positions = token_rows.to(cache.device), positions.to(cache.device)
        context = self.project_context(features.to(cache.device))  # [M, d]
        rotation = self.rotary(positions, context.dtype)
        for index, layer in enumerate(self.layers):
            cache.write(index, token_rows, positions, *layer.self_attn.keys_values(context, rotation))

    @torch.no_grad()
    def draft_states(self, anchor_ids: Tensor, anchor_positions: Tensor, cache: DraftCache) -> Tensor:
        """Post-`norm` states [B, G, d] of one block a row; the block's own keys and values are not kept.

        anchor_ids [B] and anchor_positions [B] are for cache rows 0 to B-1. Row b sees its first anchor_positions[b]
        cached positions, so it must hold at least those; what lies behind them is overwritten.
        """
        config, slots = self.config, self.config.input_slots
        anchors = anchor_positions.to(cache.device)
        longest = int(anchor_positions.max()) + slots
        cache.reserve(longest)
        positions = anchors[:, None] + torch.arange(slots, device=cache.device)  # [B, slots]
        visible = None
        if int(anchor_positions.min()) + slots < longest:
            visible = torch.arange(longest, device=cache.device) < (anchors + slots)[:, None]
        rotation = self.rotary(positions, self.dtype)
        rows = torch.arange(len(anchors), device=cache.device)[:, None]
        x = self._block_inputs(anchor_ids.to(self.device))
        for index, layer in enumerate(self.layers):

            def attend(
                q: Tensor, k: Tensor, v: Tensor, at: int = index, scale: float = layer.self_attn.scale
            ) -> Tensor:
                cache.write(at, rows, positions, k, v)
                return cache.attend(at, q, visible, longest, scale)

            x = layer(x, rotation, attend)
        return self.norm(x[:, slots - config.block_size :])

    # Heads

    def base_logits(self, states: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """Head and soft cap, before the sequential bias: states [..., d] to [..., V], or to `vocabulary`'s tokens."""
        weight = self.lm_head.weight if vocabulary is None else self.lm_head.weight[vocabulary]
        logits = nn.functional.linear(states, weight)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def confidence_logits(self, states: Tensor, previous_ids: Tensor) -> Tensor | None:
        """Logits [..., G] of acceptance from states [..., G, d] and previous_ids [..., G]; None without the head."""
        if self.confidence_head is None:
            return None
        embedded = None
        if self.confidence_head.with_markov:
            assert self.markov_head is not None
            embedded = self.markov_head.embed(previous_ids)
        return self.confidence_head(states, embedded)

    def restrict_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only `token_ids` [Vd].

        The checkpoint carries them in the last Markov rank column, or as `d2t` and `t2d` without a sequential head.
        """
        self.draft_token_ids = checked_draft_tokens(token_ids, self.config).to(self.device)
        if self.markov_head is not None:
            self.markov_head.reserve_column(self.draft_token_ids)

    # Weights

    def share_target(self, embedding: Tensor, head: Tensor) -> None:
        """Take the target's embedding and head [V, d], frozen, without a copy where dtype and device agree."""
        share_target(self, self.config, embedding, head)

    def initialise_random(self, seed: int = 0) -> None:
        """Normal weights, standard deviation 0.02; a sequential head starts without an effect. Global state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for name, module in self.named_children():
                if name not in ("embed_tokens", "lm_head"):
                    initialise(module)
            if self.markov_head is not None:
                nn.init.zeros_(self.markov_head.markov_w2.weight)

    def _block_inputs(self, anchor_ids: Tensor) -> Tensor:
        """[N] anchors to slot inputs [N, slots, d]: the anchor's embedding, then mask embeddings."""
        slots, size = self.config.input_slots, self.config.hidden_size
        anchors = self.embed_tokens(anchor_ids)
        assert self.config.mask_token_id is not None
        mask = self.embed_tokens.weight[self.config.mask_token_id]
        x = torch.cat([anchors[:, None], mask.expand(len(anchors), slots - 1, size)], dim=1)
        if FAMILIES[self.config.family].scaled_embedding:
            x = x * torch.tensor(math.sqrt(size), dtype=x.dtype)
        return x


def share_target(drafter: Any, config: DrafterConfig, embedding: Tensor, head: Tensor) -> None:
    """Make embedding and head [V, d] the drafter's, frozen. Raises SettingError for other shapes."""
    shape = (config.vocab_size, config.hidden_size)
    if tuple(embedding.shape) != shape or tuple(head.shape) != shape:
        raise SettingError(
            f"the target's embedding is {tuple(embedding.shape)} and its head {tuple(head.shape)}; "
            f"the drafter is configured for {shape} (option `target.model`)"
        )
    for module, weight in ((drafter.embed_tokens, embedding), (drafter.lm_head, head)):
        shared = weight.detach().to(drafter.device, drafter.dtype)
        module.weight = nn.Parameter(shared, requires_grad=False)


def require_width(drafter: Any, features: Tensor) -> None:
    """Raises SettingError unless features [..., C] are as wide as what the drafter's `fc` reads."""
    if features.shape[-1] != drafter.fc.in_features:
        size, layers = drafter.config.hidden_size, len(drafter.config.target_layer_ids)
        raise SettingError(
            f"the cache's features are {features.shape[-1]} wide; this drafter reads {layers} layers of hidden size "
            f"{size}, {drafter.fc.in_features} values together (option `drafter.target_layer_ids`)"
        )


def checked_draft_tokens(token_ids: Tensor, config: DrafterConfig) -> Tensor:
    """Distinct ids [Vd], ascending. Raises SettingError unless they are as many as `draft_vocab_size` says."""
    token_ids = torch.unique(token_ids.long())
    if len(token_ids) != config.draft_vocab_size:
        raise SettingError(
            f"{len(token_ids)} draft tokens given, draft_vocab_size is {config.draft_vocab_size} "
            "(option `drafter.draft_vocab_size`)"
        )
    return token_ids
