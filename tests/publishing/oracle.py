"""A second implementation of the published drafters: what an engine would make of a folder.

It knows `config.json`, the tensor names and the papers, and shares no code with the product. It is slow and short: one
block at a time, the whole context projected anew each round, float32. `drafts_alike` compares the two.

Legend: S context tokens, G draft slots, V vocabulary, Vd draft vocabulary, d hidden size, m captured layers, H heads,
D head size.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipelines.errors import UserError

MASK_FIRST = "DFlashDraftModel"
EAGLE3 = "Qwen3Eagle3Model"
RESIDUAL = ("Qwen3DSparkContextResidualModel", "Gemma4DSparkContextResidualModel", "DFlashDraftContextResidualModel")
ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel", MASK_FIRST, EAGLE3, *RESIDUAL)
PROBE_ROUNDS = 4
OUTSIDE = -1e4  # logit of a token that is never drafted


@dataclass(frozen=True)
class Draft:
    """One greedily drafted block."""

    tokens: list[int]
    logits: Tensor  # [G, V], sequential bias included
    confidence: Tensor | None  # logits [G]


def open_folder(folder: str | Path, embedding: Tensor | None = None, head: Tensor | None = None) -> Reader:
    """The reader of a published folder, in the native or the `speculators` layout.

    `embedding` and `head` [V, d] are the target's, for a folder that leaves them out. Raises ValueError for an
    architecture that no reader here knows.
    """
    from safetensors.torch import load_file

    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    tensors = load_file(Path(folder) / "model.safetensors")
    if embedding is not None:
        tensors.setdefault("embed_tokens.weight", embedding.detach().cpu())
    if head is not None:
        tensors.setdefault("lm_head.weight", head.detach().cpu())
    if "speculators_model_type" in config:
        config = from_speculators(config)
    architecture = config["architectures"][0]
    if architecture not in ARCHITECTURES:
        raise UserError(f"{folder} holds a {architecture}; this reader knows {', '.join(ARCHITECTURES)}")
    if architecture == EAGLE3:
        from eagle3_oracle import Eagle3Reader

        return Eagle3Reader(config, tensors)
    return BlockReader(config, tensors)


def from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """A `speculators` configuration in the keys of the native one; the fields are those of speculators 0.9.0."""
    kind, layer = config["speculators_model_type"], dict(config["transformer_layer_config"])
    tokens = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    if kind == "eagle3":
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if config[key]:
                raise UserError(f"{key} is set; this reader knows EAGLE-3 without it")
        ids = [layer_id - 1 for layer_id in config["eagle_aux_hidden_state_layer_ids"]]
        return {**layer, "architectures": [EAGLE3], "target_layer_ids": ids, "ttt_length": tokens}
    found = {**layer, "target_layer_ids": [layer_id - 1 for layer_id in config["aux_hidden_state_layer_ids"]]}
    for key in ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"):
        found[key] = config.get(key)
    if not config["sample_from_anchor"]:
        found |= {"architectures": [MASK_FIRST], "dflash_config": {"mask_token_id": config["mask_token_id"]}}
    else:
        found |= {"architectures": ["Qwen3DSparkModel"], "mask_token_id": config["mask_token_id"]}
    return {**found, "block_size": config["block_size"]}


class Reader(ABC):
    """What all layouts share: tensors by name, norms, rotary positions, the output head."""

    block_size: int  # draft tokens a round

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.gemma = config["architectures"][0].startswith("Gemma4")
        self.drafted = _drafted(tensors)
        self.tensors = {name: value.float() for name, value in tensors.items()}
        self.eps: float = config["rms_norm_eps"]
        self.head_dim: int = config["global_head_dim" if self.gemma else "head_dim"]
        self._frequencies, self._scaling = self._rotary()

    @abstractmethod
    def draft(self, token_ids: Sequence[int], hidden_states: Tensor) -> Draft:
        """Draft after the last of token_ids [S+1], from the hidden states [S, m*d] of all positions before it."""

    def _logits(self, states: Tensor, bias: Tensor | None = None) -> Tensor:
        """Head and soft cap of states [..., d], plus a sequential bias [..., Vd or V], over all of V."""
        logits = states @ self._weight("lm_head").T
        cap = self.config.get("final_logit_softcapping")
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if self.drafted is None:
            return logits if bias is None else logits + bias
        if logits.shape[-1] != len(self.drafted):
            logits = logits[..., self.drafted]
        if bias is not None:
            logits = logits + (bias if bias.shape[-1] == len(self.drafted) else bias[..., self.drafted])
        full = torch.full((*logits.shape[:-1], self.config["vocab_size"]), OUTSIDE)
        full[..., self.drafted] = logits
        return full

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate = x @ self._weight(name + "gate_proj").T
        kind = self.config["hidden_activation" if self.gemma else "hidden_act"]
        if kind in ("silu", "swish"):
            gate = gate * torch.sigmoid(gate)
        elif kind == "gelu_pytorch_tanh":
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
        else:
            raise UserError(f"this reader does not know the activation {kind!r}")
        return (gate * (x @ self._weight(name + "up_proj").T)) @ self._weight(name + "down_proj").T

    def _weight(self, name: str) -> Tensor:
        return self.tensors[name + ".weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self._weight(name).T
        bias = self.tensors.get(name + ".bias")
        return out if bias is None else out + bias

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self._weight(name)

    def _rotary(self) -> tuple[Tensor, float]:
        rope = dict(self.config["rope_parameters"])
        rope = rope.get("full_attention", rope)
        kind = rope.get("rope_type", "default")
        if kind == "default":
            return rope["rope_theta"] ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim), 1.0
        from transformers import PretrainedConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        carrier = PretrainedConfig(**{**self.config, "rope_parameters": rope, "head_dim": self.head_dim})
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](carrier, torch.device("cpu"))
        return frequencies, float(scaling)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Heads [S, H, D] turned by their positions [S]."""
        angles = positions.float()[:, None] * self._frequencies
        cos, sin = (self._scaling * part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


def _drafted(tensors: dict[str, Tensor]) -> Tensor | None:
    """Token ids [Vd] of a reduced draft vocabulary; takes the mapping out of `tensors`."""
    offsets = tensors.pop("d2t", None)
    inside = tensors.pop("t2d", None)
    if offsets is None:
        return None
    ids = offsets.long() + torch.arange(len(offsets))
    if inside is not None and not torch.equal(inside.nonzero().flatten(), ids):
        raise UserError("d2t and t2d name different draft tokens")
    return ids


class BlockReader(Reader):
    """DSpark of both families, and DFlash in either layout."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        super().__init__(config, tensors)
        self.residual = config["architectures"][0] in RESIDUAL
        self.first = int("dflash_config" in config)  # slots before the one that drafts
        self.block_size = config["block_size"] - self.first
        self.mask = config["dflash_config"]["mask_token_id"] if self.first else config["mask_token_id"]

    @torch.no_grad()
    def draft(self, token_ids: Sequence[int], hidden_states: Tensor) -> Draft:
        states = self._states(token_ids[-1], hidden_states.float())
        return self._sequential(token_ids[-1], states[self.first :])

    def _states(self, anchor_id: int, hidden_states: Tensor) -> Tensor:
        """Block states [slots, d] after the final norm."""
        position, slots = len(hidden_states), self.config["block_size"]
        merged = hidden_states @ self._weight("fc").T
        context = self._norm(merged, "hidden_norm")
        ids = torch.tensor([anchor_id] + [self.mask] * (slots - 1))
        x = self.tensors["embed_tokens.weight"][ids]
        if self.gemma:
            x = x * self.config["hidden_size"] ** 0.5
        if self.residual and position:
            x = x + merged[-1]
        where = torch.arange(position + slots)
        for layer in range(self.config["num_hidden_layers"]):
            name = f"layers.{layer}."
            attended = self._attend(name + "self_attn.", context, self._norm(x, name + "input_layernorm"), where)
            if self.gemma:
                x = x + self._norm(attended, name + "post_attention_layernorm")
                inner = self._mlp(name + "mlp.", self._norm(x, name + "pre_feedforward_layernorm"))
                x = (x + self._norm(inner, name + "post_feedforward_layernorm")) * self.tensors[name + "layer_scalar"]
            else:
                x = x + attended
                x = x + self._mlp(name + "mlp.", self._norm(x, name + "post_attention_layernorm"))
        return self._norm(x, "norm")

    def _attend(self, name: str, context: Tensor, x: Tensor, where: Tensor) -> Tensor:
        """Slots see the whole context and the whole block."""
        both = torch.cat([context, x])
        queries = self._linear(name + "q_proj", x).unflatten(-1, (-1, self.head_dim))
        keys = self._linear(name + "k_proj", both).unflatten(-1, (-1, self.head_dim))
        if self.gemma and self.config["attention_k_eq_v"]:
            values = keys
        else:
            values = self._linear(name + "v_proj", both).unflatten(-1, (-1, self.head_dim))
        if self.gemma:
            values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + self.eps)
        queries = self._rotate(self._norm(queries, name + "q_norm"), where[-len(x) :])
        keys = self._rotate(self._norm(keys, name + "k_norm"), where)
        groups = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        scale = 1.0 if self.gemma else self.head_dim**-0.5
        weights = torch.softmax(torch.einsum("qhd,khd->hqk", queries, keys) * scale, dim=-1)
        return self._linear(name + "o_proj", torch.einsum("hqk,khd->qhd", weights, values).flatten(1))

    def _sequential(self, anchor_id: int, states: Tensor) -> Draft:
        """Greedy tokens, one slot after the other; the head's state goes along for an RNN head."""
        rank = self.config.get("markov_rank") or 0
        kind = self.config["markov_head_type"] if rank else "none"
        previous, memory = anchor_id, torch.zeros(rank)
        tokens: list[int] = []
        logits, confidences = [], []
        for h in states:
            embedded, bias = torch.zeros(0), None
            if rank:
                embedded = self._weight("markov_head.markov_w1")[previous]
                z, memory = self._head_vector(kind, embedded, memory, h)
                bias = z @ self._weight("markov_head.markov_w2").T
            row = self._logits(h, bias)
            if self.config.get("enable_confidence_head"):
                heard = torch.cat([h, embedded]) if self.config["confidence_head_with_markov"] else h
                confidences.append(self._linear("confidence_head.proj", heard))
            previous = int(row.argmax())
            tokens.append(previous)
            logits.append(row)
        confidence = torch.cat(confidences) if confidences else None
        return Draft(tokens, torch.stack(logits), confidence)

    def _head_vector(self, kind: str, embedded: Tensor, memory: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "vanilla":
            return embedded, memory
        if kind == "gated":
            gate = self._linear("markov_head.gate_proj", torch.cat([h, embedded]))
            return embedded * torch.sigmoid(gate), memory
        joint = self._linear("markov_head.joint_proj", torch.cat([memory, embedded, h]))
        gate, candidate, output = joint.chunk(3)
        kept = torch.sigmoid(gate)
        return torch.tanh(output), kept * memory + (1 - kept) * torch.tanh(candidate)


@torch.no_grad()
def drafts_alike(
    folder: Path, drafter: Any, token_ids: Sequence[int], hidden_states: Tensor, *, tolerance: float = 2e-3
) -> dict[str, Any]:
    """The folder as this reader sees it, against `drafter`, over rounds with a growing context cache.

    `token_ids` [S] and `hidden_states` [S, m*d] are real ones of the target. Logits and confidences may differ by
    `tolerance` of the largest logit (or 1); a drafted token may differ only where two logits are that close.
    """
    reader = open_folder(folder, drafter.embed_tokens.weight, drafter.lm_head.weight)
    # Both in float32, whatever was stored: rounding on the way is no difference in meaning.
    ours = drafter if drafter.dtype == torch.float32 else copy.deepcopy(drafter).float()
    hidden_states = hidden_states.float()
    last = len(token_ids) - 1
    if last < 1:
        raise AssertionError(f"the probe has {len(token_ids)} tokens; at least 2 are needed to draft a block")
    anchors = sorted({max(1, round(last * (index + 1) / PROBE_ROUNDS)) for index in range(PROBE_ROUNDS)})
    cache = ours.new_cache(1, last + ours.block_size + 1)
    done, worst, worst_confidence, tokens = 0, 0.0, 0.0, 0
    for anchor in anchors:
        positions = torch.arange(done, anchor)
        next_ids = torch.tensor(list(token_ids[done + 1 : anchor + 1]))
        ours.write_context(cache, hidden_states[done:anchor], torch.zeros_like(positions), positions, next_ids)
        done = anchor
        expected = reader.draft(token_ids[: anchor + 1], hidden_states[:anchor].cpu())
        logits, drafted, confidence = _greedy_block(ours, int(token_ids[anchor]), anchor, cache)
        bound = tolerance * max(1.0, float(expected.logits[expected.logits > -1e3].abs().max()))
        agreed = _agreeing(drafted, expected.tokens, expected.logits, bound)
        # After a tie the two drafts go their own ways: what follows has other previous tokens.
        # A Markov column keeps other tokens out by adding to their logits, a mapping by leaving them out.
        apart = (logits[:agreed] - expected.logits[:agreed])[expected.logits[:agreed] > OUTSIDE / 2].abs()
        difference = float(apart.max()) if agreed else 0.0
        worst, tokens = max(worst, difference), tokens + agreed
        if difference > bound:
            raise AssertionError(
                f"at position {anchor} the published folder gives other logits than the trained drafter: "
                f"{difference:.3g} apart, allowed {bound:.3g}. A setting is read differently (rotary settings, norms, "
                "block layout)."
            )
        if (confidence is None) != (expected.confidence is None):
            raise AssertionError("only one of the trained drafter and the published folder has a confidence head")
        if confidence is not None and expected.confidence is not None and agreed:
            distance = float((confidence[:agreed] - expected.confidence[:agreed]).abs().max())
            worst_confidence = max(worst_confidence, distance)
            if distance > bound:
                raise AssertionError(
                    f"at position {anchor} the confidences are {distance:.3g} apart, allowed {bound:.3g}"
                )
    return {
        "rounds": len(anchors),
        "context": anchors,
        "tokens_equal": tokens,
        "largest_logit_difference": worst,
        "largest_confidence_difference": worst_confidence,
    }


def _greedy_block(drafter: Any, anchor_id: int, anchor: int, cache: Any) -> tuple[Tensor, list[int], Tensor | None]:
    """The trained drafter's own block: logits [G, V], tokens, confidence logits [G]."""
    ids, rows, tokens = drafter.draft_token_ids, [], []

    def choose(logits: Tensor) -> Tensor:
        row = logits[0]
        if ids is not None:  # what is never drafted stands where readers have it
            row = torch.full((drafter.config.vocab_size,), OUTSIDE, device=row.device).scatter(0, ids, row)
        rows.append(row)
        tokens.append(int(row.argmax()))
        return row.argmax()[None]

    first, place = torch.tensor([anchor_id], device=drafter.device), torch.tensor([anchor])
    confidence = drafter.draft(first, place, cache, drafter.block_size, choose, drafter.output_weights())
    return torch.stack(rows).cpu(), tokens, None if confidence is None else confidence[0].cpu()


def _agreeing(ours: Sequence[int], theirs: Sequence[int], logits: Tensor, bound: float) -> int:
    """Slots up to and including the first in which the drafts part; raises unless that slot is a tie."""
    for slot, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            gap = float(logits[slot, b] - logits[slot, a])
            if gap > 2 * bound:
                raise AssertionError(
                    f"slot {slot + 1}: the trained drafter drafts token {a}, the published folder {b}, {gap:.3g} apart"
                )
            return slot + 1
    return len(ours)
