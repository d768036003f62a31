"""EAGLE-3: an autoregressive drafter of one layer, trained on its own unrolled steps (test-time training).

B rows, T packed context tokens, N blocks of G steps, M new tokens, V vocabulary, d hidden, m captured layers.

The state of the target at t is paired with the token at t+1. Seen from a block with anchor a = t+1, step i takes the
token at a+i (the anchor, then true or drafted tokens) at rotary position t+i and predicts the token at a+i+1: the same
slots, labels and visible context as every other drafter's block, so micro-batches, losses and decoding are shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.config import DrafterConfig, bad_setting
from dspark.errors import DsparkError
from dspark.losses.micro_batch import MicroBatch
from dspark.models.backbone import DraftAttention, GatedMLP, RMSNorm, Rotation
from dspark.models.base import NO_HEADS, Choose, Drafter, OutputWeights, vllm_command
from dspark.models.draft_cache import DraftCache
from dspark.models.kernels import BlockAttention
from dspark.models.starting_weights import copy_layer, scale_projections, source_layers
from dspark.registry import algorithms

if TYPE_CHECKING:
    from dspark.decoding.target import Target


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


@algorithms.register("eagle3")
class Eagle3(Drafter):
    """Parameter names are those of the reference's checkpoints; there is no sequential or confidence head."""

    title = "EAGLE-3"
    architectures: ClassVar[Mapping[str, str]] = {"Qwen3Eagle3Model": "qwen3"}
    settings: ClassVar[Mapping[str, Any]] = {"num_draft_layers": 1}
    # Step i weighs 0.8^i.
    loss: ClassVar[Mapping[str, float]] = {"ce": 0.0, "l1": 0.0, "soft_ce": 1.0, "position_decay": -1 / math.log(0.8)}
    fixed: ClassVar[Mapping[str, Any]] = {**NO_HEADS, "block_layout": "anchor-first"}
    needs_mask_token = False
    first_anchor = 1  # a block reads the state before its anchor

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([self.make_layer(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def make_layer(cls, config: DrafterConfig) -> nn.Module:
        return Eagle3Layer(config)

    @classmethod
    def check(cls, config: DrafterConfig) -> None:
        super().check(config)
        if config.num_draft_layers != 1:
            raise bad_setting("num_draft_layers", config.num_draft_layers, f"1 for {config.algorithm}")

    @classmethod
    def layout(cls, config: DrafterConfig) -> dict[str, Any]:
        return {
            "architectures": [cls.architecture(config)],
            "draft_num_hidden_layers": config.num_draft_layers,
            "ttt_length": config.block_size,
            "step_loss_decay": round(math.exp(-1 / (config.position_decay or cls.loss["position_decay"])), 9),
        }

    @classmethod
    def read_layout(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "target_layer_ids": values["target_layer_ids"],
            "block_size": values["ttt_length"],
            "position_decay": -1 / math.log(values["step_loss_decay"]),
            "mask_token_id": None,
        }

    @classmethod
    def describe(cls, config: DrafterConfig) -> str:
        return "One token after the other, by one layer that reads its own output"

    @classmethod
    def engine_notes(cls, config: DrafterConfig, *, speculators: bool) -> list[str]:
        asked = "publish.layouts=[speculators] for a layout it loads"
        where = "the folder `speculators` beside it" if speculators else asked
        return [f"vLLM: {where}. This folder is the reference's EAGLE-3 layout, for evaluation."]

    @classmethod
    def commands(cls, config: DrafterConfig, *, speculators: bool, temperatures: bool) -> dict[str, str]:
        return vllm_command("eagle3", "…/speculators", config.block_size) if speculators else {}

    @classmethod
    def speculators_layout(cls, config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any] | None:
        return {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "eagle_aux_hidden_state_layer_ids": layer_ids,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": False,
        }

    @property
    def layer(self) -> Any:
        return self.layers[0]

    def joined(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The attention's input and the residual that its output is added to, from a token and the state before it."""
        return self.layer.joined(embedded, state), state

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [..., d]: residuals and MLP after the heads' output [..., H, D]."""
        state: Tensor = residual + self.layer.self_attn.o_proj(attended.flatten(-2))
        return state + self.layer.mlp(self.layer.post_attention_layernorm(state))

    def block_states(self, batch: MicroBatch) -> Tensor:
        """Post-`norm` states [N, G, d] of unrolled steps; step i is for the token at anchor + i + 1.

        Step i's query sees the context's keys strictly before t = anchor - 1 and, at t, the keys of steps 0 to i.
        Raises DsparkError for an anchor that is its sequence's first token: there is no state before it.
        """
        last = batch.block_anchor - 1  # t of each block
        if bool((batch.positions[batch.block_anchor] == 0).any()):
            raise DsparkError(
                f"{self.title} reads the state before the anchor: a sequence's first token cannot be an anchor"
            )
        attention = self.layer.self_attn
        context = self.project_context(batch.hidden_states)
        # The last token's pair lies in the next sequence, or nowhere; no block sees it.
        pairs = self.embed_tokens(batch.input_ids.roll(-1))
        joined, _ = self.joined(pairs, context)
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
                joined, residual = self.joined(self.embed_tokens(batch.previous_ids[:, step]), state)
                key, value = attention.keys_values(joined, rotation)
                blocks = BlockAttention(
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
                attended = blocks.attend(query, context_kv, *own, attention.scale)
                return self.finish(residual, attended[:, 0]), key, value

            recomputing = self.gradient_checkpointing and torch.is_grad_enabled()
            state, key, value = checkpoint(run, state, use_reentrant=False) if recomputing else run(state)
            keys.append(key)
            values.append(value)
            states.append(state)
        return self.norm(torch.stack(states, dim=1))

    def new_cache(self, rows: int, capacity: int = 256) -> DraftCache:
        """An empty cache for `rows` requests; it keeps each row's last projected state as well."""
        cache = super().new_cache(rows, capacity)
        cache.last_states = torch.zeros(rows, self.config.hidden_size, dtype=self.dtype, device=self.device)
        return cache

    @torch.no_grad()
    def write_context(
        self, cache: DraftCache, hidden_states: Tensor, token_rows: Tensor, positions: Tensor, next_ids: Tensor
    ) -> None:
        if len(token_rows) == 0:
            return
        cache.reserve(int(positions.max()) + 1)
        token_rows, positions = token_rows.to(cache.device), positions.to(cache.device)
        state = self.project_context(hidden_states.to(cache.device))
        rotation = self.rotary(positions, state.dtype)
        joined, _ = self.joined(self.embed_tokens(next_ids.to(cache.device)), state)
        cache.write(0, token_rows, positions, *self.layer.self_attn.keys_values(joined, rotation))
        cache.keep_last_states(token_rows, state)

    @torch.no_grad()
    def begin_block(self, anchor_ids: Tensor, anchor_positions: Tensor, cache: DraftCache) -> Eagle3Block:
        """Start drafting after anchors [B] at anchor_positions [B], for cache rows 0 to B-1."""
        return Eagle3Block(self, anchor_ids, anchor_positions, cache)

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        cache: DraftCache,
        slots: int,
        choose: Choose,
        weights: OutputWeights,
    ) -> None:
        """One step a token."""
        block = self.begin_block(anchor_ids, anchor_positions, cache)
        for slot in range(slots):
            chosen = choose(self.base_logits(block.state, weights.head))
            if slot + 1 < slots:
                block.feed(chosen)

    @torch.no_grad()
    def start_from_target(self, target: Target) -> list[int]:
        """The layer as the target's top layer, reading the last captured layer.

        The layer's attention reads the next token's embedding beside the state: the state's half of its projections
        and the norm before it are the target's, the embedding's half stays random. fc is the identity on the last
        captured layer; MLP and final norm are the target's.
        """
        layer, size = self.layer, self.config.hidden_size
        sources = source_layers(self, target, width=size)
        source = target.layers[sources[0]]
        super().start_from_target(target)
        layer.hidden_norm.weight.copy_(source.input_layernorm.weight.to(layer.hidden_norm.weight))
        copy_layer(layer, source, without=("input_layernorm.weight",))
        for part in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(source.self_attn, part, None)
            if projection is not None:
                getattr(layer.self_attn, part).weight[:, size:].copy_(projection.weight)
        scale_projections(self.layers, target, sources)
        return sources


class Eagle3Block:
    """One round of drafting: `state` is for the next token, `feed` takes the token that was chosen.

    The keys of drafted steps lie behind the context in the cache and are overwritten by the next round.
    """

    def __init__(self, drafter: Eagle3, anchor_ids: Tensor, anchor_positions: Tensor, cache: DraftCache) -> None:
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
        drafter, cache = self.drafter, self.cache
        attention = drafter.layer.self_attn
        rotation: Rotation = drafter.rotary(self.positions, self._state.dtype)
        joined, residual = drafter.joined(drafter.embed_tokens(token_ids.to(cache.device)), self._state)
        cache.write(0, self.rows, self.positions, *attention.keys_values(joined, rotation))
        visible = None
        if not self.even:
            visible = torch.arange(self.longest, device=cache.device) <= self.positions[:, None]
        query = attention.queries(joined, rotation)[:, None]
        attended = cache.attend(0, query, visible, self.longest, attention.scale)[:, 0]
        self._state = drafter.finish(residual, attended)
        self.positions = self.positions + 1
        self.longest += 1
        return self.state
