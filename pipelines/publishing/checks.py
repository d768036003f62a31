"""What must hold before a checkpoint is published; each check raises or returns what it found.

1. Every key of the layout is written out; nothing relies on a reader's default.
2. The mask token is a row of the target's embedding; no captured layer is -1 or the last one, unless it is said which
   engine takes it.
3. Stored embedding and head equal the target's, bit for bit.
4. The folder, opened again, is the trained drafter: the same configuration, and every tensor bit for bit.
5. What only some engines can serve is marked so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dspark.config import DrafterConfig, SettingError
from dspark.families import FAMILIES
from dspark.models.checkpoint import WEIGHTS, load_drafter, native_tensors
from dspark.registry import algorithms
from pipelines.errors import UserError

EVERY_KEY = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("rms_norm_eps", "max_position_embeddings", "attention_bias", "num_target_layers", "num_hidden_layers"),
    *("target_layer_ids", "layer_types", "tie_word_embeddings", "rope_parameters"),
)


class CheckFailed(UserError):
    """The checkpoint is not published: a check found something that a server would stumble over."""


def keys_written(config: Mapping[str, Any]) -> list[str]:
    """Check 1: the keys that were required and found."""
    try:
        read = DrafterConfig.from_checkpoint(config)
    except SettingError as error:
        raise CheckFailed(str(error)) from error
    family = FAMILIES[read.family]
    own = (family.head_dim, family.key_heads, family.activation, *(("attention_k_eq_v",) * family.keys_as_values))
    required = [*dict.fromkeys((*EVERY_KEY, *own, *algorithms[read.algorithm].layout(read)))]
    if missing := [key for key in required if config.get(key) is None]:
        raise CheckFailed(
            f"config.json lacks {', '.join(missing)}; every layout key must be written out, a reader's default "
            f"may differ (architecture {config['architectures'][0]})"
        )
    if config["tie_word_embeddings"] is not False:
        raise CheckFailed("config.json must say tie_word_embeddings: false, the drafter's head is stored by itself")
    if config.get("block_layout", read.block_layout) != read.block_layout:
        raise CheckFailed(
            f"block_layout is {config['block_layout']!r}, but {config['architectures'][0]} is {read.block_layout}"
        )
    return required


def ids_are_real(config: Mapping[str, Any], embedding: Tensor, *, engines: Sequence[str] = ()) -> dict[str, Any]:
    """Check 2. `engines` names those that take the embedding output or the last layer; empty forbids both."""
    rows, layers = embedding.shape[0], config["num_target_layers"]
    mask = config.get("mask_token_id")
    if mask is not None and not 0 <= mask < rows:
        raise CheckFailed(
            f"mask_token_id is {mask}, the target's embedding has rows 0 to {rows - 1} (option `drafter.mask_token_id`)"
        )
    odd = layers_are_servable(config["target_layer_ids"], layers, engines)
    return {"mask_token_id": mask, "rows": rows, "unusual_layers": odd, "engines": list(engines)}


def layers_are_servable(layer_ids: Sequence[int], layers: int, engines: Sequence[str]) -> list[int]:
    """The captured ids that only the named engines take: -1, the embedding's output, and the last layer.

    The last hidden state's, one above, is of drafters that no engine loads, as their notes say.
    """
    odd = [layer for layer in layer_ids if layer in (-1, layers - 1)]
    outside = [layer for layer in layer_ids if not -1 <= layer <= layers]
    if outside or (odd and not engines):
        raise CheckFailed(
            f"target_layer_ids has {', '.join(map(str, outside or odd))}; engines take 0 to {layers - 2} for this "
            "target (option `drafter.target_layer_ids`), or name the engines that take it (option `publish.engines`)"
        )
    return odd


def shared_weights_equal(folder: Path, embedding: Tensor, head: Tensor) -> dict[str, Any]:
    """Check 3. A wider type than the target's must hold its values exactly; a narrower one is refused."""
    found = {}
    with safe_open(folder / WEIGHTS, framework="pt") as stored:
        for name, own in (("embed_tokens.weight", embedding), ("lm_head.weight", head)):
            if name not in stored.keys():  # noqa: SIM118 (not a mapping)
                raise CheckFailed(f"model.safetensors lacks {name}; the native layout carries the target's")
            theirs = stored.get_tensor(name)
            same = theirs.shape == own.shape and torch.equal(theirs.float(), own.detach().cpu().float())
            if not same:
                raise CheckFailed(
                    f"{name} {tuple(theirs.shape)} differs from the target's {tuple(own.shape)}: the drafter belongs "
                    "to another target or revision, or its type is narrower than the target's (option `publish.dtype`)"
                )
            found[name] = str(theirs.dtype).removeprefix("torch.")
    return found


def reads_back(folder: Path, drafter: Any) -> dict[str, Any]:
    """Check 4 of the native layout: `load_drafter` makes the trained drafter of the folder."""
    again = load_drafter(folder)
    ours, theirs = vars(drafter.config), vars(again.config)
    if again.config != drafter.config:
        other = [f"{key} is {theirs[key]!r} there, {ours[key]!r} here" for key in ours if ours[key] != theirs[key]]
        raise CheckFailed(f"config.json does not say what the trained drafter is: {'; '.join(other)}")
    if not _same_tokens(again.draft_token_ids, drafter.draft_token_ids):
        raise CheckFailed("the folder drafts other tokens than the trained drafter (option `drafter.draft_vocab_size`)")
    return stored_alike(folder / WEIGHTS, native_tensors(drafter))


def stored_alike(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Any]:
    """Check 4 of every layout: the file holds these tensors and no others, bit for bit, and finite."""
    with safe_open(path, framework="pt") as stored:
        if set(stored.keys()) != expected.keys():
            raise CheckFailed(f"{path} holds {sorted(set(stored.keys()) ^ expected.keys())} on one side only")
        for name, own in expected.items():
            theirs = stored.get_tensor(name)
            if not bool(torch.isfinite(theirs).all()):
                raise CheckFailed(f"{name} has numbers that are not finite: train with a lower train.learning_rate")
            if theirs.dtype != own.dtype or not torch.equal(theirs, own.cpu()):
                raise CheckFailed(f"{name} in {path} is not the trained drafter's")
    return {"tensors": len(expected), "values": sum(tensor.numel() for tensor in expected.values())}


def _same_tokens(ours: Tensor | None, theirs: Tensor | None) -> bool:
    return ours is theirs or (ours is not None and theirs is not None and torch.equal(ours.cpu(), theirs.cpu()))
