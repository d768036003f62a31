"""EAGLE-3: an autoregressive drafter of one layer, trained on its own unrolled steps (test-time training).

B rows, T packed context tokens, N blocks of G steps, M new tokens, V vocabulary, d hidden, m captured layers.

The state of the target at t is paired with the token at t+1. Seen from a block with anchor a = t+1, step i takes the
token at a+i (the anchor, then true or drafted tokens) at rotary position t+i and predicts the token at a+i+1: the same
slots, labels and visible context as every other drafter's block, so packs, losses and decoding are shared with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.attention import BlockLayout, Implementation
from dspark.backbone import DraftAttention, GatedMLP, RMSNorm, Rotary, Rotation, initialise
from dspark.config import DrafterConfig, SettingError
from dspark.draft_cache import DraftCache
from dspark.drafter import checked_draft_tokens, require_width, share_target
from dspark.packing import PackedBatch


class Eagle3Layer(nn.Module):
    """Attention over [norm(embedding); norm(state)], with the state itself as residual."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = DraftAttention(config, input_size=2 * size)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def joined(self, embedded: Tensor, state: Tensor) -> Tensor:
        """The attention's input [..., 2d]."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)

    def finish(self, state: Tensor, attended: Tensor) -> Tensor:
        """Residuals and MLP after the heads' output [..., H, D]."""
        state = state + self.self_attn.o_proj(attended.flatten(-2))
        return state + self.mlp(self.post_attention_layernorm(state))


class Eagle3Drafter(nn.Module):
    """Parameter names are those of the reference's checkpoints; there is no sequential or confidence head."""

    markov_head = None
    confidence_head = None
    first_anchor = 1  # a block reads the state before its anchor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        if config.algorithm != "eagle3":
            raise SettingError(f"algorithm is {config.algorithm!r}, not eagle3 (option `drafter.algorithm`)")
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fc = nn.Linear(config.num_features, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.attention: Implementation = "auto"
        self.gradient_checkpointing = False  # keep only the steps' states, keys and values, and compute the rest again
        self.draft_token_ids: Tensor | None
        self.register_buffer("draft_token_ids", None, persistent=False)  # [Vd] ascending; None drafts all of V
        self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(False)

    @property
    def layer(self) -> Eagle3Layer:
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

    @property
    def sequential_head(self) -> None:
        return None

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def block_size(self) -> int:
        """Draft tokens a round, G: as many as there are training steps."""
        return self.config.block_size

    def project_context(self, features: Tensor) -> Tensor:
        """fc(features): [..., m*d] to [..., d], before `hidden_norm`.

        Raises SettingError when the features' width is not that of the configured layers.
        """
        require_width(self, features)
        return self.fc(features.to(self.dtype))

    def block_states(self, batch: PackedBatch) -> Tensor:
        """Post-`norm` states [N, G, d] of unrolled steps; step i is for the token at anchor + i + 1.

        Step i's query sees the context's keys strictly before t = anchor - 1 and, at t, the keys of steps 0 to i.
        Raises ValueError for an anchor that is its sequence's first token: there is no state before it.
        """
        last = batch.block_anchor - 1  # t of each block
        if bool((batch.positions[batch.block_anchor] == 0).any()):
            raise ValueError("EAGLE-3 reads the state before the anchor: a sequence's first token cannot be an anchor")
        layer, attention = self.layer, self.layer.self_attn
        context = self.project_context(batch.features)
        # The last token's pair lies in the next sequence, or nowhere; no block sees it.
        pairs = self.embed_tokens(batch.input_ids.roll(-1))
        joined = layer.joined(pairs, context)
        context_kv = attention.keys_values(joined, self.rotary(batch.positions, context.dtype))
        state, states = context[last], []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(batch.block_size):

            def run(
                state: Tensor,
                step: int = step,
                keys: Sequence[Tensor] = tuple(keys),
                values: Sequence[Tensor] = tuple(values),
            ) -> tuple[Tensor, Tensor, Tensor]:
                rotation = self.rotary(batch.positions[last] + step, context.dtype)
                joined = layer.joined(self.embed_tokens(batch.previous_ids[:, step]), state)
                key, value = attention.keys_values(joined, rotation)
                layout = BlockLayout(
                    sequence_starts=batch.sequence_starts,
                    block_starts=batch.block_starts,
                    block_sequence=batch.block_sequence,
                    block_anchor=last,
                    slots=1,
                    own_keys=step + 1,
                    implementation=self.attention,
                )
                query = attention.queries(joined, rotation)[:, None]
                own = torch.stack([*keys, key], dim=1), torch.stack([*values, value], dim=1)
                attended = layout.attend(query, context_kv, *own, attention.scale)
                return layer.finish(state, attended[:, 0]), key, value

            recomputing = self.gradient_checkpointing and torch.is_grad_enabled()
            state, key, value = checkpoint(run, state, use_reentrant=False) if recomputing else run(state)
            keys.append(key)
            values.append(value)
            states.append(state)
        return self.norm(torch.stack(states, dim=1))

    # DeepSpeed and its like wrap `forward`.
    forward = block_states

    def new_cache(self, rows: int, capacity: int = 256) -> DraftCache:
        """An empty cache for `rows` requests; it keeps each row's last projected state as well."""
        config = self.config
        return DraftCache(
            layers=1,
            rows=rows,
            key_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
            capacity=capacity,
            state_size=config.hidden_size,
        )

    @torch.no_grad()
    def extend_context(
        self,
        cache: DraftCache,
        features: Tensor,
        next_ids: Tensor,
        lengths: Tensor | list[int],
        rows: Tensor | list[int] | None = None,
    ) -> None:
        """Append the first lengths[b] of features [B, S, m*d] to cache row rows[b] (row b when `rows` is None).

        next_ids [B, S] are the tokens one to the right; a row's last one is the coming anchor.
        """
        token_rows, slots, source = cache.take_slots(lengths, rows, features.shape[1])
        source = source.to(features.device)
        self.write_context(cache, features.flatten(0, 1)[source], token_rows, slots, next_ids.flatten()[source])

    @torch.no_grad()
    def write_context(
        self, cache: DraftCache, features: Tensor, token_rows: Tensor, positions: Tensor, next_ids: Tensor
    ) -> None:
        """Put packed features [M, m*d] at cache rows token_rows [M], positions [M] ascending within a row.

        next_ids [M] are the tokens at the next position. The primitive under `extend_context`.
        """
        if len(token_rows) == 0:
            return
        cache.reserve(int(positions.max()) + 1)
        token_rows, positions = token_rows.to(cache.device), positions.to(cache.device)
        state = self.project_context(features.to(cache.device))
        rotation = self.rotary(positions, state.dtype)
        joined = self.layer.joined(self.embed_tokens(next_ids.to(cache.device)), state)
        cache.write(0, token_rows, positions, *self.layer.self_attn.keys_values(joined, rotation))
        cache.keep_last_states(token_rows, state)

    @torch.no_grad()
    def begin_block(self, anchor_ids: Tensor, anchor_positions: Tensor, cache: DraftCache) -> Eagle3Block:
        """Start drafting after anchors [B] at anchor_positions [B], for cache rows 0 to B-1."""
        return Eagle3Block(self, anchor_ids, anchor_positions, cache)

    def base_logits(self, states: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """Head and soft cap: states [..., d] to [..., V], or to `vocabulary`'s tokens."""
        weight = self.lm_head.weight if vocabulary is None else self.lm_head.weight[vocabulary]
        logits = nn.functional.linear(states, weight)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def confidence_logits(self, states: Tensor, previous_ids: Tensor) -> None:
        """None: EAGLE-3 has no confidence head."""
        return None

    def restrict_vocabulary(self, token_ids: Tensor) -> None:
        """Draft only `token_ids` [Vd], which the checkpoint carries as `d2t` and `t2d`."""
        self.draft_token_ids = checked_draft_tokens(token_ids, self.config).to(self.device)

    def share_target(self, embedding: Tensor, head: Tensor) -> None:
        """Take the target's embedding and head [V, d], frozen, without a copy where dtype and device agree."""
        share_target(self, self.config, embedding, head)

    def initialise_random(self, seed: int = 0) -> None:
        """Normal weights, standard deviation 0.02. Global random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            initialise(self.fc)
            initialise(self.layers)


class Eagle3Block:
    """One round of drafting: `state` is for the next token, `feed` takes the token that was chosen.

    The keys of drafted steps lie behind the context in the cache and are overwritten by the next round.
    """

    def __init__(self, drafter: Eagle3Drafter, anchor_ids: Tensor, anchor_positions: Tensor, cache: DraftCache) -> None:
        assert cache.last_states is not None
        self.drafter, self.cache = drafter, cache
        self.rows = torch.arange(len(anchor_ids), device=cache.device)
        self.positions = anchor_positions.to(cache.device) - 1  # rotary position and cache cell of the next step
        self.longest = int(anchor_positions.max())
        self.even = bool((anchor_positions == anchor_positions[0]).all())
        self._state = cache.last_states[: len(anchor_ids)]
        cache.reserve(self.longest + drafter.block_size)
        self.feed(anchor_ids)

    @property
    def state(self) -> Tensor:
        """Post-`norm` state [B, d] of the latest step."""
        return self.drafter.norm(self._state)

    @torch.no_grad()
    def feed(self, token_ids: Tensor) -> Tensor:
        """Take the token [B] of the latest position and go one step on; gives the new `state` [B, d]."""
        layer, cache = self.drafter.layer, self.cache
        rotation: Rotation = self.drafter.rotary(self.positions, self._state.dtype)
        joined = layer.joined(self.drafter.embed_tokens(token_ids.to(cache.device)), self._state)
        cache.write(0, self.rows, self.positions, *layer.self_attn.keys_values(joined, rotation))
        visible = None
        if not self.even:
            visible = torch.arange(self.longest, device=cache.device) <= self.positions[:, None]
        query = layer.self_attn.queries(joined, rotation)[:, None]
        attended = cache.attend(0, query, visible, self.longest, layer.self_attn.scale)[:, 0]
        self._state = layer.finish(self._state, attended)
        self.positions = self.positions + 1
        self.longest += 1
        return self.state
