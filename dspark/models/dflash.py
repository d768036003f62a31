"""DFlash: all slots of a block in one parallel pass, in either block layout, for every family.

B rows, T packed context tokens, N blocks, G draft slots, d hidden, m captured layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dspark.config import DrafterConfig, SettingError, bad_setting
from dspark.families import FAMILIES, with_residual
from dspark.losses.micro_batch import MicroBatch
from dspark.models.backbone import DraftLayer, RMSNorm
from dspark.models.base import Choose, Drafter, OutputWeights, vllm_command
from dspark.models.draft_cache import DraftCache
from dspark.models.kernels import BlockAttention
from dspark.models.starting_weights import copy_layer, scale_projections, source_layers
from dspark.registry import algorithms

if TYPE_CHECKING:
    from dspark.decoding.target import Target

MASK_FIRST = "DFlashDraftModel"
MASK_FIRST_NAMES = (MASK_FIRST, with_residual(MASK_FIRST))


@algorithms.register("dflash")
class DFlash(Drafter):
    """Draft layers over [anchor, mask x (G-1)], whose keys and values come from the projected context as well.

    With `context_residual` fc(hidden states) of the position before the anchor is added to every slot's input, so that
    the residual stream starts from a state of the target's, as EAGLE-3's does (arXiv 2503.01840). Nothing is added at a
    sequence's first position, which has none before it.
    """

    title = "DFlash"
    architectures: ClassVar[Mapping[str, str]] = dict.fromkeys(MASK_FIRST_NAMES, "qwen3")
    families = tuple(FAMILIES)
    loss: ClassVar[Mapping[str, float]] = {"ce": 1.0, "l1": 0.0}
    block_layouts: ClassVar[tuple[str, ...]] = ("anchor-first", "mask-first")
    takes_context_residual = True

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_draft_layers))
        self.norm = RMSNorm(size, eps)

    @classmethod
    def check(cls, config: DrafterConfig) -> None:
        super().check(config)
        if config.block_layout == "mask-first" and config.family != "qwen3":
            raise bad_setting("block_layout", config.block_layout, f"anchor-first on a {config.family}-family target")

    @classmethod
    def architecture(cls, config: DrafterConfig) -> str:
        """DSpark's for a block from the anchor: it is the same layout, with a rank of 0."""
        mask_first = config.block_layout == "mask-first"
        plain = MASK_FIRST if mask_first else FAMILIES[config.family].dspark_architecture
        return with_residual(plain) if config.context_residual else plain

    @classmethod
    def layout(cls, config: DrafterConfig) -> dict[str, Any]:
        """z-lab's keys for a mask-first block, else DSpark's; `context_residual` where it is so."""
        residual = {"context_residual": True} if config.context_residual else {}
        if config.block_layout != "mask-first":
            return super().layout(config) | residual
        shared = {"target_layer_ids": list(config.target_layer_ids), "mask_token_id": config.mask_token_id}
        return residual | {
            "architectures": [cls.architecture(config)],
            "block_size": config.input_slots,
            "block_layout": config.block_layout,
            "mask_token_id": config.mask_token_id,
            "num_anchors": config.num_anchors,
            "dflash_config": shared,
        }

    @classmethod
    def read_layout(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        architecture, said = values["architectures"][0], values.get("context_residual", False)
        if said != (architecture in map(with_residual, cls.architectures)):
            raise SettingError(
                f"config.json names the architecture {architecture} and says context_residual {said}: the two "
                "contradict each other, so what the weights are is not known; publish the drafter again"
            )
        residual = {"context_residual": said}
        if architecture not in MASK_FIRST_NAMES:
            return super().read_layout(values) | residual
        return residual | {
            "target_layer_ids": values["dflash_config"]["target_layer_ids"],
            "block_size": values["block_size"] - 1,
            "block_layout": "mask-first",
            "mask_token_id": values["dflash_config"]["mask_token_id"],
            "num_anchors": values.get("num_anchors", 512),
        }

    @classmethod
    def describe(cls, config: DrafterConfig) -> str:
        layout = super().describe(config)
        if config.block_layout == "mask-first":
            layout = f"Layout: {config.input_slots} slots, the anchor's predicts nothing"
        return layout + "; the projected state before the anchor is added to every slot" * config.context_residual

    @classmethod
    def engine_notes(cls, config: DrafterConfig, *, speculators: bool) -> list[str]:
        if config.context_residual:
            return ["Evaluation only: no engine has the context residual (docs/engines.md says what one would add)."]
        if config.block_layout == "mask-first":
            return ["vLLM loads this layout (DFlash: slot j predicts the token at anchor + j, slot 0 nothing)."]
        return ["Evaluation only: without a sequential head engines don't load this layout."]

    @classmethod
    def commands(cls, config: DrafterConfig, *, speculators: bool, temperatures: bool) -> dict[str, str]:
        served = config.block_layout == "mask-first" and not config.context_residual
        return vllm_command("dflash", "…", config.block_size) if served else {}

    @classmethod
    def speculators_layout(cls, config: DrafterConfig, layer_ids: list[int]) -> dict[str, Any]:
        """Blocks that draft from the anchor are DSpark's, with or without its heads: engines know no such DFlash."""
        values = {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "aux_hidden_state_layer_ids": layer_ids,
            "mask_token_id": config.mask_token_id,
            "block_size": config.input_slots,
            "sample_from_anchor": config.block_layout == "anchor-first",
            "sliding_window_non_causal": True,
        }
        if config.block_layout == "mask-first":
            return values
        return values | {
            "speculators_model_type": "dspark",
            "architectures": ["DSparkSpeculator"],
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head_type or "vanilla",
            "enable_confidence_head": config.enable_confidence_head,
            "confidence_head_with_markov": config.confidence_head_with_markov,
        }

    def block_states(self, batch: MicroBatch) -> Tensor:
        config = self.config
        slots = config.input_slots
        blocks = BlockAttention(
            sequence_starts=batch.sequence_starts,
            block_starts=batch.block_starts,
            block_sequence=batch.block_sequence,
            block_anchor=batch.block_anchor,
            slots=slots,
            implementation=self.attention,
        )
        projected = self.project_context(batch.hidden_states)
        context = self.hidden_norm(projected)
        offsets = torch.arange(slots, device=context.device)
        block_positions = batch.positions[batch.block_anchor][:, None] + offsets
        context_rotation = self.rotary(batch.positions, context.dtype)
        block_rotation = self.rotary(block_positions, context.dtype)
        x = self._block_inputs(batch.input_ids[batch.block_anchor])
        if self.config.context_residual:
            before = projected[(batch.block_anchor - 1).clamp(min=0)]
            x = x + _residual(before, batch.positions[batch.block_anchor])
        for layer in self.layers:

            def run(x: Tensor, layer: Any = layer) -> Tensor:
                context_kv = layer.self_attn.keys_values(context, context_rotation)

                def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                    return blocks.attend(q, context_kv, k, v, layer.self_attn.scale)

                return layer(x, block_rotation, attend)

            recomputing = self.gradient_checkpointing and torch.is_grad_enabled()
            x = checkpoint(run, x, use_reentrant=False) if recomputing else run(x)
        return self.norm(x[:, slots - config.block_size :])

    def new_cache(self, rows: int, capacity: int = 256) -> DraftCache:
        """An empty cache for `rows` requests; for a context residual with each row's last projected state."""
        cache = super().new_cache(rows, capacity)
        if self.config.context_residual:
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
        projected = self.project_context(hidden_states.to(cache.device))  # [M, d]
        if self.config.context_residual:
            cache.keep_last_states(token_rows, projected)
        context = self.hidden_norm(projected)
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
        if self.config.context_residual:
            assert cache.last_states is not None
            x = x + _residual(cache.last_states[: len(anchors)], anchors)
        for index, layer in enumerate(self.layers):

            def attend(
                q: Tensor, k: Tensor, v: Tensor, at: int = index, scale: float = layer.self_attn.scale
            ) -> Tensor:
                cache.write(at, rows, positions, k, v)
                return cache.attend(at, q, visible, longest, scale)

            x = layer(x, rotation, attend)
        return self.norm(x[:, slots - config.block_size :])

    def draft(
        self,
        anchor_ids: Tensor,
        anchor_positions: Tensor,
        cache: DraftCache,
        slots: int,
        choose: Choose,
        weights: OutputWeights,
    ) -> Tensor | None:
        """One parallel block, then the sequential head, where there is one, slot by slot."""
        previous = anchor_ids.to(self.device)
        states = self.draft_states(previous, anchor_positions, cache)[:, :slots]
        logits = self.base_logits(states, weights.head)
        head = self.markov_head
        carried = None if head is None else head.initial_state(len(previous))
        before = []
        for slot in range(slots):
            scores = logits[:, slot]
            if head is not None:
                vectors, carried = head.step_vector(carried, previous, states[:, slot])
                scores = scores + head.bias(vectors, weights.bias)
            before.append(previous)
            previous = choose(scores)
        return self.confidence_logits(states, torch.stack(before, dim=1))

    @torch.no_grad()
    def start_from_target(self, target: Target) -> list[int]:
        """The draft layers as the target's top layers, reading the last captured layer.

        fc is the identity on the last captured layer. One norm serves the context of every draft layer, so each
        layer's own input norm is merged into its projections, relative to the first's: keys and values of the context
        are then what the target's layer would make of that state. Parts of another shape stay as they are.
        """
        sources = source_layers(self, target)
        super().start_from_target(target)
        first_norm = target.layers[sources[0]].input_layernorm.weight.float()
        shared_norm = torch.where(first_norm.abs() < 1e-3, torch.full_like(first_norm, 1e-3), first_norm)
        self.hidden_norm.weight.copy_(shared_norm.to(self.hidden_norm.weight))
        for layer, source_id in zip(self.layers, sources, strict=True):
            source = target.layers[source_id]
            copy_layer(layer, source)
            ratio = source.input_layernorm.weight.float() / shared_norm
            layer.input_layernorm.weight.copy_(shared_norm.to(layer.input_layernorm.weight))
            for part in ("q_proj", "k_proj", "v_proj"):
                projection = getattr(layer.self_attn, part)
                if projection is not None:
                    projection.weight.mul_(ratio.to(projection.weight))
        scale_projections(self.layers, target, sources)
        return sources

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


def _residual(before: Tensor, anchor_positions: Tensor) -> Tensor:
    """[N, 1, d] to add to the slots of N blocks, from the projected states [N, d] before their anchors [N]."""
    return (before * (anchor_positions > 0)[:, None])[:, None]
