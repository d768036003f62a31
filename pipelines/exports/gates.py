"""What must hold before a native checkpoint is published; each gate raises or returns what it measured.

1. Every key of the layout is written out; nothing relies on a reader's default.
2. The mask token is a row of the target's embedding; no captured layer is -1 or the last one, unless it is said which
   engine takes it.
3. Stored embedding and head equal the target's, bit for bit.
4. A second reader of the folder drafts what the trained drafter drafts, over several rounds of a growing context.
5. What only some engines can serve is marked so.

Legend: S sequence, G block slots, V vocabulary, m captured layers, d hidden size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.config import DrafterConfig, SettingError
from dspark.families import FAMILIES
from dspark.models.checkpoint import load_drafter
from dspark.registry import algorithms
from pipelines.errors import UserError
from pipelines.exports.reader import ARCHITECTURES, OUTSIDE, Draft, open_folder

EVERY_KEY = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("rms_norm_eps", "max_position_embeddings", "attention_bias", "num_target_layers", "num_hidden_layers"),
    *("target_layer_ids", "layer_types", "tie_word_embeddings", "rope_parameters"),
)
PROBE_ROUNDS = 4


class GateFailed(UserError):
    """The checkpoint is not published: a gate found something that a server would stumble over."""


def keys_written(config: Mapping[str, Any]) -> list[str]:
    """Gate 1: the keys that were required and found."""
    try:
        read = DrafterConfig.from_checkpoint(config)
    except SettingError as error:
        raise GateFailed(str(error)) from error
    family = FAMILIES[read.family]
    own = (family.head_dim, family.key_heads, family.activation, *(("attention_k_eq_v",) * family.keys_as_values))
    required = [*dict.fromkeys((*EVERY_KEY, *own, *algorithms[read.algorithm].layout(read)))]
    if missing := [key for key in required if config.get(key) is None]:
        raise GateFailed(
            f"config.json lacks {', '.join(missing)}; every layout key must be written out, a reader's default "
            f"may differ (architecture {config['architectures'][0]})"
        )
    if config["tie_word_embeddings"] is not False:
        raise GateFailed("config.json must say tie_word_embeddings: false, the drafter's head is stored by itself")
    if config.get("block_layout", read.block_layout) != read.block_layout:
        raise GateFailed(
            f"block_layout is {config['block_layout']!r}, but {config['architectures'][0]} is {read.block_layout}"
        )
    return required


def ids_are_real(config: Mapping[str, Any], embedding: Tensor, *, engines: Sequence[str] = ()) -> dict[str, Any]:
    """Gate 2. `engines` names those that take the embedding output or the last layer; empty forbids both."""
    rows, layers = embedding.shape[0], config["num_target_layers"]
    mask = config.get("mask_token_id")
    if mask is not None and not 0 <= mask < rows:
        raise GateFailed(
            f"mask_token_id is {mask}, the target's embedding has rows 0 to {rows - 1} (option `drafter.mask_token_id`)"
        )
    odd = layers_are_servable(config["target_layer_ids"], layers, engines)
    return {"mask_token_id": mask, "rows": rows, "unusual_layers": odd, "engines": list(engines)}


def layers_are_servable(layer_ids: Sequence[int], layers: int, engines: Sequence[str]) -> list[int]:
    """The captured ids that only the named engines take: -1, the embedding's output, and the last layer."""
    odd = [layer for layer in layer_ids if layer in (-1, layers - 1)]
    outside = [layer for layer in layer_ids if not -1 <= layer < layers]
    if outside or (odd and not engines):
        raise GateFailed(
            f"target_layer_ids has {', '.join(map(str, outside or odd))}; engines take 0 to {layers - 2} for this "
            "target (option `drafter.target_layer_ids`), or name the engines that take it (option `publish.engines`)"
        )
    return odd


def shared_weights_equal(folder: Path, embedding: Tensor, head: Tensor) -> dict[str, Any]:
    """Gate 3. A wider type than the target's must hold its values exactly; a narrower one is refused."""
    from safetensors import safe_open

    found = {}
    with safe_open(folder / "model.safetensors", framework="pt") as stored:
        for name, own in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
            if name not in stored.keys():  # noqa: SIM118 (not a mapping)
                raise GateFailed(f"model.safetensors lacks {name}; the native layout carries the target's")
            theirs = stored.get_tensor(name)
            same = theirs.shape == own.shape and torch.equal(theirs.float(), own.detach().cpu().float())
            if not same:
                raise GateFailed(
                    f"{name} {tuple(theirs.shape)} differs from the target's {tuple(own.shape)}: the drafter belongs "
                    "to another target or revision, or its type is narrower than the target's (option `publish.dtype`)"
                )
            found[name] = str(theirs.dtype).removeprefix("torch.")
    return found


@torch.no_grad()
def drafts_alike(
    folder: Path, drafter: Any, token_ids: Sequence[int], features: Tensor, *, tolerance: float = 2e-3
) -> dict[str, Any]:
    """Gate 4: the folder as the second reader sees it, against `drafter`, over rounds with a growing context cache.

    `token_ids` [S] and `features` [S, m*d] are real ones of the target. Logits and confidences may differ by
    `tolerance` of the largest logit (or 1); a drafted token may differ only where two logits are that close.
    """
    reader = _reader_of(folder, drafter)
    # Both in float32, whatever was stored: rounding on the way is no difference in meaning.
    ours = drafter if drafter.dtype == torch.float32 else copy.deepcopy(drafter).float()
    features = features.float()
    last = len(token_ids) - 1
    if last < 1:
        raise GateFailed(f"the probe has {len(token_ids)} tokens; at least 2 are needed to draft a block")
    anchors = sorted({max(1, round(last * (index + 1) / PROBE_ROUNDS)) for index in range(PROBE_ROUNDS)})
    cache = ours.new_cache(1, last + ours.block_size + 1)
    done, worst, worst_confidence, tokens = 0, 0.0, 0.0, 0
    for anchor in anchors:
        _take_in(ours, cache, token_ids, features, done, anchor)
        done = anchor
        expected = reader.draft(token_ids[: anchor + 1], features[:anchor].cpu())
        logits, drafted, confidence = _greedy_block(ours, int(token_ids[anchor]), anchor, cache)
        bound = tolerance * max(1.0, float(expected.logits[expected.logits > -1e3].abs().max()))
        agreed = _agreeing(drafted, expected.tokens, expected.logits, bound)
        # After a tie the two drafts go their own ways: what follows has other previous tokens.
        # A Markov column keeps other tokens out by adding to their logits, a mapping by leaving them out.
        apart = (logits[:agreed] - expected.logits[:agreed])[expected.logits[:agreed] > OUTSIDE / 2].abs()
        difference = float(apart.max()) if agreed else 0.0
        worst, tokens = max(worst, difference), tokens + agreed
        if difference > bound:
            raise GateFailed(
                f"at position {anchor} the published folder gives other logits than the trained drafter: "
                f"{difference:.3g} apart, allowed {bound:.3g}. A setting is read differently (rotary settings, norms, "
                "block layout)."
            )
        if (confidence is None) != (expected.confidence is None):
            raise GateFailed("only one of the trained drafter and the published folder has a confidence head")
        if confidence is not None and expected.confidence is not None and agreed:
            distance = float((confidence[:agreed] - expected.confidence[:agreed]).abs().max())
            worst_confidence = max(worst_confidence, distance)
            if distance > bound:
                raise GateFailed(f"at position {anchor} the confidences are {distance:.3g} apart, allowed {bound:.3g}")
    return {
        "rounds": len(anchors),
        "reader": type(reader).__name__,
        "context": anchors,
        "tokens_equal": tokens,
        "largest_logit_difference": worst,
        "largest_confidence_difference": worst_confidence,
    }


def _reader_of(folder: Path, drafter: Any) -> Any:
    """The second reader of the folder; for an architecture that it does not know, the loader that users have."""
    architectures = json.loads((folder / "config.json").read_text()).get("architectures", [])
    if set(architectures) & set(drafter.architectures) - set(ARCHITECTURES):
        return _Reopened(folder)
    return open_folder(folder, drafter.embed_tokens.weight, drafter.lm_head.weight)


class _Reopened:
    """A published folder as `load_drafter` opens it, the whole context taken in anew each round."""

    def __init__(self, folder: Path) -> None:
        self.drafter = load_drafter(folder, dtype="float32")

    def draft(self, token_ids: Sequence[int], features: Tensor) -> Draft:
        anchor = len(features)
        cache = self.drafter.new_cache(1, anchor + self.drafter.block_size + 1)
        _take_in(self.drafter, cache, token_ids, features, 0, anchor)
        logits, tokens, confidence = _greedy_block(self.drafter, token_ids[-1], anchor, cache)
        return Draft(tokens, logits, confidence)


def _take_in(drafter: Any, cache: Any, token_ids: Sequence[int], features: Tensor, begin: int, anchor: int) -> None:
    """The context from `begin` up to the anchor."""
    positions = torch.arange(begin, anchor)
    next_ids = torch.tensor(token_ids[begin + 1 : anchor + 1], device=drafter.device)
    hidden_states = features[begin:anchor].to(drafter.device)
    drafter.write_context(cache, hidden_states, torch.zeros_like(positions), positions, next_ids)


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
                raise GateFailed(
                    f"slot {slot + 1}: the trained drafter drafts token {a}, the published folder {b}, {gap:.3g} apart"
                )
            return slot + 1
    return len(ours)
